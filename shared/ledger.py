"""Where the memory goes: one formula for the worker that starts and for the user who plans.

    memory of the device
      - weights          in the dtype that is computed in, with the tables of positions
      - activations      what one step of max_step_tokens positions holds at its height, inside one layer
      - logits           logits of as many rows as are sampled at once, and their copies on the way to a token
      - step buffers     the inputs of a step, made once at their largest
      - graphs           where decodes are recorded: the activations of the largest, and the result of each; on a CPU
                         what a recorded step takes beyond its activations, some MB, which is known then
      = spare         -> KV pool of whole blocks (pool_size.py says how much of it is taken)

The worker fills in the same bill by measurement when it starts (worker/measured.py); `differences` compares the two.
Windows of attention mask and free nothing: blocks behind one stay owned, and are on the bill.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from kilburn.shared.layout import DTYPE_BYTES, EIGHT_BITS, KVLayout, blocks_for
from kilburn.shared.model_shape import Build, ModelShape

LOGITS_TILE_BYTES = 16 << 20  # logits of more rows than this are made and sampled in turns, while caches hold them
# Bytes that a logit costs at the height of sampling, where every row has penalties, top_k and top_p. By array code: the
# logits, the shaped ones, the scaled ones, their masses, the masses above a floor, and whether each is above it. By a
# kernel that goes over them in place: the logits and the shaped ones.
LOGIT_BYTES = 5 * 4 + 1
FUSED_LOGIT_BYTES = 2 * 4
TOLERANCE = 0.05  # by how much plan and measurement may differ


@dataclass(frozen=True, slots=True)
class Ledger:
    """The bill, in bytes. Block counts are by tier."""

    weight_bytes: int
    activation_bytes: int
    logits_bytes: int
    buffer_bytes: int
    graph_bytes: int
    kv_bytes: int
    host_bytes: int
    layout: KVLayout
    num_blocks: int
    num_host_blocks: int

    @property
    def step_bytes(self) -> int:
        """What steps need beside weights and KV."""
        return self.activation_bytes + self.logits_bytes + self.buffer_bytes + self.graph_bytes

    @property
    def device_bytes(self) -> int:
        return self.weight_bytes + self.step_bytes + self.kv_bytes

    def amounts(self) -> dict[str, int]:
        """Every entry, in bytes."""
        return {
            "weights": self.weight_bytes,
            "activations": self.activation_bytes,
            "logits workspace": self.logits_bytes,
            "step buffers": self.buffer_bytes,
            "graphs": self.graph_bytes,
            "KV pool": self.kv_bytes,
            "device total": self.device_bytes,
            "host pool": self.host_bytes,
        }

    def lines(self) -> list[str]:
        """The bill as text, one entry a line."""
        layout, shown_with = self.layout, {name: shown(amount) for name, amount in self.amounts().items() if amount}
        tokens = self.num_blocks * layout.block_size
        scales = f", {shown(layout.scale_bytes)} of it scales" if layout.scale_bytes else ""
        shown_with["KV per token"] = shown(int(layout.bytes_per_token))
        shown_with["KV per block"] = (
            f"{shown(layout.bytes_per_block)} ({layout.block_size} tokens, {layout.dtype}{scales})"
        )
        for name, detail in (
            ("KV pool", f" ({self.num_blocks} blocks, {tokens} tokens)"),
            ("host pool", f" ({self.num_host_blocks} blocks)"),
        ):
            if name in shown_with:
                shown_with[name] += detail
        steps = ("activations", "logits workspace", "step buffers", "graphs")
        order = ("weights", *steps, "KV per token", "KV per block", "KV pool", "device total", "host pool")
        return [f"{name:<18}{shown_with[name]}" for name in order if name in shown_with]


def shown(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def differences(planned: Ledger, measured: Ledger) -> dict[str, float]:
    """By how much of the measured amount each entry of the plan is off."""
    plan, found = planned.amounts(), measured.amounts()
    return {name: abs(plan[name] - found[name]) / max(found[name], 1) for name in plan if plan[name] != found[name]}


def compared(planned: Ledger, measured: Ledger) -> list[str]:
    """The measured bill, and what was planned wherever that differs by more than the tolerance."""
    off = {name: share for name, share in differences(planned, measured).items() if share > TOLERANCE}
    plan = planned.amounts()
    return measured.lines() + [f"{name} planned as {shown(plan[name])}, off by {off[name]:.0%}" for name in off]


# --- the formula


def layout_for(
    shape: ModelShape, block_size: int, dtype: str, kv_dtype: str = "auto", kv_scales: str = "auto"
) -> KVLayout:
    """Blocks of a model, by the settings of these names; `dtype` is the one that is computed in."""
    stored = dtype if kv_dtype == "auto" else EIGHT_BITS[kv_dtype]
    layout = KVLayout(block_size, shape.num_layers, shape.num_kv_heads, shape.head_dim, stored)
    return layout.with_scale_area() if kv_dtype != "auto" and kv_scales == "block" else layout


def values_at_height(shape: ModelShape) -> int:
    """Values that a token has alive inside a layer when that is most, as worker/models/ compute it."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = 2 * q + 2 * kv  # q, k, v, and what attention gave
    match shape.build:
        case Build.GATED:  # residual, the last sum, the norm; gate and up, and their product
            return 3 * shape.hidden + attention + 3 * shape.intermediate
        case Build.GATED_QK_NORM:  # and normed copies of q and k
            return 3 * shape.hidden + attention + q + kv + 3 * shape.intermediate
        case Build.PLAIN_NORM_FIRST:  # the sum and its norm; fc1 before and after its activation
            return 2 * shape.hidden + (q + 2 * kv) + 2 * shape.intermediate
        case Build.PLAIN_NORM_LAST:
            return shape.hidden + (q + 2 * kv) + 2 * shape.intermediate
        case Build.UNKNOWN:  # transformers' modules keep less in place
            return 3 * shape.hidden + attention + 4 * shape.intermediate
        case _:
            assert_never(shape.build)


