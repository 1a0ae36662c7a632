"""Two tiers: groups that leave for the host and come back, evicted blocks that are kept there, and the choice.

Blocks of 4 tokens. Requests are numbered from 1 in order of arrival.
"""

from dataclasses import replace

import pytest

from kilburn.controller.core.block_pool import BlockPool
from kilburn.controller.core.block_table import BlockTable
from kilburn.controller.core.departure import Departure
from kilburn.controller.core.events import Left, NoteKind
from kilburn.controller.core.memory import Memory, Moves
from kilburn.controller.core.policy import Costs, Preemption
from kilburn.controller.core.sequence import Group, Place, State
from kilburn.shared.digest import BlockHasher
from kilburn.shared.messages import KvLost, StepPlan
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import LawBroken, Tier
from tests.core.driver import Hand, settings_of_depth
from tests.core.worker import hello


def swapping(depth: int = 1, preemption: Preemption = Preemption.SWAP) -> Hand:
    return Hand(replace(settings_of_depth(depth), preemption=preemption))


def ways(hand: Hand) -> list[str]:
    return [note.text.split(":")[0] for note in hand.log.notes if note.kind is NoteKind.PREEMPTED]


def leaving(hand: Hand, request: int) -> Departure:
    return hand.scheduler()._leaving.choose(hand.group(request), [], Moves(99))


def until_swapped(hand: Hand, request: int) -> None:
    while hand.sequence(request, hand.group(request).live[0].index).state is not State.SWAPPED:
        hand.land()


def swaps_in(hand: Hand) -> list[tuple[int, int]]:
    return [move for plan in hand.worker().seen for move in plan.swaps_in]


