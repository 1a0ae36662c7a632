"""Memory that kernels work in, kept from call to call; of a recording, for as long as it may be replayed.

What is recorded has its addresses in the words of its launches, and so what was handed out as `scratch` or lent to a
tensor may not move or be given back. Pieces and arrivals may: they are placed anew before each replay. Replays go one
after another, and in a replay nobody comes to a launch before all that the one before it asked for is done. Who comes
late finds no work, and has a place in `scratch` that is none of theirs who went on, for all of them came before it.
"""

from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

LINE = 64


def _lines(num_bytes: int) -> np.ndarray:
    """Zeros that begin at a cache line."""
    whole = np.zeros(num_bytes + LINE, np.uint8)
    skipped = -whole.ctypes.data % LINE
    return whole[skipped : skipped + num_bytes]


class Scratch:
    """Memory that grows; zeros when it is new. Where it is recorded, it is of the size that was asked for, and what was
    outgrown stays."""

    def __init__(self, is_recorded: bool = False) -> None:
        self._is_recorded = is_recorded
        self._held: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        return sum(held.nbytes for held in self._held)

    def address(self, num_bytes: int) -> int:
        if not self._held or num_bytes > self._held[-1].nbytes:
            kept = self._held if self._is_recorded else []
            self._held = [*kept, _lines(num_bytes if self._is_recorded else 2 * num_bytes)]
        return self._held[-1].ctypes.data


class Rooms:
    """What attention works in."""

    def __init__(self) -> None:
        self.scratch, self.pieces = Scratch(), Scratch()
        self.arrivals = Scratch()  # left at zero


class Loans:
    """Memory of tensors that are made while something is recorded. It is lent again when no view of it is left, as an
    allocator would, but never given back."""

    def __init__(self) -> None:
        self._blocks: list[tuple[np.ndarray, ReferenceType[np.ndarray]]] = []  # and whom it was lent to last

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block, _ in self._blocks)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor without contents, of this shape and type."""
        size = tensor.nbytes
        if not size:
            return tensor
        free = [i for i, (block, lent) in enumerate(self._blocks) if lent() is None and block.nbytes >= size]
        at = min(free, key=lambda i: self._blocks[i][0].nbytes, default=len(self._blocks))
        block = self._blocks[at][0] if free else _lines(size)
        lent = block[:size]
        self._blocks[at : at + 1] = [(block, ref(lent))]
        return torch.frombuffer(lent, dtype=tensor.dtype).view(tensor.shape)
