"""How likely each token of a prompt was, as it comes in from the engine, chunk by chunk.

    position   0      1      2      3           of the prompt
    own id     p0     p1     p2     p3
    scores     none   [own, likeliest ...]      width entries each, and the rank of the own token

Columns of numbers and not objects, since a prompt may be long. What may be asked for at all is bounded where requests
are read. Where the prompt is echoed, `starts` says where each of its tokens begins in its text.
What this file does not know: how scores are shown.
"""

from array import array
from collections.abc import Iterator, Sequence

from kilburn.controller.core.events import PromptScored
from kilburn.controller.detokenize import Detokenizer


class PromptScores:
    """See the file's head. `detokenizer`: of the echo; None where there is none."""

    __slots__ = ("_detokenizer", "_ids", "_length", "_logprobs", "_ranks", "_width", "prompt", "starts")

    def __init__(self, prompt: Sequence[int], detokenizer: Detokenizer | None) -> None:
        self.prompt = prompt
        self.starts = array("q")
        self._ids, self._logprobs, self._ranks = array("q"), array("f"), array("q")
        self._width = 1
        self._detokenizer, self._length = detokenizer, 0
        self._spell(0, 1)

    def add(self, scored: PromptScored) -> None:
        """The next positions."""
        self._width = scored.width
        self._ids.extend(scored.ids)
        self._logprobs.extend(scored.logprobs)
        self._ranks.extend(scored.ranks)
        self._spell(scored.start, scored.start + len(scored.ranks))

    def _spell(self, start: int, end: int) -> None:
        if self._detokenizer is None:
            return
        for id in self.prompt[start:end]:
            self.starts.append(self._length)
            self._length += len(self._detokenizer.step(id))

    @property
    def is_complete(self) -> bool:
        return len(self._ranks) == len(self.prompt) - 1

    def __iter__(self) -> "Iterator[tuple[int, float, int, list[tuple[int, float]]]]":
        """Of each position but the first: its own token, log probability and rank; and the likeliest, best first."""
        width = self._width
        for i, rank in enumerate(self._ranks):
            at = i * width
            likeliest = zip(self._ids[at + 1 : at + width], self._logprobs[at + 1 : at + width], strict=True)
            yield self._ids[at], self._logprobs[at], rank, list(likeliest)
