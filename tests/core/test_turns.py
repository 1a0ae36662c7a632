"""Whose turn it is: priorities, aging, and that whoever was preempted goes before newcomers.

Blocks of 4 tokens. Requests are numbered from 1 in order of arrival; time passes only where a test says so.
"""

from dataclasses import replace

import pytest

from kilburn.controller.core.sequence import State
from kilburn.controller.core.settings import EngineSettings
from tests.core.driver import Hand


def aging_hand(aging_s: float, **worker: int) -> Hand:
    hand = Hand(replace(EngineSettings(), depth=1, aging_s=aging_s, silence_s=1e6, step_deadline_s=1e6))
    hand.join(**worker)
    return hand


def order_of_starts(aging_s: float, arrivals: list[tuple[float, int]]) -> list[int]:
    """Requests that arrive at (seconds, priority) while a row is taken, in the order in which they begin."""
    hand = aging_hand(aging_s, max_rows=1)
    hand.submit((1, 2), max_tokens=2)
    for at_s, priority in arrivals:
        hand.now = at_s
        hand.submit((1, 2), max_tokens=1, priority=priority)
    hand.run()
    return list(hand.log.started)[1:]


@pytest.mark.parametrize(
    ("aging_s", "arrivals", "order"),
    [
        (0.0, [(0.0, 3), (9.0, 0), (99.0, -1)], [4, 3, 2]),  # strict
        (10.0, [(0.0, 1), (9.0, 0)], [3, 2]),  # nine seconds do not make up for a level
        (10.0, [(0.0, 1), (11.0, 0)], [2, 3]),  # eleven do
        (10.0, [(0.0, 1), (10.0, 0)], [2, 3]),  # ten make them equal, and he was first
        (10.0, [(0.0, 2), (11.0, 0), (19.0, 0), (21.0, 0), (21.0, -1)], [3, 6, 4, 2, 5]),
        (10.0, [(0.0, 0), (1.0, 0), (2.0, 0)], [2, 3, 4]),
    ],
)
def test_seconds_of_waiting_make_up_for_levels_of_priority(
    aging_s: float, arrivals: list[tuple[float, int]], order: list[int]
) -> None:
    assert order_of_starts(aging_s, arrivals) == order


@pytest.mark.parametrize("aging_s", [0.0, 1.0])
def test_nobody_starves_under_an_endless_stream_of_urgent_requests(aging_s: float) -> None:
    """Priority 3 against 0, arriving faster than they are served. With aging its turn comes after those of 3 s."""
    hand = aging_hand(aging_s, max_rows=1)
    hand.submit((1, 2), max_tokens=3)
    low = hand.submit((3, 4), max_tokens=3, priority=3)
    for _ in range(100):
        hand.now += 0.125
        hand.submit((5, 6), max_tokens=3)
        hand.land()
        if low in hand.log.finished:
            break
    if aging_s == 0.0:
        assert low not in hand.log.started
        return
    started = list(hand.log.started)
    assert started.index(low) == 1 + 23, "the one that ran, and those who came before three seconds were over"


def test_the_victim_is_chosen_by_priority_however_long_it_has_waited() -> None:
    """2 is admitted by its age, before 3; when blocks run out it is the one to go, and then comes back before 4."""
    hand = aging_hand(10.0, num_blocks=8)
    hand.submit(range(7), max_tokens=6)
    old = hand.submit(range(20, 27), max_tokens=6, priority=1)
    hand.now = 100.0
    urgent = hand.submit(range(40, 47), max_tokens=6)
    hand.land()
    assert hand.sequence(old).state is hand.sequence(urgent).state is State.RUNNING
    while not hand.preemptions():
        hand.land()
    assert hand.preemptions() == [f"request {old}"]
    late = hand.submit((1,), max_tokens=1)
    while old in {group.request_id for group in hand.line().waiting}:
        assert late not in hand.log.started, "no newcomer of a later turn"
        hand.land()
    hand.run()
    hand.check(1, old, urgent, late)


def test_one_that_had_its_turn_by_waiting_comes_to_its_end_although_it_is_everybodys_victim() -> None:
    hand = aging_hand(1.0, num_blocks=12, max_rows=8)
    low = hand.submit(range(200, 212), max_tokens=24, priority=2)
    num_urgent = 0
    while (low, 0) not in hand.log.finished:
        hand.now += 0.5
        num_urgent += 1
        hand.submit(range(num_urgent, num_urgent + 5), max_tokens=20)
        hand.land()
        assert num_urgent < 150, f"thrown out {len(hand.preemptions())} times"
    assert f"request {low}" in hand.preemptions()
    hand.check(low)


def test_no_newcomer_of_equal_priority_goes_before_who_was_preempted() -> None:
    hand = aging_hand(1000.0, num_blocks=4)
    hand.submit(range(3), max_tokens=10)
    hand.submit(range(20, 23), max_tokens=10)
    while not hand.preemptions():
        hand.land()
    equal = hand.submit((3,), max_tokens=1)
    urgent = hand.submit((4,), max_tokens=1, priority=-1)
    assert hand.snapshot().preempted_waiting == 1
    while 2 in {group.request_id for group in hand.line().waiting}:
        assert equal not in hand.log.started
        hand.land()
    started = list(hand.log.started)
    assert urgent in started, "a more urgent one may"
    assert started.index(urgent) < started.index(equal) if equal in started else True
    hand.run()
    hand.check(1, 2, equal, urgent)
    hand.expect_empty()


def test_of_equal_turns_the_one_that_arrived_first_is_first() -> None:
    hand = aging_hand(10.0, max_rows=1)
    hand.handle(*[hand.new_submit((i,), max_tokens=1, priority=0) for i in range(5)])
    hand.run()
    assert list(hand.log.started) == [1, 2, 3, 4, 5]


def test_what_they_wait_for_is_told() -> None:
    hand = aging_hand(0.0, num_blocks=8, max_rows=2)
    hand.submit(range(16), max_tokens=2)
    hand.submit(range(20, 36), max_tokens=2)
    hand.submit((1,), max_tokens=1)
    assert hand.snapshot().waiting_for_budget == 2, "of the next step: nobody has looked at them yet"
    hand.land()
    seen = hand.snapshot()
    assert (seen.waiting_for_blocks, seen.waiting_for_rows, seen.waiting_tokens) == (2, 0, 17)
    hand.run()
    hand.submit((1, 2), max_tokens=3)
    hand.submit((1, 2), max_tokens=3)
    hand.submit((1, 2, 3), max_tokens=3)
    hand.land()
    seen = hand.snapshot()
    assert (seen.waiting_for_blocks, seen.waiting_for_rows, seen.waiting_tokens) == (0, 1, 3)
    hand.run()
    assert hand.snapshot().waiting_tokens == 0
