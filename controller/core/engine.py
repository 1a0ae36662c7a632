"""The core's one door: events in, effects out, time an argument.

    effects = engine.handle([Submit(...), Arrived(peer, StepResult(...))], now)

    requests --> placement --> a home (lease + scheduler) --> plans, until its flight is full
                     ^                |
                     '-- homeless <---'  the lease ended: tokens are the truth, KV is lost, places in line are kept

Every doubt about a worker (silence, a gap, a step past its deadline, an outcome that does not fit, a failed step) is
treated in one way: its lease ends, and its requests go where they fit or wait `recovery_s` for a new Hello. Worker
groups come and go at any time and know nothing of each other: each has its own pool, line and flight.
"""

from collections import deque
from collections.abc import Callable, Sequence

from kilburn.controller.core import door, laws
from kilburn.controller.core.blame import POISON
from kilburn.controller.core.block_map import BlockMap, all_tables, request_rows, worker_map
from kilburn.controller.core.block_pool import BlockPool, NameJournal
from kilburn.controller.core.commit import Disagreement
from kilburn.controller.core.events import (
    Arrived,
    Cancel,
    Disturbed,
    Effect,
    Event,
    Left,
    Names,
    Note,
    NoteKind,
    Pin,
    Refusal,
    Refused,
    Retire,
    Send,
    Shutdown,
    Stop,
    Submit,
    Tick,
    Turn,
    Turned,
    Unpin,
)
from kilburn.controller.core.home import Home
from kilburn.controller.core.lease import Lease, LeaseState
from kilburn.controller.core.limits import Limit
from kilburn.controller.core.memory import Memory
from kilburn.controller.core.pinning import Pinning
from kilburn.controller.core.placement import can_move
from kilburn.controller.core.prefix_index import Hasher, PrefixIndex
from kilburn.controller.core.ranks import Muster, RanksDisagree
from kilburn.controller.core.requests import Requests
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.core.snapshot import Snapshot, group_snapshot
from kilburn.shared.digest import BlockHasher
from kilburn.shared.messages import (
    Beat,
    Drain,
    FromController,
    Gone,
    Goodbye,
    Hello,
    Prepared,
    Reject,
    StepDone,
    StepFailed,
    StepResult,
    Unpreparable,
    Welcome,
)
from kilburn.shared.types import LawBroken

NAME_TAKEN = "another process has this name, and is heard; give this one a --name of its own"


