"""The CPU set: checks what it is given, writes a kernel's words, and runs it.

What the compiled code has no form for (float64, operands of mixed types) goes to the reference. Scratch is kept from
call to call and grows. One call runs at a time; a second thread waits.
"""

import threading
from collections.abc import Callable
from math import e, log2
from pathlib import Path

import torch
from torch import Tensor

from kilburn.kernels import checks, reference
from kilburn.kernels.contract import Batch, Rope, Shapes
from kilburn.kernels.cpu import arguments as words
from kilburn.kernels.cpu.arguments import Words
from kilburn.kernels.cpu.objects import Objects
from kilburn.kernels.cpu.team import Fork, Team

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as simd.py numbers them
KERNELS = ("survey", "attention", "kv_write", "rms_norm", "silu_mul", "move_blocks")
UNTYPED = ("survey", "move_blocks")  # know no elements
NO_WINDOW = 1 << 40
LOG2_E = log2(e)
WORTH_SHARING = 16 * 1024  # values to touch before it pays to wake a second thread
MOVE_BYTES = 64 * 1024


class CpuKernels:
    """Kernels for tensors in the host's memory. `fork` starts threads (see team.py); None: Python's own."""

    def __init__(self, fork: Fork | None, folder: Path | None = None) -> None:
        self._objects, self._team = Objects(folder), Team(fork)
        self._addresses: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        self._attention = Words(words.ATTENTION_WORDS, words.SCALE, words.CAP)
        self._write, self._moves = Words(words.WRITE_WORDS), Words(words.MOVE_WORDS)
        self._rows = Words(words.ROWS_WORDS, words.R_EPS)
        self._scratch, self._pieces = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        self._arrivals = torch.zeros(0, dtype=torch.int64)  # the kernel leaves them at zero

    @property
    def name(self) -> str:
        return f"cpu (compiled for {self._objects.cpu}, on {self._team.name})"

    def warm_up(self, shapes: Shapes, on_progress: Callable[[str], None] | None = None) -> None:
        if shapes.dtype in KINDS:
            for name in KERNELS:
                self._address(name, KINDS[shapes.dtype], on_progress)

    def _address(self, name: str, kind: int, say: Callable[[str], None] | None = None) -> int:
        key = (name, 0 if name in UNTYPED else kind)
        if key not in self._addresses:
            self._addresses[key] = self._objects.address(*key, say)
        return self._addresses[key]

    def _run(self, name: str, kind: int, arguments: Words, num_values: int) -> None:
        num_threads = torch.get_num_threads() if num_values >= WORTH_SHARING else 1
        self._team.run(self._address(name, kind), arguments.address, num_threads)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in KINDS or weight.dtype != x.dtype:
            return reference.rms_norm(x, weight, eps)
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        return self._normed(flat, None, weight, eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in KINDS or not x.dtype == residual.dtype == weight.dtype:
            return reference.add_rms_norm(x, residual, weight, eps)
        checks.check_rows("residual", residual, x.shape[-1])
        if x.shape != residual.shape:
            raise ValueError(f"residual {checks.said(residual)}: want the shape of x {checks.said(x)}")
        return self._normed(x, residual, weight, eps)

    def _normed(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        num_rows, width = x.shape
        checks.check_rows("x", x, width)
        if weight.shape != (width,) or not weight.is_contiguous():
            raise ValueError(f"weight {checks.said(weight)}: want [{width}], contiguous, as x is {checks.said(x)}")
        out, size = x.new_empty(num_rows, width), x.element_size()
        at, step = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0) * size)
        with self._lock:
            self._rows.set(
                *(num_rows, width, x.data_ptr(), x.stride(0) * size, at, step),
                *(weight.data_ptr(), out.data_ptr(), eps, _grain(width)),
            )
            self._run("rms_norm", KINDS[x.dtype], self._rows, num_rows * width)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in KINDS:
            return reference.silu_mul(gate_up)
        num_rows, width, size = gate_up.shape[0], gate_up.shape[-1] // 2, gate_up.element_size()
        checks.check_rows("gate_up", gate_up, 2 * width)
        out = gate_up.new_empty(num_rows, width)
        with self._lock:
            self._rows.set(
                *(num_rows, width, gate_up.data_ptr(), gate_up.stride(0) * size, 0, 0),
                *(0, out.data_ptr(), 0.0, _grain(width)),
            )
            self._run("silu_mul", KINDS[gate_up.dtype], self._rows, 2 * num_rows * width)
        return out

    def kv_write(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch, rope: Rope | None) -> None:
        if q.dtype not in KINDS or not q.dtype == k.dtype == v.dtype == kv.dtype:
            reference.kv_write(q, k, v, kv, batch, rope)
            return
        num_tokens, num_heads, head_dim = q.shape
        num_slots = _checked_write(q, k, v, kv, batch)
        table, num_positions, rotary_dim, interleaved = 0, 0, 0, False
        if rope is not None:
            checks.check_rope(rope, head_dim)
            table, (num_positions, rotary_dim) = rope.cos_sin.data_ptr(), rope.cos_sin.shape
            interleaved = rope.interleaved
        size = q.element_size()
        block_step, value_step, head_step, _, _ = kv.stride()
        with self._lock:
            self._write.set(
                *(num_tokens, num_heads, kv.shape[2], head_dim, kv.shape[3], num_slots),
                *(q.data_ptr(), q.stride(0) * size, q.stride(1) * size),
                *(k.data_ptr(), k.stride(0) * size, k.stride(1) * size),
                *(v.data_ptr(), v.stride(0) * size, v.stride(1) * size),
                *(kv.data_ptr(), block_step * size, value_step * size, head_step * size),
                *(batch.positions.data_ptr(), batch.slots.data_ptr()),
                *(table, num_positions, rotary_dim, interleaved),
            )
            self._run("kv_write", KINDS[q.dtype], self._write, num_tokens * num_heads * head_dim)
            fault = self._write[words.FAULT]
        if fault:
            position, slot = int(batch.positions[fault - 1]), int(batch.slots[fault - 1])
            where = f"position {position} of {num_positions if rope else 'any'}, slot {slot} of {num_slots}"
            raise ValueError(f"batch: token {fault - 1} is out of bounds: {where}")

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        batch: Batch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if q.dtype not in KINDS or kv.dtype != q.dtype:
            return reference.paged_attention(q, kv, batch, scale, window, soft_cap, sinks, out)
        out = q.new_empty(q.shape) if out is None else out
        checks.check_heads("q", q, (q.shape[0], q.shape[1], q.shape[2]))
        checks.check_heads("out", out, (q.shape[0], q.shape[1], q.shape[2]))
        checks.check_cache(kv, q)
        checks.check_sequences(batch)
        checks.check_options(window, soft_cap, sinks, q.shape[1])
        sinks = None if sinks is None else sinks.float().contiguous()
        in_base_2 = LOG2_E if soft_cap is None else 2 * LOG2_E / soft_cap
        size, group = q.element_size(), q.shape[1] // kv.shape[2]
        block_step, value_step, head_step, _, _ = kv.stride()
        with self._lock:
            self._attention.set(
                *(len(batch.context_len), kv.shape[2], group, kv.shape[3], kv.shape[0], q.shape[2]),
                *(window or NO_WINDOW, q.shape[0], batch.query_start.data_ptr(), batch.context_len.data_ptr()),
                *(batch.tables.data_ptr(), 4 * batch.tables.stride(0), batch.tables.shape[1]),
                *(q.data_ptr(), q.stride(0) * size, q.stride(1) * size),
                *(out.data_ptr(), out.stride(0) * size, out.stride(1) * size),
                *(kv.data_ptr(), block_step * size, value_step * size, head_step * size),
                *(0 if sinks is None else sinks.data_ptr(), scale * in_base_2, (soft_cap or 0.0) * LOG2_E),
                *(0, 0, 0, 0, 0, 0, 0, 0),
            )
            self._attend(KINDS[q.dtype], q.shape[2], group)
            fault = self._attention[words.FAULT]
        if fault:
            context, table = int(batch.context_len[fault - 1]), batch.tables[fault - 1].tolist()
            raise ValueError(f"batch: sequence {fault - 1} is out of bounds: context {context}, blocks {table}")
        return out

    def _attend(self, kind: int, head_dim: int, group: int) -> None:
        """Surveys, gives scratch, runs."""
        arguments = self._attention
        self._team.run(self._address("survey", kind), arguments.address, 1)
        if arguments[words.FAULT]:
            return
        num_units, num_values = arguments[words.NUM_UNITS], arguments[words.NUM_VALUES]
        num_threads = min(torch.get_num_threads(), num_units) if num_values >= WORTH_SHARING else 1
        step = -(-words.scratch_bytes(head_dim, group) // 64) * 64
        self._scratch = _grown(self._scratch, num_threads * step + 64)
        self._pieces = _grown(self._pieces, arguments[words.NUM_CUT_ROWS] * words.piece_bytes(head_dim))
        self._arrivals = _grown(self._arrivals, arguments[words.NUM_ARRIVALS])
        arguments[words.SCRATCH], arguments[words.SCRATCH_STEP] = -(-self._scratch.data_ptr() // 64) * 64, step
        arguments[words.PIECES], arguments[words.ARRIVALS] = self._pieces.data_ptr(), self._arrivals.data_ptr()
        self._team.run(self._address("attention", kind), arguments.address, num_threads)

    def copy_blocks(self, pool: Tensor, pairs: Tensor) -> None:
        self.swap_blocks(pool, pool, pairs)

    def swap_blocks(self, source_pool: Tensor, destination_pool: Tensor, pairs: Tensor) -> None:
        checks.check_pairs(pairs, source_pool.shape[0], destination_pool.shape[0])
        checks.check_pools(source_pool, destination_pool)
        pairs, num_blocks, size = pairs.contiguous(), len(pairs), source_pool.element_size()
        block_bytes = source_pool[:1].numel() * size
        per_block = -(-block_bytes // MOVE_BYTES)
        with self._lock:
            self._moves.set(
                *(num_blocks * per_block, MOVE_BYTES, per_block, block_bytes, pairs.data_ptr()),
                *(source_pool.data_ptr(), source_pool.stride(0) * size),
                *(destination_pool.data_ptr(), destination_pool.stride(0) * size),
            )
            self._run("move_blocks", 0, self._moves, num_blocks * block_bytes)


def _checked_write(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> int:
    """Slots of the cache."""
    num_tokens, _, head_dim = q.shape
    checks.check_cache(kv, q)
    for what, tensor, heads in (("q", q, q.shape[1]), ("k", k, kv.shape[2]), ("v", v, kv.shape[2])):
        checks.check_heads(what, tensor, (num_tokens, heads, head_dim))
    checks.check_tokens(batch, num_tokens)
    return kv.shape[0] * kv.shape[3]


def _grain(width: int) -> int:
    """Rows that a thread takes at a time."""
    return max(4096 // max(width, 1), 1)


def _grown(held: Tensor, count: int) -> Tensor:
    """At least `count` elements, zeros where they are new. No element outlives a launch."""
    return held if len(held) >= count else held.new_zeros(2 * count)
