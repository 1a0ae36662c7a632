"""Drives a loaded model by hand, as a worker would: blocks scattered over a pool, prompts in chunks, decodes beside
them, and padding in between. The twin of every model is transformers in float32.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kilburn.kernels.dispatch import Batch, kernels_for
from kilburn.worker.models.weights import LoadedModel, load

CPU = torch.device("cpu")
BLOCK_SIZE = 4
TOLERANCE = 1e-4


def load_cpu(folder: Path) -> LoadedModel:
    return load(folder, torch.float32, CPU)


@dataclass
class Line:
    """One sequence: its tokens, its blocks, and how far it is."""

    tokens: list[int]
    table: list[int]
    computed: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)  # the logits of each position that sampled


def new_pool(loaded: LoadedModel, num_blocks: int) -> torch.Tensor:
    """Poisoned: whatever is read before it is written spoils the result."""
    config = loaded.config
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return torch.full(shape, float("nan"))


def batch_of(work: list[tuple[Line, int]], padding: int = 0) -> tuple[torch.Tensor, Batch]:
    """ids and the batch of the next `count` tokens of each line, with some padding rows at the end."""
    ids, positions, slots, starts, contexts = [], [], [], [0], []
    for line, count in work:
        for position in range(line.computed, line.computed + count):
            ids.append(line.tokens[position])
            positions.append(position)
            slots.append(line.table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(ids))
        contexts.append(line.computed + count)
    width = max(len(line.table) for line, _ in work)
    tables = [line.table + [0] * (width - len(line.table)) for line, _ in work]
    batch = Batch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor(contexts, dtype=torch.int32),
        tables=torch.tensor(tables, dtype=torch.int32),
        positions=torch.tensor(positions + [0] * padding),
        slots=torch.tensor(slots + [-1] * padding),
        max_query=max(count for _, count in work),
        max_context=max(contexts),
    )
    return torch.tensor(ids + [0] * padding), batch


def greedy(loaded: LoadedModel, prompts: list[list[int]], num_new: int, seed: int, budget: int = 13) -> list[Line]:
    """All prompts at once: steps of at most `budget` tokens, shared out at random, until each has `num_new` more."""
    rng = random.Random(seed)
    needed = [-(-(len(prompt) + num_new) // BLOCK_SIZE) for prompt in prompts]
    blocks = list(range(sum(needed) + 3))
    rng.shuffle(blocks)
    lines = [Line(list(prompt), [blocks.pop() for _ in range(n)]) for prompt, n in zip(prompts, needed, strict=True)]
    pool, kernels, model = new_pool(loaded, sum(needed) + 3), kernels_for(CPU), loaded.model
    ends = [len(prompt) + num_new for prompt in prompts]
    while True:
        live = [line for line, end in zip(lines, ends, strict=True) if len(line.tokens) < end]
        if not live:
            return lines
        rng.shuffle(live)
        work, left = [], budget
        for line in live:
            count = min(len(line.tokens) - line.computed, left, rng.randint(1, budget))
            if count > 0:
                work.append((line, count))
                left -= count
        ids, batch = batch_of(work, padding=rng.randint(0, 2))
        hidden = model.forward(ids, pool, batch, kernels)
        for index, (line, count) in enumerate(work):
            line.computed += count
            if line.computed == len(line.tokens):
                row = model.logits(hidden[batch.query_start[index + 1] - 1][None])[0]
                line.rows.append(row)
                line.tokens.append(int(row.argmax()))


def theirs(folder: Path) -> Any:
    """transformers' own model, in float32, with its plainest attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def check_against(reference: Any, lines: list[Line], num_new: int) -> None:
    """Each line's tokens are the reference's greedy ones, or the first that differs was a tie within TOLERANCE; and
    all logits up to there agree within TOLERANCE of their spread."""
    for line in lines:
        num_prompt = len(line.tokens) - num_new
        with torch.inference_mode():
            logits = reference(torch.tensor([line.tokens[:-1]]), use_cache=False).logits[0, num_prompt - 1 :].float()
        for step, (ours, expected) in enumerate(zip(line.rows, logits, strict=True)):
            worst = float((ours - expected).abs().max())
            assert worst <= TOLERANCE * max(1.0, float(expected.std())), f"logits of step {step} differ by {worst:.2e}"
            best = expected.topk(2).values
            if line.tokens[num_prompt + step] != int(expected.argmax()):
                gap = float(best[0] - best[1])
                print(f"first difference at step {step}: the gap of the two best is {gap:.2e}")
                assert gap <= TOLERANCE
                break
