"""The figures of the PagedAttention paper (Kwon et al., SOSP 2023), with its own block numbers.

    block size 4; physical blocks are handed out in the order 7, 1, 3 (one request) or 7, 1, 5, 2, 3 (two)

    Fig. 5/6   Four score and seven | years ago our           7 (filled 4), 1 (filled 3)
               ... fathers                                    1 (filled 4)
               ... brought                                    3 (filled 1)

`filled` counts what the worker has written: a token's KV exists once the step that reads the token has run.
"""

from kilburn.controller.core.block_pool import BlockPool
from kilburn.controller.core.events import Tick
from kilburn.shared.sampling import Draws
from tests.core.driver import Hand, rows_of, settings_of_depth
from tests.core.worker import Choose, Worker, draw

TEXTS = ("Four score and seven years ago our fathers brought forth", "It was the best of times that mothers")
WORDS = [word for text in TEXTS for word in text.split()]
ID_OF = {word: i + 1 for i, word in enumerate(WORDS)}


def ids(text: str) -> tuple[int, ...]:
    return tuple(ID_OF[word] for word in text.split())


FOUR_SCORE = ids("Four score and seven years ago our")
BEST_OF_TIMES = ids("It was the best of times")


def saying(*continuations: tuple[tuple[int, ...], str]) -> Choose:
    """What the model says after each prompt; further streams take the words from there on."""

    def choose(text: tuple[int, ...], stream: int) -> int:
        for prompt, words in continuations:
            at = len(text) - len(prompt)
            if text[: len(prompt)] == prompt and at + stream < len(ids(words)):
                return ids(words)[at + stream]
        return draw(text, stream)

    return choose


def fills(worker: Worker, blocks: list[int]) -> list[int]:
    return [worker.filled(block) for block in blocks]


def test_figures_5_and_6_one_request() -> None:
    hand = Hand(
        settings_of_depth(1), order=[7, 1, 3, 0, 2, 4, 5, 6], choose=saying((FOUR_SCORE, "fathers brought forth"))
    )
    hand.join(num_blocks=8)
    request = hand.submit(FOUR_SCORE, max_tokens=3)

    first = hand.last_plan()
    assert hand.table(request) == [7, 1]
    assert first.admits[0].blocks == (7, 1)
    assert first.counts == [7]
    hand.land()
    assert fills(hand.worker(), [7, 1]) == [4, 3]
    assert hand.tokens(request) == list(ids("fathers"))

    assert hand.table(request) == [7, 1], "fathers has a slot in block 1"
    assert hand.last_plan().grown_blocks == []
    hand.land()
    assert fills(hand.worker(), [7, 1]) == [4, 4]
    assert hand.tokens(request) == list(ids("fathers brought"))

    assert hand.table(request) == [7, 1, 3], "block 1 is full, so brought takes a new one"
    assert hand.last_plan().grown_blocks == [3]
    hand.land()
    assert fills(hand.worker(), [7, 1, 3]) == [4, 4, 1]
    assert hand.tokens(request) == list(ids("fathers brought forth"))
    hand.check(request)
    hand.expect_empty()


def test_figure_7_two_requests_side_by_side() -> None:
    said = saying((FOUR_SCORE, "fathers brought forth"), (BEST_OF_TIMES, "that was the"))
    hand = Hand(settings_of_depth(1), order=[7, 1, 5, 2, 3, 0, 4, 6], choose=said)
    hand.join(num_blocks=8)
    a, b = hand.new_submit(FOUR_SCORE, max_tokens=3), hand.new_submit(BEST_OF_TIMES, max_tokens=3)
    hand.handle(a, b)
    hand.land()
    assert (hand.table(1), hand.table(2)) == ([7, 1], [5, 2])
    assert fills(hand.worker(), [7, 1, 5, 2]) == [4, 3, 4, 2]

    hand.land()
    assert (hand.table(1), hand.table(2)) == ([7, 1, 3], [5, 2])
    assert fills(hand.worker(), [7, 1, 5, 2]) == [4, 4, 4, 3]

    hand.land()
    assert fills(hand.worker(), [7, 1, 3, 5, 2]) == [4, 4, 1, 4, 4]
    hand.check(1, 2)
    hand.expect_empty()


def test_figure_8_two_samples_share_and_part() -> None:
    """A1 says fathers and A2 mothers: block 1 is copied to 3 for A1, and A2 then writes it in place."""

    def choose(text: tuple[int, ...], stream: int) -> int:
        return ID_OF["mothers" if stream else "fathers"] if text == FOUR_SCORE else draw(text, stream)

    hand = Hand(settings_of_depth(1), order=[7, 1, 3, 0, 2, 4, 5, 6], choose=choose)
    hand.join(num_blocks=8)
    request = hand.submit(FOUR_SCORE, max_tokens=3, n=2)
    prefill = hand.last_plan()
    assert prefill.counts == [7]
    assert prefill.admits[0].sampling.choose == Draws(0, 2)
    pool: BlockPool = hand.pool()

    hand.land()
    # The fork gave both tables blocks 7 and 1, with two references each; the plan of the same turn parted them.
    plan = hand.last_plan()
    assert plan.copies == [(1, 3)], "the first to write copies; for the second the block is then its own"
    parent, child = plan.admits
    assert (parent.blocks, child.blocks) == ((7, 3), (7, 1))
    assert (parent.tokens, child.tokens) == (ids("fathers"), ids("mothers"))
    assert (parent.start, child.start) == (7, 7)
    assert (parent.num_prompt, child.num_prompt) == (7, 7)
    assert [admit.sampling.choose for admit in plan.admits] == [Draws(0, 1), Draws(1, 1)]
    assert rows_of(plan) == {parent.row: 1, child.row: 1}
    assert (hand.table(request, 0), hand.table(request, 1)) == ([7, 3], [7, 1])
    assert [pool.refs(block) for block in (7, 1, 3)] == [2, 1, 1]

    hand.land()
    assert fills(hand.worker(), [7, 1, 3]) == [4, 4, 4]
    hand.run()
    hand.check(request)
    hand.expect_empty()


def test_figure_8_both_tables_hold_both_blocks_until_somebody_writes() -> None:
    """As above, with the moment between fork and plan made visible: in that turn there is no budget for a plan."""
    hand = Hand(settings_of_depth(1), order=[7, 1, 3, 0, 2, 4, 5, 6])
    hand.join(num_blocks=8)
    request = hand.submit(FOUR_SCORE, max_tokens=3, n=2)
    hand.scheduler().max_step_tokens = 0
    hand.land()
    assert (hand.table(request, 0), hand.table(request, 1)) == ([7, 1], [7, 1])
    assert [hand.pool().refs(block) for block in (7, 1)] == [2, 2]
    assert hand.snapshot().owned_blocks == 2
    assert hand.snapshot().shared_refs == 2
    hand.scheduler().max_step_tokens = 64
    hand.handle(Tick())
    assert (hand.table(request, 0), hand.table(request, 1)) == ([7, 3], [7, 1])
    hand.run()
    hand.check(request)
    hand.expect_empty()
