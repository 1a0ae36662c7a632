"""Beam search: its rules against brute force, and its memory: Figure 9 of the PagedAttention paper.

Fig. 9    0 - 1 - 3 - 5     beam 0        the next four all follow beams 1 and 2:
               |    - 6     beam 1        blocks 2, 4, 5 and 8 are given back in that commit,
               |    - 7     beam 2        and 9 to 12 are taken for the new tokens
            - 2 - 4 - 8     beam 3
"""

from itertools import product

import pytest

from kilburn.controller.core.beam import BeamSearch
from kilburn.controller.core.events import BeamSettings, EarlyStopping, Left
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.sequence import State
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.simulate.beams import Search, search
from kilburn.controller.simulate.oracle import candidates, chain_of
from kilburn.shared.messages import KvLost
from kilburn.shared.sampling import Candidates
from kilburn.shared.types import Tier
from tests.core.driver import Hand, settings_of_depth
from tests.core.worker import VOCAB_SIZE

# --- the rules


def searched(
    prompt: list[int], stop_ids: frozenset[int], max_tokens: int, settings: BeamSettings, vocab: int
) -> Search:
    """The core's search by itself, fed by the oracle."""
    core = BeamSearch(settings, stop_ids, max_tokens)
    beams: list[list[int]] = [[]]
    levels = [[()]]
    while beams:
        found = [candidates(chain_of([*prompt, *beam]), core.num_candidates, vocab) for beam in beams]
        beams = [[*beams[c.parent], c.token] for c in core.step(found, beams)]
        levels.append([tuple(beam) for beam in beams])
    return Search(core.kept, levels[:-1])  # type: ignore[arg-type]


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_the_search_is_that_of_brute_force(early_stopping: EarlyStopping, length_penalty: float) -> None:
    num_early = 0
    for seed, width, stop_ids in product(range(12), (1, 2, 3, 4, 6), ((), (0,), (1, 2))):
        settings = BeamSettings(width, length_penalty, early_stopping)
        prompt, max_tokens = [seed % 20, seed // 3], 1 + seed
        due = search(prompt, stop_ids, max_tokens, settings, 20)
        core = searched(prompt, frozenset(stop_ids), max_tokens, settings, 20)
        told = [(one.tokens, one.cumulative, one.score, one.reason) for one in core.outcomes]
        assert told == [(one.tokens, one.cumulative, one.score, one.reason) for one in due.outcomes]
        assert core.levels == due.levels
        num_early += len(core.levels) < max_tokens
    assert num_early > 0, "some searches were over before their limit"


def test_the_modes_differ() -> None:
    """Otherwise the test above would show nothing of them."""
    ends = set()
    for early_stopping in EarlyStopping:
        settings = BeamSettings(3, 2.0, early_stopping)
        ends.add(tuple(len(search([seed], (0, 1), 20, settings, 9).levels) for seed in range(30)))
    assert len(ends) == 3


# --- the memory


FIGURE_9 = {
    (0,): {1: -1.0, 2: -1.1, 3: -5.0, 4: -6.0},
    (0, 1): {3: -1.0},
    (0, 2): {4: -1.0},
    (0, 3): {9: -1.0},
    (0, 4): {9: -1.0},
    (0, 1, 3): {5: -0.1, 6: -0.2, 7: -0.3},
    (0, 2, 4): {8: -0.5},
    (0, 1, 3, 6): {9: -0.1, 10: -0.2},
    (0, 1, 3, 7): {11: -0.15, 12: -0.2},
}


def as_in_figure_9(text: tuple[int, ...], count: int) -> list[tuple[int, float]]:
    liked = list(FIGURE_9.get(text, {}).items())
    others = [(100 + i, -50.0 - i) for i in range(count)]
    return (liked + others)[:count]


def test_figure_9_dropped_beams_give_their_blocks_back_in_the_same_commit() -> None:
    """Blocks of one token; those of the two beams that the figure does not show are 20 to 23."""
    hand = Hand(settings_of_depth(1), order=[0, 1, 2, 20, 21, 3, 4, 22, 23, 5, 6, 7, 8, *range(9, 20)])
    hand.join(num_blocks=24, block_size=1)
    hand.worker().likely = as_in_figure_9
    request = hand.submit((0,), max_tokens=6, n=4, beams=BeamSettings(4))
    for _ in range(3):
        hand.land()
    assert [hand.table(request, i) for i in range(4)] == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    pool, owned = hand.pool(), {0, 1, 2, 3, 4, 5, 6, 7, 8}
    assert {block for block in range(24) if pool.refs(block)} == owned
    assert (pool.refs(0), pool.refs(1), pool.refs(3)) == (4, 3, 3)

    agreement = hand.home().agreement
    agreement.hear(0, hand.worker().run_next())
    hand.scheduler().commit(agreement.settle(), hand.now, [])  # and nothing is planned yet
    assert [hand.table(request, i) for i in range(4)] == [[0, 1, 3, 6], [0, 1, 3, 6], [0, 1, 3, 7], [0, 1, 3, 7]]
    assert {block for block in range(24) if pool.refs(block)} == owned - {2, 4, 5, 8}
    assert [pool.refs(block) for block in (0, 1, 3, 6, 7)] == [4, 4, 4, 2, 2]

    hand.handle()
    assert [hand.table(request, i)[-1] for i in range(4)] == [9, 10, 11, 12]
    assert not hand.last_plan().copies, "full blocks are shared, and nothing is copied"
    tails = [hand.sequence(request, i).tokens[-2:] for i in range(4)]
    assert tails == [[6, 9], [6, 10], [7, 11], [7, 12]]
    hand.run()
    hand.expect_empty()


def check_beams(hand: Hand, request: int) -> None:
    submit = hand.submits[request]
    assert submit.beams is not None
    due = search(submit.prompt, submit.sampling.stop_ids, submit.max_tokens, submit.beams, VOCAB_SIZE)
    told = [(one.index, one.tokens, one.score, one.reason) for one in hand.log.beams[request]]
    assert told == [(i, one.tokens, one.score, one.reason) for i, one in enumerate(due.outcomes[: submit.n])]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_prompt", [3, 4, 6])
def test_only_the_partial_block_is_copied(depth: int, num_prompt: int) -> None:
    """At the fork of 3 beams the last one writes where the block is; later steps copy for whoever shares a parent."""
    hand = Hand(settings_of_depth(depth))
    hand.join(num_blocks=30)
    request = hand.submit(range(num_prompt), max_tokens=7, n=3, beams=BeamSettings(3))
    hand.land()
    assert len(hand.last_plan().copies) == (0 if num_prompt == 4 else 2)
    assert {admit.start for admit in hand.last_plan().admits} == {num_prompt}
    hand.run()
    check_beams(hand, request)
    hand.expect_empty()


def test_beams_advance_together_or_not_at_all() -> None:
    """A budget of 4: three beams wait for each other beside two requests that leave them too little."""
    hand = Hand(settings_of_depth(1, max_step_tokens=4))
    hand.join()
    hand.submit((7,), max_tokens=4)
    hand.submit((8,), max_tokens=4)
    request = hand.submit((9,), max_tokens=5, n=2, beams=BeamSettings(3))
    hand.run()
    forked = [[a for a in plan.admits if isinstance(a.sampling.choose, Candidates)] for plan in hand.worker().seen]
    assert [len(admits) for admits in forked if admits] == [1, 3, 3, 3, 3]
    assert any(len(plan.rows) < 3 and not admits for plan, admits in zip(hand.worker().seen, forked, strict=True))
    check_beams(hand, request)
    hand.check(1, 2)
    hand.expect_empty()


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
@pytest.mark.parametrize("num_blocks", [10, 12, 14])
def test_beams_are_preempted_and_come_back_whole(preemption: Preemption, num_blocks: int) -> None:
    hand = Hand(EngineSettings(depth=2, preemption=preemption))
    hand.join(num_blocks=num_blocks, num_host_blocks=20)
    hand.submit(range(20, 27), max_tokens=18)
    request = hand.submit(range(5), max_tokens=9, n=3, beams=BeamSettings(3, early_stopping=EarlyStopping.NEVER))
    while hand.worker().plans:
        hand.land()
        if request in hand.engine.requests.groups:
            states = {sequence.state for sequence in hand.group(request).live}
            assert len(states) == 1, "all of a group, or nothing"
    notes = [note.text for note in hand.log.notes if note.text.startswith(f"request {request}, by")]
    ways = {text.split(":")[0] for text in notes}
    assert ways <= {f"request {request}, by {preemption.value}"}
    hand.check(1)
    check_beams(hand, request)
    hand.expect_empty()
    assert num_blocks > 12 or ways, "the pool is small enough to preempt"


def test_a_row_that_lost_its_block_in_the_middle_of_a_step_of_beams() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=30)
    request = hand.submit(range(5), max_tokens=6, n=2, beams=BeamSettings(3))
    hand.land()
    hand.land()
    result = hand.worker().run_next()
    result.num_tokens[2], result.tokens = 0, result.tokens[:-6]
    result.logprobs = result.logprobs[:2]
    result.lost = (KvLost(2, Tier.DEVICE, hand.table(request, 2)[-1], result.step),)
    hand.say(result)
    hand.run()
    check_beams(hand, request)
    hand.expect_empty()


def test_beams_outlive_their_worker() -> None:
    hand = Hand(settings_of_depth(2))
    hand.join(num_blocks=30)
    request = hand.submit(range(5), max_tokens=8, n=3, beams=BeamSettings(4))
    for _ in range(4):
        hand.land()
    before = [list(sequence.tokens) for sequence in hand.group(request).live]
    hand.handle(Left(b"w-1", "died"))
    assert [list(sequence.tokens) for sequence in hand.group(request).live] == before
    hand.join(num_blocks=30)
    hand.run()
    check_beams(hand, request)
    hand.expect_empty()


def test_stop_is_nothing_to_beams_and_cancel_ends_them() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join()
    request = hand.submit(range(5), max_tokens=8, n=2, beams=BeamSettings(2))
    hand.land()
    assert not hand.stop(request, 0)
    assert [sequence.state for sequence in hand.group(request).live] == [State.RUNNING] * 2
    hand.cancel(request)
    hand.run()
    assert request not in hand.log.beams
    hand.expect_empty()
