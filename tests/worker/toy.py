"""A model small enough to be run a second time in the plainest way, and the plain way itself.

`ToyModel` reads and writes KV through blocks, as any model does. `dense` computes the same hidden states from a list of
tokens, with no block, no batch and no kernel. `plain_choice` samples one row in float64, one step after the other.
`oracle` puts the two together: what a sequence must be, token by token, alone in the world.
"""

import math

import numpy as np
import torch
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.dispatch import Batch, Kernels
from kilburn.kernels.philox import uniform
from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import Admit, StepPlan, StepResult
from kilburn.shared.sampling import Sampling
from kilburn.worker.knobs import Knobs
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.model_runner import ModelRunner
from kilburn.worker.rows import Limits, Rows
from kilburn.worker.step import Executor

CPU = torch.device("cpu")
VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 4, 2, 8, 2
HIDDEN = HEADS * HEAD_DIM
MAX_LEN = 96


class ToyModel:
    """Attention and nothing else, twice; learned positions, so that a wrong position shows."""

    def __init__(self, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)

        def weight(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=rng) * scale * shape[-1] ** -0.5

        self.embed = torch.randn((VOCAB, HIDDEN), generator=rng)
        self.place = torch.randn((MAX_LEN + 1, HIDDEN), generator=rng) * 0.5
        self.qkv = [weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) for _ in range(LAYERS)]
        self.out = [weight(HIDDEN, HIDDEN, scale=2.0) for _ in range(LAYERS)]
        self.head = weight(VOCAB, HIDDEN, scale=2.0)
        self.poison: int | None = None  # a token that makes the hidden state of its position NaN
        self.poisoned_logits: int | None = None  # a token after which the logits are NaN, and the hidden state is not

    def forward(self, ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels) -> Tensor:
        x = self.embed[ids] + self.place[batch.positions]
        if self.poison is not None:
            x[ids == self.poison] = torch.nan
        for layer in range(LAYERS):
            q, k, v = self._split(layer, x)
            kv = pool[:, layer]
            kernels.kv_write(q, k, v, kv, batch, None)
            x = x + kernels.paged_attention(q, kv, batch, HEAD_DIM**-0.5).flatten(1) @ self.out[layer].T
        if self.poisoned_logits is not None:
            x[:, 0] = torch.where(ids == self.poisoned_logits, 1e30, x[:, 0])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        logits = (hidden @ self.head.T).float()
        return torch.where(hidden[:, :1] > 1e29, torch.nan, logits)

    def dense(self, tokens: list[int]) -> Tensor:
        """Logits [len(tokens), VOCAB]."""
        x = self.embed[torch.tensor(tokens)] + self.place[: len(tokens)]
        causal = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
        for layer in range(LAYERS):
            q, k, v = self._split(layer, x)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
            weight = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5 + causal, dim=-1)
            x = x + torch.einsum("hqk,khd->qhd", weight, v).flatten(1) @ self.out[layer].T
        return x @ self.head.T

    def _split(self, layer: int, x: Tensor) -> list[Tensor]:
        qkv = (x @ self.qkv[layer].T).view(len(x), -1, HEAD_DIM)
        return list(qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1))


def layout(block_size: int) -> KVLayout:
    return KVLayout(block_size, LAYERS, KV_HEADS, HEAD_DIM, "float32")


def toy_executor(
    model: ToyModel, *, block_size: int = 4, num_blocks: int = 64, num_host_blocks: int = 32, max_rows: int = 8
) -> Executor:
    limits = Limits(max_rows, 128, MAX_LEN, block_size, num_blocks, VOCAB)
    rows = Rows(limits, Knobs(max_rows, VOCAB))
    cache = KVCache(layout(block_size), num_blocks, num_host_blocks, CPU, reference)
    cache.pool.fill_(torch.nan)  # what no plan has written must not be read
    return Executor(rows, ModelRunner(model, cache, rows, reference, CPU))


# --- plans by hand


class Hand:
    """Writes plans for an executor, with step numbers that fit."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.step = executor, 0

    def run(self, advances: dict[int, int], admits: tuple[Admit, ...] = (), **columns: list) -> StepResult:
        """advances: row -> count. `columns` are further fields of the plan."""
        self.step += 1
        plan = StepPlan(7, self.step, list(advances), list(advances.values()), admits=list(admits), **columns)
        return self.executor.run(plan)


def admit(
    row: int,
    tokens: list[int],
    blocks: list[int],
    sampling: Sampling,
    *,
    start: int = 0,
    num_prompt: int | None = None,
) -> Admit:
    """`tokens` are all that the sequence has; those before `start` go along only where they are needed."""
    history = tuple(tokens[:start]) if sampling.needs_history else ()
    border = len(tokens) if num_prompt is None else num_prompt
    return Admit(row, start, border, tuple(tokens[start:]), history, tuple(blocks), sampling)


# --- the plain way


def plain_logits(logits: np.ndarray, sampling: Sampling, known: list[int], num_prompt: int) -> np.ndarray:
    """One row's logits after penalties, bias and masks."""
    logits = logits.astype(np.float64).copy()
    for token in set(known):
        value = logits[token]
        logits[token] = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
    generated = known[num_prompt:]
    for token in set(generated):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * generated.count(token)
    for token, by in sampling.logit_bias:
        logits[token] += by
    if len(generated) < sampling.min_tokens:
        for token in sampling.stop_ids:
            logits[token] = -math.inf
    return logits


def plain_distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What each token's chance is, after temperature, top_k, top_p and min_p."""
    scaled = logits / sampling.temperature
    chance = np.exp(scaled - scaled.max())
    if 0 < sampling.top_k < len(chance):
        chance[chance < np.sort(chance)[::-1][sampling.top_k - 1]] = 0.0
    if sampling.top_p < 1.0:
        ranked = np.sort(chance)[::-1]
        reached = int(np.argmax(np.cumsum(ranked) >= sampling.top_p * chance.sum()))
        chance[chance < ranked[reached]] = 0.0
    chance[chance < sampling.min_p * chance.max()] = 0.0
    return chance / chance.sum()


def plain_choice(logits: np.ndarray, sampling: Sampling, known: list[int], num_prompt: int, stream: int = 0) -> int:
    """The token that follows `known`."""
    logits = plain_logits(logits, sampling, known, num_prompt)
    if sampling.is_greedy:
        return int(logits.argmax())
    chance = plain_distribution(logits, sampling)
    lane = [np.array([value], np.uint64) for value in (sampling.seed, stream, len(known))]
    return int(np.searchsorted(np.cumsum(chance), uniform(*lane)[0], side="right"))


def oracle(model: ToyModel, prompt: list[int], sampling: Sampling, num_tokens: int, stream: int = 0) -> list[int]:
    """The `num_tokens` tokens that follow the prompt."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(plain_choice(model.dense(known)[-1].numpy(), sampling, known, len(prompt), stream))
    return known[len(prompt) :]
