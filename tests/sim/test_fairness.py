"""Shares of tenants, on a virtual clock: whoever floods the queue gets his share and no more."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kilburn.controller.core.events import Arrived, Refusal, Submit
from kilburn.controller.core.fairness import Fairness
from kilburn.controller.core.sequence import Group, Place
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.simulate.fake_daemon import fake_hello
from kilburn.controller.simulate.metered import Metered, StepCosts
from kilburn.shared.messages import StepFailed
from kilburn.shared.sampling import Sampling
from tests.core.driver import Hand

PATIENT = EngineSettings(step_deadline_s=1e9, silence_s=1e9, max_waiting=10_000)
NUM_PROMPT, NUM_ANSWER = 20, 20


def world_of(is_fair: bool) -> Metered:
    hello = fake_hello(num_blocks=400, block_size=4, max_rows=4)
    return Metered(replace(PATIENT, is_fair=is_fair), hello, StepCosts())


def flood(
    world: Metered, first: int, count: int, at_s: float, tenant: bytes, weight: float, every_s: float = 0.0
) -> None:
    for number in range(first, first + count):
        prompt = [number % 500 + 1, number // 500 + 1, *range(1, NUM_PROMPT - 1)]  # no two begin alike
        sampling = Sampling(temperature=0.0, seed=number)
        submit = Submit(number, prompt, NUM_ANSWER, sampling, tenant=tenant, weight=weight)
        world.submit(at_s + every_s * (number - first), submit)


def served(world: Metered, tenant: bytes, since_s: float, until_s: float) -> float:
    """Tokens of answers in this time, and of the prompts that began in it."""
    total = 0
    for case in world.cases.values():
        if case.submit.tenant == tenant:
            total += NUM_PROMPT * (since_s <= case.started_s < until_s)
            total += sum(since_s <= at_s < until_s for at_s in case.tokens_s)
    return total


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.5)])
def test_shares_converge_to_the_weights_whoever_floods(weights: Sequence[float]) -> None:
    """alice has 200 requests in the queue before bob's 200; both always have some waiting."""
    world = world_of(is_fair=True)
    flood(world, 0, 200, 0.0, b"alice", weights[0])
    flood(world, 1000, 200, 0.5, b"bob", weights[1])
    world.run(until_s=2.5)
    alice, bob = served(world, b"alice", 0.8, 2.5), served(world, b"bob", 0.8, 2.5)
    assert any(case.started_s < 0 for case in world.cases.values() if case.submit.tenant == b"bob")
    assert alice / bob == pytest.approx(weights[0] / weights[1], rel=0.15)


def test_without_shares_the_order_is_that_of_arrival() -> None:
    world = world_of(is_fair=False)
    flood(world, 0, 40, 0.0, b"alice", 1.0)
    flood(world, 1000, 10, 0.1, b"bob", 1.0)
    world.run()
    started = sorted(world.cases.values(), key=lambda case: case.started_s)
    assert {case.submit.tenant for case in started[:40]} == {b"alice"}


def test_one_that_asks_seldom_is_served_at_once() -> None:
    """bob's requests come one at a time; he was never served his share, and goes first."""
    world = world_of(is_fair=True)
    flood(world, 0, 120, 0.0, b"alice", 1.0)
    flood(world, 1000, 6, 0.3, b"bob", 1.0, every_s=0.3)
    world.run(until_s=2.4)
    for case in world.cases.values():
        if case.submit.tenant == b"bob":
            assert 0 <= case.started_s - case.at_s < 0.2, "only until a row is free"


def test_a_pause_is_not_paid_for() -> None:
    """bob comes when alice has been served for long: from then on they share, and he does not get all."""
    world = world_of(is_fair=True)
    flood(world, 0, 200, 0.0, b"alice", 1.0)
    flood(world, 1000, 100, 1.0, b"bob", 1.0)
    world.run(until_s=3.0)
    alice, bob = served(world, b"alice", 1.2, 3.0), served(world, b"bob", 1.2, 3.0)
    assert alice / bob == pytest.approx(1.0, rel=0.15)


def test_no_tenant_has_more_than_half_of_the_queue() -> None:
    hand = Hand(replace(PATIENT, is_fair=True, max_waiting=4, depth=1))
    hand.join(max_rows=1)
    for number, tenant in enumerate((b"a", b"a", b"a", b"a", b"b", b"b", b"b"), start=1):
        submit = replace(hand.new_submit((number,), max_tokens=3), tenant=tenant)
        hand.handle(submit)
    assert list(hand.log.refused) == [4, 7], "one runs; two of each wait"
    assert hand.log.refused[4].refusal is Refusal.QUEUE_FULL
    hand.run()
    hand.check(1, 2, 3, 5, 6)
    hand.expect_empty()


def test_priorities_are_a_tenants_own() -> None:
    hand = Hand(replace(PATIENT, is_fair=True, depth=1))
    hand.join(max_rows=1)
    for tenant, priority in ((b"a", 0), (b"a", 0), (b"a", -5), (b"b", 9)):
        hand.handle(replace(hand.new_submit((1,), max_tokens=4, priority=priority), tenant=tenant))
    hand.run()
    assert list(hand.log.started) == [1, 4, 3, 2]


def lose_the_worker(hand: Hand) -> None:
    hand.handle(Arrived(b"w-1", StepFailed(hand.worker().lease, hand.scheduler().last_step + 1, "out of memory")))


def take_off(hand: Hand) -> None:
    hand.line().recompute(hand.group(1), [])


@pytest.mark.parametrize("leave", [take_off, lose_the_worker])
def test_what_a_sequence_drew_that_ends_off_the_rows_is_charged(leave: Callable[[Hand], None]) -> None:
    """Two samples; one is stopped off the rows, and then the other, or the client leaves."""
    for last in (Hand.stop, Hand.cancel):
        fairness = Fairness()
        hand = Hand(replace(PATIENT, is_fair=True, depth=1))
        hand.engine.requests.fairness = fairness
        hand.join(num_blocks=60)
        request = hand.submit(range(20, 26), max_tokens=60, n=2)
        for _ in range(20):
            hand.land()
        group = hand.group(request)
        leave(hand)
        goes_on, ends = group.live
        num_drawn_by_one = ends.num_generated
        assert num_drawn_by_one == goes_on.num_generated > 15
        hand.stop(request, 1)
        if leave is take_off:
            for _ in range(12):
                hand.land()
            assert goes_on.num_generated > num_drawn_by_one + 5
        last(hand, request)
        assert fairness.time_of(group) == 6 + num_drawn_by_one + goes_on.num_generated, (
            "the prompt, and all that was drawn"
        )


def test_what_is_drawn_is_charged_once() -> None:
    fairness = Fairness()
    group = Group(1, Place(0, 1), (1, 2, 3), 9, Sampling())
    group.tenant, group.weight = b"t", 2.0
    fairness.waits(group)
    group.live[0].tokens += [7, 8]
    fairness.settle(group)
    fairness.settle(group)
    assert fairness.time_of(group) == 1.0
    group.num_drawn_by_ended, group.live = 6, []
    fairness.settle(group)
    assert fairness.time_of(group) == 3.0
