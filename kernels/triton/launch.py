"""One launch of a compiled kernel, as a value: what runs, over which grid, with which arguments.

    launcher (checks, tiling)  ->  Launch  ->  .run()               on the device of its tensors
                                           ->  tests/kernels/aot    compiled for other architectures, without any device

A launcher of this folder computes its Launch and does nothing else, so that what is compiled ahead of time is by
construction what a device will be asked to run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kilburn.kernels.checks import said

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any  # a function under @triton.jit
    grid: tuple[int, ...]
    arguments: tuple[Tensor | int | float, ...]  # in the order of the kernel's own
    constants: Mapping[str, Any]  # its constexprs by name
    num_warps: int
    num_stages: int

    def run(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](*self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told besides. Triton's releases differ in their default for fused multiply-adds."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def padded(number: int) -> int:
    """The power of two that a tile needs to hold `number` lanes."""
    return 1 << max(number - 1, 0).bit_length()


def check_dtype(what: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(f"{what} {said(x)}: want float32, float16 or bfloat16")


def check_device(what: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise ValueError(f"{what} is on {x.device}: want {like.device}, where the others are")