def activation_bytes(shape: ModelShape, dtype: str, num_tokens: int) -> int:
    return num_tokens * values_at_height(shape) * DTYPE_BYTES[dtype]


def logits_rows(vocab_size: int, max_rows: int) -> int:
    """Rows whose logits are made and sampled at once."""
    return max(1, min(max_rows, LOGITS_TILE_BYTES // (4 * vocab_size)))


def logits_bytes(vocab_size: int, max_rows: int, is_fused: bool) -> int:
    return (FUSED_LOGIT_BYTES if is_fused else LOGIT_BYTES) * vocab_size * logits_rows(vocab_size, max_rows)


def _logits_bytes(vocab_size: int, batch: "Batch") -> int:
    if batch.num_unsampled:
        return 4 * batch.num_unsampled * logits_rows(vocab_size, batch.max_rows)
    return logits_bytes(vocab_size, batch.max_rows, batch.is_fused)


def buffer_bytes(max_rows: int, max_step_tokens: int, max_len: int, block_size: int) -> int:
    """Token ids, positions and slots; the start, context, table and last state of each row."""
    return 3 * 8 * max_step_tokens + 4 * (max_rows + 1) + (4 + 8 + 4 * blocks_for(max_len, block_size)) * max_rows


MOST_RECORDED_ROWS = 512  # larger decodes keep a device busy while the host asks for launches


def recorded_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that decodes are recorded for, ascending: so near one another that padding costs little."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_RECORDED_ROWS + 1, 32)]
    largest = min(max_rows, MOST_RECORDED_ROWS)
    return [*(size for size in steps if size < largest), largest]


def graph_bytes(shape: ModelShape, dtype: str, sizes: list[int], max_len: int, block_size: int) -> int:
    """Of decodes recorded for these numbers of rows: all work in the memory of the largest, and keep their result."""
    if not sizes:
        return 0
    tables = 4 * blocks_for(max_len, block_size) * max(sizes)
    results = sum(sizes) * shape.hidden * DTYPE_BYTES[dtype]
    return activation_bytes(shape, dtype, max(sizes)) + results + tables


@dataclass(frozen=True, slots=True)
class Batch:
    """How much is computed at once: the settings of these names, and how a device of its own goes about it."""

    max_rows: int
    max_step_tokens: int
    max_len: int
    recorded: tuple[int, ...] = ()  # numbers of rows whose decodes are recorded
    is_fused: bool = False  # sampling goes over the logits in place
    host_graph_bytes: int = 0  # of a step that a CPU has recorded: what its kernels make depends on their forms
    num_unsampled: int = 0  # of ranks > 0: the columns of logits that they make, and do not sample from


def bill(
    shape: ModelShape, layout: KVLayout, dtype: str, batch: Batch, num_blocks: int = 0, num_host_blocks: int = 0
) -> Ledger:
    """The ledger of a worker with these settings, computing in `dtype`."""
    return Ledger(
        weight_bytes=shape.weight_bytes,
        activation_bytes=activation_bytes(shape, dtype, batch.max_step_tokens),
        logits_bytes=_logits_bytes(shape.vocab_size, batch),
        buffer_bytes=buffer_bytes(batch.max_rows, batch.max_step_tokens, batch.max_len, layout.block_size),
        graph_bytes=graph_bytes(shape, dtype, list(batch.recorded), batch.max_len, layout.block_size)
        + batch.host_graph_bytes,
        kv_bytes=num_blocks * layout.bytes_per_block,
        host_bytes=num_host_blocks * layout.bytes_per_block,
        layout=layout,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
    )


# --- what a pool is worth


def expected_tail_slots(block_size: int) -> float:
    """Slots of its last block that a sequence leaves unused, where any length is as likely as the next."""
    return (block_size - 1) / 2


def expected_tail_waste(num_tokens: int, block_size: int) -> float:
    """Of the slots of a sequence of about so many tokens, the share that is unused."""
    unused = expected_tail_slots(block_size)
    return unused / (num_tokens + unused)


def sequences_in(num_blocks: int, block_size: int, lengths: tuple[int, ...]) -> Mapping[int, int]:
    """By length: sequences that a pool holds at once."""
    return {length: num_blocks // blocks_for(length, block_size) for length in lengths}
