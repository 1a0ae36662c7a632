"""An engine in the middle of everything, for tests that break it or look at it."""

from tests.core.driver import Hand, settings_of_depth

SHARED = (1, 2, 3, 4, 5, 6)


def a_live_engine() -> Hand:
    """1 runs alone, 2 is forked in two, 3 is in its prompt and will fork, 4 and 5 wait; two plans are under way."""
    hand = Hand(settings_of_depth(2, max_step_tokens=8))
    hand.join(num_blocks=32, max_rows=6)
    hand.submit((7, 7, 7, 7, 7), max_tokens=30)
    hand.submit(SHARED, max_tokens=30, n=2)
    while len(hand.tokens(2, 1)) < 3:
        hand.land()
    hand.submit(range(20, 50), max_tokens=9, n=2)
    hand.submit((9, 9), max_tokens=4)
    hand.submit((8, 8), max_tokens=4, n=2)
    hand.land()
    hand.land()
    hand.submit((6, 6, 6, 6, 6), max_tokens=1)
    assert hand.snapshot().running_requests == 3
    assert hand.snapshot().waiting_requests == 3
    assert len(hand.worker().plans) == 2
    return hand
