"""Rows: what a plan may say, where tokens go, and what a life and a death are. Through the executor, by hand."""

import random
from dataclasses import replace

import pytest
import torch

from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import Admit
from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.shared.types import Tier
from kilburn.worker.outcomes import Failed, Lost, PlanBroken
from tests.worker.toy import MAX_LEN, VOCAB, Hand, ToyModel, admit, oracle, toy_executor

GREEDY = Sampling(temperature=0.0)


def world(**sizes: int) -> tuple[ToyModel, Hand]:
    model = ToyModel()
    return model, Hand(toy_executor(model, **sizes))


def test_prefill_chunk_and_decode_are_one_sentence() -> None:
    model, hand = world()
    prompt = [5, 9, 60, 0, 33, 2, 17]
    result = hand.run({2: 3}, (admit(2, prompt, [9, 4, 30], GREEDY),))
    assert (result.num_tokens, result.tokens) == ([0], [])
    result = hand.run({2: 4})
    tokens = result.tokens
    for _ in range(4):
        tokens = tokens + hand.run({2: 1}).tokens
    assert tokens == oracle(model, prompt, GREEDY, 5)


def test_an_admit_without_an_advance_runs_nothing() -> None:
    _, hand = world()
    result = hand.run({}, (admit(0, [1, 2], [3], GREEDY),))
    assert (result.num_tokens, result.tokens, result.failed) == ([], [], {})
    assert torch.isnan(hand.executor.runner.cache.pool).all()


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_step_writes_its_own_slots_and_no_others(block_size: int) -> None:
    """Canaries everywhere: after each step exactly the slots of the computed positions have changed."""
    _, hand = world(block_size=block_size, num_blocks=40)
    rng = random.Random(block_size)
    pool = hand.executor.runner.cache.pool
    blocks, held = rng.sample(range(40), 40), blocks_for(12, block_size)
    tables = {0: blocks[:held], 3: blocks[held : 2 * held]}
    prompts = {row: [rng.randrange(VOCAB) for _ in range(11)] for row in tables}
    admits = tuple(admit(row, prompts[row], table, GREEDY) for row, table in tables.items())
    computed = {0: 0, 3: 0}
    for counts in ({0: 4, 3: 1}, {0: 7}, {3: 10}, {3: 1, 0: 1}):
        before = pool.clone()
        hand.run(counts, admits)
        admits = ()
        changed = (pool != before) & ~(torch.isnan(pool) & torch.isnan(before))
        expected = torch.zeros_like(changed)
        for row, count in counts.items():
            for position in range(computed[row], computed[row] + count):
                expected[tables[row][position // block_size], :, :, :, position % block_size] = True
            computed[row] += count
        assert torch.equal(changed, expected)


# --- lives


def test_a_row_admitted_anew_goes_on_from_what_its_blocks_hold() -> None:
    """As after a preemption by swap, or a beam: the same blocks, the newest token named by the core."""
    model, hand = world()
    prompt, sampling = [7, 8, 9, 10, 11], Sampling(seed=5, repetition_penalty=1.3, presence_penalty=0.4)
    expected = oracle(model, prompt, sampling, 6)
    tokens = hand.run({1: 5}, (admit(1, prompt, [0, 1, 2], sampling),)).tokens
    tokens += hand.run({1: 1}).tokens
    again = admit(6, prompt + tokens, [0, 1, 2], sampling, start=6, num_prompt=5)
    tokens += hand.run({6: 1}, (again,)).tokens
    from_nothing = admit(1, prompt + tokens, [40, 41, 42], sampling, num_prompt=5)
    tokens += hand.run({1: 8}, (from_nothing,)).tokens
    tokens += hand.run({1: 1}).tokens + hand.run({1: 1}).tokens
    assert tokens == expected


@pytest.mark.parametrize("prompt_length", [4, 6, 8])  # a full last block, a partial one
def test_a_fork_shares_blocks_and_copies_the_one_that_it_writes(prompt_length: int) -> None:
    model, hand = world()
    prompt, n = list(range(10, 10 + prompt_length)), 3
    base = Sampling(temperature=1.5, seed=8, frequency_penalty=0.5)
    shared = list(range(blocks_for(prompt_length, 4)))
    first = hand.run({0: prompt_length}, (admit(0, prompt, shared, with_draws(base, 0, n)),))
    assert first.num_tokens == [n]
    partial = prompt_length % 4 != 0
    tables, copies, spare = [], [], iter(range(20, 60))
    for child in range(n):
        table = list(shared)
        if partial and child:
            table[-1] = next(spare)
            copies.append((shared[-1], table[-1]))
        tables.append(table + [next(spare) for _ in range(3)])
    admits = tuple(
        admit(child, [*prompt, first.tokens[child]], tables[child], with_draws(base, child, 1), start=prompt_length,
              num_prompt=prompt_length)
        for child in range(n)
    )  # fmt: skip
    outputs = [[token] for token in first.tokens]
    for step in range(7):
        result = hand.run(dict.fromkeys(range(n), 1), admits if step == 0 else (), copies=copies if step == 0 else [])
        for output, token in zip(outputs, result.tokens, strict=True):
            output.append(token)
    assert outputs == [oracle(model, prompt, base, 8, stream=stream) for stream in range(n)]
    assert len({tuple(output) for output in outputs}) > 1


def with_draws(base: Sampling, first: int, count: int) -> Sampling:
    return replace(base, choose=Draws(first, count))


def test_candidates_come_best_first_and_the_core_chooses() -> None:
    """Two steps of one beam: the row is told which candidate it became."""
    model, hand = world()
    prompt, sampling = [3, 1, 4, 1, 5], Sampling(choose=Candidates(4))
    result = hand.run({0: 5}, (admit(0, prompt, [1, 2], sampling),))
    logprobs = torch.log_softmax(model.dense(prompt)[-1].double(), 0)
    assert result.num_tokens == [4]
    assert result.tokens == logprobs.topk(4).indices.tolist()
    assert result.logprobs[0].logprobs == pytest.approx(logprobs.topk(4).values.tolist(), abs=1e-4)
    chosen = [*prompt, result.tokens[2]]
    result = hand.run({0: 1}, (admit(0, chosen, [1, 2], sampling, start=5, num_prompt=5),))
    assert result.tokens == model.dense(chosen)[-1].topk(4).indices.tolist()


@pytest.mark.parametrize("choose", [Draws(0, 2), Candidates(2)])
def test_a_row_that_returned_its_draws_waits_for_its_next_admit(choose: Draws | Candidates) -> None:
    _, hand = world()
    hand.run({0: 2}, (admit(0, [1, 2], [1], Sampling(choose=choose)),))
    with pytest.raises(PlanBroken, match="awaits an Admit"):
        hand.run({0: 1})


def test_logits_made_in_turns_are_reported_in_the_plans_order() -> None:
    model, hand = world()
    hand.executor.runner.rows_at_once = 2
    sampling = Sampling(temperature=0.0, logprobs=1)
    prompts = {row: [row, 7, row + 30] for row in (4, 1, 0, 6, 2)}
    result = hand.run(dict.fromkeys(prompts, 3), tuple(admit(row, prompts[row], [row], sampling) for row in prompts))
    assert [report.index for report in result.logprobs] == [0, 1, 2, 3, 4]
    for report, prompt in zip(result.logprobs, prompts.values(), strict=True):
        logprobs = torch.log_softmax(model.dense(prompt)[-1].double(), 0)
        best = int(logprobs.argmax())
        assert report.ids == (best, best)
        assert report.logprobs == pytest.approx((float(logprobs[best]),) * 2, abs=1e-4)


# --- plans that cannot be


def advance(rows: dict[int, int], **columns: list):
    return lambda hand: hand.run(rows, **columns)


def admitted(**changes: object):
    return lambda hand: hand.run({}, (replace(Admit(1, 0, 2, (1, 2), (), (1,), GREEDY), **changes),))


PENALISED = Sampling(presence_penalty=1.0)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (advance({5: 1}), "row 5, which was never admitted"),
        (advance({8: 1}), "there are 8"),
        (advance({0: 4}), "beyond its 3 known tokens"),
        (advance({7: 9}), "its 2 blocks end before"),
        (advance({0: 1}, grown_at=[0], grown_blocks=[64]), "the pool has 64"),
        (advance({7: 60, 6: 80}), "max_step_tokens is 128"),
        (advance({}, copies=[(0, 64)]), "copy 0 -> 64"),
        (advance({}, swaps_out=[(0, 32)]), "swap out 0 -> 32"),
        (advance({}, swaps_in=[(32, 0)]), "swap in 32 -> 0"),
        (admitted(row=8), "there are 8 rows"),
        (admitted(tokens=()), "no tokens"),
        (admitted(tokens=(1,) * (MAX_LEN + 1)), f"max_len is {MAX_LEN}"),
        (admitted(blocks=(64,)), "the pool has 64"),
        (admitted(blocks=(0,) * 25), "max_len fills 24"),
        (admitted(start=5), "1 blocks do not hold them"),
        (admitted(start=2, sampling=PENALISED, history=(1,)), "need 2 tokens of history, 1 came"),
    ],
)
def test_a_plan_that_breaks_the_contract_is_named(act, words: str) -> None:
    _, hand = world()
    short, homeless = admit(0, [1, 2, 3], [1], GREEDY), admit(7, [1] * 90, [2, 3], GREEDY)
    hand.run({}, (short, homeless, admit(6, [1] * 90, list(range(4, 27)), GREEDY)))
    with pytest.raises(PlanBroken, match=words):
        act(hand)


