"""Requests that end early: the client leaves, a stop string is found, in every state and at every moment.

Whatever is under way then comes back to nobody, and every block and row is free at once.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kilburn.controller.core.events import Arrived, Cancel, Finished, Stop
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.sequence import State
from kilburn.shared.messages import StepFailed
from kilburn.shared.types import FinishReason
from tests.core.driver import Hand, settings_of_depth

PROMPT = range(7)

# Each brings request 1 into a state, and beside it request 2, which must not notice.


def before_the_first_worker(hand: Hand) -> None:
    hand.submit(PROMPT, max_tokens=6, n=2)
    hand.submit((1, 2), max_tokens=5)


def waiting_in_line(hand: Hand) -> None:
    hand.join(num_blocks=8, max_rows=2)
    first, second = hand.new_submit(PROMPT, max_tokens=6, n=2), hand.new_submit((1, 2), max_tokens=5)
    hand.handle(second)
    hand.handle(first)  # wants two rows, and there is one
    assert hand.snapshot().waiting_requests == 1


def between_plan_and_commit(hand: Hand) -> None:
    hand.join(num_blocks=8)
    hand.submit(PROMPT, max_tokens=6, n=2)
    hand.submit((1, 2), max_tokens=5)
    assert hand.sequence(1).num_planned > hand.sequence(1).num_computed == 0


def between_two_chunks(hand: Hand) -> None:
    hand.join(num_blocks=8, max_step_tokens=4)
    hand.submit(PROMPT, max_tokens=6, n=2)
    hand.submit((1, 2), max_tokens=5)
    hand.land()
    assert 0 < hand.sequence(1).num_computed < 7


def after_the_fork(hand: Hand) -> None:
    hand.join(num_blocks=8)
    hand.submit(PROMPT, max_tokens=6, n=2)
    hand.submit((1, 2), max_tokens=5)
    hand.land()
    hand.land()
    assert len(hand.group(1).live) == 2


def with_one_choice_ended(hand: Hand) -> None:
    after_the_fork(hand)
    hand.stop(1, 1)
    assert len(hand.group(1).live) == 1


def preempted(hand: Hand) -> None:
    after_the_fork(hand)
    hand.line().recompute(hand.group(1), [])
    assert hand.sequence(1).state is State.WAITING


def preempted_and_back(hand: Hand) -> None:
    preempted(hand)
    while hand.sequence(1).state is State.WAITING:
        hand.land()


def homeless(hand: Hand) -> None:
    after_the_fork(hand)
    hand.say(StepFailed(1, 1, "lost"))
    assert hand.engine.snapshot().homeless_requests == 2


def being_swapped_out(hand: Hand) -> None:
    """The plan that copies its blocks to the host is under way, and so is one that still computes for it."""
    hand.join(num_blocks=5, num_host_blocks=8)
    first, second = hand.new_submit(PROMPT, max_tokens=6, n=2), hand.new_submit((1, 2), max_tokens=5)
    hand.handle(second)
    hand.handle(first)
    while not hand.preemptions():
        hand.land()
    assert hand.sequence(1).state is State.SWAPPED
    assert any(plan.swaps_out for plan in hand.worker().plans)


def swapped_out(hand: Hand) -> None:
    being_swapped_out(hand)
    [step] = [plan.step for plan in hand.worker().plans if plan.swaps_out]
    while hand.scheduler().last_step < step:
        hand.land()


def being_swapped_in(hand: Hand) -> None:
    """The plan that copies its blocks back is under way."""
    being_swapped_out(hand)
    for block in range(5):
        hand.pool().withdraw(block)  # nothing of it is found on the device
    while hand.sequence(1).state is State.SWAPPED:
        hand.land()
    assert any(plan.swaps_in for plan in hand.worker().plans)


def passed_over(hand: Hand) -> None:
    """Request 2 is computing the block that both begin with."""
    hand.join(num_blocks=8)
    first, second = hand.new_submit(PROMPT, max_tokens=6, n=2), hand.new_submit((0, 1, 2, 3, 9), max_tokens=5)
    hand.handle(second, first)
    assert hand.snapshot().waiting_for_prefix == 1


STATES = [
    before_the_first_worker,
    waiting_in_line,
    between_plan_and_commit,
    between_two_chunks,
    after_the_fork,
    with_one_choice_ended,
    preempted,
    preempted_and_back,
    being_swapped_out,
    swapped_out,
    being_swapped_in,
    passed_over,
    homeless,
]


def settle(hand: Hand) -> None:
    """Everybody else goes on to the end."""
    if not hand.workers:
        hand.join(num_blocks=8)
    hand.run()
    hand.check(2)
    hand.expect_empty()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("bring", STATES)
def test_the_client_leaves(bring: Callable[[Hand], None], depth: int) -> None:
    hand = Hand(replace(settings_of_depth(depth), preemption=Preemption.SWAP))
    bring(hand)
    said = {key for key in hand.log.finished if key[0] == 1}
    effects = hand.cancel(1)
    assert not any(isinstance(effect, Finished) for effect in effects), "nobody is there to be told"
    assert 1 not in hand.engine.requests.groups
    if hand.workers:
        assert all(group.request_id != 1 for group in (*hand.line().running, *hand.line().waiting))
    hand.handle(Cancel(1), Cancel(1), Stop(1, 0))
    settle(hand)
    assert {key for key in hand.log.finished if key[0] == 1} == said
    hand.handle(Cancel(1), Cancel(2), Stop(2, 0), Cancel(99), Stop(99, 7))
    hand.expect_empty()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("bring", STATES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stop_strings_in_both_choices(bring: Callable[[Hand], None], depth: int, order: tuple[int, int]) -> None:
    hand = Hand(replace(settings_of_depth(depth), preemption=Preemption.SWAP))
    bring(hand)
    has_forked = hand.group(1).has_forked
    for index in order:
        is_over = (1, index) in hand.log.finished
        num_said = len(hand.tokens(1, index))
        effects = hand.stop(1, index)
        ends = [effect for effect in effects if isinstance(effect, Finished) and effect.request_id == 1]
        if has_forked and not is_over:
            assert ends == [Finished(1, index, FinishReason.STOP)]
            assert len(hand.tokens(1, index)) == num_said
        else:
            assert ends == [], "nothing has been said yet, so nobody can have found a stop string in it"
        hand.stop(1, index)
    if has_forked:
        assert 1 not in hand.engine.requests.groups
    else:
        settle(hand)
        hand.check(1)
        return
    settle(hand)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("stopped", [0, 1, 2, 3])
def test_one_of_four_choices_stops_and_the_rest_go_on(stopped: int, depth: int) -> None:
    hand = Hand(settings_of_depth(depth))
    hand.join(num_blocks=24)
    request = hand.submit(PROMPT, max_tokens=9, n=4)
    while len(hand.tokens(request, stopped)) < 3:
        hand.land()
    hand.stop(request, stopped)
    assert len(hand.group(request).live) == 3
    hand.run()
    for index in {0, 1, 2, 3} - {stopped}:
        assert (hand.tokens(request, index), hand.reason(request, index)) == hand.expected(request, index)
    assert hand.tokens(request, stopped) == hand.expected(request, stopped)[0][:3]
    hand.expect_empty()


@pytest.mark.parametrize("num_ended", [1, 2, 3])
def test_the_client_leaves_when_some_choices_have_ended(num_ended: int) -> None:
    """And one that shares blocks with those who go on has let go of its own share only."""
    hand = Hand(settings_of_depth(2))
    hand.join(num_blocks=24)
    request = hand.submit(PROMPT, max_tokens=9, n=4)
    hand.land()
    hand.land()
    for index in range(num_ended):
        hand.stop(request, index)
    assert hand.pool().refs(hand.table(request, 3)[0]) == 4 - num_ended
    hand.cancel(request)
    hand.expect_empty()
    hand.run()
    hand.expect_empty()


def test_a_stop_and_a_result_in_one_turn() -> None:
    """In either order; the token that came with the result is said before the stop, or not at all."""
    for is_stop_first in (True, False):
        hand = Hand(settings_of_depth(2))
        hand.join()
        request = hand.submit(PROMPT, max_tokens=9)
        hand.land()
        events = [Stop(request, 0), Arrived(b"w-1", hand.worker().run_next())]
        hand.handle(*events if is_stop_first else reversed(events))
        assert len(hand.tokens(request)) == (1 if is_stop_first else 2)
        assert hand.reason(request) is FinishReason.STOP
        hand.run()
        hand.expect_empty()


def test_a_stop_and_a_cancel_in_one_turn() -> None:
    for events in ((Stop(1, 0), Cancel(1)), (Cancel(1), Stop(1, 0))):
        hand = Hand()
        hand.join()
        hand.submit(PROMPT, max_tokens=9)
        hand.land()
        hand.handle(*events)
        assert ((1, 0) in hand.log.finished) is isinstance(events[0], Stop)
        hand.expect_empty()
        hand.run()
        hand.expect_empty()


def test_submit_and_cancel_in_one_turn() -> None:
    hand = Hand()
    hand.join()
    hand.handle(hand.new_submit(PROMPT, max_tokens=9), Cancel(1))
    assert not hand.worker().plans
    assert 1 not in hand.log.started
    hand.expect_empty()


def test_stop_ids_end_each_choice_by_itself() -> None:
    hand = Hand(settings_of_depth(2))
    hand.join(num_blocks=24)
    probe = hand.submit(PROMPT, max_tokens=9, n=3)
    hand.run()
    stops = (hand.tokens(probe, 0)[2], hand.tokens(probe, 2)[5])
    request = hand.submit(PROMPT, max_tokens=9, n=3, stop_ids=stops)
    hand.run()
    hand.check(request)
    assert hand.reason(request, 0) is FinishReason.STOP
    assert hand.tokens(request, 0)[-1] in stops, "the stop id is the last token"
    assert hand.reason(request, 1) is FinishReason.LENGTH
    hand.expect_empty()


def test_all_choices_end_at_the_fork() -> None:
    hand = Hand()
    hand.join()
    probe = hand.submit(PROMPT, max_tokens=1, n=3)
    hand.run()
    hand.check(probe)
    stops = tuple(hand.tokens(probe, index)[0] for index in range(3))
    request = hand.submit(PROMPT, max_tokens=5, n=3, stop_ids=stops)
    hand.run()
    hand.check(request)
    hand.expect_empty()
