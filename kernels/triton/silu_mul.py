"""silu(gate) * up, the two halves of one product's rows.

    gate_up [T, 2 * I]   | gate: tile | tile | ..  | up: tile | tile | ..  |
                              \\_______________________/
                                 one program reads both and writes out [T, I] at the same columns

The grid is (T, tiles of a half). The lanes of the last tile beyond I are masked.
"""

import triton
import triton.language as tl
from torch import Tensor

from kilburn.kernels.checks import check_rows, said
from kilburn.kernels.triton.launch import Launch, check_dtype, padded

TILE = 1024


@triton.jit
def _silu_mul_kernel(
    out_ptr,  # [T, I], contiguous
    x_ptr,  # [T, 2 * I], each row contiguous
    width,
    stride_row,
    COLUMNS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_col = o_col < width
    b_gate = tl.load(x_ptr + i_row * stride_row + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_up = tl.load(x_ptr + i_row * stride_row + width + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_out = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(out_ptr + i_row * width + o_col, b_out.to(out_ptr.dtype.element_ty), mask=m_col)


def silu_mul(out: Tensor, gate_up: Tensor) -> Launch:
    """out [T, I] = silu(gate_up[:, :I]) * gate_up[:, I:]."""
    check_dtype("gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up {said(gate_up)}: want [T, 2 * I], each row contiguous")
    check_rows("gate_up", gate_up, gate_up.shape[1])
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    tile = min(padded(width), TILE)
    return Launch(
        kernel=_silu_mul_kernel,
        grid=(num_rows, -(-width // tile)),
        arguments=(out, gate_up, width, gate_up.stride(0)),
        constants={"COLUMNS": tile},
        num_warps=4,
        num_stages=1,
    )
