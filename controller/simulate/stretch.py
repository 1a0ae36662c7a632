"""Many steps at once, where nothing can happen but that every sequence goes on by a token.

    commit 1, plan; commit 2, plan; ... commit k, plan        k turns of the engine
    ------------------ k tokens each ------------------       or one stretch, with the same effects

A stretch is possible while all that is under way are plain decodes of all who run, nobody waits for anything but a row,
and for so many steps as nobody ends, no block must be taken from anybody, and nothing comes. What a stretch leaves
behind is what k turns would leave: tokens, progress, blocks taken and named in the same order, flights, counters, and
what the worker has shown to take. tests/sim/test_stretch.py compares the two, state by state. It knows the engine from
the inside, as nothing else here does; but for the hints on names, which come together at the end of a stretch, nobody
can tell. Where others begin or end, a step is a turn of the engine; but of those who merely go on it hears nothing
(`land_steady`).
"""

from collections import Counter, deque
from dataclasses import dataclass

from kilburn.controller.core.home import Home
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.sequence import Group, Sequence, State
from kilburn.controller.core.step import Flight
from kilburn.controller.simulate.quick import TOKEN
from kilburn.controller.simulate.record import Record
from kilburn.controller.simulate.roofline import Load, Machine
from kilburn.shared.messages import StepPlan, StepResult, Timings

OVER = -1  # the epoch of no life


@dataclass(slots=True)
class Under:
    """What is under way on one worker group: when each result is there, and what it took; oldest first."""

    ready_s: deque[float]
    results: deque[StepResult]


@dataclass(frozen=True, slots=True)
class Stretch:
    """What came of one."""

    num_steps: int
    num_rows: int


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
    while most > 0:
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
    if not most or under.ready_s[0] >= until_s:
        return None
    times, forwards = _take(scheduler, sequences, most, machine, under, until_s, record)
    _settle(scheduler, sequences, times)
    results, plans = _under_way(scheduler, list(under.results)[len(times) :], forwards)
    under.results = deque(results)
    home.agreement.went_on(len(times), plans)
    home.lease.heard(peer, times[-1])
    record.emitted_together(Counter([sequence.group.request_id for sequence in sequences]), times)
    return Stretch(len(times), len(sequences))


def land_steady(scheduler: Scheduler, now: float, record: Record) -> None:
    """Commit what of the oldest flight can come to nothing but one token more, before the engine takes the rest.

    To the engine these rows are of lives that are over. Whoever fills a block, ends, or is watched is left to it.
    """
    flight, size, told = scheduler.flights[0], scheduler.block_size, list[int]()
    epochs = list(flight.epochs)
    for i, sequence in enumerate(flight.sequences):
        computed, group = sequence.num_computed + 1, sequence.group
        is_plain = sequence.is_steady and group.departure is None and not sequence.stop_ids
        if is_plain and sequence.epoch == epochs[i] and computed % size and computed < sequence.limit:
            sequence.num_computed = computed
            sequence.tokens.append(TOKEN)
            epochs[i] = OVER
            told.append(group.request_id)
    if told:
        flight.epochs = epochs
        scheduler.counters.generated_tokens += len(told)
        for request_id in told:
            record.emitted(request_id, now)


