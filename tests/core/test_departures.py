"""Each preemption is chosen by two predictions, and its truth is counted when the group is all there again.

Blocks of 4 tokens. The worker says what a block moved and a position computed took it.
"""

from dataclasses import replace
from typing import Any

import pytest

from kilburn.controller.core.departure import Departure, Way, Why, said
from kilburn.controller.core.events import Left, NoteKind
from kilburn.controller.core.memory import Moves
from kilburn.controller.core.policy import Preemption
from tests.core.driver import Hand, settings_of_depth

MOVE_S, TOKEN_S = 0.01, 0.002


def pressed(preemption: Preemption, depth: int = 1, num_host_blocks: int = 8) -> Hand:
    """Two requests that cannot finish together: 2 leaves, and comes back."""
    hand = Hand(replace(settings_of_depth(depth), preemption=preemption))
    hand.join(num_blocks=4, num_host_blocks=num_host_blocks)
    hand.worker().move_s, hand.worker().token_s = MOVE_S, TOKEN_S
    hand.submit(range(3), max_tokens=10)
    hand.submit(range(20, 23), max_tokens=10)
    return hand


def chosen(hand: Hand, request: int, preemption: Preemption = Preemption.AUTO) -> Departure:
    """How the request would leave now."""
    leaving = hand.scheduler()._leaving
    leaving._preemption = preemption
    return leaving.choose(hand.group(request), hand.line().pinned_blocks, Moves(99))


def texts(hand: Hand, kind: NoteKind) -> list[str]:
    return [note.text for note in hand.log.notes if note.kind is kind]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_swap_is_told_with_both_predictions_and_then_with_the_truth(depth: int) -> None:
    hand = pressed(Preemption.SWAP, depth)
    hand.run()
    hand.check(1, 2)
    left, back = texts(hand, NoteKind.PREEMPTED), texts(hand, NoteKind.RETURNED)
    assert len(left) == len(back) == hand.snapshot().preempted_by_swap == hand.snapshot().returned_by_swap > 0
    assert left[0].startswith("request 2, by swap: as the setting says; predicted 0.")
    assert "to swap out and in" in left[0]
    assert "to recompute" in left[0]
    num_moved = sum(len(plan.swaps_out) + len(plan.swaps_in) for plan in hand.worker().seen)
    num_saved = hand.snapshot().blocks_saved  # of others, evicted meanwhile
    assert hand.snapshot().actual_swap_s == pytest.approx(MOVE_S * (num_moved - num_saved))
    assert back[0].startswith(f"request 2, back by swap in {said(hand.snapshot().actual_swap_s)}")


@pytest.mark.parametrize("depth", [1, 2])
def test_the_truth_of_a_recompute_is_what_was_computed_again(depth: int) -> None:
    hand = pressed(Preemption.RECOMPUTE, depth, num_host_blocks=0)
    while not texts(hand, NoteKind.PREEMPTED):
        hand.land()
    departure = hand.group(2).departure
    assert departure is not None
    while not texts(hand, NoteKind.RETURNED):
        hand.land()
    [left], [back] = texts(hand, NoteKind.PREEMPTED), texts(hand, NoteKind.RETURNED)
    assert left.startswith("request 2, by recompute: as the setting says; predicted ")
    again = [admit for plan in hand.worker().seen for admit in plan.admits][-1]
    seconds = TOKEN_S * (departure.targets[0] - again.start)
    assert seconds > 0
    assert hand.snapshot().actual_recompute_s == pytest.approx(seconds)
    assert back.startswith(f"request 2, back by recompute in {said(seconds)}, predicted ")
    hand.run()
    assert hand.snapshot().returned_by_recompute == hand.snapshot().preempted_by_recompute
    hand.check(1, 2)


