"""A model small enough to be run a second time in the plainest way, and the plain way itself.

`ToyModel` reads and writes KV through blocks, as any model does. `dense` computes the same hidden states from a list of
tokens, with no block, no batch and no kernel. `plain_choice` samples one row in float64, one step after the other.
`oracle` puts the two together: what a sequence must be, token by token, alone in the world.

With KV of 8 bits the plain way rounds each key and value as its slot would (`Int8`), and all of it runs in float64:
what is rounded to one of 255 values must not depend on the last digits of a sum.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.dispatch import Batch, Kernels, Scales
from kilburn.kernels.philox import uniform
from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import Admit, StepPlan, StepResult
from kilburn.shared.sampling import Sampling
from kilburn.worker.grammars import Grammars
from kilburn.worker.knobs import Knobs
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.model_runner import ModelRunner
from kilburn.worker.rows import Limits, Rows
from kilburn.worker.step import Executor

CPU = torch.device("cpu")
VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 4, 2, 8, 2
HIDDEN = HEADS * HEAD_DIM
MAX_LEN = 96


@dataclass(frozen=True)
class Int8:
    """KV of 8 bits: with these scales [LAYERS, 2, KV_HEADS], or with one for each row in its block."""

    static: Tensor | None = None

    def rounded(self, x: Tensor, layer: int, which: int) -> Tensor:
        """x [T, KV_HEADS, HEAD_DIM] as it comes back from the cache."""
        if self.static is None:
            scale = (x.abs().amax(dim=-1) / 127).float().to(x.dtype)[..., None]
        else:
            scale = self.static[layer, which].to(x.dtype)[None, :, None]
        return (x / scale).clamp(-127, 127).round() * scale


class ToyModel:
    """Attention and nothing else, twice; learned positions, so that a wrong position shows."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        rng = torch.Generator().manual_seed(seed)

        def weight(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=rng) * scale * shape[-1] ** -0.5).to(dtype)

        self.embed = torch.randn((VOCAB, HIDDEN), generator=rng).to(dtype)
        self.place = (torch.randn((MAX_LEN + 1, HIDDEN), generator=rng) * 0.5).to(dtype)
        self.qkv = [weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) for _ in range(LAYERS)]
        self.out = [weight(HIDDEN, HIDDEN, scale=2.0) for _ in range(LAYERS)]
        self.head = weight(VOCAB, HIDDEN, scale=2.0)
        self.poison: int | None = None  # a token that makes the hidden state of its position NaN
        self.poisoned_logits: int | None = None  # a token after which the logits are NaN, and the hidden state is not

    def forward(self, ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels, scales: Scales = None) -> Tensor:
        x = self.embed[ids] + self.place[batch.positions]
        if self.poison is not None:
            x[ids == self.poison] = torch.nan
        for layer in range(LAYERS):
            q, k, v = self._split(layer, x)
            kv, scale = pool[:, layer], None if scales is None else scales[layer]
            kernels.kv_write(q, k, v, kv, batch, None, scale)
            x = x + kernels.paged_attention(q, kv, batch, HEAD_DIM**-0.5, scales=scale).flatten(1) @ self.out[layer].T
        if self.poisoned_logits is not None:
            x[:, 0] = torch.where(ids == self.poisoned_logits, 1e30, x[:, 0])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        logits = (hidden @ self.head.T).float()
        return torch.where(hidden[:, :1] > 1e29, torch.nan, logits)

    def dense(self, tokens: list[int], form: Int8 | None = None) -> Tensor:
        """Logits [len(tokens), VOCAB]."""
        x = self.embed[torch.tensor(tokens)] + self.place[: len(tokens)]
        causal = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=x.dtype).triu(1)
        for layer in range(LAYERS):
            q, k, v = self._split(layer, x)
            if form is not None:
                k, v = (form.rounded(t, layer, which) for which, t in enumerate((k, v)))
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
    model: ToyModel,
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    num_host_blocks: int = 32,
    max_rows: int = 8,
    form: Int8 | None = None,
    grammars: Grammars | None = None,
) -> Executor:
    limits = Limits(max_rows, 128, MAX_LEN, block_size, num_blocks, VOCAB)
    rows = Rows(limits, Knobs(max_rows, VOCAB, grammars))
    cache = toy_cache(block_size, num_blocks, num_host_blocks, form)
    return Executor(rows, ModelRunner(model, cache, rows, reference, CPU))


def toy_cache(block_size: int, num_blocks: int, num_host_blocks: int, form: Int8 | None = None) -> KVCache:
    """Poisoned: what no plan has written must not be read. Static scales have no poison, but loud values."""
    if form is None:
        cache = KVCache(layout(block_size), num_blocks, num_host_blocks, CPU, reference)
        cache.pool.fill_(torch.nan)
        return cache
    narrow = replace(layout(block_size), dtype="int8")
    if form.static is not None:
        cache = KVCache(narrow, num_blocks, num_host_blocks, CPU, reference, form.static)
    else:
        cache = KVCache(narrow.with_scale_area(), num_blocks, num_host_blocks, CPU, reference)
        for scales in cache.scales or ():
            scales.fill_(torch.nan)
    cache.pool.fill_(127)
    return cache


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
    scored_from: int = 0,
) -> Admit:
    """`tokens` are all that the sequence has; those before `start` go along only where they are needed."""
    history = tuple(tokens[:start]) if sampling.needs_history else ()
    border = len(tokens) if num_prompt is None else num_prompt
    return Admit(row, start, border, tuple(tokens[start:]), history, tuple(blocks), sampling, scored_from)


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


def oracle(
    model: ToyModel,
    prompt: list[int],
    sampling: Sampling,
    num_tokens: int,
    stream: int = 0,
    form: Int8 | None = None,
) -> list[int]:
    """The `num_tokens` tokens that follow the prompt."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(plain_choice(model.dense(known, form)[-1].numpy(), sampling, known, len(prompt), stream))
    return known[len(prompt) :]
