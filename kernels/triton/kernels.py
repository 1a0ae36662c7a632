"""The Triton set: allocates what comes out, has the launch computed, and runs it.

What it may know of a device is told to it: `Device` for the cutting, `aside` for the stream that swaps run on. So the
same code runs in Triton's interpreter, where there is neither.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kilburn.kernels.contract import Batch, Likeliest, Odds, Rope, Sampled, Shapes
from kilburn.kernels.triton import copy_blocks, kv_write, paged_attention, rms_norm, sample, silu_mul, swap_blocks
from kilburn.kernels.triton.launch import check_device
from kilburn.kernels.triton.paged_attention import Device, Options
from kilburn.kernels.triton.swap_blocks import Aside


class TritonKernels:
    """Kernels for tensors of one device."""

    def __init__(self, torch_device: torch.device, device: Device, aside: Aside) -> None:
        self._torch_device, self._device, self._aside = torch_device, device, aside

    @property
    def name(self) -> str:
        return f"triton (for {self._device.architecture}, {self._device.num_units} multiprocessors)"

    def warm_up(self, shapes: Shapes, on_progress: Callable[[str], None] | None = None) -> None:
        """Compiles each kernel in the forms that `shapes` needs: one small decode and one small ragged batch."""
        if on_progress is not None:
            on_progress("compiling kernels")
        place, dtype = self._torch_device, shapes.dtype
        heads, kv_heads, dim, size = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, shapes.block_size
        pool = torch.zeros((2, 1, 2, kv_heads, size, dim), dtype=dtype, device=place)
        for queries in (1, min(2, size)):
            batch = _first_positions(queries, place)
            fused = torch.zeros((queries, heads + 2 * kv_heads, dim), dtype=dtype, device=place)
            q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
            rope = Rope(torch.zeros((size, dim - dim % 2), device=place))
            self.kv_write(q, k, v, pool[:, 0], batch, rope if dim > 1 else None)
            self.paged_attention(q, pool[:, 0], batch, scale=1.0)
            x = torch.zeros((queries, shapes.hidden), dtype=dtype, device=place)
            self.rms_norm(x, x[0], eps=1e-6)
            self.add_rms_norm(x, x.clone(), x[0], eps=1e-6)
            self.silu_mul(torch.zeros((queries, 2 * shapes.intermediate), dtype=dtype, device=place))
        self.copy_blocks(pool, torch.tensor([[0, 1]], device=place))
        if shapes.vocab:
            logits = torch.zeros((1, shapes.vocab), device=place)
            rows = torch.ones((1, 4), dtype=torch.float64, device=place)
            odds = Odds(rows, torch.zeros((1, 4), dtype=torch.int64, device=place))
            for asked in (None, odds):
                self.sample(logits, asked)
            self.likeliest(logits, 1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        width = x.shape[-1]
        rows = x if x.dim() == 3 else x.reshape(-1, width).unsqueeze(1)
        check_device("weight", weight, x)
        rms_norm.rms_norm(y, rows, weight, eps).run()
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        check_device("residual", residual, x)
        rms_norm.add_rms_norm(y, x, residual, weight, eps).run()
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        silu_mul.silu_mul(out, gate_up).run()
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
        """`scales` float32 [2, Hkv]: for a kv of 8 bits, what a stored value is multiplied with."""
        check_device("kv", kv, q)
        check_device("batch.slots", batch.slots, q)
        kv_write.kv_write(q, k, v, kv, batch, rope, scales).run()

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
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        check_device("kv", kv, q)
        check_device("batch.tables", batch.tables, q)
        options = Options(window, soft_cap, sinks, scales)
        for launch in paged_attention.paged_attention(self._device, out, q, kv, batch, scale, options):
            launch.run()
        return out

    def copy_blocks(self, pool: Tensor, pairs: Tensor) -> None:
        check_device("pairs", pairs, pool)
        copy_blocks.copy_blocks(pool, pool, pairs).run()

    def swap_blocks(self, source_pool: Tensor, destination_pool: Tensor, pairs: Tensor) -> None:
        with self._aside():
            swap_blocks.swap_blocks(source_pool, destination_pool, pairs, self._torch_device)

    def sample(self, logits: Tensor, odds: Odds | None = None) -> Sampled:
        sampled, launches = sample.sample(logits, odds)
        for launch in launches:
            launch.run()
        return sampled

    def likeliest(self, logits: Tensor, count: int) -> Likeliest:
        found, launches = sample.likeliest(logits, count)
        for launch in launches:
            launch.run()
        return found


def _first_positions(queries: int, place: torch.device) -> Batch:
    """One sequence of `queries` new tokens in block 0."""

    def whole(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=place)

    positions = torch.arange(queries, device=place)
    return Batch(whole(0, queries), whole(queries), whole(0).unsqueeze(0), positions, positions, queries, queries)
