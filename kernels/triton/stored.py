"""A pool of 8 bits and its scales: value = stored * scale, float32, of either form.

    of heads    [2, Hkv]                     one for a head's keys, one for its values
    of rows     [num_blocks, 2, Hkv, bs]     one for each row, in the block's own scale area, written with it

Kernels take both by the same steps; `IN_BLOCKS` says at compile time whether block and row take part.
"""

from typing import Any

from torch import Tensor

from kilburn.kernels import checks
from kilburn.kernels.checks import said
from kilburn.kernels.contract import LARGEST


def check_scales(kv: Tensor, scales: Tensor | None, q: Tensor) -> None:
    if kv.dtype not in (q.dtype, *LARGEST):
        raise ValueError(f"kv {said(kv)}: want the dtype of q {said(q)}, or 8 bits with scales")
    checks.check_scales(kv, scales)


def steps(scales: Tensor | None) -> tuple[int, int, int]:
    """Values from block to block, from keys to values, from head to head; 0 where there is no step."""
    if scales is None:
        return 0, 0, 0
    steps = scales.stride()
    return (0, steps[0], steps[1]) if len(steps) == 2 else (steps[0], steps[1], steps[2])


def form(scales: Tensor | None) -> dict[str, Any]:
    """What kernels are compiled for."""
    return {"SCALED": scales is not None, "IN_BLOCKS": scales is not None and scales.dim() == 4}
