"""Checksums of the blocks on the host (--verify-swap), and the device blocks that a bad one has filled.

    swap out   after the copy has ended: crc32 of the host block's bytes is noted
    swap in    the same again; another sum means that the block is not what it was

What a bad host block fills is unreadable until it is filled anew, by a move or from its first slot on. A row that would
read it answers `kv_lost` instead, and the core computes its tokens again. Copies of an unreadable block are no better.

Of several ranks each looks at its own part of a block, and a block that one of them cannot read is lost for all.

What this file does not know: which rows there are. It is asked once for each plan, before anything is computed.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilburn.shared.types import Tier

Pairs = Sequence[tuple[int, int]]
NO_SUM = -1  # of a copy of what was unreadable itself
Agree = Callable[[NDArray[np.bool_]], NDArray[np.bool_]]  # what this rank says -> what any says, place by place


class SwapCheck:
    """Of one host pool. host_blocks [num_host_blocks, ...]: whole blocks, contiguous, in the host's memory."""

    def __init__(self, host_blocks: Tensor, agree: Agree = lambda flags: flags) -> None:
        self._agree = agree
        self._blocks = host_blocks.view(torch.uint8).flatten(1)
        self._sums: dict[int, int] = {}
        self._unreadable: dict[int, int] = {}  # device block -> the host block that it came from
        self._came_up: set[int] = set()  # of these, filled in the plan that runs

    def clear(self) -> None:
        """The lease is over."""
        self._sums.clear()
        self._unreadable.clear()
        self._came_up.clear()

    def moved(self, copies: Pairs, swaps_in: Pairs) -> None:
        """A plan's copies and swaps in, in this order. No host block that they read is written by the same plan."""
        for source, destination in copies:
            self._fill(destination, self._unreadable.get(source))
        self._came_up = set()
        spoilt = self._agree(np.array([self._sums.get(host) != self._sum(host) for host, _ in swaps_in], np.bool_))
        for (host, device), is_spoilt in zip(swaps_in, spoilt.tolist(), strict=True):
            self._fill(device, host if is_spoilt else None)
            if is_spoilt:
                self._came_up.add(device)

    def _fill(self, block: int, host: int | None) -> None:
        if host is None:
            self._unreadable.pop(block, None)
        else:
            self._unreadable[block] = host

    def leaving(self, swaps_out: Pairs) -> set[int]:
        """Host blocks that a plan fills from what is unreadable: asked before its other moves are told."""
        return {host for device, host in swaps_out if device in self._unreadable}

    def after(self, swaps_out: Pairs, spoiled: set[int]) -> None:
        """A plan's swaps out have ended. `spoiled`: what `leaving` said of them."""
        for _, host in swaps_out:
            self._sums[host] = NO_SUM if host in spoiled else self._sum(host)

    def _sum(self, host: int) -> int:
        return zlib.crc32(self._blocks[host].numpy())

    @property
    def has_doubts(self) -> bool:
        return bool(self._unreadable)

    def lost(self, blocks: Iterable[int]) -> tuple[tuple[Tier, int], ...]:
        """Of the blocks that a row is about to read, those that are unreadable, as the core is to be told."""
        found = [block for block in blocks if block in self._unreadable]
        return tuple((Tier.HOST, self._unreadable[b]) if b in self._came_up else (Tier.DEVICE, b) for b in found)

    def written(self, blocks: Iterable[int]) -> None:
        """Blocks that are written from their first slot on: what they held is gone."""
        for block in blocks:
            self._unreadable.pop(block, None)
