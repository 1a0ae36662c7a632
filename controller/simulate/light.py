"""A turn of the engine in which one worker group answers and goes on, and nothing else can be: without the rest of it.

    engine.handle([Arrived(peer, result)])     messages, times, leases, homes of all requests; all worker groups
    here                                       commit, and plan, of the one that answered

The production scheduler commits, and the engine plans, admits and forgets. But of rows that merely go on
not even the scheduler hears. tests/sim/test_stretch.py holds that no state differs.
"""

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Effect
from kilburn.controller.core.home import Home
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.simulate.quick import TOKEN
from kilburn.controller.simulate.record import Record
from kilburn.shared.messages import StepResult

OVER = -1  # the epoch of no life


def turn(engine: Engine, home: Home, peer: bytes, result: StepResult, now: float, record: Record) -> list[Effect]:
    """What is to be done after the oldest plan under way has come to this."""
    scheduler, effects = home.scheduler, list[Effect]()
    scheduler.memory.at(now)
    home.lease.heard(peer, now)
    home.agreement.hear(0, result)
    home.agreement.settle()
    _land_steady(scheduler, now, record)
    scheduler.commit(result, now, effects)
    if scheduler.line.ended:
        engine.requests.forget_ended(home)
    engine.go_on(home, now, effects)
    return effects


def _land_steady(scheduler: Scheduler, now: float, record: Record) -> None:
    """Commit what of the oldest flight can come to nothing but one token more, before the scheduler takes the rest.

    To the scheduler these rows are of lives that are over. Whoever ends or is watched is left to it.
    """
    flight, size, told = scheduler.flights[0], scheduler.block_size, list[int]()
    epochs, index = list(flight.epochs), scheduler.memory.index
    for i, sequence in enumerate(flight.sequences):
        computed, group = sequence.num_computed + 1, sequence.group
        is_plain = sequence.is_steady and group.departure is None and not sequence.stop_ids
        if is_plain and sequence.epoch == epochs[i] and computed < sequence.limit:
            sequence.num_computed = computed
            if computed % size == 0:
                full = sequence.own_table.blocks[: computed // size]
                index.publish(sequence.chain, sequence.tokens, full, len(full) - 1, group.salt)
            sequence.tokens.append(TOKEN)
            epochs[i] = OVER
            told.append(group.request_id)
    if told:
        flight.epochs = epochs
        scheduler.counters.generated_tokens += len(told)
        record.emitted_by(told, now)
