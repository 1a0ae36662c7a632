"""Who computes what in which step: budgets, order, plans ahead of their results, and what happens when blocks run out.

Blocks of 4 tokens. Requests are numbered from 1 in order of arrival.
"""

import pytest

from kilburn.shared.messages import StepPlan
from tests.core.driver import Hand, rows_of, settings_of_depth
from tests.core.worker import hello


def counts_by_request(hand: Hand, plan: StepPlan) -> dict[int, int]:
    """request -> positions, for rows as they are now."""
    request_of = {
        sequence.row: group.request_id for group in hand.line().running for sequence in group.live if sequence.row >= 0
    }
    return {request_of[row]: count for row, count in rows_of(plan).items()}


# --- budget and order


def test_a_long_prompt_runs_in_chunks_of_the_budget() -> None:
    hand = Hand(settings_of_depth(1, max_step_tokens=5))
    hand.join()
    request = hand.submit(range(13), max_tokens=2)
    hand.run()
    assert [plan.counts for plan in hand.worker().seen] == [[5], [5], [3], [1]]
    assert len(hand.worker().seen[0].admits) == 1
    assert not any(plan.admits for plan in hand.worker().seen[1:]), "a chunk only says what changed: nothing"
    assert not any(plan.grown_blocks for plan in hand.worker().seen), "the prompt's blocks came with the admission"
    hand.check(request)


def test_the_workers_own_budget_counts_too() -> None:
    hand = Hand(settings_of_depth(1, max_step_tokens=50))
    hand.join(max_step_tokens=6)
    hand.submit(range(13), max_tokens=1)
    hand.run()
    assert [plan.counts for plan in hand.worker().seen] == [[6], [6], [1]]


def test_decodes_come_first_then_chunks_then_newcomers() -> None:
    hand = Hand(settings_of_depth(1, max_step_tokens=6))
    hand.join()
    hand.submit(range(3), max_tokens=9)
    hand.land()  # 1 decodes from now on
    hand.submit(range(20, 31), max_tokens=9)
    hand.submit(range(40, 43), max_tokens=9)
    assert counts_by_request(hand, hand.last_plan()) == {1: 1}
    hand.land()
    assert counts_by_request(hand, hand.last_plan()) == {1: 1, 2: 5}
    hand.land()
    assert counts_by_request(hand, hand.last_plan()) == {1: 1, 2: 5}
    hand.land()
    assert counts_by_request(hand, hand.last_plan()) == {1: 1, 2: 1, 3: 3}, "2 has one token of its prompt left"
    hand.land()
    assert counts_by_request(hand, hand.last_plan()) == {1: 1, 2: 1, 3: 1}
    hand.run()
    hand.check(1, 2, 3)


def test_where_the_budget_is_short_of_decodes_the_first_in_line_have_it() -> None:
    hand = Hand(settings_of_depth(1, max_step_tokens=2))
    hand.join()
    for start in (0, 20, 40):
        hand.submit((start,), max_tokens=4)
    hand.run()
    hand.check(1, 2, 3)
    assert list(hand.log.finished) == [(1, 0), (2, 0), (3, 0)]


def test_order_of_arrival_and_priorities() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(max_rows=1)
    hand.submit((1, 2), max_tokens=2)
    for priority in (5, 0, -3, 0, 5):
        hand.submit((1, 2), max_tokens=1, priority=priority)
    hand.run()
    assert list(hand.log.started) == [1, 4, 3, 5, 2, 6], "lower runs first, then who came first"


def test_submits_of_one_turn_stand_in_their_order() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(max_rows=1)
    hand.handle(*[hand.new_submit((i,), max_tokens=1) for i in range(5)])
    hand.run()
    assert list(hand.log.started) == [1, 2, 3, 4, 5]


# --- ahead of the results


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_plans_run_ahead_as_deep_as_was_asked(depth: int) -> None:
    hand = Hand(settings_of_depth(depth))
    hand.join()
    request = hand.submit(range(5), max_tokens=20)
    sequence = hand.sequence(request)
    for landed in range(6):
        assert len(hand.worker().plans) == depth
        assert hand.snapshot().flights == depth
        computed = 0 if landed == 0 else 4 + landed
        assert sequence.num_computed == computed
        assert sequence.num_planned == (computed + depth if landed else 4 + depth)
        hand.land()
    hand.run()
    hand.check(request)
    assert [count for plan in hand.worker().seen for count in plan.counts] == [5] + [1] * 19


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_planned_beyond_the_limit(depth: int) -> None:
    """The last draw needs no KV of its own: 5 + 4 - 1 positions are computed, whatever the depth."""
    hand = Hand(settings_of_depth(depth))
    hand.join()
    request = hand.submit(range(5), max_tokens=4)
    hand.run()
    assert sum(count for plan in hand.worker().seen for count in plan.counts) == 8
    hand.check(request)
    hand.expect_empty()


