"""What is counted for onlookers: by hand, and never downwards."""

from dataclasses import replace

import pytest

from kilburn.controller.core.block_pool import BlockPool, Name
from kilburn.controller.core.departure import Way, Why
from kilburn.controller.core.events import Left
from kilburn.controller.core.histogram import Histogram
from kilburn.controller.core.policy import Preemption
from tests.core.driver import Hand, settings_of_depth

SHARED = (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ((), (0, 0, 0, 0)),
        ((0.1, 0.1, 0.1), (3, 0, 0, 0)),  # an edge belongs to what is below it
        ((0.0, 0.11, 0.2, 0.3, 0.5, 0.6, 99.0), (1, 2, 2, 2)),
        ((7.0, 0.1, 7.0, 7.0, 0.1), (2, 0, 0, 3)),  # also where values come twice in a row
    ],
)
def test_a_histogram_counts_between_its_edges(values: tuple[float, ...], counts: tuple[int, ...]) -> None:
    histogram = Histogram((0.1, 0.2, 0.5))
    for value in values:
        histogram.observe(value)
    spread = histogram.spread()
    assert (spread.counts, spread.total) == (counts, pytest.approx(sum(values)))
    assert spread.count == len(values)


def test_an_evicted_block_tells_how_long_it_lived_and_how_long_nobody_wanted_it() -> None:
    pool = BlockPool(num_blocks=2)
    pool.now = 1.0
    (block,) = pool.take(1, step=1)
    pool.publish(block, Name(b"a" * 32, b"p" * 32, (1, 2, 3, 4)))
    pool.drop([block])
    pool.now = 5.0
    pool.share(block)
    pool.drop([block])  # it was wanted once more
    assert (pool.lifetimes_s.spread().count, pool.idle_s.spread().count) == (0, 0)
    pool.now = 12.0
    pool.take(2, step=2)
    assert pool.num_evictions == 1
    assert (pool.lifetimes_s.spread().total, pool.idle_s.spread().total) == (11.0, 7.0)


def test_shared_blocks_are_counted_once_however_many_hold_them() -> None:
    pool = BlockPool(num_blocks=4)
    first, second = pool.take(2, step=1)
    for block in (first, first, second):
        pool.share(block)
    assert (pool.num_shared, pool.num_refs - pool.num_owned) == (2, 3)
    pool.drop([first])
    assert pool.num_shared == 2
    pool.drop([second, first])
    assert pool.num_shared == 0
    pool.validate([[first], [second]])
    pool.share(first)
    pool.quarantine(first)
    assert pool.num_shared == 0
    pool.validate([[second]])


def test_steps_are_measured_by_rows_positions_and_use_of_the_budget() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=16)
    for _ in range(2):
        hand.submit(SHARED, max_tokens=3)
    hand.run()
    now = hand.snapshot()
    assert now.step_rows.count == now.step_positions.count == now.step_flight_s.count == now.steps
    assert now.step_rows.total == 2 * 3, "each was in three steps, one of its prompt and two of decoding"
    assert now.step_positions.total == 2 * (len(SHARED) + 2) - now.prefix_hit_tokens
    assert 0 < now.step_budget_use.total < now.steps


def test_preemptions_are_counted_by_the_way_and_by_what_decided_it() -> None:
    hand = Hand(settings_of_depth(2))
    hand.join(num_blocks=7)
    requests = [hand.submit((*SHARED, i), max_tokens=9) for i in range(6)]
    hand.land()
    hand.line().recompute(hand.line().running[-1], [])  # as where blocks prove unreadable
    hand.run()
    now = hand.snapshot()
    assert {way for way, _ in now.preempted} == {Way.RECOMPUTE}
    assert now.preempted[Way.RECOMPUTE, Why.LOST] == 1
    assert sum(now.preempted.values()) == now.preempted_by_recompute > 1
    hand.check(*requests)


def test_the_time_of_moves_is_divided_between_their_directions() -> None:
    hand = Hand(replace(settings_of_depth(2), preemption=Preemption.SWAP))
    hand.join(num_blocks=7, num_host_blocks=14)
    hand.worker().move_s = 0.5
    requests = [hand.submit((*SHARED, i), max_tokens=9) for i in range(4)]
    hand.run()
    now = hand.snapshot()
    assert now.preempted_by_swap > 0
    assert now.swap_out_s == pytest.approx(0.5 * now.blocks_out)
    assert now.swap_in_s == pytest.approx(0.5 * now.blocks_in)
    assert sum(number for (way, _), number in now.preempted.items() if way is Way.SWAP) == now.preempted_by_swap
    hand.check(*requests)


def test_waste_is_what_blocks_have_beyond_the_known_tokens() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=16)
    hand.submit(SHARED, max_tokens=3)  # 6 tokens in 2 blocks of 4
    assert (hand.snapshot().owned_slots, hand.snapshot().tail_slots, hand.snapshot().filled_slots) == (8, 2, 0)
    hand.land()
    assert (hand.snapshot().owned_slots, hand.snapshot().tail_slots, hand.snapshot().filled_slots) == (8, 1, 6)
    hand.run()
    assert (hand.snapshot().owned_slots, hand.snapshot().tail_slots) == (0, 0)


def test_requests_that_lost_their_worker_are_counted_when_they_leave_and_when_they_are_placed_again() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=16)
    requests = [hand.submit(SHARED, max_tokens=4) for _ in range(2)]
    hand.land()
    before = hand.engine.snapshot()
    assert (before.requests_displaced, before.requests_recovered) == (0, 0)
    hand.handle(Left(b"w-1", "killed"))
    lost = hand.engine.snapshot()
    assert (lost.requests_displaced, lost.requests_recovered, lost.homeless_requests) == (2, 0, 2)
    hand.join(num_blocks=16)
    back = hand.engine.snapshot()
    assert (back.requests_displaced, back.requests_recovered, back.homeless_requests) == (2, 2, 0)
    hand.run()
    hand.check(*requests)
