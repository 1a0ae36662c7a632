"""The block map says of every block, table and request what the pools, tables and groups themselves say.

Blocks of 4 tokens. Requests are numbered from 1 in order of arrival.
"""

from dataclasses import replace

import pytest

from kilburn.controller.core.block_map import CELL_PINNED, BlockMap, RequestRow
from kilburn.controller.core.block_pool import CELL_CACHED, CELL_QUARANTINED, MOST_CELL_REFS, BlockPool, Name
from kilburn.controller.core.events import Left, Tick
from kilburn.controller.core.policy import Preemption
from kilburn.shared.types import Tier
from tests.core.driver import Hand, settings_of_depth
from tests.core.test_pins import PREFIX, pinned_hand
from tests.core.test_swap import swapping, two_requests, until_swapped

BY_STATE = {0: "free", CELL_CACHED: "cached", CELL_QUARANTINED: "quarantined"}


def states(cells: bytes) -> dict[str, int]:
    """How many blocks are in which state."""
    counts = dict.fromkeys(("free", "cached", "owned", "quarantined"), 0)
    for cell in cells:
        counts[BY_STATE.get(cell & ~CELL_PINNED, "owned")] += 1
    return counts


def expect_true(hand: Hand) -> BlockMap:
    """The map, compared block by block with what it is about."""
    found = hand.engine.block_map()
    assert found.snapshot == hand.engine.snapshot()
    for group, worker in zip(found.snapshot.groups, found.workers, strict=True):
        assert group.lease == worker.lease
        home = next(home for home in hand.engine._homes.values() if home.lease.id == worker.lease)
        pinned = set(home.scheduler.line.pinned_blocks)
        for pool, cells in ((home.scheduler.pool, worker.device), (home.scheduler.memory.host, worker.host)):
            assert len(cells) == pool.num_blocks
            for block, cell in enumerate(cells):
                assert (cell & CELL_PINNED != 0) == (pool is home.scheduler.pool and block in pinned)
                refs = pool.refs(block)
                assert cell & ~CELL_PINNED == (min(refs, 60) if refs else 61 * pool.is_cached(block))
        assert states(worker.device) == {
            "free": group.free_blocks,
            "cached": group.cached_blocks,
            "owned": group.owned_blocks,
            "quarantined": group.quarantined_blocks,
        }
        tables = [
            blocks for lease, tier, blocks in found.tables.values() if (lease, tier) == (worker.lease, Tier.DEVICE)
        ]
        assert sum(map(len, tables)) == home.scheduler.pool.num_refs
    return found


def row(found: BlockMap, request: int) -> RequestRow:
    [only] = [row for row in found.requests if row.id == request]
    return only


def test_a_request_from_the_line_to_the_end() -> None:
    hand = Hand(settings_of_depth(1))
    hand.submit(range(9), max_tokens=4)
    waiting = row(expect_true(hand), 1)
    assert (waiting.worker, waiting.state, waiting.wait, waiting.blocks) == ("", "waiting", "a worker", 0)
    hand.join(num_blocks=6)
    running = row(expect_true(hand), 1)
    assert (running.worker, running.state, running.wait) == ("w", "running", "")
    assert (running.prompt_tokens, running.generated_tokens, running.computed_tokens, running.blocks) == (9, 0, 0, 3)
    hand.land()
    after = expect_true(hand)
    assert (row(after, 1).generated_tokens, row(after, 1).computed_tokens) == (1, 9)
    assert after.tables == {(1, 0): (1, Tier.DEVICE, hand.table(1))}
    hand.run()
    ended = expect_true(hand)
    assert (ended.requests, ended.tables) == ([], {})
    assert states(ended.workers[0].device) == {"free": 3, "cached": 3, "owned": 0, "quarantined": 0}
    assert row_of_repeat(hand).cached_tokens == 8


def row_of_repeat(hand: Hand) -> RequestRow:
    """The same prompt once more: what is in the pool is not computed again."""
    hand.submit(range(9), max_tokens=4)
    return row(expect_true(hand), 2)


def test_sharing_is_counted_in_the_cells_and_blocks_once() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=16)
    hand.submit(range(8), max_tokens=6, n=3)
    while hand.group(1).n and not hand.group(1).has_forked:
        hand.land()
    found = expect_true(hand)
    shared = [block for block, cell in enumerate(found.workers[0].device) if cell == 3]
    assert shared == hand.table(1)[:2]
    assert row(found, 1).sequences == 3
    assert row(found, 1).blocks == len({block for i in range(3) for block in hand.table(1, i)}) == 5
    assert set(found.tables) == {(1, 0), (1, 1), (1, 2)}
    hand.run()


