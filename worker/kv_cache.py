"""The two pools of KV blocks, what memory there is for them, and the moves between them.

    device pool [num_blocks,      layers, 2, kv_heads, block_size, head_dim]    read and written by the kernels
    host pool   [num_host_blocks, layers, 2, kv_heads, block_size, head_dim]    swapped tables and evicted blocks

    8 bits      [ values of a block | its own scales ]  ...             where scales are kept in the blocks

A block is one contiguous piece in either, so a move is one copy, and scales that a block keeps go where it goes. A
plan's moves run in the order swaps out, copies, swaps in, before anything is computed; where a device moves beside what
it computes, events keep that order. So what a block held is out before it is written again, and what comes back is
there before it is read. Pools begin zeroed; what a block held for an earlier owner is never read, as the kernels mask
everything beyond a sequence's context.

What this file does not know: who owns a block. A plan that names a block that does not exist is refused.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kilburn.kernels.dispatch import Kernels, Scales, stopwatch_for
from kilburn.shared.layout import DTYPE_BYTES, EIGHT_BITS, KVLayout
from kilburn.worker.outcomes import PlanBroken

Pairs = Sequence[tuple[int, int]]


class KVCache:
    """Both pools of one worker."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        num_host_blocks: int,
        device: torch.device,
        kernels: Kernels,
        static_scales: Tensor | None = None,
    ) -> None:
        """`static_scales` float32 [layers, 2, kv_heads]: of KV of 8 bits whose blocks have no scale area."""
        num_scales = (layout.scale_bytes > 0) + (static_scales is not None)
        if num_scales != (layout.dtype in EIGHT_BITS.values()):
            raise ValueError(f"{layout}, {num_scales} kinds of scales: KV of 8 bits has one kind, other KV has none")
        self.layout, self.num_blocks, self.num_host_blocks = layout, num_blocks, num_host_blocks
        self._kernels, self._watch = kernels, stopwatch_for(device)
        shape = (layout.bytes_per_block,)
        if has_own_memory(device):
            blocks = torch.zeros((num_blocks, *shape), dtype=torch.int8, device=device)
            # Pinned, so that copies need no staging.
            host_blocks = torch.zeros((num_host_blocks, *shape), dtype=torch.int8, pin_memory=True)
        else:
            blocks, host_blocks = _untouched((num_blocks, *shape)), _untouched((num_host_blocks, *shape))
        self.pool, self.host_pool = values_of(blocks, layout), values_of(host_blocks, layout)
        # Whole blocks, as they are moved.
        self._blocks, self.host_blocks = self.pool, self.host_pool
        self.scales: Scales = None
        if layout.scale_bytes:
            self._blocks, self.host_blocks = blocks, host_blocks
            self.scales = list(scales_of(blocks, layout).unbind(1))
        elif static_scales is not None:
            self.scales = list(static_scales.to(device).contiguous().unbind(0))

    def move(self, swaps_out: Pairs, copies: Pairs, swaps_in: Pairs) -> None:
        """A plan's moves, in their order: asked for, not waited for. Raises PlanBroken before anything has moved."""
        device, host = self.num_blocks, self.num_host_blocks
        out = _checked(swaps_out, "swap out", device, host)
        copy = _checked(copies, "copy", device, device)
        back = _checked(swaps_in, "swap in", host, device)
        if out is copy is back is None:
            return
        self._watch.start()
        if out is not None:
            self._kernels.swap_blocks(self._blocks, self.host_blocks, out)
        if copy is not None:
            self._kernels.copy_blocks(self._blocks, copy.to(self.pool.device))
        if back is not None:
            self._kernels.swap_blocks(self.host_blocks, self._blocks, back)
        self._watch.stop()

    def finish(self) -> float:
        """Wait for the moves that were asked for last. Seconds that they took on a device with a clock of its own."""
        return self._watch.seconds()


def values_of(blocks: Tensor, layout: KVLayout) -> Tensor:
    """Keys and values in whole blocks, int8 [num_blocks, bytes]: a view of the shape above."""
    count = layout.values_per_block * DTYPE_BYTES[layout.dtype]
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return blocks[:, :count].view(getattr(torch, layout.dtype)).unflatten(1, shape)


def scales_of(blocks: Tensor, layout: KVLayout) -> Tensor:
    """The scale areas of whole blocks: a float32 view [num_blocks, layers, 2, kv_heads, block_size]."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size)
    return blocks.view(torch.float32)[:, -layout.scales_per_block :].unflatten(1, shape)


def _untouched(shape: tuple[int, ...]) -> Tensor:
    """Zeros in the host's memory, of which a page costs nothing until something is written to it."""
    num_bytes = math.prod(shape)
    if num_bytes == 0:
        return torch.zeros(shape, dtype=torch.int8)
    # The tensor keeps it. Private, for pages that processes share are not huge unless a system's settings say so.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.int8).view(shape)


def _checked(pairs: Pairs, what: str, num_sources: int, num_destinations: int) -> Tensor | None:
    """int64 [n, 2], or None where there is nothing to move."""
    if not pairs:
        return None
    moves = torch.tensor(pairs, dtype=torch.int64)
    lowest, (source, destination) = int(moves.min()), moves.amax(dim=0).tolist()
    if lowest < 0 or source >= num_sources or destination >= num_destinations:
        raise PlanBroken(f"a {what} {source} -> {destination}: the pools have {num_sources} and {num_destinations}")
    return moves


# --- how much memory there is


def has_own_memory(device: torch.device) -> bool:
    """Whether the device has memory apart from the host's."""
    return hasattr(torch.get_device_module(device), "mem_get_info")


def spare_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses."""
    if has_own_memory(device):
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return spare_host_bytes()


def total_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that the host has, whoever uses it: the machine's, or the container's limit where that is less."""
    total = 1 << 62
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                total = int(line.split()[1]) << 10
        limit = (cgroup / "memory.max").read_text().strip()
        total = total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        pass  # another system, or no such control group: what is known so far holds
    return total


def spare_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of the host that can be had without swapping: the machine's, or the container's where that is less."""
    available = 1 << 62
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            used = int((cgroup / "memory.current").read_text())
            for line in (cgroup / "memory.stat").read_text().splitlines():
                if line.startswith("inactive_file "):
                    used -= int(line.split()[1])  # cached files give way, those of the weights among them
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass  # another system, or no such control group: what is known so far holds
    return max(available, 0)