def test_two_advances_of_one_row_in_one_plan_are_refused() -> None:
    _, hand = world()
    hand.run({}, (admit(0, [1, 2, 3], [1], GREEDY),))
    with pytest.raises(PlanBroken, match="two Advances of row 0"):
        hand.executor.rows.advance([0, 0], [1, 1], [], [])


def test_the_end_of_a_lease_leaves_no_row() -> None:
    _, hand = world()
    hand.run({0: 3}, (admit(0, [1, 2, 3], [1, 2], PENALISED),))
    hand.executor.clear()
    with pytest.raises(PlanBroken, match="never admitted"):
        hand.run({0: 1})


# --- deaths


@pytest.mark.parametrize("where", ["hidden", "logits", "a chunk"])
def test_a_poisoned_row_fails_alone_and_stays_dead(where: str) -> None:
    model, hand = world()
    hand.executor.runner.rows_at_once = 1  # a turn for each, so that places in a turn are not places in the plan
    bad_prompt = [1, 2, 44, 3] if where == "a chunk" else [1, 2, 3, 44]
    if where == "logits":
        model.poisoned_logits = 44
    else:
        model.poison = 44
    good = {row: [row + 20, row + 7, 5, 9] for row in (0, 2, 3)}
    admits = tuple(admit(row, tokens, [4 * row, 4 * row + 1, 4 * row + 2], GREEDY) for row, tokens in good.items())
    bad = admit(1, bad_prompt, [4, 5], GREEDY)
    result = hand.run({0: 4, 1: 3 if where == "a chunk" else 4, 2: 4, 3: 4}, (*admits, bad))
    assert list(result.failed) == [1]
    assert "not finite" in result.failed[1]
    assert result.num_tokens == [1, 0, 1, 1]
    outputs = {row: [token] for row, token in zip(good, result.tokens, strict=True)}
    for _ in range(5):
        pool = hand.executor.runner.cache.pool.clone()
        result = hand.run({1: 1, 0: 1, 2: 1, 3: 1}, grown_at=[0], grown_blocks=[60])
        assert list(result.failed) == [0]
        assert result.num_tokens == [0, 1, 1, 1]
        for output, token in zip(outputs.values(), result.tokens, strict=True):
            output.append(token)
        for block in (4, 5, 60):  # the dead write nothing
            assert torch.equal(hand.executor.runner.cache.pool[block].nan_to_num(0.5), pool[block].nan_to_num(0.5))
    model.poison = model.poisoned_logits = None
    for row, tokens in good.items():
        assert outputs[row] == oracle(model, tokens, GREEDY, 6)
    revived = hand.run({1: 4, 0: 1}, (admit(1, [8, 8, 8, 8], [4, 5], GREEDY),))
    assert revived.tokens[0] == oracle(model, [8, 8, 8, 8], GREEDY, 1)[0]
    assert not revived.failed


