"""The launcher of panels.py: x . weight for any number of rows, over a weight that is laid in panels here, once."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels import checks
from kilburn.kernels.cpu.arguments import P_NUM_ROWS, PANEL, Words
from kilburn.kernels.cpu.objects import KINDS, Objects
from kilburn.kernels.cpu.team import Fork, Team

Product = Callable[[Tensor, Tensor | None], Tensor]  # x [rows, in] and bias [out] -> [rows, out]


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [num_outputs, depth] in panels; outputs beyond the last are zeros."""

    held: Tensor
    no_bias: Tensor  # zeros [outputs of all panels]
    num_outputs: int
    depth: int

    @property
    def num_panels(self) -> int:
        return len(self.no_bias) // PANEL


def panels_of(weight: Tensor) -> Panels:
    """A copy of `weight` [out, in], in its own type."""
    num_outputs, depth = weight.shape
    missing = -num_outputs % PANEL
    whole = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    columns = whole.reshape(-1, PANEL, depth).transpose(1, 2)
    if weight.dtype == torch.bfloat16:  # neighbours are those that share a word
        columns = columns.unflatten(2, (2, PANEL // 2)).transpose(2, 3)
    return Panels(columns.contiguous(), torch.zeros(num_outputs + missing), num_outputs, depth)


class PanelProduct:
    """x [rows, in] -> x . weight^T + bias, float32. One call runs at a time; a second thread waits."""

    def __init__(self, fork: Fork | None, folder: Path | None = None) -> None:
        self._objects, self._team = Objects(folder), Team(fork)
        self._lock, self._words = threading.Lock(), Words(4, 5, rows_at=P_NUM_ROWS)
        self._functions: dict[int, int] = {}

    def over(self, weight: Tensor) -> Product:
        """The product with one weight, of a type in KINDS. Holds nothing of `weight`."""
        return partial(self, panels_of(weight))

    def __call__(self, panels: Panels, x: Tensor, bias: Tensor | None) -> Tensor:
        checks.check_rows("x", x, panels.depth)
        if x.dtype != torch.float32:
            raise ValueError(f"x {checks.said(x)}: want float32")
        num_rows, num_outputs = x.shape[0], panels.num_panels * PANEL
        out = torch.empty((num_rows, num_outputs), dtype=torch.float32)
        if not num_rows:
            return out[:, : panels.num_outputs]
        start = panels.no_bias if bias is None else bias
        if len(start) < num_outputs:
            start = F.pad(start, (0, num_outputs - len(start)))
        kind, key = KINDS[panels.held.dtype], (num_rows, panels.depth, num_outputs, x.stride(0))
        with self._lock:
            words = self._words
            if kind not in self._functions:
                self._functions[kind] = self._objects.address("panels", kind)
            if key != words.key:
                words.others(key, num_rows, panels.depth, panels.num_panels, x.stride(0) * 4, num_outputs * 4)
            words.begin(x.data_ptr(), panels.held.data_ptr(), start.data_ptr(), out.data_ptr())
            self._team.run(self._functions[kind], words, torch.get_num_threads())
        return out if num_outputs == panels.num_outputs else out[:, : panels.num_outputs].contiguous()
