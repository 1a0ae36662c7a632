"""The launcher of `look_up` (rows.py): rows of a table of any float type, as float32, by their numbers."""

import threading
from pathlib import Path

import torch
from torch import Tensor

from kilburn.kernels.cpu.arguments import E_NUM_IDS, FAULT, Words
from kilburn.kernels.cpu.objects import KINDS, Objects
from kilburn.kernels.cpu.team import Fork, Team


class RowLookup:
    """(table [rows, width], ids int64 [T]) -> float32 [T, width]. One call runs at a time; a second thread waits."""

    def __init__(self, fork: Fork | None, folder: Path | None = None) -> None:
        self._objects, self._team = Objects(folder), Team(fork)
        self._lock, self._words = threading.Lock(), Words(3, 4, rows_at=E_NUM_IDS)
        self._functions: dict[int, int] = {}

    def takes(self, table: Tensor) -> bool:
        return table.dtype in KINDS and table.stride(1) == 1

    def __call__(self, table: Tensor, ids: Tensor) -> Tensor:
        num_rows, width = table.shape
        out = torch.empty((len(ids), width), dtype=torch.float32)
        with self._lock:
            kind, words = KINDS[table.dtype], self._words
            if kind not in self._functions:
                self._functions[kind] = self._objects.address("look_up", kind)
            words.others((), len(ids), num_rows, width, table.stride(0) * table.element_size())
            words.begin(table.data_ptr(), ids.data_ptr(), out.data_ptr())
            self._team.run(self._functions[kind], words, 1)
            (fault,) = words.read(FAULT, FAULT + 1)
        if fault:
            raise IndexError(f"token {int(ids[fault - 1])} is none of the {num_rows} of the vocabulary")
        return out
