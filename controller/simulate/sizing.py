"""One run of a cluster that does not exist: a setup and its requests in, an outcome out.

Many groups are dealt to several controllers, each of which has an engine and an equal share of the requests, in turn,
as behind a balancer that counts; they know nothing of each other, and so run in as many processes as there are cores.
"""

import gc
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.pool import Pool

from kilburn.controller.core.departure import Way
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.core.snapshot import Snapshot
from kilburn.controller.simulate.cluster import FOREVER_S, LATEST_S, Cluster, Timed, Worker
from kilburn.controller.simulate.demand import Decoding, submits
from kilburn.controller.simulate.gates import Batched, Gate, Open, Reserved
from kilburn.controller.simulate.orphans import end_with
from kilburn.controller.simulate.record import Record
from kilburn.controller.simulate.reservations import Max, Oracle, Pow2, Reservation
from kilburn.controller.simulate.roofline import Machine
from kilburn.controller.simulate.traces import Asked
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.shared.messages import Hello

GROUPS_EACH = 8  # worker groups of one controller, where nobody says
_RESERVATIONS: dict[str, type[Reservation]] = {
    "orca-max": Max,
    "orca-pow2": Pow2,
    "orca-oracle": Oracle,
    "batch": Max,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster: what each worker group is, and how it is scheduled."""

    layout: KVLayout
    machine: Machine
    num_blocks: int
    num_host_blocks: int = 0
    max_rows: int = 128
    max_step_tokens: int = 512
    max_len: int = 2048
    vocab_size: int = 32_000
    num_groups: int = 1
    policy: str = "paged"
    depth: int = 2
    step_target_s: float = 0.25
    prefix_wait_steps: int = 64
    preemption: Preemption = Preemption.AUTO
    is_fair: bool = False
    decoding: Decoding = field(default=Decoding())

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.layout.block_size

    def engine_settings(self) -> EngineSettings:
        return EngineSettings(
            depth=self.depth,
            max_step_tokens=self.max_step_tokens,
            beat_s=FOREVER_S,
            silence_s=FOREVER_S,
            step_deadline_s=FOREVER_S,
            recovery_s=FOREVER_S,
            max_waiting=1 << 40,
            preemption=self.preemption,
            step_target_s=self.step_target_s,
            prefix_wait_steps=self.prefix_wait_steps,
            is_fair=self.is_fair,
        )

    def hello(self, number: int) -> Hello:
        # Behind a gate the pool that counts is the policy's; the engine's own is never short.
        behind_gate = self.max_rows * blocks_for(self.max_len, self.layout.block_size) + self.max_rows
        num_blocks = self.num_blocks if self.policy == "paged" else behind_gate * 101 // 100
        pools = (num_blocks, self.num_host_blocks if self.policy == "paged" else 0)
        limits = (self.max_rows, self.max_step_tokens, self.max_len, self.vocab_size)
        return Hello(f"group-{number}", b"\x11" * 32, self.layout, *pools, *limits)

    def gate(self) -> Gate:
        if self.policy == "paged":
            return Open()
        policy = _RESERVATIONS[self.policy](self.num_slots)  # type: ignore[call-arg]
        return (Batched if self.policy == "batch" else Reserved)(policy, self.max_len, self.max_rows)


@dataclass(slots=True)
class Tally:
    """What engines counted, added up."""

    num_groups: int = 0
    num_steps: int = 0
    num_sequence_steps: int = 0
    prompt_tokens: int = 0
    host_hit_tokens: int = 0
    preempted: Counter[Way] = field(default_factory=Counter)

    def add(self, snapshot: Snapshot) -> None:
        for group in snapshot.groups:
            self.num_groups += 1
            self.prompt_tokens += group.prompt_tokens
            self.host_hit_tokens += group.prefix_host_hit_tokens
            for (way, _), count in group.preempted.items():
                self.preempted[way] += count

    def merge(self, other: "Tally") -> None:
        self.num_groups += other.num_groups
        self.num_steps += other.num_steps
        self.num_sequence_steps += other.num_sequence_steps
        self.prompt_tokens += other.prompt_tokens
        self.host_hit_tokens += other.host_hit_tokens
        self.preempted += other.preempted


@dataclass(frozen=True, slots=True)
class Watch:
    """What of a run is looked at: pools once in `sample_s`, they and steps from a moment on; and when it is cut off."""

    sample_s: float = 1.0
    from_s: float = 0.0
    until_s: float = LATEST_S


WHOLE = Watch()


def run_controller(
    setup: Setup, asked: Sequence[Asked], watch: Watch = WHOLE, tell: Callable[[], None] | None = None
) -> tuple[Record, Tally]:
    """One engine with all groups of the setup. `tell` is called as each request comes."""
    workers = [
        Worker(f"group-{number}".encode(), setup.hello(number), setup.machine, number, setup.decoding.sure_share)
        for number in range(setup.num_groups)
    ]
    record, tally = Record(from_s=watch.from_s), Tally()
    cluster = Cluster(setup.engine_settings(), workers, setup.gate(), record, watch.sample_s)
    gc.disable()  # nothing here makes cycles that would last, and it is a fifth of the time
    try:
        cluster.run(_told(submits(asked, setup.decoding), tell), watch.until_s)
    finally:
        gc.enable()
    tally.add(cluster.snapshot())
    tally.num_steps, tally.num_sequence_steps = cluster.num_steps, cluster.num_sequence_steps
    return record, tally


def _told(requests: Iterator[Timed], tell: Callable[[], None] | None) -> Iterator[Timed]:
    for timed in requests:
        if tell is not None:
            tell()
        yield timed


@dataclass(frozen=True, slots=True)
class Run:
    """A cluster and what is asked of it."""

    setup: Setup
    asked: Sequence[Asked]
    num_controllers: int = 1
    watch: Watch = WHOLE

    def shares(self) -> Iterator[tuple[Setup, Sequence[Asked]]]:
        """Of each controller: as equal as can be, of groups and of requests."""
        for number in range(self.num_controllers):
            groups = len(range(number, self.setup.num_groups, self.num_controllers))
            yield replace(self.setup, num_groups=groups), self.asked[number :: self.num_controllers]


def run_all(
    runs: Sequence[Run], jobs: int = 1, tell: Callable[[int], None] | None = None
) -> list[tuple[Record, Tally]]:
    """Every run's clients and counts, in their order; `jobs` processes. `tell` hears of requests that are done with."""
    found = [(Record(), Tally()) for _ in runs]
    shares = [(number, *share, run.watch) for number, run in enumerate(runs) for share in run.shares()]
    if jobs == 1 or len(shares) == 1:
        for number, setup, asked, watch in shares:
            record, tally = run_controller(setup, asked, watch, None if tell is None else partial(tell, 1))
            found[number][0].merge(record)
            found[number][1].merge(tally)
        return found
    with _deaf_pool(min(jobs, len(shares))) as pool:
        for number, record, tally in pool.imap_unordered(_run_share, shares):
            found[number][0].merge(record)
            found[number][1].merge(tally)
            if tell is not None:
                tell(len(record.seen) + record.num_refused)
    return found


def _deaf_pool(num_processes: int) -> Pool:
    """An interrupt from the keyboard goes to all processes; these leave it to the one that ends them.

    A pool that is interrupted as it begins may fork one more while it is taken down, of which nobody knows any more.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return multiprocessing.get_context("fork").Pool(num_processes, end_with, (os.getpid(),))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _run_share(share: tuple[int, Setup, Sequence[Asked], Watch]) -> tuple[int, Record, Tally]:
    number, setup, asked, watch = share
    return number, *run_controller(setup, asked, watch)
