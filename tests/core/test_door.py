"""Who is let in, and the requests so small that there is hardly anything to compute.

Nothing to plan must never mean nothing to answer; what can never fit is told so at once, with the number that would.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.controller.core.events import Refusal, Shutdown, Tick
from kilburn.controller.core.settings import EngineSettings
from kilburn.shared.types import FinishReason
from tests.core.driver import Hand, settings_of_depth
from tests.core.worker import hello

# --- hardly anything to compute


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_computed"),
    [
        (1, 0, 0),
        (1, 1, 1),
        (1, 2, 2),
        (2, 0, 1),
        (4, 0, 3),
        (5, 0, 4),
        (4, 1, 4),
        (5, 1, 5),
        (8, 0, 7),
    ],
)
def test_the_smallest_requests(depth: int, n: int, num_prompt: int, max_tokens: int, num_computed: int) -> None:
    hand = Hand(settings_of_depth(depth))
    hand.join()
    request = hand.submit(range(num_prompt), max_tokens, n=n)
    hand.run()
    hand.check(request)
    computed = sum(count for plan in hand.worker().seen for count in plan.counts)
    assert computed == num_computed + (n - 1) * max(max_tokens - 1, 0)
    assert hand.log.started[request].cached_tokens == 0
    hand.expect_empty()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_prompt", [4, 5, 8, 9])
def test_nothing_left_to_compute_is_still_answered(num_prompt: int, n: int) -> None:
    """max_tokens 0 on a prompt whose needed positions are all cached: 5 tokens, 4 of them hit."""
    hand = Hand()
    hand.join()
    hand.submit(range(num_prompt), max_tokens=2)
    hand.run()
    num_seen = len(hand.worker().seen)
    request = hand.submit(range(num_prompt), max_tokens=0, n=n)
    is_whole = num_prompt % 4 == 1
    assert (len(hand.worker().seen) == num_seen) is is_whole, "nothing to plan where all is hit"
    hand.run()
    assert hand.log.started[request].cached_tokens == (num_prompt - 1) // 4 * 4
    assert [hand.reason(request, index) for index in range(n)] == [FinishReason.LENGTH] * n
    hand.expect_empty()


def test_a_wholly_hit_request_does_not_hold_up_the_next() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(max_rows=1)
    hand.submit(range(5), max_tokens=2)
    hand.run()
    hand.handle(*[hand.new_submit(range(5), max_tokens=0) for _ in range(5)], hand.new_submit((7,), max_tokens=1))
    assert len(hand.log.finished) == 6
    hand.run()
    hand.check(*range(1, 8))
    hand.expect_empty()


def test_one_token_and_nothing_to_say_needs_no_worker() -> None:
    hand = Hand()
    request = hand.submit((1,), max_tokens=0, n=2)
    hand.check(request)
    assert hand.engine.is_idle


# --- refusals


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "n", "refusal", "words"),
    [
        (0, 5, 1, Refusal.EMPTY, "no tokens"),
        (24, 8, 1, None, ""),  # 32 tokens, the model's length
        (24, 9, 1, Refusal.TOO_LONG, "at most 8 fit"),
        (31, 1, 1, None, ""),
        (32, 0, 1, None, ""),
        (32, 1, 1, Refusal.TOO_LONG, "no room for an answer"),
        (33, 0, 1, Refusal.TOO_LONG, "the prompt has 33 tokens"),
        (500, 1, 1, Refusal.TOO_LONG, "the prompt has 500 tokens"),
        (8, 5, 4, None, ""),  # two common blocks and four times one
        (8, 9, 4, None, ""),  # ... and four times two
        (8, 10, 4, Refusal.TOO_LONG, "at most 9 fit"),  # ... and four times three: 14 of 10 blocks
        (1, 1, 4, None, ""),
        (1, 1, 5, Refusal.TOO_WIDE, "at most 4"),
        (100, 1, 5, Refusal.TOO_WIDE, "is 5"),
    ],
)
def test_the_table_of_refusals(num_prompt: int, max_tokens: int, n: int, refusal: Refusal | None, words: str) -> None:
    """Ten blocks of 4, four rows, at most 32 tokens."""
    hand = Hand()
    hand.say_hello(hello(num_blocks=10, max_rows=4, max_len=32))
    request = hand.submit(range(num_prompt), max_tokens, n)
    if refusal is None:
        assert request not in hand.log.refused
        hand.run()
        hand.check(request)
    else:
        assert hand.log.refused[request].refusal is refusal
        assert words in hand.log.refused[request].message
    hand.expect_empty()


def test_too_long_for_every_pool() -> None:
    """Fits the model's length, and not the 49 blocks that there are; the next one is served."""
    hand = Hand()
    hand.say_hello(hello(num_blocks=49, block_size=16, max_len=4096, max_step_tokens=512))
    long = hand.submit(range(1000), max_tokens=4)
    prompt_alone_fits = hand.submit(range(700), max_tokens=200)
    short = hand.submit(range(10), max_tokens=4)
    hand.run()
    assert hand.log.refused[long].refusal is Refusal.TOO_LONG
    assert hand.log.refused[prompt_alone_fits].refusal is Refusal.TOO_LONG
    assert "at most 85 fit" in hand.log.refused[prompt_alone_fits].message
    hand.check(short)
    fits = hand.submit(range(700), max_tokens=85)
    hand.run()
    hand.check(fits)
    assert not hand.preemptions()


