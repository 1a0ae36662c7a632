"""The real engine, stepped by hand, with workers (worker.py) that run a plan when asked to.

    hand = Hand()
    hand.join(num_blocks=8, block_size=4)          a worker says Hello
    request = hand.submit([1, 2, 3], max_tokens=5)
    hand.land()                                    its oldest plan is run, the result delivered
    hand.run()                                     until nothing is under way
    hand.check(request)                            tokens and reasons are the oracle's

After every event the engine's laws are counted anew, and the effects are held to their own rules: nothing after a
Finished, no gap in the steps, names that add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kilburn.controller.core.block_pool import BlockPool
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import (
    Arrived,
    Beam,
    BeamSettings,
    Cancel,
    Effect,
    Emit,
    Event,
    Finished,
    Names,
    Note,
    NoteKind,
    NotPinned,
    Pin,
    Pinned,
    Refused,
    Send,
    Started,
    Stop,
    Stuck,
    Submit,
    Unpin,
)
from kilburn.controller.core.home import Home
from kilburn.controller.core.lineup import Lineup
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.sequence import Group
from kilburn.controller.core.sequence import Sequence as CoreSequence
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.core.snapshot import GroupSnapshot
from kilburn.shared.messages import FromWorker, Gone, Hello, StepPlan, Welcome
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason
from tests.core.worker import Choose, Worker, draw, hello


@dataclass
class Log:
    """What the engine said, for good."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    finished: dict[tuple[int, int], Finished] = field(default_factory=dict)
    refused: dict[int, Refused] = field(default_factory=dict)
    started: dict[int, Started] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    sent: list[Send] = field(default_factory=list)
    names: dict[str, set[bytes]] = field(default_factory=dict)
    beams: dict[int, list[Beam]] = field(default_factory=dict)
    pinned: list[Pinned] = field(default_factory=list)
    not_pinned: list[NotPinned] = field(default_factory=list)
    stuck: list[Stuck] = field(default_factory=list)


