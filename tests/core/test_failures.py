"""A row that fails, KV that proves unreadable, and results that do not fit.

One bad row fails one request. Lost KV costs time and nothing else. Whatever does not fit ends the lease.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kilburn.controller.core.events import Arrived, Drawn, Emit, Finished
from kilburn.controller.core.sequence import State
from kilburn.shared.messages import KvLost, RowLogprobs, StepFailed, StepResult
from kilburn.shared.types import FinishReason, Tier
from tests.core.driver import Hand, settings_of_depth
from tests.core.worker import VOCAB_SIZE

PROMPT = range(9)  # two full blocks and a token


# --- failed rows


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_row_fails_its_request_and_no_other(depth: int, n: int) -> None:
    hand = Hand(settings_of_depth(depth))
    hand.join()
    bad, good = hand.submit(PROMPT, max_tokens=9, n=n), hand.submit((7, 7, 7), max_tokens=9)
    while len(hand.tokens(bad, n - 1)) < 2:
        hand.land()
    said = [list(hand.tokens(bad, index)) for index in range(n)]
    hand.worker().bad_rows.add(hand.sequence(bad, n - 1).row)
    while (bad, 0) not in hand.log.finished:
        hand.land()
    for index in range(n):
        assert hand.reason(bad, index) is FinishReason.ERROR
        assert "not finite" in hand.log.finished[bad, index].message
        assert hand.tokens(bad, index)[: len(said[index])] == said[index]
    hand.run()
    hand.check(good)
    hand.expect_empty()


@pytest.mark.parametrize("is_in_chunk", [True, False])
def test_names_of_a_failed_rows_blocks_are_dropped(is_in_chunk: bool) -> None:
    """A NaN in a chunk that draws nothing is seen only at the draw, when earlier blocks have names already."""
    hand = Hand(settings_of_depth(1, max_step_tokens=4 if is_in_chunk else 64))
    hand.join()
    bad = hand.submit(PROMPT, max_tokens=9)
    hand.land()
    assert hand.pool().all_names()
    hand.worker().bad_rows.add(hand.sequence(bad).row)
    hand.land()
    assert hand.reason(bad) is FinishReason.ERROR
    assert hand.pool().all_names() == []
    assert hand.pool().num_free == 64
    again = hand.submit(PROMPT, max_tokens=9)
    assert hand.log.started[again].cached_tokens == 0
    hand.run()
    hand.check(again)


def test_whoever_shares_a_failed_rows_blocks_goes_on() -> None:
    """The names go, the owners stay."""
    hand = Hand(settings_of_depth(1))
    hand.join()
    hand.submit(PROMPT, max_tokens=2)
    hand.run()
    bad, good = hand.submit(PROMPT, max_tokens=9), hand.submit((*PROMPT, 1), max_tokens=9)
    hand.land()
    assert hand.table(bad)[:2] == hand.table(good)[:2]
    hand.land()
    hand.worker().bad_rows.add(hand.sequence(bad).row)
    hand.land()
    assert hand.reason(bad) is FinishReason.ERROR
    assert [hand.pool().refs(block) for block in hand.table(good)[:2]] == [1, 1]
    assert [hand.pool().name_of(block) for block in hand.table(good)[:2]] == [None, None]
    hand.run()
    hand.check(good)
    hand.expect_empty()


def test_every_choice_that_fails_in_one_result_is_told_once() -> None:
    hand = Hand(settings_of_depth(2))
    hand.join()
    bad = hand.submit(PROMPT, max_tokens=9, n=3)
    hand.land()
    hand.worker().bad_rows.update(sequence.row for sequence in hand.group(bad).live)
    effects = hand.land()
    assert [effect.index for effect in effects if isinstance(effect, Finished)] == [0, 1, 2]
    hand.run()
    hand.expect_empty()


def test_a_failure_of_a_life_that_is_over_is_dropped() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join()
    request = hand.submit(PROMPT, max_tokens=9)
    hand.land()
    hand.line().recompute(hand.group(request), [])
    hand.worker().bad_rows.add(hand.last_plan().rows[0])
    hand.land()
    hand.run()
    hand.check(request)


@pytest.mark.parametrize("how", ["cancelled", "preempted"])
def test_a_failure_of_a_life_that_is_over_still_costs_its_names(how: str) -> None:
    """The blocks may be as bad as the row; whoever asks for the same prompt next is not to be hurt by them."""
    hand = Hand(settings_of_depth(1))
    hand.join()
    gone = hand.submit(PROMPT, max_tokens=9)
    hand.land()
    row = hand.last_plan().rows[0]
    if how == "cancelled":
        hand.cancel(gone)
    else:
        hand.line().recompute(hand.group(gone), [])
    assert len(hand.pool().all_names()) == 2
    hand.worker().bad_rows.add(row)
    hand.land()
    assert hand.pool().all_names() == []
    again = hand.submit(PROMPT, max_tokens=3)
    assert how == "preempted" or hand.log.started[again].cached_tokens == 0
    hand.run()
    hand.check(again)


# --- lost KV


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_lost_kv_is_recomputed_and_nobody_notices(depth: int, n: int) -> None:
    hand = Hand(settings_of_depth(depth))
    hand.join(num_blocks=24)
    requests = [hand.submit(PROMPT, max_tokens=8, n=n), hand.submit((*PROMPT, 3), max_tokens=8)]
    while len(hand.tokens(1, n - 1)) < 3:
        hand.land()
    block = hand.table(1)[0]
    digest = hand.pool().name_of(block)
    hand.worker().bad_blocks.add(block)
    num_steps = hand.snapshot().steps
    while not hand.preemptions():
        hand.land()
        assert hand.snapshot().steps < num_steps + 2 * depth
    assert digest is not None
    assert "request 1" in hand.preemptions()
    hand.run()
    hand.check(*requests)
    hand.expect_empty()


def test_every_table_that_holds_a_lost_block_is_recomputed() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join()
    hand.submit(PROMPT, max_tokens=2)
    hand.run()
    hand.handle(*[hand.new_submit((*PROMPT, i), max_tokens=9) for i in range(3)], hand.new_submit((99,), max_tokens=9))
    hand.land()
    shared = hand.table(2)[0]
    assert hand.pool().refs(shared) == 3
    result = hand.worker().run_next()
    lost = KvLost(0, Tier.DEVICE, shared, result.step)
    row_0 = result.num_tokens[0]
    result = replace(result, lost=(lost,), num_tokens=[0, *result.num_tokens[1:]], tokens=result.tokens[row_0:])
    hand.say(result)
    assert sorted(hand.preemptions()) == ["request 2", "request 3", "request 4"]
    hand.run()
    hand.check(1, 2, 3, 4, 5)
    hand.expect_empty()


def one_result_with(hand: Hand, lost: KvLost) -> None:
    """The next result, plus a loss. The row that read it draws nothing."""
    result = hand.worker().run_next()
    start = sum(result.num_tokens[: lost.index])
    end = start + result.num_tokens[lost.index]
    counts = [0 if i == lost.index else count for i, count in enumerate(result.num_tokens)]
    hand.say(replace(result, lost=(lost,), num_tokens=counts, tokens=result.tokens[:start] + result.tokens[end:]))


def test_a_loss_counts_even_if_the_row_that_found_it_is_dead() -> None:
    """Rule 12: before the epoch check. The block is still cached under its name, and must not be hit."""
    hand = Hand(settings_of_depth(1))
    hand.join()
    gone = hand.submit(PROMPT, max_tokens=9)
    hand.land()
    block = hand.table(gone)[0]
    hand.cancel(gone)
    assert hand.pool().is_cached(block)
    one_result_with(hand, KvLost(0, Tier.DEVICE, block, step=2))
    assert hand.pool().name_of(block) is None
    again = hand.submit(PROMPT, max_tokens=3)
    assert hand.log.started[again].cached_tokens == 0
    hand.run()
    hand.check(again)
    hand.expect_empty()


def test_a_loss_in_a_block_that_was_taken_again_is_of_no_interest() -> None:
    """What step 2 could not read is not what the block holds since the plan of step 3."""
    hand = Hand(settings_of_depth(2))
    hand.join(num_blocks=3)
    gone = hand.submit(PROMPT, max_tokens=3)
    hand.land()
    block = hand.table(gone)[0]
    assert [plan.step for plan in hand.worker().plans] == [2, 3]
    hand.cancel(gone)
    hand.land()  # step 2; the next plan is made, which is step 4
    next_one = hand.submit(range(50, 60), max_tokens=2)
    assert hand.last_plan().step == 4
    assert block in hand.table(next_one)
    assert hand.pool().held_since(block) == 4
    one_result_with(hand, KvLost(0, Tier.DEVICE, block, step=3))
    assert not hand.preemptions()
    assert hand.sequence(next_one).state is State.RUNNING
    hand.run()
    hand.check(next_one)
    hand.expect_empty()


def test_a_loss_that_a_revived_block_had_all_the_time_counts() -> None:
    """The block was let go of and hit again, but never taken: it holds what the step read."""
    hand = Hand(settings_of_depth(2))
    hand.join()
    gone = hand.submit(PROMPT, max_tokens=9)
    hand.land()
    block = hand.table(gone)[0]
    hand.cancel(gone)
    hand.land()
    heir = hand.submit((*PROMPT, 1), max_tokens=3)
    assert hand.table(heir)[0] == block
    one_result_with(hand, KvLost(0, Tier.DEVICE, block, step=3))
    assert hand.preemptions() == [f"request {heir}"]
    hand.run()
    hand.check(heir)
    hand.expect_empty()


# --- results that do not fit

Spoil = Callable[[StepResult], StepResult]

DISAGREEMENTS: dict[str, Spoil] = {
    "one outcome too few": lambda r: replace(r, num_tokens=r.num_tokens[:-1]),
    "one outcome too many": lambda r: replace(r, num_tokens=[*r.num_tokens, 0]),
    "no outcome": lambda r: replace(r, num_tokens=[], tokens=[]),
    "a token beyond the vocabulary": lambda r: replace(r, tokens=[VOCAB_SIZE, *r.tokens[1:]]),
    "a negative token": lambda r: replace(r, tokens=[-1, *r.tokens[1:]]),
    "two tokens where one was due": lambda r: replace(r, num_tokens=[2, *r.num_tokens[1:]], tokens=[5, *r.tokens]),
    "no token where one was due": lambda r: replace(r, num_tokens=[0, *r.num_tokens[1:]], tokens=r.tokens[1:]),
    "a step ahead": lambda r: replace(r, step=r.step + 1),
    "a loss in a block that does not exist": lambda r: replace(r, lost=(KvLost(0, Tier.DEVICE, 64, r.step),)),
    "a loss in a tier that does not exist": lambda r: replace(r, lost=(KvLost(0, Tier.HOST, 0, r.step),)),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_result_that_does_not_fit_ends_the_lease(name: str, depth: int) -> None:
    hand = Hand(settings_of_depth(depth))
    hand.join()
    requests = [hand.submit(PROMPT, max_tokens=8), hand.submit((5, 5), max_tokens=8, n=2)]
    while len(hand.tokens(2, 1)) < 2:
        hand.land()
    hand.say(DISAGREEMENTS[name](hand.worker().run_next()))
    assert not hand.workers
    assert hand.engine.snapshot().homeless_requests == 2
    assert hand.engine.snapshot().leases_ended == 1
    hand.join()
    hand.run()
    hand.check(*requests)
    hand.expect_empty()


def test_a_draw_that_nobody_asked_for_ends_the_lease() -> None:
    hand = Hand(settings_of_depth(1, max_step_tokens=4))
    hand.join()
    request = hand.submit(PROMPT, max_tokens=2)
    result = hand.worker().run_next()
    assert result.num_tokens == [0]
    hand.say(replace(result, num_tokens=[1], tokens=[5]))
    assert not hand.workers
    assert hand.tokens(request) == []
    hand.join()
    hand.run()
    hand.check(request)


def test_a_fork_with_too_few_draws_ends_the_lease() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join()
    request = hand.submit(PROMPT, max_tokens=2, n=3)
    result = hand.worker().run_next()
    hand.say(replace(result, num_tokens=[2], tokens=result.tokens[:2]))
    assert not hand.workers
    hand.join()
    hand.run()
    hand.check(request)


def test_a_failed_step_ends_the_lease_and_fails_nobody() -> None:
    hand = Hand()
    hand.join()
    requests = [hand.submit(PROMPT, max_tokens=8), hand.submit((5, 5), max_tokens=8, n=2)]
    hand.land()
    hand.say(StepFailed(1, 2, "out of memory"))
    assert not hand.workers
    assert not hand.log.finished
    hand.join()
    hand.run()
    hand.check(*requests)


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_a_result_that_comes_twice_is_taken_once(num_in_flight: int) -> None:
    hand = Hand(settings_of_depth(1))
    hand.join()
    request = hand.submit((1, 2, 3), max_tokens=1 + num_in_flight)
    result = hand.worker().run_next()
    hand.say(result)
    assert len(hand.worker().plans) == num_in_flight
    assert hand.say(result) == []
    assert len(hand.tokens(request)) == 1
    hand.run()
    hand.check(request)
    assert hand.engine.snapshot().leases_ended == 0


def test_two_results_in_one_turn() -> None:
    hand = Hand(settings_of_depth(2))
    hand.join()
    request = hand.submit(PROMPT, max_tokens=6)
    hand.handle(Arrived(b"w-1", hand.worker().run_next()), Arrived(b"w-1", hand.worker().run_next()))
    assert len(hand.tokens(request)) == 2
    hand.run()
    hand.check(request)


def test_names_withdrawn_in_the_turn_in_which_the_lease_ends_are_told() -> None:
    """The replayed Names must come out empty, though the failed row's were dropped a moment before."""
    hand = Hand(settings_of_depth(1))
    hand.join()
    request = hand.submit(PROMPT, max_tokens=9)
    hand.land()
    assert hand.log.names["w"]
    hand.worker().bad_rows.add(hand.sequence(request).row)
    hand.handle(Arrived(b"w-1", hand.worker().run_next()), Arrived(b"w-1", StepFailed(1, 3, "lost")))
    assert hand.log.names["w"] == set()


