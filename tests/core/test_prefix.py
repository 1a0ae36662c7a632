"""Prefixes: what a name stands for, who may hit it, and when it comes to be.

Sizes: blocks of 4 tokens, unless a table says otherwise.
"""

import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256

import pytest

from kilburn.controller.core.block_pool import BlockPool
from kilburn.controller.core.block_table import BlockTable
from kilburn.controller.core.prefix_index import UNSALTED, Hasher, PrefixIndex, Salt
from kilburn.shared.digest import ROOT, BlockHasher
from kilburn.shared.messages import StepFailed
from tests.core.driver import Hand, rows_of, settings_of_depth
from tests.core.worker import hello

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)


class ConstantHasher:
    """Everything collides with everything."""

    def digest(self, parent: bytes, tokens: Sequence[int], salt: bytes = b"") -> bytes:
        return b"same" * 8


class ForgetfulHasher:
    """Looks at a block's own tokens only, as if it mattered not what comes before."""

    def digest(self, parent: bytes, tokens: Sequence[int], salt: bytes = b"") -> bytes:
        return sha256(repr(tuple(tokens)).encode()).digest()


def holding(tokens: tuple[int, ...], hasher: Hasher, salt: Salt = UNSALTED) -> tuple[PrefixIndex, list[int]]:
    """An index over a pool in which `tokens` are computed and named, and the table of them."""
    pool = BlockPool(16)
    index = PrefixIndex(pool, hasher, 4)
    table = BlockTable(pool)
    table.grow(len(tokens) // 4, step=1)
    index.publish([], tokens, table.blocks, 0, salt)
    return index, table.blocks


# --- who hits


@pytest.mark.parametrize(
    ("held", "asked", "num_hits"),
    [
        (A + B, A + B + C, 2),
        (A + B, A + B + (9,), 2),
        (A + B, A + B, 1),  # the block of the newest token is never hit
        (A + B, A, 0),
        (A + B, (*A, 5), 1),
        (A + B, (*A, 5, 6, 7, 0, *C), 1),
        (A + B, (0, 2, 3, 4, *B, *C), 0),  # an equal second block after another first one
        (A + B, B + C, 0),
        (A + A, A + A + A, 2),
        ((), A + B, 0),
        (A, (), 0),
        (A, (1,), 0),
    ],
)
def test_the_longest_run_of_leading_blocks_is_hit(held: tuple[int, ...], asked: tuple[int, ...], num_hits: int) -> None:
    index, blocks = holding(held, BlockHasher(b"m" * 32, 4))
    assert index.match([], asked, UNSALTED) == blocks[:num_hits]


@pytest.mark.parametrize("asked", [B + C, (1, 2, 3, 5, *C), (4, 3, 2, 1, *C)])
def test_a_collision_is_a_miss(asked: tuple[int, ...]) -> None:
    index, blocks = holding(A, ConstantHasher())
    assert index.match([], (*A, 9), UNSALTED) == blocks, "the hasher collides, and the right tokens do hit"
    assert index.match([], asked, UNSALTED) == []


def test_a_collision_beyond_the_first_block_is_a_miss() -> None:
    index, blocks = holding(A, ConstantHasher())
    again = index.match([], A + A + (9,), UNSALTED)
    assert again == blocks, "the second block has the same digest and tokens, and another parent"


@pytest.mark.parametrize("hasher", [ConstantHasher(), ForgetfulHasher()])
def test_answers_are_right_whatever_the_hasher(hasher: Hasher) -> None:
    """Twelve requests from few tokens, by the real engine, with digests that are worth nothing."""
    hand = Hand(settings_of_depth(2))
    hand.join(num_blocks=20)
    hand.scheduler().memory.index = PrefixIndex(hand.pool(), hasher, 4)
    parts = [A, B, C]
    requests = [hand.submit(parts[i % 3] + parts[i // 3 % 3] + parts[i % 2], max_tokens=5) for i in range(12)]
    hand.run()
    hand.check(*requests)
    again = [hand.submit(parts[i % 3] + parts[i // 3 % 3] + parts[i % 2], max_tokens=5) for i in range(12)]
    hand.run()
    hand.check(*again)
    hand.expect_empty()


def test_equal_blocks_after_different_parents_never_alias() -> None:
    index, blocks = holding(A + B, ForgetfulHasher())
    assert index.match([], A + B + C, UNSALTED) == blocks
    assert index.match([], B + C, UNSALTED) == [], "B is known, but only after A"
    # C comes to be known after B; asked for after A it is another block.
    other, _ = holding(B + C, ForgetfulHasher())
    assert other.match([], A + C + (1,), UNSALTED) == []


def test_a_prompt_with_another_first_block_gets_nothing_of_the_second() -> None:
    hand = Hand()
    hand.join()
    first = hand.submit(A + B + C, max_tokens=2)
    hand.run()
    second = hand.submit(C + B + C, max_tokens=2)
    hand.run()
    assert hand.log.started[second].cached_tokens == 0
    hand.check(first, second)


@pytest.mark.parametrize(("mine", "theirs", "is_hit"), [(b"", b"", True), (b"x", b"x", True), (b"x", b"y", False),
                                                        (b"x", b"", False), (b"", b"x", False)])  # fmt: skip
def test_a_salt_keeps_tenants_apart(mine: bytes, theirs: bytes, is_hit: bool) -> None:
    hand = Hand()
    hand.join()
    hand.submit(A + B + C, max_tokens=1, salt=mine)
    hand.run()
    request = hand.submit(A + B + C, max_tokens=1, salt=theirs)
    hand.run()
    assert hand.log.started[request].cached_tokens == (8 if is_hit else 0)
    hand.check(request)


# --- the last block of a wholly cached prompt


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_prompt_of_whole_blocks_again(num_blocks: int, block_size: int, times: int, is_alone: bool) -> None:
    """At least one token is computed, and never into a block that others hold or can find."""
    hand = Hand(settings_of_depth(2))
    hand.say_hello(hello(block_size=block_size))
    prompt = range(num_blocks * block_size)
    first = hand.submit(prompt, max_tokens=3)
    hand.run()
    named = {block for block in range(64) if hand.pool().name_of(block)}
    assert len(named) == num_blocks
    requests = []
    for _ in range(times - 1):
        request = hand.submit(prompt, max_tokens=3)
        requests.append(request)
        while request not in hand.log.started:
            hand.land()
        hit = (num_blocks - 1) * block_size
        assert hand.log.started[request].cached_tokens == hit
        table = hand.table(request)
        plan = next(plan for plan in reversed(hand.worker().seen) if plan.admits)
        [admit] = plan.admits
        assert (admit.start, len(admit.tokens)) == (hit, block_size)
        assert rows_of(plan)[admit.row] == block_size
        assert set(table[: num_blocks - 1]) <= named
        assert table[num_blocks - 1] not in named, "the last block is computed anew"
        assert hand.pool().refs(table[num_blocks - 1]) == 1
        if is_alone:
            hand.run()
    hand.run()
    hand.check(first, *requests)
    hand.expect_empty()


def test_a_preempted_request_whose_tokens_are_wholly_cached() -> None:
    """Prompt and output are a whole number of blocks when it comes back; the newest token is computed again."""
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=4)
    first, second = hand.submit(A, max_tokens=9), hand.submit(B, max_tokens=9)
    hand.run()
    assert hand.preemptions()
    hand.check(first, second)
    hand.expect_empty()


# --- when a name comes to be


def test_a_block_is_named_when_the_step_that_filled_it_is_committed() -> None:
    hand = Hand(settings_of_depth(2))
    hand.join()
    request = hand.submit(A + B, max_tokens=6)
    assert hand.pool().all_names() == [], "planned and sent, but nobody knows that it was computed"
    hand.land()
    assert len(hand.pool().all_names()) == 2
    for _ in range(3):
        hand.land()
        assert len(hand.pool().all_names()) == 2, "positions 8 to 10"
    hand.land()
    assert len(hand.pool().all_names()) == 3, "position 11 filled the third block"
    hand.run()
    hand.check(request)


@pytest.mark.parametrize("num_landed", [0, 1, 2])
def test_cancelled_between_plan_and_commit_leaves_no_name(num_landed: int) -> None:
    """Chunks of 4: after k results exactly k blocks are findable, also for the one who asks next."""
    hand = Hand(settings_of_depth(2, max_step_tokens=4))
    hand.join()
    request = hand.submit(A + B + C, max_tokens=2)
    for _ in range(num_landed):
        hand.land()
    hand.cancel(request)
    assert len(hand.pool().all_names()) == num_landed
    hand.land()  # of a life that is over
    assert len(hand.pool().all_names()) == num_landed
    again = hand.submit(A + B + C, max_tokens=2)
    hand.run()
    assert hand.log.started[again].cached_tokens == 4 * min(num_landed, 2)
    hand.check(again)
    hand.expect_empty()


def test_a_lease_takes_its_names_with_it() -> None:
    hand = Hand()
    hand.join()
    hand.submit(A + B + C, max_tokens=2)
    hand.run()
    assert len(hand.log.names["w"]) == 3
    hand.say(StepFailed(1, 9, "lost"))
    assert hand.log.names["w"] == set()
    hand.join()
    again = hand.submit(A + B + C, max_tokens=2)
    hand.run()
    assert hand.log.started[again].cached_tokens == 0
    hand.check(again)


def test_generated_tokens_are_hit_too() -> None:
    """A second turn of a conversation finds the first one's answer."""
    hand = Hand()
    hand.join()
    first = hand.submit(A + B, max_tokens=9)
    hand.run()
    turn = [*A, *B, *hand.tokens(first), 77]
    second = hand.submit(turn, max_tokens=2)
    hand.run()
    assert hand.log.started[second].cached_tokens == 16, "the newest token of the answer has no KV"
    hand.check(second)


# --- digests


def test_every_field_that_changes_kv_changes_the_digest() -> None:
    parent = b"p" * 32
    base = BlockHasher(b"m" * 32, 4).digest(parent, A, b"salt")
    others = {
        "model": BlockHasher(b"n" * 32, 4).digest(parent, A, b"salt"),
        "block size": BlockHasher(b"m" * 32, 8).digest(parent, A, b"salt"),
        "parent": BlockHasher(b"m" * 32, 4).digest(ROOT, A, b"salt"),
        "a token": BlockHasher(b"m" * 32, 4).digest(parent, (1, 2, 3, 5), b"salt"),
        "order": BlockHasher(b"m" * 32, 4).digest(parent, (1, 2, 4, 3), b"salt"),
        "fewer tokens": BlockHasher(b"m" * 32, 4).digest(parent, (1, 2, 3), b"salt"),
        "salt": BlockHasher(b"m" * 32, 4).digest(parent, A, b"tlas"),
        "no salt": BlockHasher(b"m" * 32, 4).digest(parent, A, b""),
    }
    assert base not in others.values()
    assert len(set(others.values())) == len(others)
    assert len(base) == 32


def test_no_two_inputs_encode_alike() -> None:
    """Parts of variable length carry their length: moving a border moves the digest."""
    hasher = BlockHasher(b"m" * 32, 4)
    four = (0x61626364,)  # 'dcba' as bytes
    assert hasher.digest(ROOT, four, b"") != hasher.digest(ROOT, (), b"dcba")
    assert hasher.digest(ROOT, four, b"abcd") != hasher.digest(ROOT, (*four, *four), b"")
    assert hasher.digest(ROOT, A, b"a") != hasher.digest(ROOT, A, b"a\0")
    assert BlockHasher(b"ab", 4).digest(b"c" * 32, A) != BlockHasher(b"abc", 4).digest(b"c" * 31, A)
    assert BlockHasher(b"a", 4).digest(b"bc", A) != BlockHasher(b"ab", 4).digest(b"c", A)


def test_digests_are_equal_in_every_process() -> None:
    script = (
        "from kilburn.shared.digest import ROOT, BlockHasher\n"
        "h = BlockHasher(b'm' * 32, 4)\n"
        "print(h.digest(h.digest(ROOT, (1, 2, 3, 4), b's'), (5, 6, 7, 2**31 - 1)).hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("0", "4242")
    }
    hasher = BlockHasher(b"m" * 32, 4)
    here = hasher.digest(hasher.digest(ROOT, A, b"s"), (5, 6, 7, 2**31 - 1)).hex()
    assert said == {here}


def test_the_digest_is_what_the_page_says() -> None:
    """Spelled out by hand, so that another implementation can be checked against it."""

    def le32(number: int) -> bytes:
        return bytes([number & 255, number >> 8 & 255, number >> 16 & 255, number >> 24 & 255])

    tokens = b"".join(map(le32, A))
    text = b"kilburn.block.1\0" + le32(4) + le32(32) + b"m" * 32 + le32(2) + le32(16) + b"p" * 32 + b"xy" + tokens
    assert BlockHasher(b"m" * 32, 4).digest(b"p" * 32, A, b"xy") == sha256(text).digest()
