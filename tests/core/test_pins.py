"""Named prefixes: computed once, pinned, shared down to their last partial block, restored, and never in the way.

Blocks of 4 tokens. A prefix of 10 tokens fills two blocks and half of a third.
"""

from dataclasses import replace

import pytest

from kilburn.controller.core.events import Left, Refusal, Shutdown
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.prefixes import common_run
from kilburn.controller.core.sequence import State
from kilburn.controller.core.settings import EngineSettings
from kilburn.shared.messages import Drain, StepPlan
from kilburn.shared.types import LawBroken
from tests.core.driver import Hand, settings_of_depth
from tests.core.worker import hello

PREFIX = tuple(range(100, 110))


def pinned_hand(num_blocks: int = 20, depth: int = 1, **how: object) -> Hand:
    """A worker that holds PREFIX in blocks 0, 1 and 2."""
    hand = Hand(settings_of_depth(depth))
    hand.join(num_blocks=num_blocks)
    hand.pin(PREFIX, **how)  # type: ignore[arg-type]
    hand.run()
    return hand


def test_a_prefix_is_computed_once_and_held() -> None:
    hand = pinned_hand()
    [told] = hand.log.pinned
    assert (told.prefix_id, told.group, told.num_blocks) == (1001, "w", 3)
    [pin] = hand.line().pinned
    assert pin.live[0].state is State.PINNED
    assert (pin.live[0].row, pin.live[0].num_computed) == (-1, 10)
    assert hand.snapshot().pinned_blocks == hand.snapshot().owned_blocks == 3
    assert not hand.log.tokens
    assert not hand.log.started
    hand.unpin(1001)
    hand.expect_empty()


