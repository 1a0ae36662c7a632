"""The CPU set: checks what it is given, writes a kernel's words, and runs it.

What the compiled code has no form for (float64, operands of mixed types) goes to the reference. Memory to work in is
kept from call to call (rooms.py). One call runs at a time; a second thread waits.
"""

import threading
from collections.abc import Callable
from math import e, log2
from pathlib import Path

import torch
from torch import Tensor

from kilburn.kernels import checks, reference
from kilburn.kernels.contract import Batch, Likeliest, Odds, Rope, Sampled, Shapes
from kilburn.kernels.cpu import arguments as words
from kilburn.kernels.cpu import sampling
from kilburn.kernels.cpu.arguments import Words
from kilburn.kernels.cpu.objects import KINDS, Objects
from kilburn.kernels.cpu.recording import Recorder
from kilburn.kernels.cpu.rooms import Rooms
from kilburn.kernels.cpu.team import TAPE, Fork, Team

KERNELS = ("survey", "attention", "kv_write", "rms_norm", "silu_mul", "move_blocks")
INT8_KERNELS = ("attention_int8", "kv_write_int8")  # in place of those of the same name, for a cache of int8
UNTYPED = ("survey", "move_blocks")  # know no elements, or one kind only
NO_WINDOW = 1 << 40
LOG2_E = log2(e)
WORTH_SHARING = 16 * 1024  # values to touch before it pays to wake a second thread
MOVE_BYTES = 64 * 1024


