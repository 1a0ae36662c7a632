"""An engine that is sabotaged is found out, and those who are not concerned notice nothing.

Every test elsewhere counts the laws anew after each event; here they are broken on purpose.
"""

from collections.abc import Callable

import pytest

from kilburn.controller.core.block_pool import Name
from kilburn.controller.core.events import Arrived, NoteKind, Tick
from kilburn.controller.core.sequence import Group, Place, State
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason, LawBroken
from tests.core.driver import Hand, settings_of_depth
from tests.core.live_engine import SHARED, a_live_engine
from tests.core.worker import hello


def block_of(hand: Hand, request: int) -> int:
    return hand.table(request)[0]


def free_block(hand: Hand) -> int:
    return hand.pool()._free[0]


def in_flight_block(hand: Hand) -> int:
    """The block that the plans under way write for request 1."""
    sequence = hand.sequence(1)
    assert sequence.num_computed < sequence.num_planned
    return hand.table(1)[sequence.num_computed // 4]


# --- sabotages: each is one thing that is not as it should be


def set_refs(hand: Hand, request: int, by: int) -> None:
    hand.pool()._refs[block_of(hand, request)] += by


def swap_tables(hand: Hand) -> None:
    one, two = hand.sequence(1), hand.sequence(3)
    assert one.table is not None
    assert two.table is not None
    one.table.blocks[0] = two.table.blocks[0]


def hold_twice(hand: Hand) -> None:
    table = hand.sequence(1).own_table
    table.blocks[1] = table.blocks[0]


def own_a_free_block(hand: Hand) -> None:
    hand.pool()._free.append(block_of(hand, 1))


def lose_a_free_block(hand: Hand) -> None:
    hand.pool()._free.pop()


def free_a_block_twice(hand: Hand) -> None:
    hand.pool()._free.append(free_block(hand))


def cache_an_owned_block(hand: Hand) -> None:
    hand.pool()._cached[block_of(hand, 1)] = None


def cache_without_a_name(hand: Hand) -> None:
    block = hand.pool()._free.popleft()
    hand.pool()._cached[block] = None


def name_a_free_block(hand: Hand) -> None:
    block, name = free_block(hand), Name(b"z" * 32, b"p" * 32, (1, 2, 3, 4))
    hand.pool()._names[block] = name
    hand.pool()._named[name.digest] = block


def misname(hand: Hand) -> None:
    digest = hand.pool().all_names()[0]
    hand.pool()._named[digest] = free_block(hand)


def quarantine_a_free_block_too(hand: Hand) -> None:
    hand.pool()._quarantined.add(free_block(hand))


def miscount_owned(hand: Hand) -> None:
    hand.pool()._num_owned += 1


def miscount_refs(hand: Hand) -> None:
    hand.pool()._num_refs -= 1


def name_what_is_being_written(hand: Hand) -> None:
    """Whoever hits it reads what is not there yet."""
    hand.pool().publish(in_flight_block(hand), Name(b"z" * 32, b"p" * 32, (1, 2, 3, 4)))


def share_what_is_being_written(hand: Hand) -> None:
    """Two tables, counted rightly, and one of them is written through by a plan under way."""
    block = in_flight_block(hand)
    three = hand.sequence(3)
    three.own_table.adopt([block])
    three.capacity += 4


def lose_a_row(hand: Hand) -> None:
    hand.line().free_rows.pop()


def free_a_running_row(hand: Hand) -> None:
    hand.line().free_rows[0] = hand.sequence(1).row


def share_a_row(hand: Hand) -> None:
    hand.sequence(1).row = hand.sequence(2).row


def forget_reserved_rows(hand: Hand) -> None:
    hand.group(3).reserved_rows = []


def run_out_of_order(hand: Hand) -> None:
    hand.line().running.reverse()


def wait_out_of_order(hand: Hand) -> None:
    hand.line().waiting.fresh.reverse()


def wait_among_the_returned(hand: Hand) -> None:
    waiting = hand.line().waiting
    waiting.returned.append(waiting.fresh.pop())


def miscount_what_waits(hand: Hand) -> None:
    hand.line().waiting.num_tokens += 1


def run_without_sequences(hand: Hand) -> None:
    group = Group(2, Place(0, 2), (1,), 1, Sampling())
    group.live = []
    hand.line().running.insert(1, group)


def compute_more_than_was_planned(hand: Hand) -> None:
    hand.sequence(1).num_computed = hand.sequence(1).num_planned + 1


def plan_what_is_not_in_flight(hand: Hand) -> None:
    hand.sequence(3).num_planned += 1


def forget_what_is_in_flight(hand: Hand) -> None:
    hand.sequence(1).num_planned -= 1


def drop_a_flight(hand: Hand) -> None:
    hand.scheduler().flights.pop()


def be_reborn_with_work_in_flight(hand: Hand) -> None:
    hand.sequence(1).is_fresh = True


def live_another_life(hand: Hand) -> None:
    hand.sequence(1).epoch += 1


def plan_beyond_the_limit(hand: Hand) -> None:
    hand.sequence(1).limit = hand.sequence(1).num_planned - 1


def claim_slots(hand: Hand) -> None:
    hand.sequence(1).capacity += 4


def forget_a_token(hand: Hand) -> None:
    sequence = hand.sequence(1)
    del sequence.tokens[sequence.num_computed - 1 :]


def run_without_a_table(hand: Hand) -> None:
    hand.sequence(1).table = None


def run_while_waiting(hand: Hand) -> None:
    hand.sequence(1).state = State.WAITING


def wait_while_running(hand: Hand) -> None:
    hand.sequence(4).state = State.RUNNING


def wait_with_a_row(hand: Hand) -> None:
    hand.sequence(4).row = 0


def wait_with_progress(hand: Hand) -> None:
    hand.sequence(4).num_planned = 1


def lose_a_waiting_request(hand: Hand) -> None:
    waiting = hand.line().waiting
    waiting.remove(waiting.fresh[-1])


def be_in_two_places(hand: Hand) -> None:
    hand.engine.requests.homeless.arrived(hand.group(4), 0.0)


def be_homeless_twice(hand: Hand) -> None:
    group = hand.line().waiting.fresh[-1]
    hand.line().waiting.remove(group)
    del hand.engine.requests.placed[group.request_id]
    for _ in range(2):
        hand.engine.requests.homeless.arrived(group, 0.0)


def forget_where_it_is(hand: Hand) -> None:
    del hand.engine.requests.placed[1]


def remember_what_has_ended(hand: Hand) -> None:
    hand.engine.requests.groups[99] = hand.group(1)


SABOTAGES: dict[str, Callable[[Hand], None]] = {
    "one reference too many": lambda hand: set_refs(hand, 1, +1),
    "one reference too few": lambda hand: set_refs(hand, 2, -1),
    **{
        sabotage.__name__.replace("_", " "): sabotage
        for sabotage in (
            swap_tables, hold_twice, own_a_free_block, lose_a_free_block, free_a_block_twice, cache_an_owned_block,
            cache_without_a_name, name_a_free_block, misname, quarantine_a_free_block_too, miscount_owned,
            miscount_refs, name_what_is_being_written, share_what_is_being_written, lose_a_row, free_a_running_row,
            share_a_row, forget_reserved_rows, run_out_of_order, wait_out_of_order,
            wait_among_the_returned, miscount_what_waits, run_without_sequences,
            compute_more_than_was_planned, plan_what_is_not_in_flight, forget_what_is_in_flight, drop_a_flight,
            be_reborn_with_work_in_flight, live_another_life, plan_beyond_the_limit, claim_slots, forget_a_token,
            run_without_a_table, run_while_waiting, wait_while_running, wait_with_a_row, wait_with_progress,
            lose_a_waiting_request, be_in_two_places, be_homeless_twice, forget_where_it_is, remember_what_has_ended,
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_is_found_out(name: str) -> None:
    hand = a_live_engine()
    hand.engine.validate()
    SABOTAGES[name](hand)
    with pytest.raises(LawBroken):
        hand.engine.validate()


def test_without_a_sabotage_the_engine_goes_on() -> None:
    hand = a_live_engine()
    hand.run()
    hand.check(*hand.submits)
    hand.expect_empty()


# --- afterwards


CONTAINED: dict[str, tuple[Callable[[Hand], None], set[int]]] = {
    # what is broken -> whose requests fail
    "one reference too many": (SABOTAGES["one reference too many"], {1}),
    "one reference too few": (SABOTAGES["one reference too few"], {2}),
    "a table of another": (swap_tables, {1, 3}),
    "an owned block is free too": (own_a_free_block, {1}),
    "an owned block is cached too": (cache_an_owned_block, {1}),
    "a free block vanished": (lose_a_free_block, set()),
    "a free block twice": (free_a_block_twice, set()),
    "a row is lost": (lose_a_row, set()),
    "a row is used twice": (share_a_row, set()),
    "no table": (run_without_a_table, set()),
    "a flight is forgotten": (drop_a_flight, set()),
    "progress without a plan": (plan_what_is_not_in_flight, set()),
    "a miscount": (miscount_owned, set()),
    "a block held twice": (hold_twice, {1}),
}


@pytest.mark.parametrize("name", CONTAINED)
def test_only_those_who_hold_suspect_blocks_fail(name: str) -> None:
    """The others are recomputed on the next lease, and their clients notice nothing."""
    hand = a_live_engine()
    sabotage, failing = CONTAINED[name]
    sabotage(hand)
    with pytest.raises(LawBroken):
        hand.engine.validate()
    hand.record(hand.engine.contain(hand.now))
    hand.engine.validate()
    assert {request for request, _ in hand.log.finished} == failing
    assert all(finished.reason is FinishReason.ERROR for finished in hand.log.finished.values())
    assert all("accounting" in finished.message for finished in hand.log.finished.values())
    assert hand.engine.snapshot().laws_broken == 1
    assert [note.kind for note in hand.log.notes].count(NoteKind.LAW_BROKEN) == 1
    assert not hand.workers, "its lease has ended"
    hand.join(num_blocks=32)
    hand.run()
    hand.check(*hand.submits.keys() - failing)
    hand.expect_empty()


def test_another_worker_group_is_left_alone() -> None:
    hand = Hand(settings_of_depth(2))
    hand.say_hello(hello(name="a"), b"a-1")
    hand.say_hello(hello(name="b"), b"b-1")
    hand.submit(SHARED, max_tokens=9)
    hand.submit(SHARED, max_tokens=9)
    assert [group.running_requests for group in hand.engine.snapshot().groups] == [1, 1]
    hand.pool(b"a-1")._refs[hand.table(1)[0]] += 1
    hand.record(hand.engine.contain(hand.now))
    assert list(hand.workers) == [b"b-1"]
    assert list(hand.log.finished) == [(1, 0)]
    hand.run()
    hand.check(2)


def test_nothing_decided_before_the_law_broke_is_lost() -> None:
    """Tokens that were committed in the very turn reach their clients, and so do the events after the fatal one."""
    hand = Hand(settings_of_depth(1))
    hand.join()
    hand.handle(hand.new_submit((1, 2, 3), max_tokens=1), hand.new_submit((4, 5, 6, 7), max_tokens=3))
    hand.pool()._free.pop()
    late = hand.new_submit((8, 9), max_tokens=2)
    with pytest.raises(LawBroken):
        hand.engine.handle([Arrived(b"w-1", hand.worker().run_next()), late], hand.now)
    hand.record(hand.engine.contain(hand.now))
    hand.check(1)
    assert len(hand.tokens(2)) == 1
    hand.join()
    hand.run()
    hand.check(1, 2, 3)
    hand.expect_empty()


def test_nobody_loses_a_token_to_a_law_that_a_later_row_of_its_step_breaks() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join()
    hand.handle(hand.new_submit((1, 2), max_tokens=5), hand.new_submit((4, 5, 6), max_tokens=5))
    hand.land()
    hand.pool()._refs[hand.table(2)[0]] = 0  # which is about to be named
    with pytest.raises(LawBroken):
        hand.engine.handle([Arrived(b"w-1", hand.worker().run_next())], hand.now)
    hand.record(hand.engine.contain(hand.now))
    assert len(hand.tokens(1)) == 2
    hand.join()
    hand.run()
    hand.check(1)


def test_the_cheap_law_is_checked_at_every_turn() -> None:
    hand = a_live_engine()
    hand.pool()._free.pop()
    with pytest.raises(LawBroken, match="are not 32 blocks"):
        hand.engine.handle([Tick()], hand.now)