def _take(
    scheduler: Scheduler,
    sequences: list[Sequence],
    most: int,
    machine: Machine,
    under: Under,
    until_s: float,
    record: Record,
) -> tuple[list[float], deque[float]]:
    """What depends on the order of steps: their times, what is learned from them, and blocks.

    Returns when each was committed, and the seconds of those that are under way then.
    """
    memory, pacing, costs, flight_s = scheduler.memory, scheduler.pacing, scheduler.costs, scheduler.sizes.flight_s
    num_rows, size, step = len(sequences), scheduler.block_size, scheduler.flights[-1].step
    full, taken = _crossings(sequences, most, size)
    load = Load(num_rows=num_rows, num_cells=sum(sequence.num_planned for sequence in sequences), num_sampled=num_rows)
    before, ready_s, times = list(under.results), under.ready_s, list[float]()
    forwards = deque(result.timings.forward_s for result in before)
    sent_s = deque(flight.sent_at for flight in scheduler.flights)
    while len(times) < most and ready_s[0] < until_s:
        now, seconds, number = ready_s.popleft(), forwards.popleft(), len(times) + 1
        flight_s.observe(now - sent_s.popleft())
        costs.computed(0, num_rows, seconds)
        scheduler.counters.worker_forward_s += seconds
        if number <= len(before):
            seconds = _apply(scheduler, before[number - 1])
        pacing.learn(num_rows, 0, seconds)
        if number in full or number in taken:
            memory.at(now)
            for sequence, num_full in full.get(number, ()):
                _publish(scheduler, sequence, num_full)
            for sequence in taken.get(number, ()):
                sequence.own_table.grow(1, step + number)
                sequence.capacity += size
        load.num_cells += num_rows
        _, seconds = machine.seconds(load)
        sent_s.append(now)
        ready_s.append((ready_s[-1] if ready_s and ready_s[-1] > now else now) + seconds)
        forwards.append(seconds)
        record.step(num_rows, seconds, now)
        times.append(now)
    memory.at(times[-1])
    return times, forwards


def _apply(scheduler: Scheduler, result: StepResult) -> float:
    """What else a step took that was planned before the stretch, and may have copied blocks. Returns its seconds."""
    timings, counters = result.timings, scheduler.counters
    counters.copy_s += timings.moves_s
    counters.worker_apply_s += timings.apply_s
    return timings.apply_s - timings.moves_s + timings.forward_s


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


def _publish(scheduler: Scheduler, sequence: Sequence, num_full: int) -> None:
    """Name a block whose last token is not appended yet."""
    missing = num_full * scheduler.block_size - len(sequence.tokens)
    tokens = sequence.tokens + [TOKEN] * missing if missing > 0 else sequence.tokens
    blocks = sequence.own_table.blocks[:num_full]
    scheduler.memory.index.publish(sequence.chain, tokens, blocks, num_full - 1, sequence.group.salt)


def _settle(scheduler: Scheduler, sequences: list[Sequence], times: list[float]) -> None:
    """What does not depend on the order of steps."""
    flights, num_rows, num_steps = scheduler.flights, len(sequences), len(times)
    for sequence in sequences:
        sequence.tokens.extend([TOKEN] * num_steps)
        sequence.num_computed += num_steps
        sequence.num_planned += num_steps
    scheduler.counters.generated_tokens += num_rows * num_steps
    scheduler.last_commit_at, scheduler.last_step = times[-1], scheduler.last_step + num_steps
    scheduler.planned(num_rows, num_rows, num_steps)
    depth, step = len(flights), flights[-1].step + num_steps
    epochs, counts = [sequence.epoch for sequence in sequences], [1] * num_rows
    sent_s = times[-depth:]
    for number, at_s in enumerate(sent_s, step - len(sent_s) + 1):
        flights.popleft()
        flights.append(Flight(number, at_s, sequences, epochs, counts))


def _under_way(
    scheduler: Scheduler, before: list[StepResult], forwards: deque[float]
) -> tuple[list[StepResult], list[StepPlan]]:
    """The results that are to come, of which those `before` were already; and their plans, as far as anybody looks."""
    flights, num_rows, results = scheduler.flights, len(scheduler.flights[0].sequences), before
    for flight, seconds in list(zip(flights, forwards, strict=True))[len(before) :]:
        result = StepResult(scheduler.lease, flight.step, [1] * num_rows, [TOKEN] * num_rows)
        result.timings = Timings(forward_s=seconds)
        results.append(result)
    return results, [StepPlan(scheduler.lease, flight.step, [], []) for flight in flights]