class Hand:
    """See the file's head."""

    def __init__(
        self,
        settings: EngineSettings | None = None,
        order: Sequence[int] | None = None,
        choose: Choose = draw,
    ) -> None:
        self.engine = Engine(settings or EngineSettings(), new_pool=lambda num_blocks: BlockPool(num_blocks, order))
        self.now = 0.0
        self.choose = choose
        self.log = Log()
        self.workers: dict[bytes, Worker] = {}
        self.submits: dict[int, Submit] = {}
        self.cancelled: set[int] = set()
        self.num_pins = 0
        self._hellos: dict[bytes, Hello] = {}

    # --- events

    def handle(self, *events: Event, after_s: float = 0.0) -> list[Effect]:
        self.now += after_s
        effects = self.engine.handle(events, self.now)
        self.engine.validate()
        self.record(effects)
        return effects

    def join(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_rows: int = 8,
        max_step_tokens: int = 64,
        num_host_blocks: int = 0,
    ) -> list[Effect]:
        return self.say_hello(
            hello(
                num_blocks=num_blocks,
                block_size=block_size,
                max_rows=max_rows,
                max_step_tokens=max_step_tokens,
                num_host_blocks=num_host_blocks,
            )
        )

    def say_hello(self, hello: Hello, peer: bytes = b"w-1") -> list[Effect]:
        self._hellos[peer] = hello
        return self.handle(Arrived(peer, hello))

    def say(self, message: FromWorker, peer: bytes = b"w-1", after_s: float = 0.0) -> list[Effect]:
        return self.handle(Arrived(peer, message), after_s=after_s)

    def new_submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        n: int = 1,
        priority: int = 0,
        stop_ids: tuple[int, ...] = (),
        salt: bytes = b"",
        beams: BeamSettings | None = None,
    ) -> Submit:
        sampling = Sampling(temperature=0.0, stop_ids=stop_ids)
        submit = Submit(len(self.submits) + 1, tuple(prompt), max_tokens, sampling, n, priority, salt, beams)
        self.submits[submit.request_id] = submit
        return submit

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        n: int = 1,
        priority: int = 0,
        stop_ids: tuple[int, ...] = (),
        salt: bytes = b"",
        beams: BeamSettings | None = None,
    ) -> int:
        submit = self.new_submit(prompt, max_tokens, n, priority, stop_ids, salt, beams)
        self.handle(submit)
        return submit.request_id

    def pin(self, tokens: Sequence[int], salt: bytes = b"", is_public: bool = False) -> int:
        self.num_pins += 1
        prefix_id = 1000 + self.num_pins
        self.handle(Pin(prefix_id, tuple(tokens), salt, is_public))
        return prefix_id

    def unpin(self, prefix_id: int) -> list[Effect]:
        return self.handle(Unpin(prefix_id))

    def cancel(self, request: int) -> list[Effect]:
        self.cancelled.add(request)
        return self.handle(Cancel(request))

    def stop(self, request: int, index: int = 0) -> list[Effect]:
        return self.handle(Stop(request, index))

    def land(self, peer: bytes = b"w-1") -> list[Effect]:
        """The oldest plan's result arrives."""
        return self.say(self.workers[peer].run_next(), peer)

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is under way."""
        for _ in range(max_steps):
            busy = [peer for peer, worker in self.workers.items() if worker.plans]
            if not busy:
                return
            self.land(busy[0])
        raise AssertionError(f"still at work after {max_steps} steps")

    # --- what was said

    def record(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._record(effect)
        for home in self.engine._homes.values():
            name = home.lease.hello.name
            assert self.log.names.get(name, set()) == set(home.scheduler.pool.all_names()), "Names do not add up"
            self._audit(home)
        for group in self.engine.snapshot().groups:
            states = group.free_blocks + group.cached_blocks + group.owned_blocks + group.quarantined_blocks
            assert states == group.num_blocks

    def _audit(self, home: Home) -> None:
        """What plans under way write is nobody else's, and a name says what its block holds."""
        size, pool = home.scheduler.block_size, home.scheduler.pool
        for sequence in [sequence for group in home.scheduler.line.running for sequence in group.live]:
            for i, block in enumerate(sequence.own_table.blocks):
                start, end = i * size, (i + 1) * size
                name = pool.name_of(block)
                if start < sequence.num_planned and sequence.num_computed < min(end, sequence.num_planned):
                    assert pool.refs(block) == 1, f"{sequence} writes into a block of others"
                    assert name is None, f"{sequence} writes into a block that others may find"
                if name is not None:
                    assert name.tokens == tuple(sequence.tokens[start:end])
                    assert end <= sequence.num_computed or not sequence.num_planned, f"{sequence}: named too early"

    def _record(self, effect: Effect) -> None:
        match effect:
            case Emit():
                for drawn in effect.each():
                    self._expect_live(drawn.request_id, drawn.index)
                    assert drawn.request_id in self.log.started
                    self.log.tokens.setdefault((drawn.request_id, drawn.index), []).append(drawn.token)
            case Finished(request_id=request, index=index):
                self._expect_live(request, index)
                self.log.finished[request, index] = effect
            case Refused(request_id=request):
                assert request not in self.log.started
                self.log.refused[request] = effect
            case Started(request_id=request):
                assert request not in self.log.started
                self.log.started[request] = effect
            case Send(peer=peer, message=message):
                self.log.sent.append(effect)
                match message:
                    case Welcome(lease=lease):
                        self.workers[peer] = Worker(peer, self._hellos[peer], lease, self.choose)
                    case Gone(lease=lease):
                        if peer in self.workers and self.workers[peer].lease == lease:
                            del self.workers[peer]
                    case StepPlan():
                        self.workers[peer].receive(message)
                    case _:
                        pass
            case Beam(request_id=request):
                self._expect_live(request, effect.index)
                self.log.beams.setdefault(request, []).append(effect)
                self.log.finished[request, effect.index] = Finished(request, effect.index, effect.reason)
            case Pinned():
                self.log.pinned.append(effect)
            case NotPinned():
                self.log.not_pinned.append(effect)
            case Names(group=name, published=published, withdrawn=withdrawn):
                known = self.log.names.setdefault(name, set())
                known -= set(withdrawn)
                known |= set(published)
            case Note():
                self.log.notes.append(effect)
            case Stuck():
                self.log.stuck.append(effect)

    def _expect_live(self, request: int, index: int) -> None:
        assert (request, index) not in self.log.finished, "nothing is said after a Finished"
        assert request not in self.cancelled, "nothing is said after a Cancel"
        assert request not in self.log.refused

    # --- questions

    def tokens(self, request: int, index: int = 0) -> list[int]:
        return self.log.tokens.get((request, index), [])

    def reason(self, request: int, index: int = 0) -> FinishReason:
        return self.log.finished[request, index].reason

    def expected(self, request: int, index: int = 0) -> tuple[list[int], FinishReason]:
        submit = self.submits[request]
        return answer(submit.prompt, submit.max_tokens, submit.sampling.stop_ids, index, self.choose)

    def check(self, *requests: int) -> None:
        """Each choice of these requests has ended as the oracle says."""
        for request in requests:
            for index in range(self.submits[request].n):
                tokens, reason = self.expected(request, index)
                assert self.tokens(request, index) == tokens, f"request {request}.{index}"
                assert self.reason(request, index) is reason

    def home(self, peer: bytes = b"w-1") -> Home:
        return self.engine._homes[peer]

    def scheduler(self, peer: bytes = b"w-1") -> Scheduler:
        return self.home(peer).scheduler

    def line(self, peer: bytes = b"w-1") -> Lineup:
        return self.scheduler(peer).line

    def pool(self, peer: bytes = b"w-1") -> BlockPool:
        return self.scheduler(peer).pool

    def worker(self, peer: bytes = b"w-1") -> Worker:
        return self.workers[peer]

    def group(self, request: int) -> Group:
        return self.engine.requests.groups[request]

    def sequence(self, request: int, index: int = 0) -> CoreSequence:
        [found] = [sequence for sequence in self.group(request).live if sequence.index == index]
        return found

    def table(self, request: int, index: int = 0) -> list[int]:
        table = self.sequence(request, index).table
        return [] if table is None else list(table.blocks)

    def last_plan(self, peer: bytes = b"w-1") -> StepPlan:
        return self.workers[peer].seen[-1]

    def snapshot(self) -> GroupSnapshot:
        [group] = self.engine.snapshot().groups
        return group

    def preemptions(self) -> list[str]:
        """The requests, in order."""
        return [note.text.split(",")[0] for note in self.log.notes if note.kind is NoteKind.PREEMPTED]

    def expect_empty(self, peer: bytes = b"w-1") -> None:
        """Nothing is left of any request: no block, no row, no entry."""
        assert self.engine.is_idle
        line, pool = self.line(peer), self.pool(peer)
        assert not line.running
        assert not line.waiting
        assert not line.ended
        assert sorted(line.free_rows) == list(range(line.max_rows))
        assert pool.num_owned == pool.num_refs == 0
        assert pool.num_available == pool.num_blocks
        host = self.scheduler(peer).memory.host
        assert host.num_owned == 0
        assert host.num_available == host.num_blocks
        assert not self.engine.requests.groups
        assert not self.engine.requests.placed
        assert not self.engine.requests.homeless.strays


def answer(
    prompt: Sequence[int], max_tokens: int, stop_ids: tuple[int, ...], stream: int, choose: Choose
) -> tuple[list[int], FinishReason]:
    """The oracle: one request, alone, without a cache."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(choose((*prompt, *tokens), stream))
        if tokens[-1] in stop_ids:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


def rows_of(plan: StepPlan) -> dict[int, int]:
    """row -> positions, in the plan's order."""
    return dict(zip(plan.rows, plan.counts, strict=True))


def settings_of_depth(depth: int, max_step_tokens: int = 1 << 20) -> EngineSettings:
    return replace(EngineSettings(), depth=depth, max_step_tokens=max_step_tokens)
