"""The fake worker answers as the oracle does, and refuses what the contract forbids: a table of broken plans."""

from dataclasses import replace

import pytest

from kilburn.controller.simulate.cells import CellPool
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.controller.simulate.oracle import chain_of, finish, next_token
from kilburn.controller.simulate.plan_rules import ContractBroken, Limits
from kilburn.shared.messages import Admit, StepPlan, StepResult
from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.shared.types import FinishReason, Tier

VOCAB = 50
LIMITS = Limits(block_size=4, num_blocks=8, num_host_blocks=4, max_rows=4, max_step_tokens=16, max_len=32)
PROMPT = (11, 12, 13, 14, 15)
SEEDED = Sampling(seed=3)


def admit(row=0, start=0, tokens=PROMPT, blocks=(0, 1), num_prompt=5, history=(), sampling=SEEDED) -> Admit:
    return Admit(row, start, num_prompt, tuple(tokens), tuple(history), tuple(blocks), sampling)


def plan(step: int, rows=(), counts=(), grown=(), **more) -> StepPlan:
    """`grown`: (advance, block) pairs."""
    at, blocks = [a for a, _ in grown], [b for _, b in grown]
    return StepPlan(1, step, list(rows), list(counts), at, blocks, **more)


def worker(*plans: StepPlan, limits: Limits = LIMITS) -> FakeWorker:
    fake = FakeWorker(1, limits, VOCAB)
    for one in plans:
        fake.run(one)
    return fake


FIRST = plan(1, [0], [5], admits=[admit()])  # the whole prompt of row 0, in blocks 0 and 1
SECOND_ROW = admit(row=1, tokens=(21, 22, 23, 24, 25), blocks=(2, 3))
HISTORY = Sampling(seed=3, presence_penalty=1.0)