def test_a_lone_token_of_one_request_is_not_anothers() -> None:
    """Tokens are cut by the counts, also where a row in the middle draws none."""
    hand = Hand(settings_of_depth(1, max_step_tokens=6))
    hand.join()
    requests = [hand.submit((i, i), max_tokens=6) for i in range(3)]
    hand.land()
    requests.append(hand.submit(range(30, 45), max_tokens=4))
    hand.run()
    hand.check(*requests)


# --- log probabilities


@pytest.mark.parametrize("n", [1, 3])
def test_log_probabilities_go_with_their_draws(n: int) -> None:
    """Each draw has its own entries, also at the fork, where one row answers for all."""
    hand = Hand(settings_of_depth(1))
    hand.join()
    hand.submit((1, 2, 3), max_tokens=4)
    request = hand.submit((4, 5), max_tokens=4, n=n)
    seen: list[Drawn] = []
    while hand.worker().plans:
        index_of = {hand.sequence(request, i).row: i for i in range(n if hand.group(request).has_forked else 1)}
        plan = hand.worker().plans[0]
        result = hand.worker().run_next()
        entries, at = [], 0
        for index, (row, count) in enumerate(zip(plan.rows, result.num_tokens, strict=True)):
            drawn, at = result.tokens[at : at + count], at + count
            if row in index_of and count:
                ids = [i for token in drawn for i in (token, 7)]
                entries.append(RowLogprobs(index, 2, tuple(ids), tuple(-0.25 * i for i in ids)))
        effects = hand.say(replace(result, logprobs=tuple(entries)))
        seen += [drawn for effect in effects if isinstance(effect, Emit) for drawn in effect.each()]
        if (request, n - 1) in hand.log.finished:
            break
    for drawn in seen:
        expected = ((drawn.token, -0.25 * drawn.token), (7, -1.75)) if drawn.request_id == request else ()
        assert drawn.logprobs == expected
    assert sum(drawn.request_id == request for drawn in seen) == 4 * n
