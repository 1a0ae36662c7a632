"""What went through the edge since the start, and how long it took: numbers that only grow, told as it happens.

    asked ---- queue ----> started ---- prefill ----> first token ---- decode ----> last token
      '------------------- first token ------------------'                              |
      '-------------------------------- end to end ------------------------------------'

One request is one observation of each, however many sequences it has; the gaps between tokens are those of each
sequence. A request that is cancelled or fails has no end and no decode time. A beam search says nothing before it is
over: its first token is its last.
"""

from collections.abc import Iterable

from kilburn.controller.api.senders import PARTS
from kilburn.controller.core.histogram import Histogram
from kilburn.shared.types import FinishReason

SPANS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
GAPS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 10.0),
)
LENGTHS = tuple(float(2**i) for i in range(18))  # tokens


class Counts:
    """See the file's head."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)  # requests, by the reason of their last sequence
        self.stalled = 0  # clients that were disconnected because they did not read
        self.turned_away = 0  # connections that were one too many
        self.incomplete = dict.fromkeys(PARTS, 0)  # requests that were given up before they were all there
        self.refused: dict[str, int] = {}  # by what the client was told: a code of ours, of which there are few
        self.queue_s = Histogram(SPANS_S)
        self.prefill_s = Histogram(SPANS_S)
        self.first_token_s = Histogram(SPANS_S)
        self.inter_token_s = Histogram(GAPS_S)
        self.decode_s = Histogram(SPANS_S)
        self.inference_s = Histogram(SPANS_S)  # prefill and decode
        self.end_to_end_s = Histogram(SPANS_S)
        self.pause_s = Histogram(SPANS_S)  # of displaced requests, until their next token
        self.prompt_lengths = Histogram(LENGTHS)
        self.answer_lengths = Histogram(LENGTHS)  # of requests, all their sequences together
        self.longest_lengths = Histogram(LENGTHS)  # of their longest sequences
        self.most_lengths = Histogram(LENGTHS)  # that were asked for: max_tokens
        self.widths = Histogram(LENGTHS)  # sequences of a request

    def refusal(self, code: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1

    def stall(self) -> None:
        self.stalled += 1

    def turn_away(self) -> None:
        self.turned_away += 1

    def give_up(self, part: str) -> None:
        self.incomplete[part] += 1


class Pace:
    """When what happened to one request, on the clock of the loop."""

    __slots__ = ("_asked_at", "_counts", "_displaced_at", "_first_at", "_heard_at", "_num_tokens", "_started_at")

    def __init__(self, counts: Counts, num_sequences: int, max_tokens: int, now: float) -> None:
        counts.widths.observe(num_sequences)
        counts.most_lengths.observe(max_tokens)
        self._counts = counts
        self._asked_at = self._started_at = now
        self._first_at = -1.0  # of any sequence; negative: not yet
        self._displaced_at = -1.0  # the first time since its newest token; negative: it was not
        self._heard_at = [-1.0] * num_sequences  # each one's newest token
        self._num_tokens = [0] * num_sequences

    def started(self, num_prompt: int, num_cached: int, now: float) -> None:
        counts = self._counts
        counts.prompt_tokens += num_prompt
        counts.cached_tokens += num_cached
        counts.prompt_lengths.observe(num_prompt)
        counts.queue_s.observe(now - self._asked_at)
        self._started_at = now

    def token(self, index: int, now: float) -> None:
        """A sequence went on. Called for every token: keep it small."""
        counts = self._counts
        counts.output_tokens += 1
        self._num_tokens[index] += 1
        if self._displaced_at >= 0.0:
            self._returned(now)
        before = self._heard_at[index]
        self._heard_at[index] = now
        if before >= 0.0:
            counts.inter_token_s.observe(now - before)
        elif self._first_at < 0.0:
            self._first(now)

    def displaced(self, now: float) -> None:
        if self._displaced_at < 0.0:
            self._displaced_at = now

    def _returned(self, now: float) -> None:
        self._counts.pause_s.observe(now - self._displaced_at)
        self._displaced_at = -1.0

    def _first(self, now: float) -> None:
        self._first_at = now
        self._counts.prefill_s.observe(now - self._started_at)
        self._counts.first_token_s.observe(now - self._asked_at)

    def whole(self, index: int, num_tokens: int, now: float) -> None:
        """A sequence came at once, as those of a beam search do."""
        self._counts.output_tokens += num_tokens
        self._num_tokens[index] = num_tokens
        if self._displaced_at >= 0.0:
            self._returned(now)
        if self._first_at < 0.0:
            self._first(now)

    def ended(self, reason: FinishReason, now: float) -> None:
        counts = self._counts
        counts.finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            counts.answer_lengths.observe(sum(self._num_tokens))
            counts.longest_lengths.observe(max(self._num_tokens))
            counts.end_to_end_s.observe(now - self._asked_at)
            counts.inference_s.observe(now - self._started_at)
            if self._first_at >= 0.0:
                counts.decode_s.observe(now - self._first_at)


def known_refusals(counts: Counts, codes: Iterable[str]) -> dict[str, int]:
    """Refusals by code: those that there may be, and those that there were."""
    return dict.fromkeys(codes, 0) | counts.refused
