"""Waste at the ends of tables: by hand, and against a count of every block in whatever comes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.controller.core.sequence import Sequence
from tests.core.driver import Hand, settings_of_depth
from tests.core.test_whole_runs import act, join
from tests.core.worker import hello

SHARED = (1, 2, 3, 4, 5, 6)


def counted(hand: Hand) -> int:
    """Every block of every table, slot by slot."""
    line, size = hand.line(), hand.scheduler().block_size
    holders: list[Sequence] = [s for group in (*line.running, *line.pinned) for s in group.live]
    held = {block for s in holders for block in s.own_table.blocks}
    filled = {
        (block, slot)
        for s in holders
        for i, block in enumerate(s.own_table.blocks)
        for slot in range(size)
        if i * size + slot < s.num_planned
    }
    return len(held) * size - len(filled)


def test_the_end_of_a_table_is_waste_until_it_is_planned() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=16)  # blocks of 4
    hand.submit(SHARED, max_tokens=4)
    assert (hand.snapshot().tail_slots, hand.snapshot().tail_waste) == (2, 2 / 8)
    hand.land()
    assert (hand.snapshot().tail_slots, hand.snapshot().tail_waste) == (1, 1 / 8)  # the seventh is under way
    hand.land()
    assert (hand.snapshot().tail_slots, hand.snapshot().tail_waste) == (0, 0.0)
    hand.land()
    assert (hand.snapshot().tail_slots, hand.snapshot().tail_waste) == (3, 3 / 12)
    hand.run()
    assert (hand.snapshot().tail_slots, hand.snapshot().tail_waste) == (0, 0.0)


def test_a_shared_end_is_counted_once() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=16)
    hand.submit(SHARED[:5], max_tokens=9, n=3)
    hand.land()
    # Each has a copy of the last block by now, as each writes to its own: 6 of 8 positions.
    assert hand.snapshot().owned_blocks == 1 + 3
    assert hand.snapshot().tail_slots == counted(hand) == 3 * 2
    assert hand.snapshot().tail_waste == 6 / 16


def test_a_named_prefix_wastes_its_last_block_for_as_long_as_it_is_held() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=16)
    hand.pin(SHARED)
    hand.run()
    assert (hand.snapshot().owned_blocks, hand.snapshot().tail_slots) == (2, 2)
    hand.submit((*SHARED, 9, 9, 9), max_tokens=3)  # shares the first, has the second copied
    assert hand.snapshot().tail_slots == counted(hand) == 2 + 3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_comes_waste_is_what_a_count_of_every_slot_says(data: st.DataObject) -> None:
    hand = Hand(settings_of_depth(data.draw(st.integers(1, 3)), max_step_tokens=data.draw(st.integers(3, 12))))
    join(hand, data)
    stopped: set[tuple[int, int]] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        act(hand, data, stopped)
        if hand.engine.snapshot().groups:
            assert hand.snapshot().tail_slots == counted(hand)
            assert 0.0 <= hand.snapshot().tail_waste < 1.0
    hand.say_hello(hello(num_blocks=200))
    hand.run()
    assert hand.snapshot().tail_slots == 0
