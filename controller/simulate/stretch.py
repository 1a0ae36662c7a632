"""Many steps at once, where nothing can happen but that every sequence goes on by a token.

    commit 1, plan; commit 2, plan; ... commit k, plan        k turns of the engine
    ------------------ k tokens each ------------------       or one stretch, with the same effects

A stretch is possible while all that is under way are plain decodes of all who run, nobody waits for anything but a row,
and for so many steps as nobody ends, no block must be taken from anybody, and nothing comes. What a stretch leaves
behind is what k turns would leave: tokens, progress, blocks taken and named in the same order, flights, counters, and
what the worker has shown to take. tests/sim/test_stretch.py compares the two, state by state. It knows the engine from
the inside, as nothing else here does; but for the hints on names, which come together at the end of a stretch, nobody
can tell.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kilburn.controller.core.home import Home
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.sequence import Group, Sequence, State
from kilburn.controller.core.step import Flight
from kilburn.controller.simulate.quick import TOKEN
from kilburn.controller.simulate.record import Record
from kilburn.controller.simulate.roofline import Load, Machine
from kilburn.shared.messages import StepPlan, StepResult, Timings

LEAST = 3  # steps: fewer are not worth the look


@dataclass(slots=True)
class Under:
    """What is under way on one worker group: when each result is there, and what it took; oldest first."""

    ready_s: deque[float]
    results: deque[StepResult]


@dataclass(slots=True)
class Stretch:
    """What came of one: the results that are under way after it."""

    num_steps: int
    num_rows: int
    under: Under


def runners(scheduler: Scheduler) -> list[Sequence]:
    """All who run, in order, where a stretch may begin; empty where it may not."""
    line, flights = scheduler.line, scheduler.flights
    if not flights or line.returning or line.waiting.aside or line.waiting.pins or line.waiting.preparing:
        return []
    if line.waiting.num_requests and (line.free_rows or line.waiting.has_shares):
        return []
    sequences = flights[0].sequences
    epochs = [sequence.epoch for sequence in sequences]
    for flight in flights:
        if flight.num_chunk_tokens or flight.num_moved or flight.sequences != sequences or flight.epochs != epochs:
            return []
    running = [sequence for group in line.running for sequence in group.live]
    if running != sequences or not all(_is_plain(sequence) for sequence in sequences):
        return []
    return sequences


def _is_plain(sequence: Sequence) -> bool:
    group, computed = sequence.group, sequence.num_computed
    is_decode = len(sequence.tokens) == computed + 1 and computed >= sequence.num_prompt
    is_simple = type(group) is Group and group.has_forked and group.departure is None and group.num_draws == 1
    is_silent = not sequence.stop_ids and not sequence.followers and sequence.sampling.logprobs < 0
    return is_decode and is_simple and is_silent and not sequence.is_fresh and sequence.state is State.RUNNING


def most_steps(scheduler: Scheduler, sequences: list[Sequence]) -> int:
    """For how many steps nobody ends, and the pool has blocks that nobody has."""
    most = min(sequence.plan_end - sequence.num_planned for sequence in sequences)
    size, pool = scheduler.block_size, scheduler.pool
    # With a host pool, whoever is evicted may have to go there, which is a move.
    free = pool.num_free if scheduler.memory.host.num_blocks else pool.num_available
    while most >= LEAST:
        # A block is taken where a position is planned that the table has no slot for.
        taken = sum(max(s.num_planned + most - s.capacity + size - 1, 0) // size for s in sequences)
        if taken <= free:
            return most
        most = min(most - 1, most * free // max(taken, 1))
    return 0


def go(home: Home, peer: bytes, machine: Machine, under: Under, until_s: float, record: Record) -> Stretch | None:
    """A stretch whose commits are all before `until_s`; None where there is none."""
    scheduler = home.scheduler
    sequences = runners(scheduler)
    most = most_steps(scheduler, sequences) if sequences else 0
    if most < LEAST or _nth(under, LEAST) >= until_s:
        return None
    fills, takes = _crossings(sequences, most, scheduler.block_size)
    num_rows, cells = len(sequences), sum(sequence.num_planned for sequence in sequences)
    stretch, times = Stretch(0, num_rows, under), list[float]()
    while stretch.num_steps < most and under.ready_s[0] < until_s:
        number, now = stretch.num_steps + 1, under.ready_s.popleft()
        landed = under.results.popleft()
        home.agreement.hear(0, landed)
        home.agreement.settle()
        _commit(scheduler, landed, now, fills.get(number, ()))
        cells += num_rows
        load = Load(num_rows=num_rows, num_cells=cells, num_sampled=num_rows)
        _plan(scheduler, now, takes.get(number, ()), sequences)
        _, seconds = machine.seconds(load)
        home.agreement.planned(StepPlan(scheduler.lease, scheduler.flights[-1].step, [], []))
        result = StepResult(scheduler.lease, scheduler.flights[-1].step, [1] * num_rows, [TOKEN] * num_rows)
        result.timings = Timings(forward_s=seconds)
        under.ready_s.append(max(now, under.ready_s[-1] if under.ready_s else now) + seconds)
        under.results.append(result)
        record.step(num_rows, seconds, now)
        times.append(now)
        stretch.num_steps = number
    for sequence in sequences:
        _advance(sequence, stretch.num_steps)
    scheduler.counters.generated_tokens += num_rows * stretch.num_steps
    home.lease.heard(peer, times[-1])
    _tell(record, sequences, times)
    return stretch


def _nth(under: Under, number: int) -> float:
    """When so many results are there at the earliest."""
    return under.ready_s[min(number, len(under.ready_s)) - 1]


def _crossings(
    sequences: list[Sequence], most: int, size: int
) -> tuple[dict[int, list[tuple[Sequence, int]]], dict[int, list[Sequence]]]:
    """By step: whose block is full once it is committed, and which one; whose table is full when it is planned."""
    full: dict[int, list[tuple[Sequence, int]]] = {}
    taken: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        computed = sequence.num_computed
        for number in range(size - computed % size, most + 1, size):
            full.setdefault(number, []).append((sequence, (computed + number) // size))
        for number in range(sequence.capacity - sequence.num_planned + 1, most + 1, size):
            taken.setdefault(number, []).append(sequence)
    return full, taken


def _commit(scheduler: Scheduler, result: StepResult, now: float, full: Iterable[tuple[Sequence, int]]) -> None:
    """What commit leaves of a step of decodes, its tokens apart."""
    flight = scheduler.flights.popleft()
    scheduler.memory.at(now)
    scheduler.last_commit_at, scheduler.last_step = now, flight.step
    scheduler.sizes.flight_s.observe(now - flight.sent_at)
    timings, counters = result.timings, scheduler.counters  # of plans from before, which may have copied blocks
    scheduler.pacing.learn(flight.num_decodes, 0, timings.apply_s - timings.moves_s + timings.forward_s)
    scheduler.costs.computed(0, flight.num_decodes, timings.forward_s)
    counters.copy_s += timings.moves_s
    counters.worker_apply_s += timings.apply_s
    counters.worker_forward_s += timings.forward_s
    for sequence, num_full in full:
        missing = num_full * scheduler.block_size - len(sequence.tokens)
        tokens = sequence.tokens + [TOKEN] * missing if missing > 0 else sequence.tokens
        blocks = sequence.own_table.blocks[:num_full]
        scheduler.memory.index.publish(sequence.chain, tokens, blocks, num_full - 1, sequence.group.salt)


def _plan(scheduler: Scheduler, now: float, full: Iterable[Sequence], sequences: list[Sequence]) -> None:
    """What plan leaves of a step of decodes, progress apart."""
    step = scheduler.flights[-1].step + 1 if scheduler.flights else scheduler.last_step + 1
    for sequence in full:
        sequence.own_table.grow(1, step)
        sequence.capacity += scheduler.block_size
    num_rows = len(sequences)
    epochs = [sequence.epoch for sequence in sequences]
    scheduler.flights.append(Flight(step, now, sequences, epochs, [1] * num_rows))
    scheduler.planned(num_rows, num_rows)


def _advance(sequence: Sequence, num_steps: int) -> None:
    sequence.tokens.extend([TOKEN] * num_steps)
    sequence.num_computed += num_steps
    sequence.num_planned += num_steps


def _tell(record: Record, sequences: list[Sequence], times: list[float]) -> None:
    """Every token, as one Emit after the other would."""
    for sequence in sequences:
        record.emitted(sequence.group.request_id, times[0])
    together: dict[int, int] = {}  # request -> its sequences
    for sequence in sequences:
        number = sequence.group.request_id
        together[number] = together.get(number, 0) + 1
    for number, count in together.items():
        record.emitted_often(number, count, times)
