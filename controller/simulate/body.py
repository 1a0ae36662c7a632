"""A worker process in the virtual world: a fake worker, its lease, and everything that can befall it.

A body hears messages in order, works through its plans one at a time, answers late, and speaks up every `beat_s`. It
dies, hangs, leaves, fails a step, damages rows and blocks, as the scenario's faults say. A process that died comes
back later under a new identity; what it had sent may still be on its way.

The body also remembers which damage the core was told of, and when: a plan sent later may not use it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from kilburn.controller.simulate.fake_daemon import limits_of
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.controller.simulate.plan_rules import ContractBroken
from kilburn.controller.simulate.scenario import Faults
from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import (
    Beat,
    Drain,
    Forget,
    FromController,
    FromWorker,
    Gone,
    Goodbye,
    Hello,
    KvLost,
    Prepare,
    Reject,
    StepFailed,
    StepPlan,
    StepResult,
    Timings,
    Welcome,
)
from kilburn.shared.types import Tier

SUSPECT = 3  # so many losses of what one block had filled, and the core should know where they come from

Filling = tuple[Tier, int, int]  # (tier, block, generation): one content of a block


class Surroundings(Protocol):
    """What a body needs of the world."""

    rng: Random
    poison: Mapping[int, int]  # request -> the position that no worker survives
    outcomes: dict[tuple[int, int], StepResult]  # of steps that a rank 0 has run, by lease and step

    @property
    def now(self) -> float: ...
    def faults(self) -> Faults: ...
    def to_core(self, body: "Body", message: FromWorker, after_s: float = 0.0) -> None: ...
    def died(self, body: "Body", returns: bool) -> None: ...
    def poisoned(self, request: int) -> None: ...


@dataclass(slots=True)
class Damage:
    """What went wrong in one step: the fillings lost, where they came from, and those that are not numbers."""

    lost: list[Filling]
    sources: list[Filling]  # what had filled the lost ones
    bad: list[Filling]


@dataclass(slots=True)
class Body:
    peer: bytes
    hello: Hello
    silence_s: float
    step_s: float
    heard_s: float
    move_s: float
    compute_s: float
    lease: int | None = None
    worker: FakeWorker | None = None  # None also while a lease that this body gave up is not over yet
    is_alive: bool = True
    hangs_until_s: float = 0.0
    free_at_s: float = 0.0  # when the plans that it has are done
    damage: dict[int, Damage] = field(default_factory=dict)  # by step
    known_lost: dict[Filling, int] = field(default_factory=dict)  # -> the turn from which the core knows
    known_bad: dict[Filling, int] = field(default_factory=dict)
    compiling: dict[bytes, tuple[float, Prepare]] = field(default_factory=dict)  # grammars, until when
    suspicions: Counter[Filling] = field(default_factory=Counter)  # how often what each had filled was lost
    origins: dict[int, tuple[int, Filling]] = field(default_factory=dict)  # block -> its generation, and what filled it

    def greet(self, world: Surroundings) -> None:
        self.lease = self.worker = None
        self.heard_s = world.now
        world.to_core(self, self.hello)

    def beat(self, world: Surroundings) -> None:
        """Called every beat_s."""
        if world.now < self.hangs_until_s:
            return
        if world.now - self.heard_s > self.silence_s:
            self.greet(world)
        elif self.worker is not None:
            world.to_core(self, Beat(self.worker.lease, self.worker.next_step - 1))

    def hear(self, message: FromController, turn: int, world: Surroundings) -> None:
        """`turn` is the core's turn in which it sent the message."""
        self.heard_s = world.now
        match message:
            case Welcome(lease):
                self.lease = lease
                self.worker = FakeWorker(lease, limits_of(self.hello), self.hello.vocab_size)
                self.damage, self.known_lost, self.known_bad, self.origins = {}, {}, {}, {}
                self.suspicions, self.compiling = Counter(), {}
                self.free_at_s = world.now
            case Gone(lease) if self.lease == lease:
                self.greet(world)
            case Drain(lease) if self.lease == lease:
                world.to_core(self, Goodbye("drained"))
                world.died(self, returns=False)
            case Reject():
                world.died(self, returns=True)
            case Prepare() if self.worker is not None and self.worker.lease == message.lease:
                self._compile(self.worker, message, world)
            case Forget() if self.worker is not None and self.worker.lease == message.lease:
                self._finish_compiling(self.worker, world.now)
                self.compiling.pop(message.digest, None)
                self.worker.forget(message)
            case StepPlan() if self.worker is not None and self.worker.lease == message.lease:
                self._work(self.worker, message, turn, world)
            case _:
                pass

    def _compile(self, worker: FakeWorker, asked: Prepare, world: Surroundings) -> None:
        """Beside the steps, for a while."""
        self._finish_compiling(worker, world.now)
        ready_s, _ = self.compiling.get(asked.digest, (world.now, asked))
        if asked.digest not in worker.grammars and asked.digest not in self.compiling:
            ready_s = max(world.now, self.hangs_until_s) + self.step_s * world.rng.choice((0.1, 1.0, 1.0, 10.0))
        self.compiling[asked.digest] = ready_s, asked
        world.to_core(self, worker.verdict(asked), ready_s - world.now)

    def _finish_compiling(self, worker: FakeWorker, now: float) -> None:
        for digest, (ready_s, asked) in list(self.compiling.items()):
            if ready_s <= now:
                worker.prepare(asked)
                del self.compiling[digest]

    def _is_spared(self, worker: FakeWorker, plan: StepPlan, world: Surroundings) -> bool:
        """Whether the plan can be run: nothing befell the process, and no plan was lost on the way."""
        if plan.step != worker.next_step:
            # All that is left is to say so.
            world.to_core(self, StepFailed(plan.lease, plan.step, f"a gap: expected step {worker.next_step}"))
            self.worker = None
            return False
        faults, rng = world.faults(), world.rng
        if rng.random() < faults.dies:
            world.died(self, returns=True)
            return False
        if rng.random() < faults.leaves:
            world.to_core(self, Goodbye("maintenance"))
            world.died(self, returns=True)
            return False
        if rng.random() < faults.step_fails:
            world.to_core(self, StepFailed(plan.lease, plan.step, "out of memory"))
            self.worker = None
            return False
        if rng.random() < faults.hangs:
            self.hangs_until_s = world.now + rng.choice((0.5, 2.0, 6.0))
        return True

    def _work(self, worker: FakeWorker, plan: StepPlan, turn: int, world: Surroundings) -> None:
        if not self._is_spared(worker, plan, world):
            return
        if world.poison and self._is_poisoned(worker, plan, world):
            world.died(self, returns=True)
            return
        self._finish_compiling(worker, world.now)
        faults, rng = world.faults(), world.rng
        result = self._run(worker, plan, turn, faults, rng)
        start_s = max(world.now, self.free_at_s, self.hangs_until_s)
        self.free_at_s = start_s + self.step_s * rng.uniform(0.3, 1.5)
        world.to_core(self, result, self.free_at_s - world.now)

    def _is_poisoned(self, worker: FakeWorker, plan: StepPlan, world: Surroundings) -> bool:
        """Whether the plan computes a position that no worker survives."""
        admits = {admit.row: (admit.sampling.seed >> 32, admit.start) for admit in plan.admits}
        for number, count in zip(plan.rows, plan.counts, strict=True):
            row = worker.rows.get(number)
            if number in admits:
                request, start = admits[number]
            elif row is not None:
                request, start = row.sampling.seed >> 32, len(row.chains)
            else:
                continue
            if start <= world.poison.get(request, -1) < start + count:
                world.poisoned(request)
                return True
        return False

    def _run(self, worker: FakeWorker, plan: StepPlan, turn: int, faults: Faults, rng: Random) -> StepResult:
        self._refuse_known_bad(worker, plan, turn)
        # Mostly at the beginning: what goes bad in a chunk that does not sample is seen only later, when it has a name.
        admitted = {admit.row for admit in plan.admits} if faults.bad_row else set()
        bad_rows = [row for row in plan.rows if rng.random() < faults.bad_row * (6 if row in admitted else 1)]
        lost_blocks: list[int] = []
        if plan.rows and faults.lost_block and rng.random() < faults.lost_block:
            row = worker.rows.get(rng.choice(plan.rows))
            if plan.copies and rng.random() < 0.3:  # nobody may read it but by later copies
                lost_blocks.append(rng.choice(plan.copies)[0])
            elif row is not None and row.table:
                lost_blocks.append(rng.choice((row.table[0], rng.choice(row.table))))  # first blocks are shared most
        lost_host = []
        if plan.swaps_in and faults.lost_host and rng.random() < faults.lost_host:
            lost_host.append(rng.choice(plan.swaps_in)[0])
        self._refuse_known_lost(worker, plan, turn)
        result = worker.run(plan, bad_rows, lost_blocks, lost_host)
        for tier, moves in ((Tier.DEVICE, plan.copies), (Tier.HOST, plan.swaps_in)):
            for source, block in moves:
                filled = (tier, source, worker.pools[tier].generations[source])
                self.origins[block] = (worker.pools[Tier.DEVICE].generations[block], filled)
        pool = worker.pools[Tier.DEVICE]
        damage = Damage([], [], [])
        for lost in result.lost:  # a dead row says it again, and is to be admitted anew as soon as the core knows
            damage.lost.append((lost.tier, lost.block, worker.pools[lost.tier].generations[lost.block]))
            damage.sources += self._sources(worker, lost)
        for filling in damage.lost:
            if self.known_lost.get(filling, turn + 1) <= turn:
                tier, block, _ = filling
                raise ContractBroken(f"a plan reads {tier.name.lower()} block {block}, which the core knows to be lost")
        for index in result.failed:
            row = worker.rows[plan.rows[index]]
            damage.bad += [(Tier.DEVICE, b, pool.generations[b]) for b in row.table if pool.has_bad_cell(b)]
        self.damage[plan.step] = damage
        num_moved = len(plan.swaps_out) + len(plan.swaps_in)
        result.timings = Timings(
            moves_s=self.move_s * num_moved * rng.uniform(0.5, 1.5),
            forward_s=self.compute_s * sum(plan.counts) * rng.uniform(0.5, 1.5),
        )
        return result

    def _refuse_known_lost(self, worker: FakeWorker, plan: StepPlan, turn: int) -> None:
        """Nothing is swapped in or copied from a block that the core knew to be lost when it sent the plan."""
        for tier, moves in ((Tier.DEVICE, plan.copies), (Tier.HOST, plan.swaps_in)):
            for source, _ in moves:
                generation = worker.pools[tier].generations[source]
                if self.known_lost.get((tier, source, generation), turn + 1) <= turn:
                    raise ContractBroken(
                        f"{tier.name.lower()} block {source} is moved, which the core knows to be lost"
                    )

    def _sources(self, worker: FakeWorker, lost: KvLost) -> list[Filling]:
        """The block that a move had filled the lost one from, if both are what they were then.

        Each loss tells of it only if the core has not given the lost block to somebody else since.
        """
        generations = worker.pools[Tier.DEVICE].generations
        if lost.tier is not Tier.DEVICE or lost.block not in self.origins:
            return []
        generation, (tier, source, then) = self.origins[lost.block]
        is_same = generations[lost.block] == generation and worker.pools[tier].generations[source] == then
        return [(tier, source, then)] if is_same else []

    def _refuse_known_bad(self, worker: FakeWorker, plan: StepPlan, turn: int) -> None:
        """No row may begin on blocks whose failure the core knew when it sent the plan."""
        if not self.known_bad:
            return
        filled = {destination for _, destination in (*plan.copies, *plan.swaps_in)}
        generations = worker.pools[Tier.DEVICE].generations
        for admit in plan.admits:
            for block in admit.blocks[: blocks_for(admit.start, worker.limits.block_size)]:
                known = self.known_bad.get((Tier.DEVICE, block, generations[block]), turn + 1)
                if block not in filled and known <= turn:
                    raise ContractBroken(f"row {admit.row} begins on block {block}, which a failed row had filled")

    def core_learned(self, step: int, turn: int) -> None:
        """The core took the result of this step; from `turn` on it may plan nothing on what the step found damaged."""
        damage = self.damage.pop(step, None)
        if damage is None:
            return
        for filling in damage.lost:
            self.known_lost.setdefault(filling, turn)
        self.suspicions.update(damage.sources)
        for filling in damage.sources:
            if self.suspicions[filling] >= SUSPECT:
                self.known_lost.setdefault(filling, turn)
        for filling in damage.bad:
            self.known_bad.setdefault(filling, turn)
