"""What an onlooker sees, and the tables of moves."""

from dataclasses import fields, replace

import pytest

from kilburn.controller.core.events import Left
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.sequence import MOVES, Group, Place, State
from kilburn.controller.core.step import Counters
from kilburn.shared.messages import StepFailed
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import LawBroken
from tests.core.driver import Hand, settings_of_depth
from tests.core.live_engine import SHARED, a_live_engine

# --- what an onlooker sees


def test_the_four_states_sum_to_the_pool_and_fall_to_zero() -> None:
    """The driver checks the sum after every event; here is what the figures are, and that none is left behind."""
    hand = a_live_engine()
    snapshot = hand.snapshot()
    assert snapshot.owned_blocks == len({b for g in hand.line().running for s in g.live for b in s.own_table.blocks})
    assert snapshot.shared_refs == 1, "the full prompt block of request 2"
    assert snapshot.filled_slots == sum(s.num_computed for g in hand.line().running for s in g.live)
    assert snapshot.owned_slots >= snapshot.filled_slots
    assert snapshot.running_sequences == 4
    assert snapshot.flights == 2
    for request in hand.submits:
        hand.cancel(request)
    assert (hand.snapshot().owned_blocks, hand.snapshot().shared_refs, hand.snapshot().filled_slots) == (0, 0, 0)
    assert hand.snapshot().running_requests == hand.snapshot().waiting_requests == 0
    assert hand.engine.snapshot().requests == 0
    hand.run()
    hand.expect_empty()


# Of a lease. Everything else in a snapshot is a state, and may fall.
GROWING = {field.name for field in fields(Counters)} | {
    "preempted_by_recompute", "preempted_by_swap", "swapped_in", "blocks_saved", "host_hits", "evictions",
    "bytes_out", "bytes_in", "bytes_saved", "bytes_hit",
}  # fmt: skip


@pytest.mark.parametrize("preemption", list(Preemption))
def test_counters_only_grow_and_hits_never_exceed_queries(preemption: Preemption) -> None:
    """Also over preemptions: what comes back is asked for anew, and may be hit, on either tier."""
    hand = Hand(replace(settings_of_depth(2), preemption=preemption))
    hand.join(num_blocks=7, num_host_blocks=6)
    hand.worker().move_s, hand.worker().token_s = 0.01, 0.001
    requests = [hand.submit((*SHARED, i), max_tokens=9, n=1 + i % 2) for i in range(6)]
    before = hand.snapshot()
    while hand.worker().plans:
        hand.land()
        after = hand.snapshot()
        for counter in sorted(GROWING):
            assert getattr(after, counter) >= getattr(before, counter), counter
        assert after.prefix_hit_tokens <= after.prefix_query_tokens
        assert after.bytes_hit <= after.bytes_in == after.blocks_in * after.bytes_per_block
        assert after.bytes_saved <= after.bytes_out == after.blocks_out * after.bytes_per_block
        before = after
    assert before.preempted_by_recompute + before.preempted_by_swap > 0
    assert before.prefix_hit_tokens > 0
    assert before.prompt_tokens == 7 * len(requests), "a prompt counts once, however often it is computed"
    assert before.generated_tokens == sum(map(len, hand.log.tokens.values()))
    hand.check(*requests)


def test_cached_tokens_never_exceed_the_prompt() -> None:
    hand = Hand(settings_of_depth(2))
    hand.join(num_blocks=6)
    requests = [hand.submit(SHARED, max_tokens=9) for _ in range(5)]
    hand.run()
    assert all(0 <= hand.log.started[request].cached_tokens < len(SHARED) for request in requests)


def test_a_snapshot_changes_nothing() -> None:
    hand = a_live_engine()
    assert hand.engine.snapshot() == hand.engine.snapshot()
    hand.run()
    hand.check(*hand.submits)


def test_production_is_possible_with_a_worker_only() -> None:
    hand = Hand()
    assert not hand.engine.snapshot().can_produce
    hand.join()
    assert hand.engine.snapshot().can_produce
    hand.handle(Left(b"w-1", "died"))
    assert not hand.engine.snapshot().can_produce


# --- the tables of moves


@pytest.mark.parametrize("state", list(State))
def test_only_the_moves_of_the_table_are_made(state: State) -> None:
    for to in State:
        [sequence] = Group(1, Place(0, 1), (1, 2), 3, Sampling()).live
        sequence.state = state
        if to in MOVES[state]:
            sequence.move(to)
            assert sequence.state is to
            assert sequence.epoch == (1 if state is State.RUNNING else 0), "a move out of RUNNING ends a life"
        else:
            with pytest.raises(LawBroken, match="no move"):
                sequence.move(to)


def test_a_fork_with_work_in_flight_is_a_bug() -> None:
    hand = Hand(settings_of_depth(1, max_step_tokens=4))
    hand.join()
    request = hand.submit(range(9), max_tokens=3, n=2)
    with pytest.raises(LawBroken, match="in flight"):
        hand.group(request).fork()


def test_the_end_of_a_lease_quarantines_nothing() -> None:
    hand = a_live_engine()
    hand.say(StepFailed(1, 1, "lost"))
    hand.join(num_blocks=32)
    assert hand.snapshot().quarantined_blocks == 0
    hand.run()
    hand.check(*hand.submits)