def test_who_waits_says_for_what() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=8, max_rows=2)
    for start in (0, 100, 200):
        hand.submit(range(start, start + 6), max_tokens=3)
    hand.submit(range(300, 306), max_tokens=3)
    assert [row(expect_true(hand), i).wait for i in (1, 2)] == ["", "the next step"]
    hand.land()
    found = expect_true(hand)
    assert [row(found, i).wait for i in (1, 2, 3, 4)] == ["", "", "free rows", "those before it"]
    hand.run()
    hand.submit(range(400, 420), max_tokens=3)
    hand.submit(range(500, 520), max_tokens=3)
    hand.land()
    assert row(expect_true(hand), 6).wait == "free blocks"
    hand.run()


def test_a_swapped_request_has_its_blocks_on_the_host() -> None:
    hand = two_requests()
    until_swapped(hand, 2)
    found = expect_true(hand)
    swapped = row(found, 2)
    assert (swapped.state, swapped.blocks, swapped.preemptions) == ("swapped", 0, 1)
    assert found.tables[2, 0] == (1, Tier.HOST, [b for b in hand.sequence(2).host if b is not None])
    assert swapped.host_blocks == len(found.tables[2, 0][2]) == states(found.workers[0].host)["owned"] > 0
    hand.run()
    assert states(expect_true(hand).workers[0].host)["owned"] == 0


def test_preemption_by_recompute_is_counted_too() -> None:
    hand = swapping(preemption=Preemption.RECOMPUTE)
    hand.join(num_blocks=4)
    hand.submit(range(3), max_tokens=10)
    hand.submit(range(20, 23), max_tokens=10)
    seen = set()
    while not hand.engine.is_idle:
        seen |= {(r.id, r.preemptions) for r in expect_true(hand).requests}
        hand.land()
    assert (2, 1) in seen
    assert (1, 1) not in seen


def test_named_prefixes_are_rows_of_their_own_and_their_blocks_are_marked() -> None:
    hand = pinned_hand()
    found = expect_true(hand)
    pin = row(found, 1001)
    assert (pin.kind, pin.state, pin.prompt_tokens, pin.blocks) == ("prefix", "pinned", len(PREFIX), 3)
    assert [block for block, cell in enumerate(found.workers[0].device) if cell & CELL_PINNED] == [0, 1, 2]
    hand.submit((*PREFIX[:8], 7, 8), max_tokens=2)
    assert expect_true(hand).workers[0].device[0] == CELL_PINNED | 2


def test_a_lost_worker_leaves_no_pool_and_its_requests_wait() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=8)
    hand.submit(range(6), max_tokens=3)
    hand.handle(Left(b"w-1", "killed"))
    found = expect_true(hand)
    assert (found.workers, found.tables, row(found, 1).wait) == ((), {}, "a worker")


@pytest.mark.parametrize("num_cached", [0, 2, 6])
def test_every_state_has_its_cell_whichever_of_free_and_cached_is_longer(num_cached: int) -> None:
    pool = BlockPool(10)
    taken = pool.take(8, step=1)
    for block in taken[: num_cached + 1]:
        pool.publish(block, Name(bytes([block]), b"", ()))
    pool.drop(taken[:num_cached])
    pool.quarantine(7)
    expected = bytearray([CELL_CACHED] * num_cached + [1] * (7 - num_cached) + [CELL_QUARANTINED, 0, 0])
    assert pool.cells() == expected


@pytest.mark.parametrize("num_tables", [59, 60, 61, 255, 256, 1000])
def test_more_tables_than_a_cell_tells_apart_are_the_most_it_can_tell(num_tables: int) -> None:
    pool = BlockPool(3)
    [block] = pool.take(1, step=1)
    for _ in range(num_tables - 1):
        pool.share(block)
    assert list(pool.cells()) == [min(num_tables, MOST_CELL_REFS), 0, 0]


def test_who_waits_can_be_put_in_the_order_in_which_they_will_go() -> None:
    hand = Hand(replace(settings_of_depth(1), aging_s=1.0))
    hand.join(num_blocks=64, max_rows=1)
    hand.submit(range(6), max_tokens=8)
    hand.handle(Tick(), after_s=1.0)
    hand.submit(range(100, 106), max_tokens=3, priority=2)
    hand.handle(Tick(), after_s=1.5)
    hand.submit(range(200, 206), max_tokens=3, priority=1)
    hand.submit(range(300, 306), max_tokens=3)
    waiting = [r for r in expect_true(hand).requests if r.wait]
    shown = [r.id for r in sorted(waiting, key=lambda r: (not r.has_started, r.turn, r.arrival))]
    hand.run()
    assert shown == list(hand.log.started)[1:] == [4, 2, 3]  # 2 has waited for longer than its priority is worth
