"""Time and numbers that are limited: who may wait, for how long, and when to try again.

Blocks of 4 tokens. Requests are numbered from 1 in order of arrival; time passes only where a test says so.
"""

from dataclasses import replace

import pytest

from kilburn.controller.core.events import Refusal, Tick
from kilburn.controller.core.limits import WINDOW_S, Clocks, Limit, Outflow, Patience, shorter
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.settings import EngineSettings
from kilburn.shared.types import FinishReason
from tests.core.driver import Hand

PATIENT = EngineSettings(depth=1, silence_s=1e6, step_deadline_s=1e6)


# --- when to try again


def test_what_drains_is_counted_over_the_last_seconds() -> None:
    outflow = Outflow()
    assert outflow.rates(5.0) == (0.0, 0.0)
    assert outflow.wait_s(3, 100, 5.0) == WINDOW_S, "nothing has left the queue: nothing is known"
    for second in range(100, 110):
        outflow.began(2, 300, float(second))
    assert outflow.rates(110.0) == (2.0, 300.0)
    assert outflow.wait_s(1, 0, 110.0) == 1, "never less than a second"
    assert outflow.wait_s(9, 0, 110.0) == 5
    assert outflow.wait_s(1, 2701, 110.0) == 10, "whichever takes longer"
    assert outflow.wait_s(10**6, 0, 110.0) == 600, "and never for ever"
    assert outflow.rates(124.0 + WINDOW_S) == (0.0, 0.0), "what is long ago says nothing"


def test_a_full_queue_says_when_to_try_again_by_its_own_rate() -> None:
    hand = Hand(replace(PATIENT, max_waiting=2))
    hand.join(max_rows=1)
    for i in range(1, 7):  # one begins every four seconds
        hand.submit((i,), max_tokens=1)
        hand.now += 4.0
        hand.land()
    for i in range(4):
        hand.submit((i,), max_tokens=1)
    [refused] = hand.log.refused.values()
    assert refused.refusal is Refusal.QUEUE_FULL
    assert refused.retry_after_s == 4
    assert "2 requests with 2 tokens are waiting; try again in 4 s" in refused.message
    seen = hand.engine.snapshot()
    assert (seen.waiting_requests, seen.waiting_tokens) == (2, 2)
    assert seen.drained_requests_per_s == pytest.approx(7 / 24)
    hand.run()
    # Nothing happens any more, and the engine is not turned: what is told falls with the time of whoever asks.
    later = [hand.engine.snapshot(hand.now + seconds) for seconds in (0.0, 10.0, WINDOW_S + 1.0)]
    requests, tokens = ([getattr(at, f"drained_{what}_per_s") for at in later] for what in ("requests", "tokens"))
    for rates in (requests, tokens):
        assert rates[0] > rates[1] > rates[2] == 0.0


def test_the_tokens_that_wait_are_bounded_and_one_alone_may_have_more() -> None:
    hand = Hand(replace(PATIENT, max_waiting_tokens=10))
    hand.join(max_rows=1)
    hand.submit((1,), max_tokens=9)
    large = hand.submit(range(40), max_tokens=1)
    assert large not in hand.log.refused, "nobody else waits"
    refused = hand.submit((1,), max_tokens=1)
    assert hand.log.refused[refused].refusal is Refusal.QUEUE_FULL
    hand.run()
    hand.submit((1,), max_tokens=9)
    waiting = [hand.submit(range(5), max_tokens=1) for _ in range(3)]
    assert [request in hand.log.refused for request in waiting] == [False, False, True]
    hand.run()
    hand.check(1, large, *waiting[:2])
    hand.expect_empty()


# --- whose time is up


@pytest.mark.parametrize(("setting_s", "asked_s", "limit_s"), [(0, None, None), (0, 3, 3), (5, 3, 3), (5, 9, 5)])
def test_a_client_may_ask_for_less_and_not_for_more(setting_s: float, asked_s: float | None, limit_s: float) -> None:
    assert shorter(setting_s, asked_s) == limit_s


def limited(hand: Hand, *, queue_s: float | None = None, request_s: float | None = None, n: int = 1) -> int:
    submit = replace(hand.new_submit(range(20, 26), max_tokens=9, n=n), queue_s=queue_s, request_s=request_s)
    hand.submits[submit.request_id] = submit
    hand.handle(submit)
    return submit.request_id


@pytest.mark.parametrize("has_worker", [True, False])
def test_who_waits_too_long_is_refused(has_worker: bool) -> None:
    hand = Hand(replace(PATIENT, queue_s=3.0, recovery_s=100.0))
    if has_worker:
        hand.join(max_rows=1)
        hand.submit((1, 2), max_tokens=9)
    waits = limited(hand)
    hurried = limited(hand, queue_s=1.0)
    assert hand.engine.deadline is not None
    assert hand.engine.deadline <= 1.0
    hand.handle(Tick(), after_s=0.9)
    assert not hand.log.refused
    hand.handle(Tick(), after_s=0.1)
    assert list(hand.log.refused) == [hurried]
    assert hand.log.refused[hurried].refusal is Refusal.QUEUE_TIMEOUT
    hand.handle(Tick(), after_s=2.0)
    assert list(hand.log.refused) == [hurried, waits]
    assert hand.log.refused[waits].retry_after_s >= 1
    assert hand.engine.snapshot().queue_timeouts == 2
    if has_worker:
        hand.run()
        hand.check(1)
        hand.expect_empty()
    else:
        assert hand.engine.is_idle