class CpuKernels:
    """Kernels for tensors in the host's memory. `fork` starts threads (see team.py); None: Python's own."""

    def __init__(self, fork: Fork | None, folder: Path | None = None) -> None:
        self._fork, self._objects, self._team = fork, Objects(folder), Team(fork)
        self._addresses: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        self._attention = Words(18, 22, 2, rows_at=words.NUM_TOKENS, seqs_at=words.NUM_SEQS)
        self._write, self._moves = Words(8, 21, rows_at=words.W_NUM_TOKENS), Words(3, 6)
        self._norm, self._silu = (Words(4, 8, 1, rows_at=words.R_NUM_ROWS) for _ in range(2))
        self._rooms = Rooms()

    @property
    def name(self) -> str:
        return f"cpu (compiled for {self._objects.cpu}, on {self._team.name})"

    def warm_up(self, shapes: Shapes, on_progress: Callable[[str], None] | None = None) -> None:
        if shapes.dtype in KINDS:
            for name in KERNELS:
                wanted = name + "_int8" if shapes.kv_dtype == torch.int8 else name
                self._address(wanted if wanted in INT8_KERNELS else name, KINDS[shapes.dtype], on_progress)

    def _address(self, name: str, kind: int, say: Callable[[str], None] | None = None) -> int:
        key = (name, 0 if name in UNTYPED else kind)
        if key not in self._addresses:
            self._addresses[key] = self._objects.address(*key, say)
        return self._addresses[key]

    def _run(self, name: str, kind: int, arguments: Words, num_values: int) -> None:
        num_threads = torch.get_num_threads() if num_values >= WORTH_SHARING else 1
        self._team.run(self._address(name, kind), arguments, num_threads)

    def recorder(self) -> Recorder | None:
        """Records what is asked of this set and of products; None where it has no threads of OpenMP."""
        return None if self._fork is None else Recorder(self._fork, self._objects)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in KINDS or weight.dtype != x.dtype:
            return reference.rms_norm(x, weight, eps)
        is_as_it_is = x.dim() == 2 or (x.dim() == 3 and x.stride(2) == 1 and x.numel() > 0)
        flat = x if is_as_it_is else x.reshape(-1, x.shape[-1])
        return self._normed(flat, None, weight, eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in KINDS or not x.dtype == residual.dtype == weight.dtype:
            return reference.add_rms_norm(x, residual, weight, eps)
        return self._normed(x, residual, weight, eps)

    def _normed(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [rows, width], or [tokens, heads, width] without a residual."""
        out, norm = torch.empty(x.shape, dtype=x.dtype), self._norm
        beside = None if residual is None else (residual.shape, residual.stride())
        key = (x.dtype, x.shape, x.stride(), beside, weight.shape, weight.stride(), eps)
        with self._lock:
            if key != norm.key:
                checks.check_norm(x[:, 0] if x.dim() == 3 and residual is None else x, residual, weight)
                width, size = x.shape[-1], x.element_size()
                heads, head_step = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1) * size)
                step = 0 if residual is None else residual.stride(0) * size
                steps = x.stride(0) * size, head_step, step
                norm.others(key, x.shape[0] * heads, width, heads, *steps, _grain(width), eps)
            at = 0 if residual is None else residual.data_ptr()
            norm.begin(x.data_ptr(), at, weight.data_ptr(), out.data_ptr())
            self._run("rms_norm", KINDS[x.dtype], norm, x.numel())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in KINDS:
            return reference.silu_mul(gate_up)
        num_rows, width = gate_up.shape[0], gate_up.shape[-1] // 2
        key = (gate_up.dtype, gate_up.shape, gate_up.stride())
        out, silu = torch.empty((num_rows, width), dtype=gate_up.dtype), self._silu
        with self._lock:
            if key != silu.key:
                checks.check_rows("gate_up", gate_up, 2 * width)
                step = gate_up.stride(0) * gate_up.element_size()
                silu.others(key, num_rows, width, 1, step, 0, 0, _grain(width), 0.0)
            silu.begin(gate_up.data_ptr(), 0, 0, out.data_ptr())
            self._run("silu_mul", KINDS[gate_up.dtype], silu, gate_up.numel())
        return out

    def kv_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        batch: Batch,
        rope: Rope | None,
        scales: Tensor | None = None,
    ) -> None:
        if q.dtype not in KINDS or not q.dtype == k.dtype == v.dtype or kv.dtype not in (q.dtype, torch.int8):
            reference.kv_write(q, k, v, kv, batch, rope, scales)
            return
        write, positions, slots = self._write, batch.positions, batch.slots
        key = (q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), kv.shape, kv.stride())
        key += (
            positions.dtype,
            positions.shape,
            positions.stride(),
            slots.dtype,
            slots.shape,
            slots.stride(),
            *_scales_key(kv, scales),
        )
        if rope is not None:
            key += (rope.cos_sin.dtype, rope.cos_sin.shape, rope.cos_sin.stride(), rope.interleaved)
        with self._lock:
            if key != write.key:
                checks.check_write(q, k, v, kv, batch, rope)
                checks.check_scales(kv, scales)
                write.others(key, *_write_others(q, k, v, kv, rope, scales))
            table = 0 if rope is None else rope.cos_sin.data_ptr()
            write.begin(
                *(q.data_ptr(), k.data_ptr(), v.data_ptr(), kv.data_ptr()),
                *(positions.data_ptr(), slots.data_ptr(), table, 0 if scales is None else scales.data_ptr()),
            )
            self._run("kv_write" if scales is None else "kv_write_int8", KINDS[q.dtype], write, q.numel())
            (fault,) = write.read(words.FAULT, words.FAULT + 1)
        if fault:
            position, slot = int(positions[fault - 1]), int(slots[fault - 1])
            num_positions = "any" if rope is None else str(rope.cos_sin.shape[0])
            where = f"position {position} of {num_positions}, slot {slot} of {kv.shape[0] * kv.shape[3]}"
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
        scales: Tensor | None = None,
    ) -> Tensor:
        if q.dtype not in KINDS or kv.dtype not in (q.dtype, torch.int8):
            return reference.paged_attention(q, kv, batch, scale, window, soft_cap, sinks, out, scales)
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        start, context, tables, attention = batch.query_start, batch.context_len, batch.tables, self._attention
        key = (q.dtype, q.shape, q.stride(), kv.shape, kv.stride(), out.dtype, out.shape, out.stride(), scale, window)
        key += (soft_cap, start.dtype, start.shape, start.stride(), context.dtype, context.shape, context.stride())
        key += (tables.dtype, tables.shape, tables.stride(), *_scales_key(kv, scales))
        with self._lock:
            if key != attention.key:
                checks.check_attention(q, kv, out, batch, window, soft_cap)
                checks.check_scales(kv, scales)
                attention.others(key, *_attention_others(q, kv, out, batch, scale, window, soft_cap, scales))
            if sinks is not None:
                checks.check_sinks(sinks, q.shape[1])
                sinks = sinks.float().contiguous()
            attention.begin(
                *(start.data_ptr(), context.data_ptr(), tables.data_ptr(), q.data_ptr(), out.data_ptr()),
                *(kv.data_ptr(), 0 if sinks is None else sinks.data_ptr(), 0 if scales is None else scales.data_ptr()),
                *(0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
            )
            self._attend(KINDS[q.dtype], q.shape[2], q.shape[1] // kv.shape[2], out, scales is not None)
            (fault,) = attention.read(words.FAULT, words.FAULT + 1)
        if fault:
            told = f"query rows {start.tolist()} of {q.shape[0]}, context {int(context[fault - 1])}"
            told += f", blocks {tables[fault - 1].tolist()} of {kv.shape[0]}"
            raise ValueError(f"batch: sequence {fault - 1} is out of bounds: {told}")
        return out

    def _attend(self, kind: int, head_dim: int, group: int, out: Tensor, is_int8: bool) -> None:
        """Surveys, gives scratch, runs. What is recorded has no rows but those of sequences."""
        attention, tape = self._attention, TAPE.get()
        self._team.run(self._address("survey", kind), attention, 1)
        fault, *_, num_units, num_values, num_cut_rows, num_arrivals, rows_start, rows_end = attention.read(
            words.FAULT, words.ROWS_END + 1
        )
        if fault:
            return
        if tape is None and (rows_start or rows_end < out.shape[0]):  # rows of no sequence
            out[:rows_start] = 0
            out[rows_end:] = 0
        num_threads = min(torch.get_num_threads(), num_units) if num_values >= WORTH_SHARING else 1
        step, rooms = words.scratch_bytes(head_dim, group), self._rooms
        if tape is None:
            scratch = rooms.scratch.address(max(num_threads, 1) * step)
        else:  # all threads come; what cut units leave has its place when the step is known
            scratch = tape.scratch.address(tape.num_threads * step)
        pieces = rooms.pieces.address(num_cut_rows * words.piece_bytes(head_dim))
        attention.write(words.SCRATCH, scratch, step, pieces, rooms.arrivals.address(8 * num_arrivals))
        name = "attention_int8" if is_int8 else "attention"
        self._team.run(self._address(name, kind), attention, num_threads)

    def copy_blocks(self, pool: Tensor, pairs: Tensor) -> None:
        self.swap_blocks(pool, pool, pairs)

    def swap_blocks(self, source_pool: Tensor, destination_pool: Tensor, pairs: Tensor) -> None:
        checks.check_pools(source_pool, destination_pool)
        checks.check_pairs(pairs, source_pool.shape[0], destination_pool.shape[0])
        pairs, size = pairs.contiguous(), source_pool.element_size()
        block_bytes = source_pool[0].numel() * size if len(pairs) else 0
        per_block = -(-block_bytes // MOVE_BYTES)
        with self._lock:
            self._moves.others(
                *((), len(pairs) * per_block, MOVE_BYTES, per_block, block_bytes),
                *(source_pool.stride(0) * size, destination_pool.stride(0) * size),
            )
            self._moves.begin(pairs.data_ptr(), source_pool.data_ptr(), destination_pool.data_ptr())
            self._run("move_blocks", 0, self._moves, len(pairs) * block_bytes)

    def sample(self, logits: Tensor, odds: Odds | None = None) -> Sampled:
        return sampling.sample(logits, odds)

    def likeliest(self, logits: Tensor, count: int) -> Likeliest:
        return sampling.likeliest(logits, count)


def _scales_key(kv: Tensor, scales: Tensor | None) -> tuple[object, ...]:
    return (kv.dtype,) if scales is None else (kv.dtype, scales.dtype, scales.shape, scales.stride())


def _scale_steps(scales: Tensor | None) -> tuple[int, int, int]:
    """Bytes from block to block (0 where there is one scale for all), from key to value, from head to head."""
    if scales is None:
        return 0, 0, 0
    steps = [4 * step for step in scales.stride()]
    return (0, steps[0], steps[1]) if scales.dim() == 2 else (steps[0], steps[1], steps[2])


def _write_others(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, rope: Rope | None, scales: Tensor | None
) -> tuple[int, ...]:
    size, (num_tokens, num_heads, head_dim) = q.element_size(), q.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv.shape
    steps = [x.stride(i) * size for x in (q, k, v) for i in (0, 1)]
    steps += [kv.stride(i) * kv.element_size() for i in (0, 1, 2)] + [*_scale_steps(scales)]
    turn = (0, 0, 0) if rope is None else (*rope.cos_sin.shape, int(rope.interleaved))
    return num_tokens, num_heads, num_kv_heads, head_dim, block_size, num_blocks * block_size, *steps, *turn


def _attention_others(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    scales: Tensor | None,
) -> tuple[float, ...]:
    size, (num_tokens, num_heads, head_dim) = q.element_size(), q.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv.shape
    num_seqs, max_blocks = batch.tables.shape
    steps = [x.stride(i) * size for x in (q, out) for i in (0, 1)]
    steps += [kv.stride(i) * kv.element_size() for i in (0, 1, 2)] + [*_scale_steps(scales)]
    return (
        *(num_seqs, num_kv_heads, num_heads // num_kv_heads, block_size, num_blocks, head_dim),
        *(NO_WINDOW if window is None else window, num_tokens, max_blocks, 4 * batch.tables.stride(0), *steps),
        *((scale * LOG2_E, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2_E)),
    )


def _grain(width: int) -> int:
    """Rows that a thread takes at a time."""
    return max(4096 // max(width, 1), 1)
