"""Where the memory goes: one formula for the worker that starts and for the user who plans.

    spare memory of the device
      - activations      what one step of max_step_tokens positions needs between the layers
      - logits           a workspace of a few copies of [rows at once, vocabulary], float32
      = KV budget  ->    blocks of layout.bytes_per_block

Weights are loaded before the spare memory is asked for, so they are on the bill but not taken off twice.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from kilburn.shared.layout import DTYPE_BYTES, KVLayout, blocks_for

LOGITS_TILE_BYTES = 16 << 20  # logits of more rows than this are made and sampled in turns, while caches hold them
LOGITS_COPIES = 4  # the logits, the shaped ones, the scaled ones, their masses


@dataclass(frozen=True, slots=True)
class ModelShape:
    """As much of a model as its memory depends on."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """The bill, in bytes. Block counts are by tier."""

    weight_bytes: int
    activation_bytes: int
    logits_bytes: int
    layout: KVLayout
    num_blocks: int
    num_host_blocks: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.layout.bytes_per_block

    @property
    def device_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.logits_bytes + self.kv_bytes

    def lines(self) -> list[str]:
        """The bill as text, one entry a line."""
        layout = self.layout
        tokens = self.num_blocks * layout.block_size
        entries = [
            ("weights", shown(self.weight_bytes)),
            ("activations", shown(self.activation_bytes)),
            ("logits workspace", shown(self.logits_bytes)),
            ("KV per token", shown(int(layout.bytes_per_token))),
            ("KV per block", f"{shown(layout.bytes_per_block)} ({layout.block_size} tokens, {layout.dtype})"),
            ("KV pool", f"{shown(self.kv_bytes)} ({self.num_blocks} blocks, {tokens} tokens)"),
            ("device total", shown(self.device_bytes)),
        ]
        if self.num_host_blocks:
            host = self.num_host_blocks * layout.bytes_per_block
            entries.append(("host pool", f"{shown(host)} ({self.num_host_blocks} blocks)"))
        return [f"{name:<18}{value}" for name, value in entries]


def shown(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def weight_bytes(folder: Path, dtype: str) -> int:
    """What the tensors of a folder's safetensors files take once they are of `dtype`. Reads the headers only."""
    values = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as source:
            header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        values += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return values * DTYPE_BYTES[dtype]


def activation_bytes(shape: ModelShape, dtype: str, max_step_tokens: int) -> int:
    """What a step holds between two layers: residual, norm and sum; q, k, v and attention; gate, up and product."""
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return max_step_tokens * (3 * shape.hidden + attention + 3 * shape.intermediate) * DTYPE_BYTES[dtype]


def logits_rows(vocab_size: int, max_rows: int) -> int:
    """Rows whose logits are made and sampled at once."""
    return max(1, min(max_rows, LOGITS_TILE_BYTES // (4 * vocab_size)))


def logits_bytes(vocab_size: int, max_rows: int) -> int:
    return LOGITS_COPIES * 4 * vocab_size * logits_rows(vocab_size, max_rows)


def blocks_in(budget_bytes: int, layout: KVLayout) -> int:
    """Whole blocks in a budget."""
    return max(budget_bytes, 0) // layout.bytes_per_block


def blocks_wanted(max_rows: int, max_len: int, block_size: int) -> int:
    """Blocks that every row could use at its full length: more serve the prefix cache only."""
    return max_rows * blocks_for(max_len, block_size)


def bill(
    shape: ModelShape, layout: KVLayout, max_rows: int, max_step_tokens: int, num_blocks: int, num_host_blocks: int = 0
) -> Ledger:
    """The ledger of a worker with these settings."""
    return Ledger(
        weight_bytes=shape.weight_bytes,
        activation_bytes=activation_bytes(shape, layout.dtype, max_step_tokens),
        logits_bytes=logits_bytes(shape.vocab_size, max_rows),
        layout=layout,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
    )
