"""What turns the engine: events in, effects out, in one event loop.

    api --> streams --Submit, Stop, Cancel-->  one turn = engine.handle(all events so far) -> effects, in order
    ROUTER --> link --Arrived, Left--------->             Send --> link     Emit... --> streams --Stop--> same turn
                       timer --Tick--------->             Names --> registry      Pinned --> named      Note --> log

Everything happens on one thread in turns of the loop, so the engine is never entered twice, and what arrives in one
turn is handled in one batch. A broken law is a bug of ours: the engine contains the damage, and a second one within a
minute ends the process, as does any other exception of the engine at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kilburn.controller.api.asking import no_worker, queue_full
from kilburn.controller.api.errors import ApiError, refusal
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import (
    Arrived,
    Cancel,
    Effect,
    Emit,
    Event,
    Left,
    Names,
    Note,
    NoteKind,
    NotPinned,
    Pinned,
    Refused,
    Retire,
    Send,
    Shutdown,
    Stuck,
    Submit,
    Tick,
    Turn,
    Turned,
)
from kilburn.controller.core.limits import Limit, Patience, gave_up_waiting
from kilburn.controller.core.snapshot import Snapshot
from kilburn.controller.health import Health, judged
from kilburn.controller.named import NamedPrefixes
from kilburn.controller.noted import Noted
from kilburn.controller.onlookers import Onlookers
from kilburn.controller.processes import RETURNS_S, Processes
from kilburn.controller.registry import PrefixRegistry
from kilburn.controller.salts import Salts
from kilburn.controller.story import Chronicle
from kilburn.controller.streams import Streams
from kilburn.controller.text import Text
from kilburn.controller.tracing import Tracing
from kilburn.shared.messages import FromController, Hello, StepPlan, StepResult, Welcome
from kilburn.shared.types import LawBroken

log = logging.getLogger("kilburn")
INT32_MAX = 2**31 - 1
MOST_NAMES = 64  # of named prefixes, for each tenant
REPEATED_S = 60.0  # a second broken law within so long ends the process


class Driver:
    """Turns the engine: the only one who calls `handle`."""

    def __init__(
        self,
        engine: Engine,
        registry: PrefixRegistry,
        text: Text,
        salts: Salts,
        most_names: int = MOST_NAMES,
        progress_s: float = 15.0,
        keeps_tokens: bool = False,
    ) -> None:
        self.engine = engine
        self.registry = registry
        self.chronicle = Chronicle(asyncio.get_running_loop().time, keeps_tokens)
        self.tracing: Tracing | None = None
        self.onlookers = Onlookers()
        self.streams = Streams(self.post, text.detokenizer, self.chronicle, self.onlookers)
        self.send: Callable[[bytes, FromController], None] = lambda peer, message: None  # until there is a link
        self.vocab_size = text.vocab_size
        self.model_digest = b""  # as the workers have it; empty until one came
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._progress_s = progress_s
        self.plan_s = 0.0  # that the engine took so far
        self._events: list[Event] = []
        self._is_booked = False
        self._timer: asyncio.TimerHandle | None = None
        self.processes = Processes(engine.settings.silence_s + RETURNS_S)
        self._broken_at = -REPEATED_S
        self._has_workers = asyncio.Event()
        self.retired: set[str] = set()  # worker groups that were told to leave
        self.noted = Noted()
        self._num_wanting = 0  # requests that wait to know how long they may be
        self._is_draining = False
        self.names = NamedPrefixes(
            self.post,
            lambda: next(self.streams.ids),
            salts,
            registry,
            lambda: engine.leases,
            lambda: self.vocab_size,
            most_names,
        )

    def post(self, event: Event) -> None:
        """Handled in this turn, or booked for the next."""
        if type(event) is Submit:
            self.names.used_by(event)
        elif type(event) is Cancel:
            self.onlookers.tell(self.chronicle.cancelled, event.request_id)
        self._events.append(event)
        if not self._is_booked:
            self._is_booked = True
            self._loop.call_soon(self._turn)

    def deliver(self, events: Sequence[Arrived | Left]) -> None:
        """From the link: what peers sent, in order."""
        for event in events:
            if type(event) is Arrived and type(event.message) is Hello:
                self.processes.present(event.peer, event.message)
            elif self.tracing is not None and type(event) is Arrived and type(event.message) is StepResult:
                self.onlookers.tell(self.tracing.landed, event.message, self._loop.time())
            self.post(event)

    def _welcomed(self, peer: bytes) -> None:
        """Only now is it true here what its Hello said: one that is rejected may serve another model."""
        hello = self.processes.hello(peer)
        if hello is not None:
            self.vocab_size, self.model_digest = hello.vocab_size, hello.model_digest
            self.retired.discard(hello.name)

    def retire(self, group: str) -> None:
        """Have a worker group leave. It is missed by nobody until its worker says Hello again."""
        self.retired.add(group)
        self.post(Retire(group))

    def worker_ended(self, name: str, pid: int, reason: str) -> None:
        peer = self.processes.ended(name, pid)
        if peer is not None:
            self.post(Left(peer, reason))

    def _turn(self) -> None:
        try:
            # Stop events that streams post while effects are performed are handled before the turn is over.
            while self._events:
                self._handle(self._loop.time())
            self._is_booked = False
            self._set_timer()
        except Exception as error:
            # Nothing is known of the engine's state any more: better no process than one that goes quiet.
            log.exception("the engine cannot go on")
            self._end_with(error)  # first: whatever else fails now, the process ends
            self.streams.cut_short("the server found a fault of its own and stops")
        finally:
            self.streams.turn_ended()
            self.names.turn_ended()

    def _handle(self, now: float) -> None:
        events, self._events = self._events, []
        begun = time.perf_counter()
        try:
            effects = self.engine.handle(events, now)
        except LawBroken:
            effects = self._contain(now)
        self.plan_s += time.perf_counter() - begun
        for effect in effects:
            self._perform(effect, now)

    def _perform(self, effect: Effect, now: float) -> None:
        if type(effect) is Emit:  # of all effects but a few
            self.onlookers.tell(self.chronicle.note, effect, now)
            self.streams.perform(effect, now)
        elif type(effect) is Send:
            self.send(effect.peer, effect.message)
            if type(effect.message) is Welcome:
                self._welcomed(effect.peer)
            if self.tracing is not None and type(effect.message) is StepPlan:
                self.onlookers.tell(self.tracing.sent, effect.message, now)
        elif type(effect) is Stuck:
            self.processes.absent(effect.peers, effect.reason, effect.busy_s)
        elif type(effect) is Names:
            self.registry.learn(effect.group, effect.published, effect.withdrawn, now)
        elif type(effect) is Note:
            self.onlookers.tell(self.noted.note, effect, now)
            self._log(effect)
        elif type(effect) is Pinned:
            self.names.perform(effect)
        elif type(effect) is NotPinned:
            log.warning("a named prefix is not held by %s: %s", effect.group, effect.message)
            self.names.perform(effect)
        elif type(effect) is Refused and self.names.perform(effect):
            pass
        elif type(effect) is Turned:
            if effect.turn is Turn.DISPLACED:
                self.streams.displaced(effect.request_id, now)
            self.onlookers.tell(self.chronicle.note, effect, now)
        else:
            self.onlookers.tell(self.chronicle.note, effect, now)
            self.streams.perform(effect, now)  # type: ignore[arg-type]  # all that are left

    def _log(self, note: Note) -> None:
        if note.kind is NoteKind.LEASE_BEGAN:
            self._has_workers.set()
        is_frequent = note.kind in (NoteKind.PREEMPTED, NoteKind.RETURNED)
        level = logging.DEBUG if is_frequent else logging.INFO
        log.log(logging.ERROR if note.kind is NoteKind.LAW_BROKEN else level, "%s: %s", note.kind.value, note.text)

    def _contain(self, now: float) -> list[Effect]:
        """What the engine makes of it: it keeps what it had decided, and fails only what cannot be trusted."""
        log.exception("a law was broken")
        if now - self._broken_at < REPEATED_S:
            self._end_with(LawBroken("a second law was broken within a minute"))
        self._broken_at = now
        return self.engine.contain(now)

    def _end_with(self, error: Exception) -> None:
        if not self.fatal.done():
            self.fatal.set_exception(error)

    def _set_timer(self) -> None:
        deadline = self.engine.deadline
        if deadline is None:
            return  # a timer that is set does no harm
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= deadline:
                return  # it will look again
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(Tick())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.processes.close()

    # --- what is known of the workers

    async def room_for(self, num_prompt: int, n: int, patience: Patience) -> int:
        room = self._room_now(num_prompt, n)
        if room is not None:
            return room
        # Lengths are not known before there is a worker. The wait is bounded as that of an accepted request is.
        settings = self.engine.settings
        if self._num_wanting >= settings.max_waiting:
            raise queue_full(self._num_wanting)
        patience.bound(settings.queue_s, settings.request_s)
        limit_s, limit = patience.first_within(settings.recovery_s)
        self._num_wanting += 1
        begun = self._loop.time()
        try:
            async with asyncio.timeout(limit_s):
                while room is None:
                    self._has_workers.clear()
                    await self._has_workers.wait()
                    room = self._room_now(num_prompt, n)
        except TimeoutError:
            raise self._gave_up(limit) from None
        finally:
            self._num_wanting -= 1
            patience.spend(self._loop.time() - begun)
        return room

    def _gave_up(self, limit: Limit | None) -> ApiError:
        """No worker came in time, as the engine says it of a request that it knows."""
        if limit is None:
            return no_worker(self.engine.settings.recovery_s)
        return refusal(gave_up_waiting(0, limit, retry_after_s=0))

    def _room_now(self, num_prompt: int, n: int) -> int | None:
        if self._is_draining:
            return INT32_MAX  # the engine refuses everything now, and says why
        room = self.engine.room_for(num_prompt, n)
        # One that is too wide for every worker is for the engine to refuse, which says how wide it may be.
        return room if room is not None else self.engine.room_for(num_prompt, 1)

    def begin_draining(self) -> None:
        self._is_draining = True
        self._has_workers.set()
        self.post(Shutdown())

    def max_len(self) -> int | None:
        return max((group.max_len for group in self.engine.snapshot().groups), default=None)

    def health(self, snapshot: Snapshot | None = None) -> Health:
        """What can be expected of this service now. `snapshot`: of this moment, where there is one already."""
        engine, seen = self.engine.settings, snapshot or self.engine.snapshot()
        limits = engine.max_waiting, engine.max_waiting_tokens
        return judged(seen, self._loop.time(), self._progress_s, *limits, self.fatal.done())


async def drain(driver: Driver, seconds: float, hurry: asyncio.Event) -> None:
    """No new requests; those that are here may finish, for so long or until `hurry`; then the workers are told."""
    driver.begin_draining()
    deadline = asyncio.get_running_loop().time() + seconds
    while driver.streams.num_open and not hurry.is_set() and asyncio.get_running_loop().time() < deadline:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await hurry.wait()
    if driver.streams.num_open:
        log.info("%d requests were cut short", driver.streams.num_open)
    driver.streams.cut_short("the server is shutting down")
    driver.post(Tick())
    await asyncio.sleep(0.05)  # a last turn: the workers' Drain goes out, and the failed answers are written