def test_what_others_hold_too_is_neither_moved_nor_computed() -> None:
    """Two requests share 8 blocks of prompt; only what the victim alone holds is on its bill."""
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=30, num_host_blocks=30)
    costs = hand.scheduler().costs
    costs.moved(100, 100 * MOVE_S)
    costs.computed(100, 0, 100 * TOKEN_S)
    hand.submit(range(33), max_tokens=12)
    hand.land()
    hand.submit((*range(33), 99, 98, 97), max_tokens=12)
    while hand.sequence(2).num_computed < 40:
        hand.land()
    departure, own = chosen(hand, 2), hand.sequence(2).num_computed - 32
    assert departure.num_kept == 8
    assert departure.recompute_s == pytest.approx(hand.scheduler().costs.compute_s_per_token * own)
    num_own = -(-own // 4)
    assert departure.swap_s == pytest.approx(MOVE_S * (8 + num_own + num_own)), "a copy of all goes out, the rest stays"
    hand.cancel(1)
    assert chosen(hand, 2).num_kept == 0
    assert chosen(hand, 2).recompute_s > 4 * departure.recompute_s
    hand.run()
    hand.check(2)


def test_the_smaller_prediction_wins() -> None:
    hand = pressed(Preemption.AUTO)
    for _ in range(3):
        hand.land()
    costs = hand.scheduler().costs
    for move_s, token_s, way in ((1.0, 1e-4, Way.RECOMPUTE), (1e-4, 1.0, Way.SWAP), (1.0, 0.1, Way.RECOMPUTE)):
        for _ in range(80):  # what was is forgotten
            costs.moved(1, move_s)
            costs.computed(4, 0, 4 * token_s)
        departure = chosen(hand, 2)
        assert (departure.way, departure.why) == (way, Why.CHEAPER)
        assert departure.predicted_s == min(departure.swap_s, departure.recompute_s)


@pytest.mark.parametrize("preemption", [Preemption.AUTO, Preemption.SWAP])
def test_both_predictions_of_a_choice_are_counted(preemption: Preemption) -> None:
    """Of the way that was not taken, too; and only where they decided anything."""
    hand = pressed(preemption)
    leaving, seen = hand.scheduler()._leaving, list[Departure]()
    choose = leaving.choose

    def noted(*asked: Any) -> Departure:
        seen.append(choose(*asked))
        return seen[-1]

    leaving.choose = noted  # type: ignore[method-assign]
    hand.run()
    found, compared = hand.snapshot(), [departure for departure in seen if departure.why is Why.CHEAPER]
    assert seen
    assert found.chosen_by_cost == len(compared)
    assert bool(compared) is (preemption is Preemption.AUTO)
    assert found.compared_swap_s == pytest.approx(sum(departure.swap_s for departure in compared))
    assert found.compared_recompute_s == pytest.approx(sum(departure.recompute_s for departure in compared))
    if compared:
        assert min(found.compared_swap_s, found.compared_recompute_s) > 0
        assert found.compared_swap_s != found.compared_recompute_s


@pytest.mark.parametrize(
    ("num_host_blocks", "preemption", "way", "why"),
    [
        (8, Preemption.RECOMPUTE, Way.RECOMPUTE, Why.SETTING),
        (8, Preemption.SWAP, Way.SWAP, Why.SETTING),
        (0, Preemption.SWAP, Way.RECOMPUTE, Why.NO_ROOM),
        (0, Preemption.AUTO, Way.RECOMPUTE, Why.NO_ROOM),
    ],
)
def test_the_reason_is_said(num_host_blocks: int, preemption: Preemption, way: Way, why: Why) -> None:
    hand = pressed(preemption, num_host_blocks=num_host_blocks)
    while not hand.sequence(2).num_computed:
        hand.land()
    assert (chosen(hand, 2, preemption).way, chosen(hand, 2, preemption).why) == (way, why)
    hand.run()
    assert (hand.snapshot().swaps_without_room > 0) is (why is Why.NO_ROOM)
    assert all(why.value in text for text in texts(hand, NoteKind.PREEMPTED))


def test_beyond_the_bound_the_choice_is_recompute() -> None:
    """The host has room for everything, and swapped groups never hold more than the device has."""
    hand = Hand(replace(settings_of_depth(1), preemption=Preemption.SWAP))
    hand.join(num_blocks=6, num_host_blocks=100)
    hand.submit(range(7), max_tokens=12)
    for first in range(20, 80, 20):
        hand.submit(range(first, first + 7), max_tokens=12)
    bounded = 0
    while hand.worker().plans:
        owned = hand.snapshot().owned_host_blocks
        hand.land()
        assert hand.snapshot().owned_host_blocks <= 6
        bounded = max(bounded, owned)
    assert bounded >= 3
    last = hand.submit(range(7), max_tokens=4)
    hand.land()
    others = hand.line().memory.host.take(5, 0)  # 5 and the victim's 2 are one too many
    departure = chosen(hand, last, Preemption.SWAP)
    assert (departure.way, departure.why) == (Way.RECOMPUTE, Why.BOUND)
    hand.line().memory.host.drop(others)
    assert chosen(hand, last, Preemption.SWAP).way is Way.SWAP
    hand.run()
    hand.expect_empty()


@pytest.mark.parametrize("end", ["cancel", "lease"])
def test_who_does_not_come_back_has_no_truth_to_tell(end: str) -> None:
    hand = pressed(Preemption.SWAP)
    while not texts(hand, NoteKind.PREEMPTED):
        hand.land()
    if end == "cancel":
        hand.cancel(2)
    else:
        hand.handle(Left(b"w-1", "died"))
        assert hand.group(2).departure is None
        hand.join(num_blocks=20)
    hand.run()
    assert not texts(hand, NoteKind.RETURNED)
    assert not hand.line().returning
    hand.check(*{1, 2} - hand.cancelled)


def test_every_departure_of_a_busy_run_ends_in_one_return() -> None:
    """Groups of several, at depth 2: predictions and truths are summed over the same preemptions."""
    hand = Hand(replace(settings_of_depth(2), preemption=Preemption.AUTO))
    hand.join(num_blocks=9, num_host_blocks=12)
    hand.worker().move_s, hand.worker().token_s = MOVE_S, TOKEN_S
    requests = [hand.submit(range(7 * i, 7 * i + 6), max_tokens=9, n=1 + i % 3) for i in range(9)]
    hand.run()
    hand.check(*[request for request in requests if request not in hand.log.refused])
    after = hand.snapshot()
    returned = after.returned_by_swap + after.returned_by_recompute
    assert returned == len(texts(hand, NoteKind.RETURNED)) > 3
    assert returned <= after.preempted_by_swap + after.preempted_by_recompute
    assert after.chosen_by_cost > 0
    assert not hand.line().returning
    assert all(group.departure is None for group in hand.engine.requests.groups.values())