@pytest.mark.parametrize(
    ("num_common", "cached"),
    [(0, 0), (1, 1), (3, 3), (4, 4), (5, 5), (7, 7), (8, 8), (9, 9), (10, 10)],
)
def test_a_request_shares_full_blocks_and_copies_what_it_has_of_the_next(num_common: int, cached: int) -> None:
    """Down to the token at which it leaves the prefix, wherever that is."""
    hand = pinned_hand()
    request = hand.submit((*PREFIX[:num_common], 1, 2, 3), max_tokens=3)
    assert hand.log.started[request].cached_tokens == cached
    assert hand.table(request)[: num_common // 4] == [0, 1][: num_common // 4]
    has_copy = num_common % 4 != 0
    assert hand.last_plan().copies == ([(num_common // 4, hand.table(request)[num_common // 4])] if has_copy else [])
    assert hand.last_plan().admits[0].start == cached
    assert {hand.pool().refs(block) for block in range(3)} <= {1, 2}
    hand.run()
    hand.check(request)
    assert hand.snapshot().owned_blocks == 3


def test_the_prefix_itself_as_a_prompt_leaves_its_newest_token() -> None:
    hand = pinned_hand()
    request = hand.submit(PREFIX, max_tokens=2)
    assert hand.log.started[request].cached_tokens == 9
    hand.run()
    hand.check(request)


def test_the_partial_block_is_shared_only_once_the_prefix_is_complete() -> None:
    hand = Hand(settings_of_depth(2, max_step_tokens=8))
    hand.join()
    hand.pin(PREFIX)
    hand.land()  # two blocks are computed, and named
    request = hand.submit((*PREFIX, 1), max_tokens=2)
    assert hand.log.started[request].cached_tokens == 8
    hand.run()
    hand.check(request)


@pytest.mark.parametrize("n", [1, 3])
def test_many_requests_fork_one_prefix(n: int) -> None:
    hand = pinned_hand(num_blocks=60)
    requests = [1, 2]
    hand.handle(*[hand.new_submit((*PREFIX, i), max_tokens=6, n=n) for i in requests])
    assert hand.pool().refs(0) == hand.pool().refs(1) == 3
    assert hand.pool().refs(2) == 1
    hand.run()
    hand.check(*requests)
    hand.unpin(1001)
    hand.expect_empty()


@pytest.mark.parametrize(
    ("theirs", "is_public", "mine", "cached"),
    [
        (b"", True, b"", 10),
        (b"", True, b"me", 10),
        (b"me", False, b"me", 10),
        (b"me", False, b"you", 0),
        (b"me", False, b"", 0),
        (b"", False, b"me", 0),
    ],
)
def test_whose_prefix_it_is(theirs: bytes, is_public: bool, mine: bytes, cached: int) -> None:
    hand = pinned_hand(salt=theirs, is_public=is_public)
    request = hand.submit((*PREFIX, 1), max_tokens=2, salt=mine)
    assert hand.log.started[request].cached_tokens == cached
    hand.run()
    hand.check(request)


def test_behind_a_public_prefix_the_salt_keeps_tenants_apart() -> None:
    """The block at which a request leaves the prefix, and all behind it, are its tenant's."""
    hand = pinned_hand(is_public=True)
    text = (*PREFIX, *range(12))
    cached = []
    for salt in (b"me", b"you", b"me"):
        request = hand.submit(text, max_tokens=2, salt=salt)
        cached.append(hand.log.started[request].cached_tokens)
        hand.run()
        hand.check(request)
    assert cached == [10, 10, 20]


def test_a_private_prefix_behind_a_public_one_is_found() -> None:
    hand = pinned_hand(is_public=True)
    hand.pin((*PREFIX[:8], *range(12)), salt=b"me")
    hand.run()
    request = hand.submit((*PREFIX[:8], *range(12), 7), max_tokens=2, salt=b"me")
    assert hand.log.started[request].cached_tokens == 20
    assert hand.table(request)[:2] == [0, 1], "of the public one, which both share"
    hand.run()
    hand.check(request)


def test_a_prefix_is_shared_whatever_became_of_its_names() -> None:
    """A request that computed the same text first has the names; they go with it, and the prefix stays."""
    hand = pinned_hand()
    for block in range(3):
        hand.pool().withdraw(block)
    request = hand.submit((*PREFIX, 1), max_tokens=2)
    assert hand.log.started[request].cached_tokens == 10
    hand.run()
    hand.check(request)


def test_it_survives_eviction() -> None:
    hand = pinned_hand(num_blocks=8)
    others = [hand.submit(range(20 * i, 20 * i + 17), max_tokens=3) for i in range(6)]
    hand.run()
    hand.check(*others)
    assert hand.snapshot().evictions > 0
    request = hand.submit((*PREFIX, 1), max_tokens=2)
    assert hand.log.started[request].cached_tokens == 10
    hand.run()
    hand.check(request)


@pytest.mark.parametrize("preemption", list(Preemption))
def test_it_is_no_victim_and_not_swapped(preemption: Preemption) -> None:
    hand = Hand(replace(settings_of_depth(1), preemption=preemption))
    hand.say_hello(hello(num_blocks=9, num_host_blocks=9))
    hand.pin(PREFIX)
    hand.run()
    requests = [hand.submit((*PREFIX, i), max_tokens=11) for i in range(4)]
    hand.run()
    assert hand.preemptions()
    hand.check(*requests)
    assert {0, 1, 2}.isdisjoint(source for plan in hand.worker().seen for source, _ in plan.swaps_out)
    assert hand.line().pinned[0].live[0].own_table.blocks == [0, 1, 2]


def test_it_is_restored_after_a_restart_and_not_after_it_was_deleted() -> None:
    hand = pinned_hand()
    other = hand.pin(range(50, 57))
    hand.run()
    hand.unpin(other)
    hand.handle(Left(b"w-1", "died"))
    hand.join(num_blocks=20)
    hand.run()
    assert [told.prefix_id for told in hand.log.pinned] == [1001, 1002, 1001]
    request = hand.submit((*PREFIX, 1), max_tokens=2)
    assert hand.log.started[request].cached_tokens == 10
    hand.run()
    hand.check(request)


def test_a_prefix_without_a_worker_waits_for_one() -> None:
    hand = Hand()
    hand.pin(PREFIX)
    assert not hand.log.refused
    hand.join()
    hand.run()
    assert [told.prefix_id for told in hand.log.pinned] == [1001]


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_lost_block_is_computed_again(block: int) -> None:
    """Nobody computes with a prefix itself: those who share it, or copied from it, tell."""
    hand = pinned_hand()
    hand.worker().bad_blocks.add(block)
    request = hand.submit((*PREFIX, 1), max_tokens=3)
    if block == 2:  # the copy is as unreadable as its source
        hand.worker().bad_blocks.add(hand.table(request)[2])
    hand.run()
    assert hand.preemptions() == [f"request {request}"]
    assert [told.prefix_id for told in hand.log.pinned] == [1001, 1001]
    hand.check(request)
    again = hand.submit((*PREFIX, 2), max_tokens=3)
    assert hand.log.started[again].cached_tokens == 10
    hand.run()
    hand.check(again)


def test_a_prefix_that_cannot_be_computed_is_noted_and_nobody_waits_for_it() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join()
    hand.pin(PREFIX)
    hand.worker().bad_rows.add(hand.last_plan().rows[0])
    hand.run()
    assert [(told.prefix_id, told.group) for told in hand.log.not_pinned] == [(1001, "w")]
    request = hand.submit((*PREFIX, 1), max_tokens=2)
    hand.run()
    hand.check(request)
    hand.expect_empty()


# --- the door


@pytest.mark.parametrize(
    ("num_tokens", "refusal", "words"),
    [
        (0, Refusal.EMPTY, "no tokens"),
        (39, None, ""),
        (40, None, ""),
        (41, Refusal.PINS_FULL, "11 blocks would be pinned, at most 10 may be"),
        (300, Refusal.TOO_LONG, "the model takes 255"),
    ],
)
def test_the_table_of_refusals(num_tokens: int, refusal: Refusal | None, words: str) -> None:
    """20 blocks, of which half may be pinned."""
    hand = Hand()
    hand.join(num_blocks=20)
    prefix = hand.pin(range(num_tokens))
    hand.run()
    if refusal is None:
        assert [told.prefix_id for told in hand.log.pinned] == [prefix]
    else:
        assert hand.log.refused[prefix].refusal is refusal
        assert words in hand.log.refused[prefix].message
        hand.expect_empty()


def test_pins_are_counted_together() -> None:
    hand = Hand()
    hand.join(num_blocks=20)
    prefixes = [hand.pin(range(20 * i, 20 * i + 16)) for i in range(3)]
    assert [prefix in hand.log.refused for prefix in prefixes] == [False, False, True]
    hand.unpin(prefixes[0])
    again = hand.pin(range(200, 216))
    hand.run()
    assert [told.prefix_id for told in hand.log.pinned] == [prefixes[1], again]


@pytest.mark.parametrize("max_tokens", [53, 54])
def test_a_prefix_that_would_strand_an_accepted_request_is_refused(max_tokens: int) -> None:
    """20 blocks; the request takes 17 of them in the end, or 16 and leaves room for three and more."""
    hand = Hand()
    hand.join(num_blocks=20)
    request = hand.submit(range(16), max_tokens=max_tokens)
    prefix = hand.pin(range(100, 112))
    assert (prefix in hand.log.refused) is (max_tokens == 54)
    hand.run()
    hand.check(request)


def test_what_a_request_shares_is_not_taken_off_its_room() -> None:
    """Of 12 blocks 3 are pinned: a request that shares two of them has two more than another has."""
    hand = pinned_hand(num_blocks=12)
    stranger = hand.submit(range(11), max_tokens=27)
    assert "at most 26 fit" in hand.log.refused[stranger].message
    friend = hand.submit((*PREFIX, 1), max_tokens=34)
    assert friend not in hand.log.refused
    hand.run()
    hand.check(friend)
    assert friend + 1 == hand.submit((*PREFIX, 1), max_tokens=35)
    assert "at most 34 fit" in hand.log.refused[friend + 1].message


def test_who_began_before_the_prefix_was_complete_comes_back_to_share_it() -> None:
    """Accepted because it shares two blocks, it computed them itself; alone and out of blocks it is admitted anew."""
    hand = Hand(replace(settings_of_depth(2), prefix_wait_steps=0))
    hand.join(num_blocks=12)
    hand.pin(PREFIX)
    request = hand.submit((*PREFIX, 1), max_tokens=34)
    assert hand.log.started[request].cached_tokens == 0
    hand.run()
    assert hand.preemptions() == [f"request {request}"]
    hand.check(request)


def test_pins_are_not_counted_as_waiting_requests() -> None:
    hand = Hand(EngineSettings(max_waiting=1))
    hand.join(max_rows=1)
    for i in range(3):
        hand.pin(range(10 * i, 10 * i + 5))
    assert hand.submit((1, 2), max_tokens=2) not in hand.log.refused
    hand.run()
    hand.check(1)


def test_a_drained_worker_begins_no_prefix() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join()
    hand.handle(Shutdown())
    assert isinstance(hand.log.sent[-1].message, Drain)
    refused = hand.pin(PREFIX)
    assert hand.log.refused[refused].refusal is Refusal.SHUTTING_DOWN
    assert not any(isinstance(send.message, StepPlan) for send in hand.log.sent)


def test_a_prefix_waiting_when_the_worker_is_drained_is_left_out() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(max_rows=1)
    hand.pin(range(5))
    hand.pin(range(20, 25))
    hand.handle(Shutdown())
    assert isinstance(hand.log.sent[-1].message, Drain)
    hand.land()
    assert not hand.worker().plans


def test_a_broken_law_leaves_prefixes_to_the_next_lease() -> None:
    hand = pinned_hand(depth=2)
    request = hand.submit((*PREFIX, 1), max_tokens=9)
    hand.pool()._refs[hand.table(request)[-1]] += 1
    with pytest.raises(LawBroken):
        hand.engine.validate()
    hand.record(hand.engine.contain(hand.now))
    assert hand.reason(request).value == "error"
    hand.join()
    hand.run()
    assert [told.prefix_id for told in hand.log.pinned] == [1001, 1001]


def test_common_runs() -> None:
    for a in ((), (1,), (1, 2), (1, 2, 3, 4, 5), (1, 2, 9), (9,), (1, 2, 3, 4, 9, 9)):
        for b in ((), (1, 2, 3, 4, 5), (1,), (1, 2, 3, 4, 5, 6, 7)):
            naive = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            assert common_run(a, b) == common_run(b, a) == naive
