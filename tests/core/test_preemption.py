"""When blocks run out: who gives way, with what he comes back, and that a forked group comes back as it was made.

Blocks of 4 tokens. Requests are numbered from 1 in order of arrival.
"""

from dataclasses import replace

import pytest

from kilburn.controller.core import policy
from kilburn.controller.core.events import Arrived, Submit
from kilburn.controller.core.sequence import State
from kilburn.shared.sampling import Sampling
from tests.core.driver import Hand, settings_of_depth
from tests.core.worker import hello

# --- when blocks run out


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_in_line_is_preempted_and_returns_to_its_place(depth: int) -> None:
    hand = Hand(settings_of_depth(depth))
    hand.join(num_blocks=6)
    # Two blocks each now, three in the end.
    hand.handle(*[hand.new_submit(range(start, start + 7), max_tokens=6) for start in (0, 20, 40)])
    hand.run()
    assert hand.preemptions()[0] == "request 3"
    assert set(hand.preemptions()) <= {"request 2", "request 3"}
    assert list(hand.log.finished) == [(1, 0), (2, 0), (3, 0)]
    hand.check(1, 2, 3)
    hand.expect_empty()


def test_a_victim_keeps_tokens_border_and_limit() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=4)
    hand.submit(range(3), max_tokens=10)
    hand.submit(range(20, 23), max_tokens=10)
    while not hand.preemptions():
        hand.land()
    victim = hand.sequence(2)
    assert victim.state is State.WAITING
    said = hand.tokens(2)
    assert said
    assert victim.tokens == [*range(20, 23), *said]
    assert (victim.num_prompt, victim.limit) == (3, 12)
    assert (victim.num_computed, victim.num_planned, victim.row) == (0, 0, -1)
    assert hand.table(2) == []
    while hand.sequence(2).state is State.WAITING:
        hand.land()
    [admit] = hand.last_plan().admits
    assert admit.num_prompt == 3
    assert (*range(20, 23), *said)[admit.start :] == admit.tokens
    hand.run()
    hand.check(1, 2)
    hand.expect_empty()


def test_no_newcomer_is_admitted_before_the_victim() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=4)
    hand.submit(range(3), max_tokens=10)
    hand.submit(range(20, 23), max_tokens=10)
    hand.submit((1,), max_tokens=1)  # came later than both
    hand.submit((2,), max_tokens=1, priority=-1)  # more urgent than all
    while not hand.preemptions():
        hand.land()
    newcomer = hand.submit((3,), max_tokens=1)
    num_waits = 0
    while hand.sequence(2).state is State.WAITING:
        assert newcomer not in hand.log.started
        num_waits += 1
        hand.land()
    assert num_waits > 1
    hand.run()
    hand.check(1, 2, 3, 4, newcomer)
    hand.expect_empty()


def test_the_victim_is_the_last_by_priority_first() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=6)
    hand.submit(range(7), max_tokens=6, priority=1)
    hand.submit(range(20, 27), max_tokens=6)
    hand.submit(range(40, 47), max_tokens=6)
    hand.run()
    assert hand.preemptions()[0] == "request 1"
    assert list(hand.log.finished)[-1] == (1, 0)
    hand.check(1, 2, 3)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [5, 6, 7, 9])
def test_whoever_is_given_work_is_not_preempted_in_that_plan(depth: int, num_blocks: int) -> None:
    hand = Hand(settings_of_depth(depth))
    hand.join(num_blocks=num_blocks)
    requests = [hand.submit(range(20 * i, 20 * i + 3), max_tokens=11, n=1 + i % 2) for i in range(4)]
    while any(worker.plans for worker in hand.workers.values()):
        result = hand.worker().run_next()
        num_seen, num_preempted = len(hand.worker().seen), len(hand.preemptions())
        effects = hand.handle(Arrived(b"w-1", result))
        victims = hand.preemptions()[num_preempted:]
        if victims:
            # By the end of the turn a victim holds no row; every row of the turn's plans belongs to a running one.
            rows = {row for plan in hand.worker().seen[num_seen:] for row in plan.rows}
            running = {sequence.row for group in hand.line().running for sequence in group.live}
            assert rows <= running, effects
    hand.check(*[request for request in requests if request not in hand.log.refused])
    hand.expect_empty()


def test_rows_go_round_and_none_is_lost() -> None:
    hand = Hand(settings_of_depth(2))
    hand.join(num_blocks=9, max_rows=3)
    requests = [hand.submit(range(i, i + 5), max_tokens=1 + i % 7, n=1 + i % 3) for i in range(40)]
    hand.run()
    hand.check(*requests)
    hand.expect_empty()


