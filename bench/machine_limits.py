"""What this machine can do for one model's shapes: bytes read a second, float32 operations a second; and what it needs.

The read is of a tensor larger than any cache, by as many threads. The products are of the model's own matrices, at the
rows of a full step, by torch's plain product and by oneDNN's on reordered weights; the faster counts.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

NUM_ROWS = 256  # of a step that has work for every core
READ_BYTES = 1 << 29
NUM_TRIES = 3


@dataclass(frozen=True)
class Shapes:
    """Of a decoder with gated MLPs, as config.json has it."""

    vocabulary: int
    num_layers: int
    matrices: tuple[tuple[int, int], ...]  # of one layer: [out, in]
    head: tuple[int, int]

    @property
    def flops_of_body(self) -> float:
        """Operations of one position through all layers, attention's own left out."""
        return 2.0 * self.num_layers * sum(rows * columns for rows, columns in self.matrices)

    @property
    def flops_of_head(self) -> float:
        return 2.0 * self.head[0] * self.head[1]

    @property
    def bytes_of_weights(self) -> float:
        """In float32, each read once."""
        return 2.0 * (self.flops_of_body + self.flops_of_head)


@dataclass(frozen=True)
class Limits:
    read_bytes_per_s: float
    flops_per_s: float


def shapes_of(folder: Path) -> Shapes:
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    fused = (heads + 2 * config.get("num_key_value_heads", heads)) * size
    matrices = ((fused, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner))
    vocabulary = config["vocab_size"]
    return Shapes(vocabulary, config["num_hidden_layers"], matrices, (vocabulary, hidden))


def best_s(way: Callable[[], object]) -> float:
    taken = []
    for _ in range(NUM_TRIES):
        begun = time.perf_counter()
        way()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def measure_limits(shapes: Shapes, threads: int) -> Limits:
    torch.set_num_threads(threads)
    read = torch.ones(READ_BYTES // 4)
    read_s = best_s(read.sum)
    taken_s = 0.0
    for shape in shapes.matrices:
        weight, x = torch.randn(shape), torch.randn(NUM_ROWS, shape[1])
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        ways = (
            lambda x=x, weight=weight: F.linear(x, weight),
            lambda x=x, packed=packed: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
        )
        taken_s += min(map(best_s, ways))
    flops = 2.0 * NUM_ROWS * sum(rows * columns for rows, columns in shapes.matrices)
    return Limits(READ_BYTES / read_s, flops / taken_s)
