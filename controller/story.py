"""What happened to each request: one record of it, from which its log line, /debug/requests and its spans are read.

    Submit, Cancel ---> begin, cancelled --+
    Refused, Started, Emit, Turned, ... ---+--> Record: when it came, its turns, how it ended --> on_end, ring
                                                   |
                         /debug/requests/{id} <----+      logs and traces are made of a whole record, at its end

A record holds times, counts and turns, and no text; token ids only where texts shall be logged. It is bounded: turns
beyond `MOST_TURNS` are counted and dropped, and the newest `MOST_ENDED` records are kept when they are over.

Times are those of the event loop's clock. `Chronicle.wall` says what time of day that was.
What this file does not know: who reads.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kilburn.controller.choice import Ask, Origin
from kilburn.controller.core.events import Beam, Effect, Emit, Finished, Refused, Started, Turn, Turned
from kilburn.shared.types import FinishReason

log = logging.getLogger("kilburn")
MOST_TURNS = 200  # of one request
MOST_ENDED = 1000


@dataclass(frozen=True, slots=True)
class Happened:
    """A turn, at a time; `since` is when it began, where it took a while."""

    turn: Turn
    at: float
    text: str = ""
    since: float | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended. `is_fault`: neither as it should, nor as its client wished."""

    at: float
    how: str  # stop, length, cancelled, refused, error, cut short
    message: str = ""
    is_fault: bool = False


@dataclass(slots=True)
class Record:
    """One prompt of one call, from its Submit on."""

    request_id: int
    origin: Origin
    num_prompt: int
    max_tokens: int
    num_choices: int
    submitted_at: float
    num_cached: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    num_tokens: int = 0
    turns: list[Happened] = field(default_factory=list)
    num_turns_dropped: int = 0
    num_preempted: int = 0
    swap_s: float = 0.0  # blocks on their way to the host and back
    reasons: dict[int, FinishReason] = field(default_factory=dict)  # of the choices that have ended
    message: str = ""
    end: End | None = None
    prompt: tuple[int, ...] = ()  # these two only where texts shall be logged
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def turned(self, turned: Turned, now: float) -> None:
        if turned.turn is Turn.PREEMPTED:
            self.num_preempted += 1
        elif turned.turn in (Turn.SWAPPED_OUT, Turn.SWAPPED_IN) and turned.since is not None:
            self.swap_s += now - turned.since
        if len(self.turns) < MOST_TURNS:
            self.turns.append(Happened(turned.turn, now, turned.text, turned.since))
        else:
            self.num_turns_dropped += 1

    def count(self, turn: Turn) -> int:
        return sum(happened.turn is turn for happened in self.turns)


class Chronicle:
    """All requests that are open, and those that ended last. `on_end` is told of each record that is over."""

    def __init__(self, clock: Callable[[], float], keeps_tokens: bool = False) -> None:
        self._clock, self._keeps_tokens = clock, keeps_tokens
        self._wall_offset = time.time() - clock()
        self._open: dict[int, Record] = {}
        self._ended: OrderedDict[int, Record] = OrderedDict()
        self._by_name: dict[str, list[int]] = {}  # what callers know: ids of answers, and their own ids
        self.on_end: list[Callable[[Record], None]] = []

    # --- what happens

    def begin(self, request_id: int, ask: Ask) -> None:
        """A request is about to be submitted."""
        record = Record(request_id, ask.origin, len(ask.prompt), ask.max_tokens, ask.n, self._clock())
        if self._keeps_tokens:
            record.prompt = tuple(ask.prompt)
        self._open[request_id] = record
        for name in ask.origin.names:
            self._by_name.setdefault(name, []).append(request_id)

    def cancelled(self, request_id: int) -> None:
        """Nobody waits for it any more, or it was failed on the way."""
        record = self._open.get(request_id)
        if record is not None:
            self._over(record, End(self._clock(), "cancelled", "the client left"))

    def failed(self, request_id: int, message: str, reason: FinishReason) -> None:
        """It was ended by the edge and not by the engine."""
        record = self._open.get(request_id)
        if record is not None:
            how = "cut short" if reason is FinishReason.CANCELLED else reason.value
            self._over(record, End(self._clock(), how, message, is_fault=True))

    def note(self, effect: Effect, now: float) -> None:
        """What the engine says of requests. Called in every step: keep it small."""
        if type(effect) is Emit:
            for request_id, index, token in zip(effect.request_ids, effect.indices, effect.tokens, strict=True):
                record = self._open.get(request_id)
                if record is not None:
                    record.num_tokens += 1
                    if record.first_token_at is None:
                        record.first_token_at = now
                    if self._keeps_tokens:
                        record.tokens.setdefault(index, []).append(token)
        elif type(effect) in _OF_REQUESTS:
            self._note_rarely(effect, now)

    def _note_rarely(self, effect: Effect, now: float) -> None:
        record = self._open.get(effect.request_id) if isinstance(effect, _REQUEST_EFFECTS) else None
        if record is None:
            return
        match effect:
            case Turned():
                record.turned(effect, now)
            case Started(cached_tokens=cached):
                record.started_at, record.num_cached = now, cached
            case Refused(refusal=refusal, message=message):
                self._over(record, End(now, "refused", message or refusal.value))
            case Finished(index=index, reason=reason, message=message):
                self._choice_ended(record, index, reason, message, now)
            case Beam(index=index, tokens=tokens, reason=reason):
                record.num_tokens += len(tokens)
                if record.first_token_at is None:
                    record.first_token_at = now
                if self._keeps_tokens:
                    record.tokens[index] = list(tokens)
                self._choice_ended(record, index, reason, "", now)

    def _choice_ended(self, record: Record, index: int, reason: FinishReason, message: str, now: float) -> None:
        record.reasons[index] = reason
        record.message = record.message or message
        if len(record.reasons) < record.num_choices:
            return
        is_fault = FinishReason.ERROR in record.reasons.values()
        how = FinishReason.ERROR if is_fault else reason
        self._over(record, End(now, how.value, record.message, is_fault))

    def _over(self, record: Record, end: End) -> None:
        record.end = end
        del self._open[record.request_id]
        self._ended[record.request_id] = record
        if len(self._ended) > MOST_ENDED:
            self._forget(self._ended.popitem(last=False)[1])
        for told in self.on_end:
            try:
                told(record)
            except Exception:  # whoever tells stories must not disturb those whom they are about
                log.exception("the story of a request could not be told")

    def _forget(self, record: Record) -> None:
        for name in record.origin.names:
            others = [number for number in self._by_name.pop(name, ()) if number != record.request_id]
            if others:
                self._by_name[name] = others

    # --- for whoever asks

    def find(self, name: str) -> list[Record]:
        """The records of one call, by the id of its answer or by the id that its client gave it."""
        numbers = self._by_name.get(name, ())
        found = [self._open.get(number) or self._ended.get(number) for number in numbers]
        return [record for record in found if record is not None]

    def wall(self, at: float) -> float:
        """Seconds since 1970 for a time of the loop's clock."""
        return at + self._wall_offset


_REQUEST_EFFECTS = (Turned, Started, Refused, Finished, Beam)
_OF_REQUESTS = frozenset(_REQUEST_EFFECTS)
