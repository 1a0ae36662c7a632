"""The text of one sequence as it grows: one choice of an answer.

    feed(token) -> Detokenizer -> StopStrings -> let out --take()--> Delta

A choice ends once: at its stop string, or with the engine's last word. Its reason and its count of tokens are what the
client is told. A stop id ends an answer and is no part of it. Log probabilities leave with the text that they are
about, and not before: they spell it, and might spell a stop string. A choice of a beam search comes whole.
What this file does not know: requests, the engine, who reads.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kilburn.controller.core.events import Beam, BeamSettings
from kilburn.controller.detokenize import Detokenizer, StopStrings
from kilburn.controller.scores import PromptScores
from kilburn.shared.grammar import Grammar
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")  # of the W3C


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from, for whoever tells its story."""

    answer_id: str = ""  # as the client reads it in the answer
    client_id: str = ""  # as the client calls it (X-Request-Id)
    tenant: str = ""
    traceparent: str = ""
    tracestate: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """What somebody may call it."""
        return tuple(dict.fromkeys(name for name in (self.answer_id, self.client_id) if name))

    @property
    def trace_id(self) -> str:
        match = _TRACEPARENT.fullmatch(self.traceparent)
        return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, as the edge hands it over. `prefix` is text that the answer begins with (echo).

    `n` sequences are drawn, and the answer keeps the `keep` best of them; None: all, in order of their index.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    n: int = 1
    priority: int = 0
    salt: bytes = b""
    stops: tuple[str, ...] = ()
    include_stop: bool = False  # stop strings and stop ids stay in the text
    skip_special: bool = True
    prefix: str = ""
    keep: int | None = None
    beams: BeamSettings | None = None
    queue_s: float | None = None
    request_s: float | None = None
    origin: Origin = Origin()
    tenant: bytes = b""
    weight: float = 1.0
    grammar: Grammar | None = None  # that the answers follow; sampling.grammar is its digest

    @property
    def is_scored(self) -> bool:
        """Whether it is asked how likely the prompt was."""
        return self.sampling.prompt_logprobs >= 0


@dataclass(slots=True)
class Scored:
    """A token of the answer with its log probability. `start` is where its text begins in the choice's text."""

    id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    start: int


@dataclass(slots=True)
class Delta:
    """What is new of a choice since it was last asked."""

    index: int
    text: str
    scored: list[Scored]
    finish: FinishReason | None  # set in the last delta, and only there
    message: str = ""
    beam: Beam | None = None  # of a beam search: what its choice scored
    stop: str = ""  # the stop string that ended it
    prompt: PromptScores | None = None  # how likely the prompt was, where that was asked for; in the first delta


class Choice:
    """The text of one sequence as it grows."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_length",
        "_let_out",
        "_message",
        "_min_tokens",
        "_out",
        "_prompt",
        "_scored",
        "_scored_out",
        "_stop_ids",
        "_stops",
        "_told",
        "beam",
        "cumulative_logprob",
        "finish",
        "index",
        "num_tokens",
    )  # fmt: skip

    def __init__(self, index: int, ask: Ask, detokenizer: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.cumulative_logprob = 0.0  # of the tokens counted, where log probabilities were asked for
        self.beam: Beam | None = None
        self.finish: FinishReason | None = None
        self._message = ""
        self._told = False
        self._detokenizer = detokenizer
        self._stops = StopStrings(ask.stops, ask.include_stop) if ask.stops else None
        self._stop_ids = frozenset(ask.sampling.stop_ids)
        self._include_stop = ask.include_stop
        self._min_tokens = ask.sampling.min_tokens
        self._prompt: PromptScores | None = None
        self._out = [ask.prefix] if ask.prefix and not ask.is_scored else []
        self._length = self._let_out = len(ask.prefix)  # of the text decoded, and of the text let out
        self._scored: list[tuple[Scored, int]] = []  # (token, where its text ends or -1), until its text is out
        self._scored_out: list[Scored] = []

    def begin(self, prefix: str, scores: PromptScores) -> None:
        """It is known how likely the prompt was: the echo leaves with that."""
        self._prompt = scores
        self._out.insert(0, prefix)

    def feed(self, token: int, logprobs: tuple[tuple[int, float], ...]) -> bool:
        """The sequence went on. True: this completed a stop string, and the choice has ended."""
        self.num_tokens += 1
        if logprobs:
            self.cumulative_logprob += logprobs[0][1]
        if token in self._stop_ids and not self._include_stop:
            return False  # its last token: it ends the answer and is no part of it
        piece = self._detokenizer.step(token)
        if logprobs:
            (id, logprob), *likeliest = logprobs
            self._scored.append((Scored(id, logprob, tuple(likeliest), self._length), -1))
        return bool(piece) and self._grow(piece)

    def _grow(self, piece: str) -> bool:
        self._length += len(piece)
        if self._scored:
            self._scored = [(scored, self._length if end < 0 else end) for scored, end in self._scored]
        stopped = False
        if self._stops is not None and self.num_tokens > self._min_tokens:
            piece, stopped = self._stops.feed(piece)
        if piece:
            self._out.append(piece)
            self._let_out += len(piece)
        if self._scored:
            self._release()
        if stopped:
            self._scored.clear()
            self.finish = FinishReason.STOP
        return stopped

    def _release(self) -> None:
        """Log probabilities go out with the text that they are about: they spell it."""
        num_out = 0
        for scored, end in self._scored:
            if not 0 <= end <= self._let_out:
                break
            self._scored_out.append(scored)
            num_out += 1
        del self._scored[:num_out]

    def end(self, reason: FinishReason, message: str) -> None:
        """The engine's last word. Lets out what was held."""
        self._message = message
        if self._grow(self._detokenizer.flush()):
            return
        if self._stops is not None:
            held = self._stops.flush()
            self._out.append(held)
            self._let_out += len(held)
        self._release()
        self.finish = reason

    def become(self, beam: Beam) -> None:
        """The whole of it at once: a choice of a beam search."""
        self.beam = beam
        for token in beam.tokens:
            self.feed(token, ())
        self.end(beam.reason, "")

    @property
    def mean_logprob(self) -> float:
        return self.cumulative_logprob / max(self.num_tokens, 1)

    def fail(self, message: str, reason: FinishReason = FinishReason.ERROR) -> None:
        """Ends it here. What was held stays held."""
        self.finish, self._message = reason, message

    def take(self) -> Delta:
        text = "".join(self._out)
        self._out.clear()
        scored, self._scored_out = self._scored_out, []
        finish = None if self._told else self.finish
        self._told = self.finish is not None
        stop = self._stops.completed if self._stops is not None else ""
        prompt, self._prompt = self._prompt, None
        return Delta(self.index, text, scored, finish, self._message, self.beam, stop, prompt)

    @property
    def num_held_characters(self) -> int:
        """Text that is out, and that nobody has taken."""
        return sum(map(len, self._out))

    @property
    def has_news(self) -> bool:
        return bool(self._out or self._scored_out or self._prompt) or (self.finish is not None and not self._told)