@pytest.mark.parametrize("has_begun", [False, True])
def test_both_times_may_be_up_at_once(has_begun: bool) -> None:
    hand = Hand(PATIENT)
    if has_begun:
        hand.join(max_rows=1)
    request = limited(hand, queue_s=2.0, request_s=2.0)
    hand.handle(Tick(), after_s=2.0)
    assert hand.engine.snapshot().queue_timeouts == (not has_begun)
    assert hand.engine.snapshot().request_timeouts == has_begun
    if has_begun:
        hand.run()
        hand.expect_empty()
    else:
        assert hand.log.refused[request].refusal is Refusal.QUEUE_TIMEOUT
        assert hand.engine.is_idle


def test_a_wait_before_the_submit_is_taken_off_both_times() -> None:
    patience = Patience(queue_s=2.0)
    assert patience.first_within(5.0) == (2.0, Limit.QUEUE)
    assert patience.first_within(2.0) == (2.0, None)
    patience.bound(0.0, 1.5)
    assert patience.first_within(5.0) == (1.5, Limit.REQUEST)
    patience.spend(0.5)
    assert patience == Patience(1.5, 1.0)
    patience.bound(9.0, 1.5)
    patience.spend(1.25)
    assert patience == Patience(0.25, 0.0), "and nobody is owed time"
    forever = Patience()
    forever.bound(0.0, 0.0)
    forever.spend(9.0)
    assert (forever, forever.first_within(5.0)) == (Patience(), (5.0, None))


def test_who_has_begun_does_not_wait_too_long_even_if_preempted() -> None:
    hand = Hand(replace(PATIENT, queue_s=3.0, preemption=Preemption.RECOMPUTE))
    hand.join(num_blocks=4)
    hand.submit(range(3), max_tokens=10)
    hand.submit(range(20, 23), max_tokens=10)
    while not hand.preemptions():
        hand.land()
    hand.handle(Tick(), after_s=50.0)
    hand.run()
    hand.check(1, 2)
    hand.expect_empty()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_landed", [0, 1, 4])
def test_whose_time_is_up_keeps_what_it_has(n: int, num_landed: int) -> None:
    """Two plans are under way when its time runs out: what they bring is not told any more."""
    hand = Hand(replace(PATIENT, depth=2, request_s=8.0))
    hand.join()
    request = limited(hand, n=n)
    for _ in range(num_landed):
        hand.land()
    said = [list(hand.tokens(request, index)) for index in range(n)]
    hand.handle(Tick(), after_s=8.0)
    for index in range(n):
        assert hand.reason(request, index) is FinishReason.TIMEOUT
        assert said[index] == hand.expected(request, index)[0][: len(said[index])]
    hand.run()
    assert [hand.tokens(request, index) for index in range(n)] == said
    assert hand.engine.snapshot().request_timeouts == 1
    hand.expect_empty()


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_its_time_is_up_while_it_is_preempted(preemption: Preemption) -> None:
    hand = Hand(replace(PATIENT, preemption=preemption))
    hand.join(num_blocks=4, num_host_blocks=4)
    hand.submit(range(3), max_tokens=10)
    request = limited(hand, request_s=5.0)
    while not hand.preemptions():
        hand.land()
    assert hand.preemptions() == [f"request {request}"]
    said = list(hand.tokens(request))
    hand.handle(Tick(), after_s=5.0)
    assert hand.reason(request) is FinishReason.TIMEOUT
    hand.run()
    assert hand.tokens(request) == said
    hand.check(1)
    hand.expect_empty()


def test_its_time_is_up_before_it_began() -> None:
    hand = Hand(PATIENT)
    hand.join(max_rows=1)
    hand.submit((1, 2), max_tokens=9)
    request = limited(hand, request_s=2.0)
    hand.handle(Tick(), after_s=2.0)
    assert hand.log.refused[request].refusal is Refusal.REQUEST_TIMEOUT
    hand.run()
    hand.expect_empty()


def test_clocks_of_those_who_ended_are_cleared_away() -> None:
    clocks, known = Clocks(), {7}
    for number in range(100):
        clocks.set(float(number), number, Limit.REQUEST)
    clocks.clear_away(known.__contains__, len(known))
    assert clocks.next_at == 7.0
    assert list(clocks.due(100.0)) == [(7, Limit.REQUEST)]
    assert clocks.next_at is None
