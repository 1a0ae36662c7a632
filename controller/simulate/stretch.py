"""Many steps at once, where nothing can happen but that every sequence goes on by a token.

    commit 1, plan; commit 2, plan; ... commit k, plan        k turns of the engine
    ------------------ k tokens each ------------------       or one stretch, with the same effects

A stretch is possible while all that is under way are plain decodes of all who run, nobody waits for anything but a row,
and for so many steps as nobody ends, no block must be taken from anybody, and nothing comes. What a stretch leaves
behind is what k turns would leave: tokens, progress, blocks taken and named in the same order, flights, counters, and
what the worker has shown to take. tests/sim/test_stretch.py compares the two, state by state. It knows the engine from
the inside, as nothing else here does; but for the hints on names, which come together at the end of a stretch, nobody
can tell. Where others begin or end, a step is a turn (light.py).
"""

from collections import Counter, deque
from dataclasses import dataclass

from kilburn.controller.core.home import Home
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.sequence import Group, Sequence, State
from kilburn.controller.core.step import Flight
from kilburn.controller.simulate.quick import TOKEN
from kilburn.controller.simulate.record import Record
from kilburn.controller.simulate.roofline import Load, Machine, steady
from kilburn.shared.messages import StepPlan, StepResult, Timings


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
    if not flights or flights[-1].num_chunk_tokens or len(flights[0].counts) != len(flights[-1].counts):
        return []  # found soonest, and most often
    if line.returning or line.waiting.aside or line.waiting.pins or line.waiting.preparing:
        return []
    if line.waiting.num_requests and (line.free_rows or line.waiting.has_shares):
        return []
    sequences = flights[0].sequences
    epochs = [sequence.epoch for sequence in sequences]
    for flight in flights:
        if flight.num_chunk_tokens or flight.num_moved or flight.sequences != sequences or flight.epochs != epochs:
            return []
    if line.sequences != sequences or not all(_is_plain(sequence) for sequence in sequences):
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
    if not under.ready_s or under.ready_s[0] >= until_s:
        return None
    sequences = runners(scheduler)
    most = most_steps(scheduler, sequences) if sequences else 0
    if not most:
        return None
    seconds, ready_s = _pace(sequences, most, machine, under, until_s)
    num_steps, num_rows = len(seconds), len(sequences)
    times = ready_s[:num_steps]
    _learn(scheduler, under, seconds, times, num_rows)
    record.steps(num_rows, seconds, times)
    forwards_s = [*[result.timings.forward_s for result in under.results], *seconds][num_steps:]
    first_step = scheduler.flights[-1].step
    _settle(scheduler, sequences, times)
    _cross(scheduler, sequences, times, first_step)
    results, plans = _under_way(scheduler, list(under.results)[num_steps:], forwards_s)
    under.ready_s, under.results = deque(ready_s[num_steps:]), deque(results)
    home.agreement.went_on(num_steps, plans)
    home.lease.heard(peer, times[-1])
    record.emitted_together(Counter([sequence.group.request_id for sequence in sequences]), times)
    return Stretch(num_steps, num_rows)


def _pace(
    sequences: list[Sequence], most: int, machine: Machine, under: Under, until_s: float
) -> tuple[list[float], list[float]]:
    """The seconds of the steps that are planned, one for each that is committed; and when each result is there.

    The first results are those under way already; whoever is next begins as the one before him ends.
    """
    num_rows, ready_s, seconds = len(sequences), list(under.ready_s), list[float]()
    load = Load(num_rows=num_rows, num_sampled=num_rows)
    load.num_cells = sum([sequence.num_planned for sequence in sequences]) + num_rows
    end_s, steps = ready_s[-1], steady(machine, load)
    for now in ready_s:  # which grows meanwhile
        if len(seconds) == most or now >= until_s:
            break
        step_s = next(steps)
        seconds.append(step_s)
        end_s += step_s
        ready_s.append(end_s)
    return seconds, ready_s


def _learn(scheduler: Scheduler, under: Under, seconds: list[float], times: list[float], num_rows: int) -> None:
    """What steps show of the worker, in their order: those under way first."""
    num_steps, counters = len(times), scheduler.counters
    sent_s = [*[flight.sent_at for flight in scheduler.flights], *times]
    forwards_s = [*[result.timings.forward_s for result in under.results], *seconds][:num_steps]
    took_s = [*[_apply(scheduler, result) for result in list(under.results)[:num_steps]], *seconds][:num_steps]
    scheduler.sizes.flight_s.observe_each([now - at_s for now, at_s in zip(times, sent_s, strict=False)])
    scheduler.costs.decoded(forwards_s)
    for forward_s in forwards_s:  # one by one, as sums of floats depend on the order
        counters.worker_forward_s += forward_s
    scheduler.pacing.learn_decodes(num_rows, took_s)


def _apply(scheduler: Scheduler, result: StepResult) -> float:
    """What else a step took that was planned before the stretch, and may have copied blocks. Returns its seconds."""
    timings, counters = result.timings, scheduler.counters
    counters.copy_s += timings.moves_s
    counters.worker_apply_s += timings.apply_s
    return timings.apply_s - timings.moves_s + timings.forward_s


def _cross(scheduler: Scheduler, sequences: list[Sequence], times: list[float], step: int) -> None:
    """Name the blocks that are full once a step is committed, and take those that planning it needs; in their order.

    `step`: the last that was planned before.
    """
    size, memory, num_steps = scheduler.block_size, scheduler.memory, len(times)
    crossings: list[tuple[int, bool, int, int]] = []  # number of the step, whether a block is taken, whose, how many
    for i, sequence in enumerate(sequences):
        before = sequence.num_computed - num_steps
        for number in range(size - before % size, num_steps + 1, size):
            crossings.append((number, False, i, (before + number) // size))
        for number in range(sequence.capacity - sequence.num_planned + num_steps + 1, num_steps + 1, size):
            crossings.append((number, True, i, 1))
    crossings.sort()
    for number, is_taken, i, num_blocks in crossings:
        sequence = sequences[i]
        memory.at(times[number - 1])
        if is_taken:
            sequence.own_table.grow(num_blocks, step + number)
            sequence.capacity += size
        else:
            blocks = sequence.own_table.blocks[:num_blocks]
            memory.index.publish(sequence.chain, sequence.tokens, blocks, num_blocks - 1, sequence.group.salt)
    memory.at(times[-1])


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
    scheduler: Scheduler, before: list[StepResult], forwards_s: list[float]
) -> tuple[list[StepResult], list[StepPlan]]:
    """The results that are to come, of which those `before` were already; and their plans, as far as anybody looks."""
    flights, num_rows, results = scheduler.flights, len(scheduler.flights[0].sequences), before
    for flight, seconds in list(zip(flights, forwards_s, strict=True))[len(before) :]:
        result = StepResult(scheduler.lease, flight.step, [1] * num_rows, [TOKEN] * num_rows)
        result.timings = Timings(forward_s=seconds)
        results.append(result)
    return results, [StepPlan(scheduler.lease, flight.step, [], []) for flight in flights]
