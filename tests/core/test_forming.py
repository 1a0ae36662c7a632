"""Prefixes in the making: requests that arrive together compute what they have in common once.

Blocks of 4 tokens. Requests are numbered from 1 in order of arrival.
"""

from collections.abc import Callable

import pytest

from kilburn.controller.core.admission import MOST_AT_ONCE
from kilburn.controller.core.events import Arrived
from kilburn.controller.core.settings import EngineSettings
from kilburn.shared.messages import StepFailed
from tests.core.driver import Hand
from tests.core.worker import hello

PREFIX = tuple(range(100, 180))  # 20 blocks


def forming_hand(steps: int = 64, depth: int = 2, budget: int = 16, **worker: int) -> Hand:
    hand = Hand(EngineSettings(depth=depth, max_step_tokens=budget, prefix_wait_steps=steps))
    hand.say_hello(hello(**({"num_blocks": 200, "max_rows": 32} | worker)))
    return hand


def num_computed(hand: Hand) -> int:
    """Positions of all plans, decodes apart: each request here draws two tokens, so it decodes once."""
    return sum(count for plan in hand.worker().seen for count in plan.counts)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [7, 16, 64])
def test_a_common_prefix_is_computed_once(depth: int, budget: int) -> None:
    hand = forming_hand(depth=depth, budget=budget)
    requests = [hand.new_submit((*PREFIX, 200 + i, 300 + i, 400 + i), max_tokens=2) for i in range(16)]
    hand.handle(*requests)
    hand.run()
    assert num_computed(hand) == len(PREFIX) + 16 * (3 + 1)
    hand.check(*hand.submits)
    hand.expect_empty()


@pytest.mark.parametrize("budget", [64, 2048])
def test_a_hundred_wait_for_one(budget: int) -> None:
    """However many they are, and whatever a step takes of them; some more of them are looked at in each step."""
    rooms = {"num_blocks": 2000, "max_rows": 128, "max_step_tokens": budget}
    hand = forming_hand(steps=1000, depth=2, budget=budget, **rooms)
    hand.handle(*[hand.new_submit((*PREFIX, 200 + i), max_tokens=2) for i in range(100)])
    assert hand.snapshot().waiting_for_prefix == (MOST_AT_ONCE if budget == 64 else 99)
    hand.run()
    assert num_computed(hand) == len(PREFIX) + 100 * 2
    hand.check(*hand.submits)
    hand.expect_empty()


def test_without_the_wait_everybody_computes_it() -> None:
    hand = forming_hand(steps=0, budget=512, max_step_tokens=512)
    hand.handle(*[hand.new_submit((*PREFIX, 200 + i), max_tokens=2) for i in range(5)])
    hand.run()
    assert num_computed(hand) == 5 * (len(PREFIX) + 2)


def test_those_behind_do_not_wait_with_it() -> None:
    hand = forming_hand(depth=1, budget=128, max_step_tokens=128)
    alike = [hand.new_submit((*PREFIX, 200 + i), max_tokens=2) for i in range(3)]
    hand.handle(*alike, hand.new_submit((1,), max_tokens=2))
    seen = hand.snapshot()
    assert (seen.waiting_for_prefix, seen.waiting_requests) == (2, 2)
    assert list(hand.log.started) == [1, 4]
    hand.land()
    assert list(hand.log.started) == [1, 4, 2, 3], "and they go in order of their turns"
    assert hand.snapshot().waiting_for_prefix == 0
    hand.run()
    hand.check(1, 2, 3, 4)


def test_equal_prompts_wait_too_and_a_block_that_is_not_full_is_nobodys() -> None:
    hand = forming_hand(depth=1, budget=64)
    hand.handle(*[hand.new_submit(range(9), max_tokens=2) for _ in range(4)])
    assert list(hand.log.started) == [1]
    hand.run()
    assert num_computed(hand) == 9 + 3 * 1 + 4
    hand.handle(*[hand.new_submit(range(50, 53), max_tokens=2) for _ in range(4)])
    assert len(hand.log.started) == 8
    hand.run()
    hand.check(*hand.submits)


def test_tenants_never_wait_for_each_other() -> None:
    hand = forming_hand(budget=512, max_step_tokens=512)
    salts = (b"alice", b"bob", b"carol")
    hand.handle(*[hand.new_submit((*PREFIX, i), max_tokens=2, salt=salt) for i, salt in enumerate(salts)])
    assert list(hand.log.started) == [1, 2, 3]
    hand.run()
    hand.check(1, 2, 3)


@pytest.mark.parametrize(("steps", "begins_in"), [(1, 2), (2, 3), (3, 4), (64, 5)])
def test_the_wait_is_bounded(steps: int, begins_in: int) -> None:
    """Four plans are under way before the first result, in which the prefix is there, comes back."""
    hand = forming_hand(steps=steps, depth=4, budget=128, max_step_tokens=128)
    hand.handle(hand.new_submit(PREFIX, max_tokens=30), hand.new_submit((*PREFIX, 1), max_tokens=2))
    while 2 not in hand.log.started:
        hand.land()
    steps_of_admits = [plan.step for plan in hand.worker().seen if plan.admits]
    assert steps_of_admits == [1, begins_in]
    hand.run()
    hand.check(1, 2)


def cancel(hand: Hand) -> None:
    hand.cancel(1)


def preempt(hand: Hand) -> None:
    hand.line().recompute(hand.group(1), [])


def lose_the_worker(hand: Hand) -> None:
    hand.handle(Arrived(b"w-1", StepFailed(hand.worker().lease, 1, "out of memory")))
    hand.say_hello(hello(num_blocks=200, max_rows=32))


@pytest.mark.parametrize("leave", [cancel, preempt, lose_the_worker])
@pytest.mark.parametrize("has_others", [True, False])
def test_a_filler_that_leaves_releases_those_who_wait(leave: Callable[[Hand], None], has_others: bool) -> None:
    hand = forming_hand(steps=1000, depth=3, budget=128, max_step_tokens=128)
    hand.handle(*[hand.new_submit((*PREFIX, 200 + i), max_tokens=2) for i in range(4)])
    if has_others:
        hand.submit((1,), max_tokens=40)
    assert hand.snapshot().waiting_for_prefix == 3
    leave(hand)
    hand.run()
    hand.check(*[request for request in hand.submits if request not in hand.cancelled])
    hand.expect_empty()


def test_one_that_waits_for_a_prefix_can_be_cancelled() -> None:
    hand = forming_hand(depth=1, budget=128, max_step_tokens=128)
    hand.handle(*[hand.new_submit((*PREFIX, 200 + i), max_tokens=2) for i in range(3)])
    assert hand.snapshot().waiting_for_prefix == 2
    hand.cancel(2)
    assert hand.snapshot().waiting_for_prefix == 1
    hand.run()
    hand.check(1, 3)
    hand.expect_empty()


def test_a_prefix_in_a_name_is_waited_for_too() -> None:
    hand = forming_hand()
    hand.pin(PREFIX, is_public=True)
    requests = [hand.submit((*PREFIX, i), max_tokens=2) for i in range(3)]
    hand.run()
    assert num_computed(hand) == len(PREFIX) + 3 * 2
    hand.check(*requests)