@pytest.mark.parametrize("depth", [2, 3])
def test_a_stop_id_voids_the_plans_that_ran_ahead(depth: int) -> None:
    """Rule 10: fewer results than sequences end it, and its row and blocks serve the next plan at once."""
    hand = Hand(settings_of_depth(depth))
    hand.join(num_blocks=3, max_rows=1)
    first = hand.submit(range(9), max_tokens=4)
    stop = hand.expected(first)[0][0]
    hand.cancel(first)
    hand.run()
    second = hand.submit(range(9), max_tokens=4, stop_ids=(stop,))
    third = hand.submit(range(20, 29), max_tokens=4)
    assert len(hand.worker().plans) == depth
    hand.land()
    assert list(hand.log.finished) == [(second, 0)]
    assert hand.last_plan().admits[0].tokens[0] == 20, "the row and blocks of the finished one, in the same turn"
    assert len(hand.worker().plans) == depth
    hand.run()
    hand.check(second, third)
    hand.expect_empty()


def test_a_group_of_n_waits_once_for_its_fork() -> None:
    hand = Hand(settings_of_depth(3))
    hand.join()
    request = hand.submit(range(6), max_tokens=5, n=3)
    assert [plan.counts for plan in hand.worker().plans] == [[6]], "nothing runs ahead of the fork"
    assert len(hand.group(request).reserved_rows) == 2
    hand.land()
    assert [plan.counts for plan in hand.worker().plans] == [[1, 1, 1]] * 3, "and everything after it"
    hand.run()
    hand.check(request)
    hand.expect_empty()


# --- the head of the line


def test_the_head_of_the_line_is_never_overtaken() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=8)
    hand.submit(range(16), max_tokens=2)  # five blocks
    hand.submit(range(20, 36), max_tokens=2)  # does not fit beside it
    hand.submit((1,), max_tokens=1)  # would fit
    assert list(hand.log.started) == [1]
    assert hand.snapshot().waiting_requests == 2
    hand.run()
    assert list(hand.log.started) == [1, 2, 3]
    hand.check(1, 2, 3)


def test_a_group_waits_for_all_its_rows() -> None:
    """Rule 8: rows for all sequences are reserved, so that two groups never fork into each other's."""
    hand = Hand(settings_of_depth(2))
    hand.join(max_rows=4)
    hand.submit(range(5), max_tokens=6, n=3)
    hand.submit(range(9, 14), max_tokens=6, n=3)
    assert hand.snapshot().running_requests == 1
    hand.submit((1,), max_tokens=1)  # there is a row for it, but it came later
    assert hand.snapshot().running_requests == 1
    hand.run()
    hand.check(1, 2, 3)
    hand.expect_empty()


def test_a_margin_is_kept_when_others_run() -> None:
    """Of 300 blocks three stay: a newcomer must not be the next one's victim. Alone, a request may have all."""
    hand = Hand(settings_of_depth(1))
    hand.say_hello(hello(num_blocks=300, max_len=2000, max_step_tokens=2000))
    hand.handle(hand.new_submit(range(4), max_tokens=9), hand.new_submit(range(297 * 4), max_tokens=2))
    assert hand.snapshot().running_requests == 1, "299 are there, 297 wanted, 3 to be kept"
    hand.run()
    hand.handle(hand.new_submit(range(4), max_tokens=9), hand.new_submit(range(296 * 4), max_tokens=2))
    assert hand.snapshot().running_requests == 2
    hand.run()
    alone = hand.submit(range(7, 7 + 300 * 4), max_tokens=1)
    assert hand.snapshot().running_requests == 1
    hand.run()
    hand.check(1, 2, 3, 4, alone)


def test_every_admit_of_a_running_sequence_begins_a_life() -> None:
    """After a fork the parent too: whatever might still carry its old number is dropped."""
    hand = Hand(settings_of_depth(1))
    hand.join()
    request = hand.submit(range(6), max_tokens=5, n=2)
    parent = hand.sequence(request)
    before = parent.epoch
    hand.land()
    assert [admit.start for admit in hand.last_plan().admits] == [6, 6]
    assert parent.epoch == before + 1
    hand.land()
    assert parent.epoch == before + 1, "an Advance goes on with the same life"
    hand.run()
    hand.check(request)
