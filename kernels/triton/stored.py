"""A pool of 8 bits and its scales: value = stored * scale, one scale for a head's keys, one for its values."""

import torch
from torch import Tensor

from kilburn.kernels.checks import said

EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)


def check_scales(kv: Tensor, scales: Tensor | None, q: Tensor) -> None:
    if kv.dtype not in (q.dtype, *EIGHT_BITS):
        raise ValueError(f"kv {said(kv)}: want the dtype of q {said(q)}, or 8 bits with scales")
    if (kv.dtype in EIGHT_BITS) != (scales is not None):
        raise ValueError(f"kv {said(kv)}: want scales with a dtype of 8 bits, and with no other")
    if scales is None:
        return
    if scales.shape != (2, kv.shape[2]) or scales.dtype != torch.float32 or not scales.is_contiguous():
        raise ValueError(f"scales {said(scales)}: want float32 [2, {kv.shape[2]}], contiguous")
