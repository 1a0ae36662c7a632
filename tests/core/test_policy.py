"""What a group needs at most, who is preempted, and where a request goes: the questions that the policy answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.controller.core import policy
from kilburn.controller.core.sequence import Group, Place
from kilburn.shared.layout import blocks_for
from kilburn.shared.sampling import Sampling
from tests.core.driver import Hand, settings_of_depth
from tests.core.worker import hello

# --- what a group needs at most


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 4), st.integers(1, 30), st.sampled_from([1, 4, 16]))
def test_the_longest_limit_is_the_longest_that_fits(
    num_prompt: int, max_tokens: int, n: int, num_blocks: int, block_size: int
) -> None:
    longest = policy.longest_limit(num_prompt, n, num_blocks, block_size)
    limit = num_prompt + max_tokens - 1
    assert (policy.most_blocks(num_prompt, limit, n, block_size) <= num_blocks) is (limit <= longest)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20), st.integers(1, 12), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_a_group_alone_never_needs_more_than_the_door_counted(
    num_prompt: int, max_tokens: int, n: int, block_size: int, depth: int
) -> None:
    """In a pool of just that size it runs to its end; in one block less it is turned away."""
    limit = num_prompt + max_tokens - 1
    most = policy.most_blocks(num_prompt, limit, n, block_size)
    hand = Hand(settings_of_depth(depth))
    hand.say_hello(hello(num_blocks=most, block_size=block_size))
    request = hand.submit(range(num_prompt), max_tokens, n)
    hand.run()
    hand.check(request)
    assert not hand.preemptions()
    assert most >= blocks_for(limit, block_size)
    if most > 1:
        smaller = Hand(settings_of_depth(depth))
        smaller.say_hello(hello(num_blocks=most - 1, block_size=block_size))
        assert smaller.submit(range(num_prompt), max_tokens, n) in smaller.log.refused


# --- who is preempted


@pytest.mark.parametrize(
    ("num_running", "asking", "was_granted", "loser"),
    [
        (3, 0, False, 2),
        (3, 0, True, 2),
        (3, 1, True, 2),
        (3, 2, False, 2),  # nobody is behind it: it gives way itself
        (3, 2, True, None),  # ... but not with work in this plan
        (1, 0, False, 0),
        (1, 0, True, None),
    ],
)
def test_the_victim_is_the_last_and_never_one_with_work(
    num_running: int, asking: int, was_granted: bool, loser: int | None
) -> None:
    running = [Group(i, Place(0, i), (1,), 1, Sampling()) for i in range(num_running)]
    assert policy.victim(running, asking, was_granted) is (None if loser is None else running[loser])


# --- where a request goes


def test_the_worker_with_the_fewest_sequences_of_those_where_it_fits() -> None:
    hand = Hand(settings_of_depth(1))
    hand.say_hello(hello(name="small", num_blocks=2), b"small-1")
    hand.say_hello(hello(name="large", num_blocks=20), b"large-1")
    hand.handle(
        hand.new_submit((1,), max_tokens=3, n=2),  # small: the older lease where both are empty
        hand.new_submit((2,), max_tokens=3),  # large
        hand.new_submit((3,), max_tokens=3),  # large: one sequence against two
        hand.new_submit(range(20), max_tokens=3),  # large: small will never hold it
        hand.new_submit((5,), max_tokens=3),  # small: two against three
    )
    placed = {request: home.lease.hello.name for request, home in hand.engine.requests.placed.items()}
    assert placed == {1: "small", 2: "large", 3: "large", 4: "large", 5: "small"}
    hand.run()
    hand.check(1, 2, 3, 4, 5)
