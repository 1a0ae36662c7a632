"""Whole blocks between the device and pinned memory of the host.

    small blocks   one launch of copy_blocks, which reads and writes pinned memory over the bus
    large blocks   a copy by the engines for each run of neighbours (3 -> 7, 4 -> 8: one copy), no multiprocessor needed

A block is one contiguous piece in either pool. Where the line lies is a matter of measurement: a copy costs some
microseconds to ask for, and that is little beside the time that a large block takes.

The moves run on a stream of their own between two events: they begin when what was computed before has ended, and what
is computed after waits for them. Any other work of the stream that asked goes on meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kilburn.kernels.checks import check_pairs, check_pools
from kilburn.kernels.triton.copy_blocks import copy_blocks

LARGE_BLOCK_BYTES = 512 * 1024

Aside = Callable[[], AbstractContextManager[object]]


def runs(pairs: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """(source, destination, number) of each stretch in which both ids go up by one."""
    if not pairs:
        return
    first_source, first_destination = source, destination = pairs[0]
    for next_source, next_destination in pairs[1:]:
        if (next_source, next_destination) != (source + 1, destination + 1):
            yield first_source, first_destination, source + 1 - first_source
            first_source, first_destination = next_source, next_destination
        source, destination = next_source, next_destination
    yield first_source, first_destination, source + 1 - first_source


def swap_blocks(source_pool: Tensor, destination_pool: Tensor, pairs: Tensor, device: torch.device) -> None:
    """Asks for the moves on the current stream. pairs int64 [n, 2] in the host's memory."""
    check_pools(source_pool, destination_pool)
    check_pairs(pairs, len(source_pool), len(destination_pool))
    if not len(pairs):
        return
    if source_pool[0].numel() * source_pool.element_size() < LARGE_BLOCK_BYTES:
        by_kernel(source_pool, destination_pool, pairs, device)
    else:
        by_copies(source_pool, destination_pool, pairs)


def by_kernel(source_pool: Tensor, destination_pool: Tensor, pairs: Tensor, device: torch.device) -> None:
    copy_blocks(source_pool, destination_pool, pairs.contiguous().to(device, non_blocking=True)).run()


def by_copies(source_pool: Tensor, destination_pool: Tensor, pairs: Tensor) -> None:
    for source, destination, number in runs(pairs.tolist()):
        destination_pool[destination : destination + number].copy_(
            source_pool[source : source + number], non_blocking=True
        )
