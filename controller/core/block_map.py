"""What an onlooker may see of memory block by block, and of requests one by one, at one moment.

    cell (a byte for each block)   0 FREE   1 ... 60 OWNED by so many tables (60: or more)   61 CACHED   62 QUARANTINED
                                   + 64 where a named prefix holds the block

Nothing is kept for this between looks, so whoever does not look pays nothing, and the step path knows nothing of it. A
look costs what copying lists costs: no loop here runs over the blocks of a pool. Numbers only: no tokens, no text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kilburn.controller.core.home import Home
from kilburn.controller.core.prefixes import PinGroup
from kilburn.controller.core.sequence import Group, State
from kilburn.controller.core.snapshot import Snapshot
from kilburn.shared.types import Tier

CELL_PINNED = 64


class Wait(Enum):
    """What a request that does not run waits for."""

    WORKER = "a worker"
    LINE = "those before it"
    ROWS = "free rows"
    BLOCKS = "free blocks"
    PREFIX = "a prefix that is being computed"
    GRAMMAR = "its grammar"
    STEP = "the next step"


class RequestRow(NamedTuple):
    """One request, or one named prefix, as numbers."""

    id: int
    kind: str  # "request" or "prefix"
    worker: str  # name of its worker group; empty: none
    state: str  # of its sequences
    sequences: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int  # of the sequence that has come furthest
    blocks: int  # distinct ones, on the device
    host_blocks: int
    cached_tokens: int
    preemptions: int
    wait: str  # what for; empty: it runs
    has_started: bool  # who ran before, and waits, goes before those who never did
    turn: float  # of those who wait: the lower one goes first (turns.py)
    priority: int
    arrival: int


Tables = dict[tuple[int, int], tuple[int, Tier, list[int]]]  # (request, sequence) -> lease, tier, blocks in order


@dataclass(frozen=True, slots=True)
class WorkerMap:
    """One worker group's pools. Its figures are the entry of the snapshot with the same place."""

    lease: int
    device: bytes  # a cell for each block
    host: bytes


@dataclass(frozen=True, slots=True)
class BlockMap:
    snapshot: Snapshot
    workers: tuple[WorkerMap, ...]
    requests: list[RequestRow]
    tables: Tables


def worker_map(home: Home) -> WorkerMap:
    """The pools of one worker group as they are now."""
    scheduler = home.scheduler
    device = scheduler.pool.cells()
    for block in dict.fromkeys(scheduler.line.pinned_blocks):
        device[block] |= CELL_PINNED
    host = scheduler.memory.host.cells()
    return WorkerMap(home.lease.id, bytes(device), bytes(host))


def all_tables(homes: Iterable[Home]) -> Tables:
    """Who holds which blocks: a copy of every table, and of what swapped sequences left on the host."""
    tables: Tables = {}
    for home in homes:
        lease, line = home.lease.id, home.scheduler.line
        for group in (*line.pinned, *line.running, *line.waiting):
            for sequence in group.live:
                key = (group.request_id, sequence.index)
                if sequence.table is not None:
                    tables[key] = (lease, Tier.DEVICE, list(sequence.table.blocks))
                elif sequence.host:
                    tables[key] = (lease, Tier.HOST, [block for block in sequence.host if block is not None])
    return tables


def request_rows(homes: Iterable[Home], homeless: Sequence[Group]) -> list[RequestRow]:
    """Those that run, those that wait, and named prefixes; in no order that means anything."""
    rows = [_row(group, "", Wait.WORKER) for group in homeless]
    for home in homes:
        line, name = home.scheduler.line, home.lease.hello.name
        rows += [_row(group, name, None) for group in (*line.pinned, *line.running)]
        first = line.waiting.head()
        if first is not None:
            rows.append(_row(first, name, _wait_of_first(home, first)))
        others = [group for group in line.waiting if group is not first]
        rows += [_row(group, name, _wait_of(group)) for group in others]
    return rows


def _wait_of(group: Group) -> Wait:
    if group.is_preparing:
        return Wait.GRAMMAR
    return Wait.LINE if group.awaits is None else Wait.PREFIX


def _wait_of_first(home: Home, first: Group) -> Wait:
    admission = home.scheduler.admission
    if admission.lacks_rows(first):
        return Wait.ROWS
    return Wait.BLOCKS if admission.lacks_blocks(first) else Wait.STEP


def _row(group: Group, worker: str, wait: Wait | None) -> RequestRow:
    live = group.live
    first = live[0]
    tables = [sequence.table.blocks for sequence in live if sequence.table is not None]
    host = [sequence.host for sequence in live if sequence.state is State.SWAPPED]
    return RequestRow(
        id=group.request_id,
        kind="prefix" if isinstance(group, PinGroup) else "request",
        worker=worker,
        state=first.state.value,
        sequences=group.n if not group.has_forked else len(live),
        prompt_tokens=first.num_prompt,
        generated_tokens=sum([sequence.num_generated for sequence in live]),
        computed_tokens=max([sequence.num_computed for sequence in live]),
        blocks=_num_distinct(tables),
        host_blocks=_num_distinct([[block for block in blocks if block is not None] for blocks in host]),
        cached_tokens=group.cached_tokens,
        preemptions=group.num_preempted,
        wait="" if wait is None else wait.value,
        has_started=group.has_started,
        turn=round(group.turn[0], 3),
        priority=group.place.priority,
        arrival=group.place.arrival,
    )


def _num_distinct(tables: list[list[int]]) -> int:
    return len(tables[0]) if len(tables) == 1 else len(set().union(*tables))