class Engine:
    """See the file's head. Not thread-safe, not async; knows no text, no sockets and no clock."""

    def __init__(
        self,
        settings: EngineSettings,
        new_pool: Callable[[int], BlockPool] = BlockPool,
        new_index: Callable[[BlockPool, Hasher, int], PrefixIndex] = PrefixIndex,
    ) -> None:
        self.settings = settings
        self._new_pool, self._new_index = new_pool, new_index
        self._homes: dict[bytes, Home] = {}  # by rank 0
        self._leads: dict[bytes, bytes] = {}  # of every other rank: rank 0
        self._muster = Muster()
        self._pinning = Pinning(settings.most_pinned)
        self.requests = Requests(settings, self._homes, self._pinning)
        self._model_digest: bytes | None = None
        self._leases_began = self._leases_ended = self._laws_broken = 0
        self._stale_messages = 0
        self._is_closing = False
        self._has_moved = False  # worker groups came or went, and prefixes may be held by none
        self._num_poison = 0  # requests that ended workers
        self._now = 0.0  # of the last turn
        # Kept here, so that what was decided and what was not yet heard outlive a broken law.
        self._events: deque[Event] = deque()
        self._effects: list[Effect] = []

    # --- the door

    def handle(self, events: Sequence[Event], now: float) -> list[Effect]:
        """Take note of what happened, and say what to do. Raises LawBroken: a bug, see `contain`."""
        effects, self._now = self._effects, now
        self._events.extend(events)
        for home in self._homes.values():
            home.scheduler.memory.at(now)
        while self._events:
            self._take(self._events.popleft(), now, effects)
        self._pass_time(now, effects)
        for home in self._homes.values():
            self._let_leave(home, now, effects)
        self._settle(now, effects)
        for home in self._homes.values():
            self.go_on(home, now, effects)
        if self._is_closing and not self.requests.groups:
            for home in self._homes.values():
                self._drain(home, effects)
        self._effects = []
        return effects

    @property
    def deadline(self) -> float | None:
        """When a Tick is wanted, if nothing else happens before."""
        times = self.requests.deadlines
        for home in self._homes.values():
            times += [home.lease.deadline, home.scheduler.line.grammars.deadline]
            late_at = home.step_deadline(self.settings.step_deadline_s)
            times += [] if late_at is None else [late_at]
        return min(times, default=None)

    def home(self, peer: bytes) -> Home | None:
        """The worker group of a peer, for simulations that go on by many steps at once."""
        return self._homes.get(peer)

    @property
    def leases(self) -> dict[str, int]:
        """The present lease of each worker group, by the group's name."""
        return {home.lease.hello.name: home.lease.id for home in self._homes.values()}

    @property
    def is_idle(self) -> bool:
        return not self.requests.groups

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row, preempted ones included."""
        return self.requests.waiting[0]

    def room_for(self, num_prompt: int, n: int) -> int | None:
        """The most max_tokens that a prompt of this length can have on some worker group; None while there is none.

        Zero or less: the prompt itself does not fit.
        """
        return door.room_for(num_prompt, n, [home.scheduler for home in self._homes.values()])

    # --- events

    def _take(self, event: Event, now: float, effects: list[Effect]) -> None:
        match event:
            case Arrived(peer, message):
                self._arrived(peer, message, now, effects)
            case Submit():
                self._submit(event, now, effects)
            case Stop(request_id, index):
                self.requests.stop(request_id, index, effects)
            case Cancel(request_id):
                self.requests.cancel(request_id)
            case Pin():
                self._pin(event, effects)
            case Unpin(prefix_id):
                self._unpin(prefix_id)
            case Left(peer, reason):
                self._end_lease(peer, reason, now, effects)
            case Retire(group):
                self._retire(group, effects)
            case Disturbed():
                for home in self._homes.values():
                    home.lease.next_beat_at = now  # where it cannot be sent, its worker is gone
            case Shutdown():
                self._is_closing = True
            case Tick():
                pass

    def _submit(self, submit: Submit, now: float, effects: list[Effect]) -> None:
        if self._is_closing:
            effects.append(Refused(submit.request_id, Refusal.SHUTTING_DOWN, "the server is shutting down"))
        else:
            self.requests.submit(submit, now, effects)

    def _pin(self, pin: Pin, effects: list[Effect]) -> None:
        if self._is_closing:
            effects.append(Refused(pin.prefix_id, Refusal.SHUTTING_DOWN, "the server is shutting down"))
            return
        refused = self._pinning.pin(pin, self._homes.values(), self.requests.homeless.groups)
        if refused is not None:
            effects.append(refused)
        for home in self._homes.values():
            self.requests.forget_ended(home)

    def _unpin(self, prefix_id: int) -> None:
        self._pinning.unpin(prefix_id, self._homes.values())
        for home in self._homes.values():
            self.requests.forget_ended(home)

    # --- workers

    def _arrived(self, peer: bytes, message: object, now: float, effects: list[Effect]) -> None:
        if isinstance(message, Hello):
            self._hello(peer, message, now, effects)
            return
        home = self._homes.get(self._leads.get(peer, peer))
        lease = getattr(message, "lease", None)
        if home is None or (lease is not None and lease != home.lease.id):
            self._stale_messages += 1
            if home is None and lease is not None:
                effects.append(Send(peer, Gone(lease, "this lease is over")))
            elif isinstance(message, Goodbye):
                self._muster.forget(peer)
            return
        home.lease.heard(peer, now)
        match message:
            case StepResult() | StepDone():
                self._answered(home, home.lease.ranks[peer], message, now, effects)
            case StepFailed(reason=reason):
                self._end_lease(peer, f"a step failed: {reason}", now, effects)
            case Goodbye(reason=reason):
                self._end_lease(peer, f"the worker left: {reason}", now, effects, is_crash=False)
            case Beat():
                home.lease.num_beats_heard += 1
            case Prepared() | Unpreparable():
                home.scheduler.line.grammar_answered(message, effects)
                self.requests.forget_ended(home)

    def _hello(self, peer: bytes, hello: Hello, now: float, effects: list[Effect]) -> None:
        self._end_lease(peer, "the worker said Hello again", now, effects, is_told=False, is_crash=False)  # it knows
        reason = self._objection(hello)
        if reason is not None:
            effects.append(Send(peer, Reject(reason)))
            return
        for other, home in list(self._homes.items()):
            if home.lease.hello.name != hello.name:
                continue
            if home.lease.keeps_out(hello):
                home.lease.next_beat_at = now  # where it cannot be sent, the name is free
                effects += [Send(peer, Gone(0, NAME_TAKEN)), Note(NoteKind.NAME_TAKEN, f"{hello.name}: {NAME_TAKEN}")]
                return
            self._end_lease(other, "another worker took its name", now, effects)
        self._model_digest = hello.model_digest
        self._muster.add(peer, hello)
        if self._muster.is_complete(hello.name):
            self._welcome(*self._muster.take(hello.name), now, effects)
        else:
            num_present, world = self._muster.present[hello.name]
            text = f"rank {hello.rank} of {hello.name}: {num_present} of {world} are there"
            effects.append(Note(NoteKind.RANK_WAITS, text))

    def _welcome(self, peers: list[bytes], boots: list[str], hello: Hello, now: float, effects: list[Effect]) -> None:
        """All ranks of a worker group are there."""
        self._leases_began += 1
        settings = self.settings
        lease = Lease(self._leases_began, peers, hello, settings.beat_s, settings.silence_s, now, boots)
        pool = self._new_pool(hello.num_blocks)
        size, host = hello.layout.block_size, BlockPool(hello.num_host_blocks)
        memory = Memory(pool, host, BlockHasher(hello.model_digest, size), size, self._new_index)
        memory.at(now)
        policies = (settings.max_step_tokens, settings.preemption, settings.prefix_wait_steps, settings.step_target_s)
        scheduler = Scheduler(hello, memory, lease.id, *policies, self.requests.fairness, settings.prepare_s)
        home = self._homes[lease.peer] = Home(lease, scheduler)
        self._leads |= dict.fromkeys(peers[1:], lease.peer)
        lease.move(LeaseState.READY)
        self._has_moved = True
        times = (settings.beat_s, settings.silence_s, settings.depth)
        self._tell(home, Welcome(lease.id, *times, hello.rendezvous, settings.step_deadline_s), effects)
        ranks = f", {len(peers)} ranks" if len(peers) > 1 else ""
        effects.append(Note(NoteKind.LEASE_BEGAN, f"lease {lease.id}: {hello.name}, {hello.num_blocks} blocks{ranks}"))

    @staticmethod
    def _tell(home: Home, message: FromController, effects: list[Effect], but: bytes | None = None) -> None:
        """All ranks of a worker group hear the same."""
        effects.extend([Send(peer, message) for peer in home.lease.peers if peer != but])

    def _objection(self, hello: Hello) -> str | None:
        if self._is_closing and not self.requests.groups:
            return "the controller is shutting down"
        if hello.num_blocks < 1:
            return "a worker needs at least one block; raise --kv-memory"
        if self._model_digest not in (None, hello.model_digest):
            return "this controller serves another model; start a controller for each"
        return self._muster.objection(hello)

    def _answered(
        self, home: Home, rank: int, message: StepResult | StepDone, now: float, effects: list[Effect]
    ) -> None:
        """A rank is done with a step; those that all are done with are committed."""
        try:
            home.agreement.hear(rank, message)
            while (result := home.agreement.settle()) is not None:
                home.scheduler.commit(result, now, effects)
        except (Disagreement, RanksDisagree) as doubt:
            self.requests.forget_ended(home)
            self._end_lease(home.lease.peer, str(doubt), now, effects)
            return
        self.requests.forget_ended(home)

    def _end_lease(
        self,
        peer: bytes,
        reason: str,
        now: float,
        effects: list[Effect],
        is_told: bool = True,
        is_crash: bool = True,
    ) -> None:
        """For all ranks of the worker group that this one is of. `is_told`: whether it is to hear of it, too.

        `is_crash`: whether what was under way may have caused it.
        """
        home = self._homes.pop(self._leads.get(peer, peer), None)
        if home is None:
            self._muster.forget(peer)
            return
        for rank in home.lease.peers[1:]:
            del self._leads[rank]
        home.lease.move(LeaseState.GONE)
        self._leases_ended += 1
        self._tell(home, Gone(home.lease.id, reason), effects, but=None if is_told else peer)
        effects.append(Note(NoteKind.LEASE_ENDED, f"lease {home.lease.id}: {reason}"))
        pool = home.scheduler.pool
        names = [*pool.journal.withdrawn, *pool.all_names()]
        if names:
            effects.append(Names(home.lease.hello.name, [], names))
        guilty = home.scheduler.lost() if is_crash else None
        if guilty is not None:
            self._num_poison += 1
            effects.append(Note(NoteKind.POISON, f"request {guilty.request_id} ended lease {home.lease.id}: {reason}"))
            home.scheduler.line.fail(guilty, POISON, effects)
            self.requests.forget_ended(home)
        self._evacuate(home, f"lease {home.lease.id} ended: {reason}", now, effects)

    def _evacuate(self, home: Home, why: str, now: float, effects: list[Effect]) -> None:
        self._has_moved = True
        for group in home.scheduler.evacuate():
            self.requests.displaced(group, now)
            effects.append(Turned(group.request_id, Turn.DISPLACED, why))

    def _retire(self, name: str, effects: list[Effect]) -> None:
        for home in self._homes.values():
            if home.lease.hello.name == name and not home.lease.is_leaving:
                home.lease.is_leaving = self._has_moved = True
                effects.append(Note(NoteKind.LEASE_LEAVES, f"lease {home.lease.id}: {name} is to leave"))

    def _let_leave(self, home: Home, now: float, effects: list[Effect]) -> None:
        """A group that is to leave gives up its requests, once nothing is under way and others can take each of them.

        Until then all of them go on here, and those that fit nowhere else come to their end.
        """
        lease = home.lease
        may_leave = lease.is_leaving and lease.state is not LeaseState.DRAINING
        home.is_held = may_leave and can_move(home, self._homes.values())
        if home.is_held and not home.scheduler.flights:
            self._evacuate(home, f"{lease.hello.name} leaves", now, effects)
            self._drain(home, effects)

    # --- what time and room bring about

    def _pass_time(self, now: float, effects: list[Effect]) -> None:
        floor_s = self.settings.step_deadline_s
        for peer, home in list(self._homes.items()):
            home.lease.doubt(now)
            if (stuck := home.overdue(now, floor_s)) is not None:
                effects.append(stuck)
                self._end_lease(peer, stuck.reason, now, effects)
            elif home.lease.is_beat_due(now):
                home.lease.beaten(now)
                self._tell(home, home.beat, effects)
            if home.scheduler.line.waiting.preparing:
                home.scheduler.line.give_up_grammars(now, effects)
                self.requests.forget_ended(home)
        self.requests.pass_time(now, effects)

    def _settle(self, now: float, effects: list[Effect]) -> None:
        if self._has_moved:
            self._has_moved = False
            effects.extend(self._pinning.settle(self._homes.values(), self.requests.homeless.groups))
        self.requests.settle(now, effects)

    def go_on(self, home: Home, now: float, effects: list[Effect]) -> None:
        """One worker group gets its next plans, and what came of them is noted; simulations ask for one alone."""
        self._plan(home, now, effects)
        self._report_names(home, effects)
        self.requests.note_begun(home, now)
        home.scheduler.memory.check()

    def _plan(self, home: Home, now: float, effects: list[Effect]) -> None:
        scheduler = home.scheduler
        if home.lease.state is LeaseState.DRAINING:
            return  # a named prefix is not waited for, and not begun
        effects.extend(Send(home.lease.peer, word) for word in scheduler.line.grammars.speak(now))  # who draws
        if home.is_held:
            return
        while len(scheduler.flights) < self.settings.depth:
            plan = home.plan(now, self.settings.step_deadline_s, effects)
            if plan is None:
                break
            self._tell(home, plan, effects)
        scheduler.note_stall(now)
        if scheduler.line.ended:
            self.requests.forget_ended(home)

    def _report_names(self, home: Home, effects: list[Effect]) -> None:
        journal = home.scheduler.pool.journal
        if journal.published or journal.withdrawn:
            effects.append(Names(home.lease.hello.name, list(journal.published), list(journal.withdrawn)))
            home.scheduler.pool.journal = NameJournal()

    def _drain(self, home: Home, effects: list[Effect]) -> None:
        if home.lease.state is not LeaseState.DRAINING:
            home.lease.move(LeaseState.DRAINING)
            self._tell(home, Drain(home.lease.id), effects)

    # --- for onlookers, and for the day a law is broken

    def snapshot(self, now: float | None = None) -> Snapshot:
        """All that an onlooker may know. `now`: of whoever asks, where turns may be long ago; None: of the last one."""
        num_waiting, num_tokens = self.requests.waiting
        requests_per_s, tokens_per_s = self.requests.outflow.rates(self._now if now is None else max(now, self._now))
        return Snapshot(
            groups=tuple([group_snapshot(home) for home in self._homes.values()]),
            requests=len(self.requests.groups),
            homeless_requests=len(self.requests.homeless.strays),
            waiting_requests=num_waiting,
            leases_began=self._leases_began,
            leases_ended=self._leases_ended,
            waiting_ranks=sum(num_present for num_present, _ in self._muster.present.values()),
            stale_messages=self._stale_messages,
            requests_displaced=self.requests.homeless.num_displaced,
            requests_recovered=self.requests.homeless.num_recovered,
            laws_broken=self._laws_broken,
            is_closing=self._is_closing,
            waiting_tokens=num_tokens,
            drained_requests_per_s=requests_per_s,
            drained_tokens_per_s=tokens_per_s,
            queue_timeouts=self.requests.timeouts[Limit.QUEUE],
            request_timeouts=self.requests.timeouts[Limit.REQUEST],
            poison_requests=self._num_poison,
        )

    def block_map(self) -> BlockMap:
        """Memory block by block and requests one by one. For onlookers who look some times a second, not every step."""
        homes = list(self._homes.values())
        rows = request_rows(homes, self.requests.homeless.groups)
        return BlockMap(self.snapshot(), tuple([worker_map(home) for home in homes]), rows, all_tables(homes))

    def validate(self) -> None:
        """Every law, counted anew. Raises LawBroken."""
        for home in self._homes.values():
            home.scheduler.validate()
        self.requests.validate()

    def contain(self, now: float) -> list[Effect]:
        """After LawBroken: fail the requests whose blocks are not as they should be, recompute all others, and go on.

        Their blocks are out of use at once, and for good with the lease, which ends for every worker group whose
        laws do not hold.
        """
        self._laws_broken += 1
        effects = self._effects
        for peer, home in list(self._homes.items()):
            try:
                home.scheduler.validate()
            except LawBroken as broken:
                effects.append(Note(NoteKind.LAW_BROKEN, str(broken)))
                laws.contain(home.scheduler.line, effects)
                self.requests.forget_ended(home)
                self._end_lease(peer, "a law of the block pool was broken", now, effects, is_crash=False)
        return self.handle((), now)