BROKEN = {
    "a step twice": ([FIRST], FIRST),
    "a step left out": ([FIRST], plan(3, [0], [1])),
    "another lease": ([FIRST], replace(plan(2, [0], [1]), lease=2)),
    "a row without a life": ([FIRST], plan(2, [1], [1])),
    "a row twice": ([FIRST], plan(2, [0, 0], [1, 1])),
    "a row beyond the batch": ([], plan(1, [4], [5], admits=[admit(row=4)])),
    "an advance by nothing": ([FIRST], plan(2, [0], [0])),
    "more positions than a step may have": ([], plan(1, [0], [17], admits=[admit(tokens=range(20), blocks=range(5))])),
    "past the last known token": ([FIRST], plan(2, [0], [2])),
    "a start beyond what is computed": ([], plan(1, [0], [6], admits=[admit(start=5, tokens=(9,))])),
    "a table too short": ([plan(1, [0], [4], admits=[admit(blocks=(0,))])], plan(2, [0], [1])),
    "a block beyond the pool": ([], plan(1, [0], [5], admits=[admit(blocks=(0, 8))])),
    "a grown block beyond the pool": ([plan(1, [0], [4], admits=[admit(blocks=(0,))])], plan(2, [0], [1], [(0, 9)])),
    "a block twice in a table": ([], plan(1, [0], [5], admits=[admit(blocks=(0, 0))])),
    "a block grown twice": ([FIRST], plan(2, [0], [1], [(0, 1)])),
    "growth for no advance": ([FIRST], plan(2, [0], [1], [(1, 2)])),
    "a start that nobody computed": ([], plan(1, [0], [1], admits=[admit(start=4, tokens=(15,))])),
    "a start on another prefix": (
        [FIRST],
        plan(2, [1], [1], admits=[admit(row=1, start=4, tokens=(9,), blocks=(1, 2))]),
    ),
    "no token to compute": ([FIRST], plan(2, [1], [1], admits=[admit(row=1, start=4, tokens=(), blocks=(0,))])),
    "half a prompt": ([], plan(1, [0], [3], admits=[admit(tokens=PROMPT[:3], blocks=(0,))])),
    "a sequence longer than any": ([], plan(1, [0], [1], admits=[admit(tokens=range(33), blocks=range(8))])),
    "a token beyond the vocabulary": ([], plan(1, [0], [1], admits=[admit(tokens=(1, 2, 3, 4, VOCAB))])),
    "history left out": ([FIRST], plan(2, [1], [1], admits=[admit(1, 4, (15,), (0, 2), sampling=HISTORY)])),
    "history that nobody asked for": (
        [FIRST],
        plan(2, [1], [1], admits=[admit(1, 4, (15,), (0, 2), history=PROMPT[:4])]),
    ),
    "wrong history": ([FIRST], plan(2, [1], [1], admits=[admit(1, 4, (15,), (0, 2), 5, (11, 12, 13, 9), HISTORY)])),
    "a row admitted twice": ([], plan(1, [0], [5], admits=[admit(), admit(blocks=(2, 3))])),
    "two rows write one block": (
        [],
        plan(1, [0, 1], [5, 5], admits=[admit(), admit(row=1, blocks=(2, 1))]),
    ),
    "one row reads what another writes": (
        [FIRST],
        plan(2, [0, 1], [1, 1], admits=[admit(row=1, start=4, tokens=(15,), blocks=(0, 1))]),
    ),
    "a block reused while its row goes on": (
        [FIRST, plan(2, [1], [5], admits=[replace(SECOND_ROW, blocks=(0, 3))])],
        plan(3, [0], [1]),
    ),
    "an advance after several draws": (
        [plan(1, [0], [5], admits=[admit(sampling=replace(SEEDED, choose=Draws(0, 2)))])],
        plan(2, [0], [1]),
    ),
    "an advance after candidates": (
        [plan(1, [0], [5], admits=[admit(sampling=replace(SEEDED, choose=Candidates(4)))])],
        plan(2, [0], [1]),
    ),
    "two copies into one block": ([FIRST], plan(2, [0], [1], copies=[(0, 4), (1, 4)])),
    "a copy of a copy": ([FIRST], plan(2, [0], [1], copies=[(0, 4), (4, 5)])),
    "a copy and a swap in into one block": ([FIRST], plan(2, [0], [1], copies=[(0, 4)], swaps_in=[(0, 4)])),
    "two swaps in into one block": ([FIRST], plan(2, [0], [1], swaps_in=[(0, 4), (1, 4)])),
    "two swaps out into one host block": ([FIRST], plan(2, [0], [1], swaps_out=[(0, 0), (1, 0)])),
    "a copy of what is swapped in": ([FIRST], plan(2, [0], [1], copies=[(4, 5)], swaps_in=[(0, 4)])),
    "a swap out of what is swapped in": ([FIRST], plan(2, [0], [1], swaps_out=[(4, 1)], swaps_in=[(0, 4)])),
    "a swap out of what is copied": ([FIRST], plan(2, [0], [1], swaps_out=[(4, 1)], copies=[(0, 4)])),
    "a host block read and taken": ([FIRST], plan(2, [0], [1], swaps_out=[(1, 0)], swaps_in=[(0, 4)])),
    "a host block beyond the pool": ([FIRST], plan(2, [0], [1], swaps_out=[(0, 4)])),
    "columns of different lengths": ([FIRST], plan(2, [0], [])),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_are_refused(name):
    before, broken = BROKEN[name]
    fake = worker(*before)
    with pytest.raises(ContractBroken):
        fake.run(broken)


def run_alone(sampling: Sampling, max_tokens: int, chunk: int) -> list[int]:
    """A request by itself, its prompt in chunks, its decodes fed by the row."""
    fake, tokens, at, table = FakeWorker(1, LIMITS, VOCAB), [], 0, [5, 2, 7, 0, 1]
    admits, step = [admit(blocks=table[:2], sampling=sampling)], 1
    num_blocks = 2
    while len(tokens) < max_tokens:
        count = max(min(chunk, len(PROMPT) - at), 1)
        grown = []
        if at + count > 4 * num_blocks:
            grown, num_blocks = [(0, table[num_blocks])], num_blocks + 1
        result = fake.run(plan(step, [0], [count], grown, admits=admits))
        tokens += result.tokens
        at, step, admits = at + count, step + 1, []
    return tokens


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@pytest.mark.parametrize("sampling", [SEEDED, HISTORY, Sampling(temperature=0.0)])
def test_a_row_answers_as_the_oracle(chunk, sampling):
    [answer] = finish(PROMPT, sampling, 12, 1, VOCAB)
    assert run_alone(sampling, 12, chunk) == list(answer.tokens)


def test_a_fork_answers_as_the_oracle():
    """Two draws of one row; the child shares the full block and takes a copy of the other."""
    two = replace(SEEDED, choose=Draws(0, 2))
    fake = FakeWorker(1, LIMITS, VOCAB)
    drawn = fake.run(plan(1, [0], [5], admits=[admit(sampling=two)])).tokens
    children = [
        admit(row, 5, [token], blocks, sampling=replace(SEEDED, choose=Draws(row, 1)))
        for row, token, blocks in ((0, drawn[0], (0, 1)), (1, drawn[1], (0, 2)))
    ]
    second = fake.run(plan(2, [0, 1], [1, 1], admits=children, copies=[(1, 2)])).tokens
    answers = finish(PROMPT, SEEDED, 2, 2, VOCAB)
    assert [list(answer.tokens) for answer in answers] == [list(pair) for pair in zip(drawn, second, strict=True)]


def test_without_the_copy_a_fork_is_found_out():
    two = replace(SEEDED, choose=Draws(0, 2))
    fake = FakeWorker(1, LIMITS, VOCAB)
    drawn = fake.run(plan(1, [0], [5], admits=[admit(sampling=two)])).tokens
    assert drawn[0] != drawn[1]
    children = [admit(row, 5, [drawn[row]], (0, 1), sampling=replace(SEEDED, choose=Draws(row, 1))) for row in range(2)]
    with pytest.raises(ContractBroken, match="written by two rows"):
        fake.run(plan(2, [0, 1], [1, 1], admits=children))


def test_what_was_swapped_out_comes_back():
    fake = worker(FIRST)
    fake.run(plan(2, [], [], swaps_out=[(0, 3), (1, 1)]))
    fake.run(plan(3, [1], [5], admits=[replace(SECOND_ROW, blocks=(0, 1))]))  # others write the blocks
    [answer] = finish(PROMPT, SEEDED, 2, 1, VOCAB)
    back = admit(0, 5, answer.tokens[:1], (4, 6))
    assert fake.run(plan(4, [0], [1], swaps_in=[(3, 4), (1, 6)], admits=[back])).tokens == [answer.tokens[1]]


def test_a_bad_row_fails_when_it_samples_and_stays_dead():
    fake = FakeWorker(1, LIMITS, VOCAB)
    quiet = fake.run(plan(1, [0], [4], admits=[admit()]), bad_rows=[0])
    assert (quiet.num_tokens, quiet.failed) == ([0], {})
    loud = fake.run(plan(2, [0], [1]))
    assert loud.num_tokens == [0]
    assert list(loud.failed) == [0]
    again = fake.run(plan(3, [0], [1]))
    assert again.failed == loud.failed


def test_who_reads_a_bad_cell_goes_bad():
    fake = FakeWorker(1, LIMITS, VOCAB)
    fake.run(plan(1, [0], [4], admits=[admit()]), bad_rows=[0])
    result = fake.run(plan(2, [1], [1], admits=[admit(row=1, start=4, tokens=(15,), blocks=(0, 2))]))
    assert list(result.failed) == [0]


def test_a_lost_block_is_reported_by_everyone_who_reads_it():
    fake = worker(FIRST)
    other = admit(row=1, start=4, tokens=(15,), blocks=(0, 2))
    lost = fake.run(plan(2, [0, 1], [1, 1], admits=[other]), lost_blocks=[0])
    assert [(entry.index, entry.tier, entry.block, entry.step) for entry in lost.lost] == [
        (0, Tier.DEVICE, 0, 2),
        (1, Tier.DEVICE, 0, 2),
    ]
    assert lost.num_tokens == [0, 0]
    anew = fake.run(plan(3, [0], [5], admits=[admit()]))  # filled anew, it is as good as ever
    assert (anew.lost, anew.num_tokens) == ((), [1])


def test_logprobs_fit_their_tokens():
    from kilburn.shared.codec import decode_from_worker, encode

    fake = FakeWorker(1, LIMITS, VOCAB)
    result = fake.run(plan(1, [0], [5], admits=[admit(sampling=replace(SEEDED, logprobs=3))]))
    [entry] = result.logprobs
    assert (entry.width, entry.ids[0]) == (4, result.tokens[0])
    decoded = decode_from_worker(encode(result))
    assert isinstance(decoded, StepResult)
    assert decoded == result


def test_every_part_of_the_past_matters():
    """Tokens, their order, seed, stream and position; for a greedy row the prefix alone."""
    chain = chain_of(PROMPT)
    assert chain != chain_of(PROMPT[::-1])
    big = 1 << 40
    draw = next_token(chain, SEEDED, 0, 5, 5, big)
    others = [
        next_token(chain_of((*PROMPT[:-1], 16)), SEEDED, 0, 5, 5, big),
        next_token(chain, replace(SEEDED, seed=4), 0, 5, 5, big),
        next_token(chain, SEEDED, 1, 5, 5, big),
        next_token(chain, SEEDED, 0, 6, 5, big),
    ]
    assert draw not in others
    greedy = Sampling(temperature=0.0)
    assert next_token(chain, greedy, 0, 5, 5, big) == next_token(chain, replace(greedy, seed=9), 3, 5, 5, big)
    assert next_token(chain, HISTORY, 0, 5, 5, big) != next_token(chain, HISTORY, 0, 5, 4, big)


def test_stop_ids_end_an_answer_but_not_before_min_tokens():
    everything = tuple(range(1, VOCAB))
    [first] = finish(PROMPT, Sampling(seed=1, stop_ids=everything), 9, 1, VOCAB)
    assert first.reason is FinishReason.STOP
    assert first.tokens[-1] != 0
    [later] = finish(PROMPT, Sampling(seed=1, stop_ids=everything, min_tokens=4), 9, 1, VOCAB)
    assert later.tokens[:4] == (0, 0, 0, 0)
    [none] = finish(PROMPT, SEEDED, 0, 1, VOCAB)
    assert (none.tokens, none.reason) == ((), FinishReason.LENGTH)


def test_a_pool_tells_never_written_from_foreign_cells():
    pool = CellPool(2, 4)
    with pytest.raises(ContractBroken, match="never written"):
        pool.prefix([0], 1)
    pool.write(0, 0, chain_of((7,)), 7, True)
    assert pool.prefix([0], 1) == ([7], [chain_of((7,))])
    with pytest.raises(ContractBroken, match="another prefix"):
        pool.read([0], [chain_of((8,))], 1)