# --- a forked group comes back as it was made


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forked_group_is_recomputed_with_what_it_shares(depth: int) -> None:
    """Rule 4. A prompt of 11 blocks, n = 3, 14 blocks in all: apart they would need 33.

    The pool holds the group and nothing beside it. Its names are dropped while it waits, so nothing is hit.
    """
    hand = Hand(settings_of_depth(depth))
    hand.say_hello(hello(num_blocks=14, max_step_tokens=64))
    prompt = range(44)
    blocks = policy.most_blocks(44, 44 + 4 - 1, 3, 4)
    assert blocks == 11 + 3 * 1
    request = hand.submit(prompt, max_tokens=4, n=3)
    hand.land()
    if depth == 1:
        hand.land()
    before = [list(hand.sequence(request, i).tokens) for i in range(3)]
    hand.line().recompute(hand.group(request), [])
    for block in range(14):
        hand.pool().withdraw(block)
    num_seen = len(hand.worker().seen)
    while hand.worker().plans:
        hand.land()
        if len(hand.worker().seen) > num_seen:
            break
    again = hand.worker().seen[num_seen]
    assert hand.snapshot().owned_blocks <= blocks
    assert len(again.admits) == 1, "one computes what all have in common"
    assert again.counts[0] == len(before[0])
    assert again.admits[0].num_prompt == 44
    while hand.worker().plans[0].step <= again.step:
        hand.land()
    tables = [hand.table(request, i) for i in range(3)]
    assert tables[0][:11] == tables[1][:11] == tables[2][:11]
    assert len({table[11] for table in tables}) == 3
    assert [hand.pool().refs(block) for block in tables[0][:11]] == [3] * 11
    hand.run()
    hand.check(request)
    hand.expect_empty()


@pytest.mark.parametrize("num_prompt", [8, 10])
@pytest.mark.parametrize("has_names", [True, False])
@pytest.mark.parametrize("stopped", [(), (0,), (2,), (0, 1)])
def test_a_forked_group_comes_back_whatever_is_left_of_it(
    num_prompt: int, has_names: bool, stopped: tuple[int, ...]
) -> None:
    """With and without its blocks still to be found, with a partial block at the border, and with choices ended."""
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=10, max_step_tokens=5)
    request = hand.submit(range(num_prompt), max_tokens=6, n=3)
    while len(hand.tokens(request, 2)) < 3:
        hand.land()
    for index in stopped:
        hand.stop(request, index)
    hand.line().recompute(hand.group(request), [])
    if not has_names:
        for block in range(10):
            hand.pool().withdraw(block)
    hand.run()
    for index in {0, 1, 2} - set(stopped):
        assert (hand.tokens(request, index), hand.reason(request, index)) == hand.expected(request, index)
    hand.expect_empty()


@pytest.mark.parametrize("when", ["leader", "follower"])
def test_a_choice_ends_while_the_others_wait_for_the_common_blocks(when: str) -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=14, max_step_tokens=4)
    request = hand.submit(range(12), max_tokens=6, n=3)
    while len(hand.tokens(request, 2)) < 2:
        hand.land()
    hand.line().recompute(hand.group(request), [])
    for block in range(14):
        hand.pool().withdraw(block)
    hand.land()
    hand.land()
    assert len(hand.sequence(request, 0).followers) == 2
    hand.stop(request, 0 if when == "leader" else 1)
    hand.run()
    for index in (1, 2) if when == "leader" else (0, 2):
        assert (hand.tokens(request, index), hand.reason(request, index)) == hand.expected(request, index)
    hand.expect_empty()


# --- history


def test_history_travels_only_where_the_sampling_needs_it() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=4)
    plain, penalized = Sampling(temperature=0.0), Sampling(temperature=0.0, frequency_penalty=0.5)
    for request, sampling in ((1, plain), (2, penalized)):
        submit = Submit(request, tuple(range(20 * request, 20 * request + 7)), 6, replace(sampling, seed=request))
        hand.submits[request] = submit
        hand.handle(submit)
    hand.run()
    histories = {admit.sampling.seed: admit.history for plan in hand.worker().seen for admit in plan.admits}
    assert hand.preemptions()
    assert histories[1] == ()
    assert histories[2][:4] == (40, 41, 42, 43), "it came back to a cached block"
    hand.check(1, 2)