def test_lost_blocks_are_told_until_the_next_admit() -> None:
    _, hand = world()
    hand.run({0: 2, 1: 2}, (admit(0, [1, 2], [1], GREEDY), admit(1, [3, 4], [2], GREEDY)))
    hand.executor.rows.kill(1, Lost(((Tier.HOST, 9), (Tier.DEVICE, 2)), step=1))
    hand.executor.rows.kill(1, Failed("a second death changes nothing"))
    for _ in range(2):
        result = hand.run({0: 1, 1: 1})
        told = [(lost.index, lost.tier, lost.block, lost.step) for lost in result.lost]
        assert told == [(1, Tier.HOST, 9, 1), (1, Tier.DEVICE, 2, 1)]
        assert (result.num_tokens, result.failed) == ([1, 0], {})
    assert hand.run({1: 2}, (admit(1, [3, 4], [2], GREEDY),)).lost == ()


def test_a_plan_of_the_dead_only() -> None:
    _, hand = world()
    hand.run({0: 2}, (admit(0, [1, VOCAB], [1], GREEDY),))
    assert hand.run({0: 1}).failed == {0: f"token {VOCAB} is beyond the vocabulary of {VOCAB}"}


@pytest.mark.parametrize(
    "sampling",
    [Sampling(logit_bias=((VOCAB, 1.0),)), Sampling(repetition_penalty=-1.0), Sampling(choose=Candidates(VOCAB + 1))],
)
def test_a_request_that_cannot_be_met_is_its_own_misfortune(sampling: Sampling) -> None:
    model, hand = world()
    result = hand.run({0: 2, 1: 3}, (admit(0, [1, 2], [1], sampling), admit(1, [3, 4, 5], [2], GREEDY)))
    assert list(result.failed) == [0]
    assert result.tokens == oracle(model, [3, 4, 5], GREEDY, 1)


def test_a_plan_that_only_moves_has_an_empty_result_and_its_moves_are_timed() -> None:
    """A preempted group leaves, and nobody can advance before its blocks are free; or the last row to advance ended."""
    _, hand = world()
    hand.run({0: 3}, (admit(0, [1, 2, 3], [1], GREEDY),))
    result = hand.run({}, swaps_out=[(1, 4)])
    assert (result.num_tokens, result.tokens, result.failed, result.lost) == ([], [], {}, ())
    assert 0.0 < result.timings.moves_s <= result.timings.apply_s
    hand.run({}, swaps_in=[(4, 2)])
    pool, host = hand.executor.runner.cache.pool, hand.executor.runner.cache.host_pool
    assert pool[2, :, :, :, :3].equal(pool[1, :, :, :, :3])
    assert host[4, :, :, :, :3].equal(pool[1, :, :, :, :3])