def test_more_wide_than_the_budget() -> None:
    hand = Hand(settings_of_depth(2, max_step_tokens=3))
    hand.join()
    request = hand.submit((1, 2), max_tokens=3, n=4)
    assert hand.log.refused[request].refusal is Refusal.TOO_WIDE
    three = hand.submit((1, 2), max_tokens=3, n=3)
    hand.run()
    hand.check(three)


def test_the_queue_has_an_end() -> None:
    hand = Hand(replace(EngineSettings(), max_waiting=2))
    hand.join(max_rows=1)
    for i in range(4):
        hand.submit((i,), max_tokens=2)
    assert list(hand.log.refused) == [4], "one runs, two wait"
    assert hand.log.refused[4].refusal is Refusal.QUEUE_FULL
    hand.land()
    hand.run()
    hand.check(1, 2, 3)
    after = hand.submit((9,), max_tokens=2)
    hand.run()
    hand.check(after)


def test_the_queue_has_an_end_without_a_worker() -> None:
    hand = Hand(replace(EngineSettings(), max_waiting=2))
    hand.handle(*[hand.new_submit((i,), max_tokens=2) for i in range(3)])
    assert list(hand.log.refused) == [3]
    hand.join()
    hand.run()
    hand.check(1, 2)


def test_without_a_worker_a_request_waits_and_then_is_told() -> None:
    hand = Hand()
    hand.now = 100.0
    request = hand.submit((1, 2), max_tokens=2)
    assert hand.engine.deadline == 160.0
    hand.handle(Tick(), after_s=59.9)
    assert request not in hand.log.refused
    hand.handle(Tick(), after_s=0.1)
    assert hand.log.refused[request].refusal is Refusal.NO_WORKER
    assert "60 s" in hand.log.refused[request].message
    assert hand.engine.is_idle
    assert hand.engine.deadline is None


def test_a_worker_that_comes_in_time_serves_those_who_waited_in_their_order() -> None:
    hand = Hand()
    for i in range(3):
        hand.submit((i,), max_tokens=2)
        hand.handle(Tick(), after_s=10.0)
    hand.join(max_rows=1)
    hand.run()
    assert list(hand.log.started) == [1, 2, 3]
    hand.check(1, 2, 3)


def test_what_fits_no_worker_that_came_is_told_in_the_end() -> None:
    """Accepted while nobody was there; the worker that came is too small; another, large enough, saves the second."""
    hand = Hand()
    first, small = hand.submit(range(40), max_tokens=2), hand.submit((1,), max_tokens=2)
    hand.say_hello(hello(name="small", num_blocks=4), b"small-1")
    hand.run()
    hand.check(small)
    assert first not in hand.log.started
    hand.say_hello(hello(name="large", num_blocks=40), b"large-1")
    hand.run()
    hand.check(first)


def test_a_request_that_had_begun_ends_with_an_error_and_not_a_refusal() -> None:
    hand = Hand()
    hand.join()
    request = hand.submit((1, 2), max_tokens=9, n=2)
    hand.land()
    hand.say_hello(hello(num_blocks=1), b"w-1")
    hand.handle(Tick(), after_s=60.0)
    assert [hand.reason(request, i) for i in (0, 1)] == [FinishReason.ERROR] * 2
    assert "60 s" in hand.log.finished[request, 0].message
    assert request not in hand.log.refused
    assert hand.engine.is_idle


def test_closing_takes_no_more_and_finishes_the_rest() -> None:
    hand = Hand()
    hand.join(max_rows=1)
    running, waiting = hand.submit((1,), max_tokens=3), hand.submit((2,), max_tokens=3)
    hand.handle(Shutdown())
    late = hand.submit((3,), max_tokens=3)
    assert hand.log.refused[late].refusal is Refusal.SHUTTING_DOWN
    hand.run()
    hand.check(running, waiting)
    assert hand.engine.is_idle


# --- what is promised fits


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 12), st.integers(2, 40), st.sampled_from([1, 4]))
def test_the_room_that_is_promised_is_there_and_no_more(
    num_prompt: int, n: int, num_blocks: int, max_len: int, block_size: int
) -> None:
    hand = Hand(settings_of_depth(1))
    hand.say_hello(hello(num_blocks=num_blocks, block_size=block_size, max_rows=4, max_len=max_len))
    room = hand.engine.room_for(num_prompt, n)
    if n > 4:
        assert room is None
        return
    assert room is not None
    more = hand.submit(range(num_prompt), max(room, 0) + 1, n)
    assert more in hand.log.refused
    if room > 0:
        assert str(room) in hand.log.refused[more].message
        just = hand.submit(range(num_prompt), room, n)
        hand.run()
        hand.check(just)
        hand.expect_empty()


def test_room_before_any_worker() -> None:
    assert Hand().engine.room_for(3, 1) is None


def test_room_is_that_of_the_roomiest_worker() -> None:
    hand = Hand()
    hand.say_hello(hello(name="a", num_blocks=2), b"a-1")
    hand.say_hello(hello(name="b", num_blocks=6), b"b-1")
    assert hand.engine.room_for(3, 1) == 22
    request = hand.submit(range(3), max_tokens=22)
    hand.run()
    hand.check(request)
