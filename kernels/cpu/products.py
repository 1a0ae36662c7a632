"""The launcher of panels.py: x . weight for few rows, over a weight that oneDNN has packed.

Nothing says that oneDNN's packed order stays as it is, so each weight is looked at before it is used so: its size, and
a sample of its values, must be where panels.py expects them. Where they are not, there are no panels, and the caller
goes on with oneDNN's own product.
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kilburn.kernels import checks
from kilburn.kernels.cpu.arguments import PANEL, Words
from kilburn.kernels.cpu.objects import Objects
from kilburn.kernels.cpu.team import Fork, Team

FewRows = Callable[[Tensor, Tensor | None], Tensor]  # x [rows, in] and bias [out] -> [rows, out]
SAMPLE = 256
DEPTH_STEP = 16  # `in` is filled up to a multiple of it


@dataclass(frozen=True, slots=True)
class Panels:
    """Where a packed weight [num_outputs, depth] lies. Whoever holds this holds the packed tensor too."""

    packed: Tensor
    address: int
    num_outputs: int
    depth: int

    @property
    def panel_bytes(self) -> int:
        return -(-self.depth // DEPTH_STEP) * DEPTH_STEP * PANEL * 4


def panels_of(packed: Tensor, weight: Tensor) -> Panels | None:
    """The panels of float32 `weight` [out, in], which `packed` is oneDNN's form of; None where it has another order."""
    num_outputs, depth = weight.shape
    ops = torch.ops.mkldnn
    if num_outputs % PANEL or not depth or not hasattr(ops, "data_ptr") or not hasattr(ops, "_nbytes"):
        return None
    panels = Panels(packed, ops.data_ptr(packed), num_outputs, depth)
    if ops._nbytes(packed) != num_outputs // PANEL * panels.panel_bytes:
        return None
    pick = torch.Generator().manual_seed(0)
    outputs = torch.randint(num_outputs, (SAMPLE,), generator=pick).tolist()
    inputs = torch.randint(depth, (SAMPLE,), generator=pick).tolist()
    for output, at in zip(outputs, inputs, strict=True):
        place = output // PANEL * panels.panel_bytes + (at * PANEL + output % PANEL) * 4
        held = ctypes.c_float.from_address(panels.address + place).value
        if held != float(weight[output, at]):
            return None
    return panels


class PanelProduct:
    """x [rows, in] -> x . weight^T + bias, float32. One call runs at a time; a second thread waits."""

    def __init__(self, fork: Fork | None, folder: Path | None = None) -> None:
        self._objects, self._team = Objects(folder), Team(fork)
        self._lock, self._words = threading.Lock(), Words(3, 7)
        self._function = 0

    def over(self, packed: Tensor, weight: Tensor) -> FewRows | None:
        """The product with one weight; None where it is not packed in panels."""
        panels = panels_of(packed, weight)
        return None if panels is None else partial(self, panels)

    def __call__(self, panels: Panels, x: Tensor, bias: Tensor | None) -> Tensor:
        checks.check_rows("x", x, panels.depth)
        if x.dtype != torch.float32:
            raise ValueError(f"x {checks.said(x)}: want float32")
        num_rows, num_outputs = x.shape[0], panels.num_outputs
        if bias is None:
            out = torch.empty((num_rows, num_outputs), dtype=torch.float32)
        else:
            out = bias.expand(num_rows, -1).contiguous() if num_rows > 1 else bias.clone().unsqueeze(0)
        key = (num_rows, panels.depth, num_outputs, x.stride(0), bias is None)
        with self._lock:
            words = self._words
            if not self._function:
                self._function = self._objects.address("panels", 0)
            if key != words.key:
                steps = (x.stride(0) * 4, panels.panel_bytes, num_outputs * 4)
                words.others(key, num_rows, panels.depth, num_outputs // PANEL, *steps, int(bias is None))
            words.begin(x.data_ptr(), panels.address, out.data_ptr())
            self._team.run(self._function, words.address, torch.get_num_threads())
        return out