def two_requests(num_host_blocks: int = 8, depth: int = 1, num_blocks: int = 4) -> Hand:
    """Two requests that cannot finish together: 1 stays, 2 goes."""
    hand = swapping(depth)
    hand.join(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    hand.submit(range(3), max_tokens=10)
    hand.submit(range(20, 23), max_tokens=10)
    return hand


# --- leaving and coming back


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_in_line_leaves_with_what_it_computed_and_goes_on_from_there(depth: int) -> None:
    hand = two_requests(depth=depth)
    until_swapped(hand, 2)
    victim = hand.sequence(2)
    computed, said = victim.num_computed, hand.tokens(2)
    assert computed >= 3
    assert victim.tokens == [*range(20, 23), *said]
    assert (victim.num_planned, victim.row, victim.table) == (computed, -1, None)
    assert len(victim.host) == -(-computed // 4) == hand.snapshot().owned_host_blocks
    assert ways(hand) == ["request 2, by swap"]
    num_seen = len(hand.worker().seen)
    while victim.state is not State.RUNNING:
        hand.land()
    [admit] = [admit for plan in hand.worker().seen[num_seen:] for admit in plan.admits]
    assert (admit.start, admit.num_prompt) == (computed, 3)
    hand.run()
    hand.check(1, 2)
    assert hand.snapshot().swapped_in == hand.snapshot().preempted_by_swap > 0
    hand.expect_empty()


def test_the_victim_is_the_last_by_priority_first() -> None:
    hand = swapping()
    hand.join(num_blocks=6, num_host_blocks=9)
    hand.submit(range(7), max_tokens=6, priority=1)
    hand.submit(range(20, 27), max_tokens=6)
    hand.submit(range(40, 47), max_tokens=6)
    hand.run()
    assert ways(hand)[0] == "request 1, by swap"
    hand.check(1, 2, 3)
    hand.expect_empty()


def test_no_newcomer_is_admitted_before_the_victim() -> None:
    hand = two_requests()
    until_swapped(hand, 2)
    newcomer = hand.submit((3,), max_tokens=1)
    while hand.sequence(2).state is State.SWAPPED:
        assert newcomer not in hand.log.started
        hand.land()
    hand.run()
    hand.check(1, 2, newcomer)


def test_a_plan_may_only_move() -> None:
    """At depth 1 the one that asks waits for the victim's blocks, which are read before they are free."""
    hand = two_requests()
    until_swapped(hand, 2)
    alone = [plan for plan in hand.worker().seen if not plan.rows]
    assert all(plan.swaps_out and not plan.admits and not plan.swaps_in for plan in alone)
    hand.run()
    assert any(not plan.rows for plan in hand.worker().seen)
    hand.check(1, 2)


def test_a_group_goes_whole_and_what_it_shares_is_copied_once() -> None:
    """12 blocks that three hold, right after their fork, of which the host gets each once."""
    hand = swapping()
    hand.join(num_blocks=20, num_host_blocks=30)
    request = hand.submit(range(46), max_tokens=6, n=3)
    hand.scheduler().commit(hand.worker().run_next(), hand.now, [])
    hand.line().swap_out(hand.group(request), leaving(hand, request), moves := Moves(99), [])
    hand.scheduler().memory.seal(moves)
    assert {sequence.state for sequence in hand.group(request).live} == {State.SWAPPED}
    hosts = [sequence.host for sequence in hand.group(request).live]
    assert hosts[0] == hosts[1] == hosts[2]
    host = hand.scheduler().memory.host
    assert host.num_owned == 12
    assert [host.refs(block) for block in hosts[0] if block is not None] == [3] * 12


def test_a_forked_group_comes_back_as_it_was() -> None:
    hand = swapping()
    hand.join(num_blocks=11, num_host_blocks=30)
    hand.submit(range(50, 53), max_tokens=18)
    request = hand.submit(range(10), max_tokens=8, n=3)
    until_swapped(hand, request)
    states = [sequence.state for sequence in hand.group(request).live]
    assert states == [State.SWAPPED] * 3
    shared = {source for sequence in hand.group(request).live for source in sequence.host[:2]}
    assert len(shared) == 2
    while hand.sequence(request).state is State.SWAPPED:
        hand.land()
    tables = [hand.table(request, i) for i in range(3)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3, "everybody writes his last block"
    hand.run()
    hand.check(1, request)
    hand.expect_empty()


def test_the_partial_block_that_three_share_is_swapped_in_three_times() -> None:
    """Swapped between the fork and the first step after it."""
    hand = swapping(depth=1)
    hand.join(num_blocks=9, num_host_blocks=30)
    request = hand.submit(range(6), max_tokens=5, n=3)
    result = hand.worker().run_next()
    hand.scheduler().commit(result, hand.now, effects := [])
    hand.line().swap_out(hand.group(request), leaving(hand, request), moves := Moves(99), effects)
    assert [len(sequence.host) for sequence in hand.group(request).live] == [2, 2, 2]
    assert len(moves.swaps_out) == 2
    tables = hand.scheduler().memory
    tables.seal(moves)
    for block in range(9):
        hand.pool().withdraw(block)
    restores = tables.restores(hand.group(request), [])
    assert restores is not None
    assert tables.num_restored(restores, 0) == 1 + 3
    hand.scheduler().memory.swap_in(hand.group(request), restores, [0, 0, 0], back := Moves(100))
    (partial,) = {source for source, _ in back.swaps_in if [s for s, _ in back.swaps_in].count(source) == 3}
    assert partial == hand.sequence(request).host[1]


# --- where it may not


@pytest.mark.parametrize(("num_host_blocks", "way"), [(0, "recompute"), (1, "recompute"), (2, "swap")])
def test_a_host_that_is_full_means_recompute(num_host_blocks: int, way: str) -> None:
    hand = two_requests(num_host_blocks)
    while not ways(hand):
        hand.land()
    assert ways(hand) == [f"request 2, by {way}"]
    hand.run()
    hand.check(1, 2)
    hand.expect_empty()


def test_swapped_groups_never_hold_more_than_the_device_has() -> None:
    memory = Memory(BlockPool(4), BlockPool(40), BlockHasher(b"m" * 32, 4), 4)
    outcomes = []
    for number in range(3):
        group = Group(number, Place(0, number), range(8), 4, Sampling(), 1)
        [sequence] = group.live
        sequence.start(0, table := BlockTable(memory.device), 8, 8, 8)
        memory.grow(table, 2, Moves(number))
        assert memory.has_host_room(group, [], Moves(number))
        outcomes.append(memory.is_within_bound(group, [], Moves(number)))
        if outcomes[-1]:
            [host] = memory.swap_out(group, [], moves := Moves(number))
            sequence.swap_out(host)
            memory.seal(moves)
    assert outcomes == [True, True, False]
    assert memory.host.num_owned == 4


# --- what is found on the way back


def test_what_is_still_on_the_device_is_adopted_and_only_the_rest_is_copied() -> None:
    hand = two_requests(num_blocks=5)
    until_swapped(hand, 2)
    copies = len(hand.sequence(2).host)
    hand.cancel(1)  # nobody needs the blocks that 2 left
    hand.land()
    assert hand.sequence(2).state is State.RUNNING
    assert len(hand.last_plan().swaps_in) < copies
    assert {host for host, _ in hand.last_plan().swaps_in} <= set(range(8))
    hand.run()
    hand.check(2)
    hand.expect_empty()


def test_without_names_all_of_it_is_copied() -> None:
    hand = two_requests(num_blocks=5)
    until_swapped(hand, 2)
    copies = list(hand.sequence(2).host)
    for block in range(5):
        hand.pool().withdraw(block)
    hand.cancel(1)
    hand.land()
    assert [host for host, _ in hand.last_plan().swaps_in] == copies
    hand.run()
    hand.check(2)
    hand.expect_empty()


# --- ends while away


def test_cancelled_while_swapped() -> None:
    hand = two_requests()
    until_swapped(hand, 2)
    hand.cancel(2)
    assert hand.snapshot().owned_host_blocks == 0
    hand.run()
    hand.check(1)
    hand.expect_empty()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_of_a_group_stopped_while_swapped(index: int) -> None:
    hand = swapping()
    hand.join(num_blocks=11, num_host_blocks=30)
    hand.submit(range(50, 53), max_tokens=18)
    request = hand.submit(range(10), max_tokens=8, n=3)
    until_swapped(hand, request)
    before = hand.snapshot().owned_host_blocks
    hand.stop(request, index)
    hand.stop(request, index)
    assert hand.reason(request, index).value == "stop"
    assert 0 < hand.snapshot().owned_host_blocks <= before
    hand.run()
    hand.check(1)
    for other in {0, 1, 2} - {index}:
        assert (hand.tokens(request, other), hand.reason(request, other)) == hand.expected(request, other)
    hand.expect_empty()


def test_the_lease_ends_while_swapped() -> None:
    hand = two_requests()
    until_swapped(hand, 2)
    said = hand.tokens(2)
    hand.handle(Left(b"w-1", "died"))
    assert hand.sequence(2).state is State.WAITING
    assert (hand.sequence(2).num_computed, hand.sequence(2).host) == (0, [])
    assert hand.tokens(2) == said
    hand.join(num_blocks=10)
    hand.run()
    hand.check(1, 2)
    hand.expect_empty()


# --- what goes wrong on the host


def test_a_lost_host_copy_is_recomputed() -> None:
    hand = two_requests()
    until_swapped(hand, 2)
    for block in range(4):
        hand.pool().withdraw(block)
    lost = hand.sequence(2).host[0]
    assert lost is not None
    while not hand.worker().plans[0].rows:
        hand.land()
    result = hand.worker().run_next()
    result.lost = (KvLost(0, Tier.HOST, lost, result.step),)
    result.num_tokens, result.tokens = [0], []
    hand.say(result)
    assert hand.sequence(2).state is State.WAITING
    assert hand.sequence(2).host == []
    hand.run()
    hand.check(1, 2)
    hand.expect_empty()


def test_a_lost_device_block_takes_its_host_source_along() -> None:
    """Otherwise the same bad copy would be hit again, for ever."""
    hand = evicted_to_host()
    hand.worker().bad_host_blocks.update(range(8))
    request = hand.submit((*range(9), 5), max_tokens=3)
    assert hand.last_plan().swaps_in
    hand.run()
    hand.check(request)
    assert len(hand.preemptions()) == 1
    hand.expect_empty()


def test_what_a_lost_host_block_filled_is_lost_with_it() -> None:
    """Also for who shares it and has not read it yet; neither is hit again."""
    hand = evicted_to_host()
    request = hand.submit((*range(9), 5), max_tokens=3)
    plan = hand.last_plan()
    host, device = plan.swaps_in[0]
    assert hand.pool().name_of(device) is not None
    result = hand.worker().run_next()
    result.lost = (KvLost(0, Tier.HOST, host, result.step),)
    result.num_tokens, result.tokens = [0], []
    hand.say(result)
    assert hand.preemptions() == [f"request {request}"]
    again = [admit for later in hand.worker().seen[plan.step :] for admit in later.admits]
    assert [admit.start for admit in again] == [0]
    hand.run()
    hand.check(request)
    hand.expect_empty()


def test_a_failed_rows_names_go_on_both_tiers() -> None:
    hand = evicted_to_host()
    request = hand.submit((*range(9), 5), max_tokens=3)
    hand.worker().bad_rows.add(hand.last_plan().rows[0])
    hand.run()
    assert hand.reason(request).value == "error"
    again = hand.submit((*range(9), 5), max_tokens=3)
    assert hand.log.started[again].cached_tokens == 0
    hand.run()
    hand.check(again)


def test_a_broken_count_on_the_host_fails_those_concerned() -> None:
    hand = two_requests()
    until_swapped(hand, 2)
    copy = hand.sequence(2).host[0]
    assert copy is not None
    hand.scheduler().memory.host._refs[copy] += 1
    with pytest.raises(LawBroken):
        hand.engine.validate()
    hand.record(hand.engine.contain(hand.now))
    assert hand.reason(2).value == "error"
    hand.join()
    hand.run()
    hand.check(1)


# --- the host as a second tier of the cache


def evicted_to_host() -> Hand:
    """Request 1's two full blocks were evicted from a device of 4 blocks, and kept."""
    hand = swapping()
    hand.say_hello(hello(num_blocks=4, num_host_blocks=8))
    hand.submit(range(9), max_tokens=1)
    hand.run()
    hand.submit(range(100, 115), max_tokens=1)
    hand.run()
    assert hand.snapshot().blocks_saved >= 2
    return hand


def test_an_evicted_block_is_kept_and_a_hit_on_it_is_a_swap_in() -> None:
    hand = evicted_to_host()
    request = hand.submit((*range(9), 5), max_tokens=3)
    assert hand.log.started[request].cached_tokens == 8
    plan = hand.last_plan()
    assert [block for _, block in plan.swaps_in] == hand.table(request)[:2]
    assert plan.admits[0].start == 8
    assert hand.snapshot().host_hits == 2
    hand.run()
    hand.check(request)
    assert hand.snapshot().blocks_in == 2
    hand.expect_empty()


def test_what_came_up_has_its_name_again() -> None:
    hand = evicted_to_host()
    one = hand.submit((*range(9), 5), max_tokens=1)
    hand.run()
    two = hand.submit((*range(9), 6), max_tokens=1)
    assert not hand.last_plan().swaps_in
    assert hand.log.started[two].cached_tokens == 8
    hand.run()
    hand.check(one, two)


def test_another_salt_hits_nothing_there() -> None:
    hand = evicted_to_host()
    request = hand.submit((*range(9), 5), max_tokens=2, salt=b"other")
    assert hand.log.started[request].cached_tokens == 0
    hand.run()
    hand.check(request)


# --- auto


def preempted(hand: Hand) -> str:
    """How request 2 leaves."""
    num_before = len(ways(hand))
    hand.submit(range(3), max_tokens=10)
    hand.submit(range(20, 23), max_tokens=10)
    while len(ways(hand)) == num_before:
        hand.land()
    way = ways(hand)[num_before].split()[-1]
    hand.run()
    return way


@pytest.mark.parametrize(
    ("move_s", "token_s", "way"),
    [
        (1e-4, 1e-4, "swap"),
        (1e-2, 1e-4, "recompute"),  # bandwidth throttled 100x
        (1e-2, 1e-2, "swap"),  # and prefill too
        (1e-4, 1e-6, "recompute"),  # a fast prefill
        (1e-6, 1e-4, "swap"),  # a fast copy
    ],
)
def test_auto_takes_what_this_worker_has_shown_to_be_cheaper(move_s: float, token_s: float, way: str) -> None:
    hand = swapping(preemption=Preemption.AUTO)
    hand.join(num_blocks=4, num_host_blocks=8)
    hand.worker().move_s, hand.worker().token_s = move_s, token_s
    costs = hand.scheduler().costs
    costs.moved(10, 10 * move_s)
    costs.computed(10, 0, 10 * token_s)
    assert preempted(hand) == way
    hand.check(1, 2)
    hand.expect_empty()


def test_auto_learns_from_what_its_choice_cost() -> None:
    """Nothing is known of a copy's time at first, and a slow prefill makes swap the guess; the copies prove slower."""
    hand = swapping(preemption=Preemption.AUTO)
    hand.join(num_blocks=4, num_host_blocks=8)
    hand.worker().move_s, hand.worker().token_s = 1.0, 1e-4
    assert preempted(hand) == "swap"
    assert hand.scheduler().costs.move_s_per_block == pytest.approx(1.0)
    assert preempted(hand) == "recompute"
    hand.worker().token_s = 10.0
    for _ in range(8):
        hand.submit(range(200, 210), max_tokens=1)
        hand.run()
    assert preempted(hand) == "swap"
    hand.expect_empty()


def test_costs_forget_by_a_fifth() -> None:
    costs = Costs(bytes_per_block=1 << 20)
    guess = costs.move_s_per_block
    costs.moved(0, 5.0)
    assert costs.move_s_per_block == guess, "nothing was moved, and nothing is learned"
    costs.moved(2, 4.0)
    assert costs.move_s_per_block == 2.0
    costs.moved(1, 12.0)
    assert costs.move_s_per_block == pytest.approx((0.8 * 4.0 + 12.0) / (0.8 * 2 + 1))
    for _ in range(60):
        costs.moved(1, 4.0)
    assert costs.move_s_per_block == pytest.approx(4.0, rel=1e-4)
    assert costs.swap_s(3, 2) == pytest.approx(20.0, rel=1e-4)


def test_a_chunk_costs_what_it_adds_to_the_decodes_beside_it() -> None:
    costs = Costs(bytes_per_block=1 << 20)
    costs.computed(0, 4, 0.5)
    costs.computed(100, 4, 0.7)
    assert costs.compute_s_per_token == pytest.approx(0.002)
    assert costs.chunk_s(0, 0.7) == 0.7, "alone, all of it is the chunk's"
    costs.computed(100, 4, 0.1)  # a step faster than those before
    assert costs.compute_s_per_token >= 0.0


def test_what_earlier_victims_found_again_is_not_counted() -> None:
    costs = Costs(bytes_per_block=1 << 20)
    costs.moved(1, 1.0)
    costs.computed(1, 0, 1.0)
    assert (costs.swap_s(10, 10), costs.recompute_s(100, 0, 10)) == (20.0, 100.0)
    costs.came_back(10, 4, None)
    assert costs.swap_s(10, 10) == pytest.approx(16.0)
    assert costs.recompute_s(100, 0, 10) == pytest.approx(60.0)
    costs.came_back(0, 0, 0)
    assert costs.recompute_s(0, 3, 10) == pytest.approx(3.0), "blocks on the host come up from there"


def test_moves_are_said_in_the_order_in_which_they_run() -> None:
    """Of all plans of a busy run: nothing is read by one move and filled by another."""
    hand = swapping(depth=2)
    hand.join(num_blocks=8, num_host_blocks=12)
    requests = [hand.submit(range(7 * i, 7 * i + 6), max_tokens=9, n=1 + i % 3) for i in range(8)]
    hand.run()
    hand.check(*[request for request in requests if request not in hand.log.refused])
    plans: list[StepPlan] = hand.worker().seen
    assert any(plan.swaps_in and plan.swaps_out for plan in plans) or any(plan.swaps_in for plan in plans)
    for plan in plans:
        filled = {b for _, b in (*plan.copies, *plan.swaps_in)}
        assert filled.isdisjoint(b for b, _ in (*plan.copies, *plan.swaps_out))
    hand.expect_empty()
