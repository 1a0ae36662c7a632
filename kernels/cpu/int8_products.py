"""The launcher of int8_panels.py: x . weight for any number of rows, over a weight that is quantized here, once."""

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels import checks
from kilburn.kernels.cpu.arguments import I_NUM_ROWS, INT8_PANEL, Q_NUM_ROWS, Words
from kilburn.kernels.cpu.objects import Objects
from kilburn.kernels.cpu.products import Product
from kilburn.kernels.cpu.team import TAPE, Fork, Team
from kilburn.kernels.reference import WEIGHT_LEVELS, levels_for, quantized_rows

ROW_GRAIN = 8  # rows that a thread quantizes at a time


@dataclass(frozen=True, slots=True)
class Int8Panels:
    """A weight [num_outputs, depth] of 8 bits: int8 [panels, pairs, 32, 2], a scale for each output."""

    held: Tensor
    scales: Tensor
    no_bias: Tensor
    depth: int

    @property
    def num_outputs(self) -> int:
        return self.scales.shape[0]


def int8_panels(weight: Tensor) -> Int8Panels | None:
    """`weight` [out, in], quantized; None where its outputs are no whole panels or x would have fewer levels."""
    num_outputs, depth = weight.shape
    if num_outputs % INT8_PANEL or not depth or levels_for(depth) < WEIGHT_LEVELS:
        return None
    values, scales = quantized_rows(weight.float(), WEIGHT_LEVELS)
    pairs = F.pad(values.to(torch.int8), (0, depth % 2)).view(num_outputs // INT8_PANEL, INT8_PANEL, -1, 2)
    return Int8Panels(pairs.transpose(1, 2).contiguous(), scales, torch.zeros(num_outputs), depth)


class Int8Product:
    """x [rows, in] -> x . weight^T + bias, float32. One call runs at a time; a second thread waits."""

    def __init__(self, fork: Fork | None, folder: Path | None = None) -> None:
        self._objects, self._team = Objects(folder), Team(fork)
        self._lock = threading.Lock()
        self._quantize_words = Words(3, 6, rows_at=Q_NUM_ROWS)
        self._words = Words(6, 5, rows_at=I_NUM_ROWS)
        self._quantize, self._multiply = 0, 0
        self._rows, self._scales = torch.empty(0, dtype=torch.int16), torch.empty(0)

    def over(self, weight: Tensor) -> Product | None:
        """The product with one weight; None where it stays as it is."""
        panels = int8_panels(weight)
        return None if panels is None else partial(self, panels)

    def __call__(self, panels: Int8Panels, x: Tensor, bias: Tensor | None) -> Tensor:
        checks.check_rows("x", x, panels.depth)
        if x.dtype != torch.float32:
            raise ValueError(f"x {checks.said(x)}: want float32")
        out = torch.empty((x.shape[0], panels.num_outputs))
        with self._lock:
            if not self._multiply:
                self._quantize = self._objects.address("quantize_rows", 0)
                self._multiply = self._objects.address("int8_panels", 0)
            self._run(panels, self._quantized(x, panels.depth), out, bias)
        return out

    def _quantized(self, x: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The rows of x, int16, and their scales."""
        num_rows, step = x.shape[0], depth + depth % 2
        rows, scales = self._rows, self._scales
        is_recorded = TAPE.get() is not None  # what is recorded has its own
        if rows.numel() < num_rows * step or is_recorded:
            rows = torch.empty(num_rows * step, dtype=torch.int16)
        if scales.numel() < num_rows or is_recorded:
            scales = torch.empty(num_rows)
        if not is_recorded:
            self._rows, self._scales = rows, scales
        words, key = self._quantize_words, (num_rows, depth, x.stride(0))
        if key != words.key:
            words.others(key, num_rows, depth, x.stride(0) * 4, step * 2, ROW_GRAIN, levels_for(depth))
        words.begin(x.data_ptr(), rows.data_ptr(), scales.data_ptr())
        self._team.run(self._quantize, words, torch.get_num_threads() if num_rows > ROW_GRAIN else 1)
        return rows, scales

    def _run(self, panels: Int8Panels, x: tuple[Tensor, Tensor], out: Tensor, bias: Tensor | None) -> None:
        num_rows, num_pairs = out.shape[0], panels.held.shape[1]
        words, key = self._words, (num_rows, num_pairs, panels.num_outputs)
        if key != words.key:
            num_panels = panels.num_outputs // INT8_PANEL
            words.others(key, num_rows, num_pairs, num_panels, num_pairs * 4, panels.num_outputs * 4)
        words.begin(
            *(values.data_ptr() for values in x),
            panels.held.data_ptr(),
            panels.scales.data_ptr(),
            (panels.no_bias if bias is None else bias).data_ptr(),
            out.data_ptr(),
        )
        self._team.run(self._multiply, words, torch.get_num_threads())
