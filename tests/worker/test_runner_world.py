"""Paged = naive: whatever the plans, every sequence is the one that it would be alone in the world.

A seeded scheduler without mercy: random subsets, random chunks, chains of steps that nobody waits for, preemption by
forgetting and by swapping, rows that change hands. The judge is `toy.oracle`, which knows no block and no batch.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch

from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import PromptLogprobs
from kilburn.shared.sampling import Sampling
from kilburn.worker.sampler import NOT_FINITE
from tests.worker.toy import KV_HEADS, LAYERS, MAX_LEN, VOCAB, Hand, Int8, ToyModel, admit, oracle, toy_executor

KNOBS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=11),
    Sampling(temperature=1.3, top_k=7, seed=12),
    Sampling(temperature=1.0, top_p=0.7, min_p=0.02, seed=2**63 + 13),
    Sampling(temperature=0.0, presence_penalty=0.7, frequency_penalty=0.3),
    Sampling(temperature=1.0, repetition_penalty=1.4, seed=14, logit_bias=((3, 2.5), (9, -4.0))),
    Sampling(temperature=0.9, min_tokens=6, stop_ids=(1, 2, 5, 8), seed=15, logprobs=2),
    Sampling(temperature=0.0, prompt_logprobs=2),
    Sampling(temperature=0.7, seed=16, repetition_penalty=1.2, prompt_logprobs=0),
)


@dataclass
class Sequence:
    prompt: list[int]
    sampling: Sampling
    num_output: int
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    scores: list[PromptLogprobs] = field(default_factory=list)

    @property
    def num_scored(self) -> int:
        return self.scores[-1].start + len(self.scores[-1].ranks) if self.scores else 1

    @property
    def limit(self) -> int:
        return len(self.prompt) + self.num_output - 1

    @property
    def is_done(self) -> bool:
        return self.computed == self.limit


class World:
    """Plays the core: blocks, rows and plans, drawn from a seed."""

    def __init__(self, seed: int, form: Int8 | None = None) -> None:
        self.rng = random.Random(seed)
        self.model = ToyModel(seed % 3, torch.float32 if form is None else torch.float64)
        self.block_size = self.rng.choice((1, 3, 4, 16))
        num_blocks = 2 * blocks_for(MAX_LEN, self.block_size)
        self.executor = toy_executor(
            self.model,
            block_size=self.block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_blocks,
            max_rows=4,
            form=form,
        )
        self.executor.runner.rows_at_once = self.rng.randint(1, 4)
        self.hand = Hand(self.executor)
        self.free, self.free_host = list(range(num_blocks)), list(range(num_blocks))
        self.free_rows = list(range(4))
        self.sequences = [self._sequence() for _ in range(6)]
        self.admits: list = []
        self.swaps_out: list[tuple[int, int]] = []
        self.swaps_in: list[tuple[int, int]] = []

    def _sequence(self) -> Sequence:
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.choice((1, 2, 5, 17, 33)))]
        return Sequence(prompt, self.rng.choice(KNOBS), self.rng.randint(1, 14), tokens=list(prompt))

    def play(self) -> None:
        while not all(seq.is_done for seq in self.sequences):
            self._leave()
            self._enter()
            self._step()

    def _leave(self) -> None:
        for seq in self.sequences:
            if seq.row is None or not (seq.is_done or self.rng.random() < 0.15):
                continue
            if not seq.is_done and self.rng.random() < 0.5:
                held = blocks_for(seq.computed, self.block_size)
                seq.host_blocks = [self.free_host.pop() for _ in range(held)]
                self.swaps_out += zip(seq.blocks, seq.host_blocks, strict=False)
            else:
                seq.computed = seq.limit if seq.is_done else 0
            self.free += seq.blocks  # handed out again in this very plan
            self.free_rows.append(seq.row)
            self.rng.shuffle(self.free)
            self.rng.shuffle(self.free_rows)
            seq.row, seq.blocks = None, []

    def _enter(self) -> None:
        swapped = {host for _, host in self.swaps_out}
        for seq in self.sequences:
            # Room for its whole life, so that nothing here ever waits half-way; a host block rests for one plan.
            if seq.is_done or seq.row is not None or not self.free_rows or swapped & set(seq.host_blocks):
                continue
            promised = sum(
                blocks_for(s.limit, self.block_size) - len(s.blocks) for s in self.sequences if s.row is not None
            )
            if len(self.free) - promised < blocks_for(seq.limit, self.block_size):
                continue
            seq.row = self.free_rows.pop()
            seq.blocks = [self.free.pop() for _ in seq.host_blocks]
            self.swaps_in += zip(seq.host_blocks, seq.blocks, strict=True)
            self.free_host += seq.host_blocks
            seq.host_blocks = []
            self.admits.append(
                admit(
                    seq.row,
                    seq.tokens,
                    seq.blocks,
                    seq.sampling,
                    start=seq.computed,
                    num_prompt=len(seq.prompt),
                    scored_from=seq.num_scored,
                )
            )

    def _step(self) -> None:
        working = [seq for seq in self.sequences if seq.row is not None and self.rng.random() < 0.8]
        advances, grown_at, grown_blocks = {}, [], []
        for index, seq in enumerate(working):
            todo = max(len(seq.tokens) - seq.computed, 1)
            count = self.rng.randint(1, min(todo, 20))
            for _ in range(blocks_for(seq.computed + count, self.block_size) - len(seq.blocks)):
                grown_at.append(index)
                grown_blocks.append(self.free.pop())
                seq.blocks.append(grown_blocks[-1])
            advances[seq.row] = count
            seq.computed += count
        result = self.hand.run(
            advances,
            tuple(self.admits),
            grown_at=grown_at,
            grown_blocks=grown_blocks,
            swaps_out=self.swaps_out,
            swaps_in=self.swaps_in,
        )
        self.admits, self.swaps_out, self.swaps_in = [], [], []
        assert not result.failed
        for scored in result.prompt_logprobs:
            seq = working[scored.index]
            assert scored.start == seq.num_scored, "each position once, in order"
            seq.scores.append(scored)
        tokens = iter(result.tokens)
        for seq, num_tokens in zip(working, result.num_tokens, strict=True):
            assert num_tokens == (seq.computed == len(seq.tokens))
            seq.tokens += [next(tokens) for _ in range(num_tokens)]


@pytest.mark.parametrize("seed", range(24))
def test_every_sequence_is_the_one_it_would_be_alone(seed: int) -> None:
    world = World(seed)
    world.play()
    for number, seq in enumerate(world.sequences):
        expected = oracle(world.model, seq.prompt, seq.sampling, seq.num_output)
        assert seq.tokens[len(seq.prompt) :] == expected, f"seed {seed}, sequence {number}: {seq}"
        check_scores(world.model, seq)


def check_scores(model: ToyModel, seq: Sequence) -> None:
    """Every position of a prompt that is scored, against logits of the whole prompt at once."""
    count = seq.sampling.prompt_logprobs
    assert seq.num_scored == (len(seq.prompt) if count >= 0 else 1)
    logits = model.dense(seq.prompt)[:-1]
    logprobs = torch.log_softmax(logits.double(), dim=1)
    for scored in seq.scores:
        assert scored.width == 1 + count
        for i, rank in enumerate(scored.ranks):
            position, entries = scored.start + i, slice(i * scored.width, (i + 1) * scored.width)
            row, own = logprobs[position - 1], seq.prompt[position]
            ids, values = scored.ids[entries], scored.logprobs[entries]
            assert ids[0] == own
            assert rank == 1 + int((row > row[own]).sum())
            assert list(values) == pytest.approx(row[list(ids)].tolist(), abs=1e-4)
            assert list(values[1:]) == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)


def test_a_long_prompt_is_scored_with_few_rows_of_logits_at_once() -> None:
    model, sizes = ToyModel(2), []
    executor = toy_executor(model, block_size=4, max_rows=2)
    executor.runner.rows_at_once, whole = 3, model.logits
    model.logits = lambda hidden: (sizes.append(len(hidden)), whole(hidden))[1]  # type: ignore[method-assign]
    prompt = [token % VOCAB for token in range(3, 20)]
    wanted = Sampling(temperature=0.0, prompt_logprobs=1)
    result = Hand(executor).run({0: 17}, (admit(0, prompt, [0, 1, 2, 3, 4], wanted, scored_from=1),))
    (scored,) = result.prompt_logprobs
    assert (scored.start, len(scored.ranks)) == (1, 16)
    assert max(sizes) == 3
    model.logits = whole  # type: ignore[method-assign]
    check_scores(model, Sequence(prompt, wanted, 1, scores=[scored]))


def test_a_prompt_that_has_no_numbers_fails_its_row_alone() -> None:
    model = ToyModel(2)
    executor = toy_executor(model, block_size=4, max_rows=2)
    whole = model.logits
    model.logits = lambda hidden: torch.where(hidden[:, :1] == hidden[0, 0], float("nan"), whole(hidden))  # type: ignore[method-assign]
    hand, wanted = Hand(executor), Sampling(temperature=0.0, prompt_logprobs=1)
    result = hand.run({0: 2}, (admit(0, [5, 9, 2], [0], wanted, scored_from=1),))
    assert result.failed == {0: NOT_FINITE}
    assert result.prompt_logprobs == ()
    model.logits = whole  # type: ignore[method-assign]
    result = hand.run({0: 1, 1: 2}, (admit(1, [5, 9, 2], [1], wanted, scored_from=1),))
    assert (set(result.failed), [scored.index for scored in result.prompt_logprobs]) == ({0}, [1])


STATIC = Int8(torch.rand(LAYERS, 2, KV_HEADS, generator=torch.Generator().manual_seed(5)) * 0.02 + 0.02)


@pytest.mark.parametrize("form", [STATIC, Int8()], ids=["static", "block"])
@pytest.mark.parametrize("seed", range(8))
def test_with_kv_of_8_bits_it_is_the_one_that_rounding_alone_would_make(seed: int, form: Int8) -> None:
    """Blocks that were swapped out and back, forgotten and computed anew in other chunks: the same values, the same
    scales."""
    world = World(seed, form)
    world.play()
    for number, seq in enumerate(world.sequences):
        expected = oracle(world.model, seq.prompt, seq.sampling, seq.num_output, form=form)
        assert seq.tokens[len(seq.prompt) :] == expected, f"seed {seed}, sequence {number}: {seq}"


@pytest.mark.parametrize("form", [STATIC, Int8()], ids=["static", "block"])
def test_a_fork_that_copies_its_last_block_goes_on_as_its_parent_would(form: Int8) -> None:
    """Copy-on-write in the middle of a block: its first rows come with their scales, the next ones are the child's."""
    model = ToyModel(1, torch.float64)
    hand = Hand(toy_executor(model, block_size=4, form=form))
    prompt, greedy = [5, 9, 2, 7, 1, 30], Sampling(temperature=0.0)
    first = hand.run({0: 6}, (admit(0, prompt, [3, 8], greedy),)).tokens[0]
    assert [first] == oracle(model, prompt, greedy, 1, form=form)
    other = (first + 17) % VOCAB
    child = admit(1, [*prompt, other], [3, 11], greedy, start=6, num_prompt=6)
    tokens = hand.run({0: 1, 1: 1}, (child,), copies=[(8, 11)]).tokens
    assert tokens[:1] == oracle(model, [*prompt, first], greedy, 1, form=form)
    assert tokens[1:] == oracle(model, [*prompt, other], greedy, 1, form=form)
