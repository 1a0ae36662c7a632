"""rms_norm, alone or with the addition before it.

    x [n, H], read where it lies: row r is at (r // inner) * stride_outer + (r % inner) * stride_inner
                                  (the heads of a fused qkv output are such rows, and are not copied together first)

      H = head_dim (q/k norm)       H = hidden
    +---------------+ program 0    +------------------------------+ program 0
    | row 0 .. ROWS |              | row 0                        |
    +---------------+ program 1    +------------------------------+ program 1
    |               |              | row 1                        |

A tile is [ROWS, WIDTH], WIDTH the next power of two of H; the lanes beyond H are zero, and add nothing to the squares.
The sum that the residual becomes is rounded to its dtype before it is normed, as the next layer will read it.
"""

import triton
import triton.language as tl
from torch import Tensor

from kilburn.kernels.checks import check_norm, said
from kilburn.kernels.triton.launch import Launch, check_dtype, padded

TILE = 1024  # values of narrow rows that a program takes together


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    y_ptr,  # [n, H], contiguous
    x_ptr,  # [n // inner, inner, H]
    residual_ptr,  # [n, H], replaced by residual + x; not read unless ADD
    weight_ptr,  # [H]
    num_rows,
    inner,
    stride_outer,
    stride_inner,
    stride_residual,
    eps,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    o_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    o_col = tl.arange(0, WIDTH)[None, :]
    m_tile = (o_row < num_rows) & (o_col < H)
    o_x = (o_row // inner) * stride_outer + (o_row % inner) * stride_inner + o_col
    b_x = tl.load(x_ptr + o_x, mask=m_tile, other=0.0)
    if ADD:
        o_residual = o_row * stride_residual + o_col
        b_residual = tl.load(residual_ptr + o_residual, mask=m_tile, other=0.0)
        b_x = (b_residual.to(tl.float32) + b_x.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + o_residual, b_x, mask=m_tile)
    b_wide = b_x.to(tl.float32)
    b_mean = tl.sum(b_wide * b_wide, axis=1)[:, None] / H
    b_weight = tl.load(weight_ptr + o_col, mask=o_col < H, other=0.0).to(tl.float32)
    b_y = b_wide * (1.0 / tl.sqrt(b_mean + eps)) * b_weight
    tl.store(y_ptr + o_row * H + o_col, b_y.to(y_ptr.dtype.element_ty), mask=m_tile)


def rms_norm(y: Tensor, x: Tensor, weight: Tensor, eps: float) -> Launch:
    """y = x / sqrt(mean(x^2) + eps) * weight. x [outer, inner, H], its last dimension contiguous; y contiguous."""
    _check_dtypes(x, weight)
    check_norm(x[:, 0], None, weight)
    outer, inner, _ = x.shape
    return _launch(y, x, y, weight, outer * inner, inner, (x.stride(0), x.stride(1), 0), eps, has_residual=False)


def add_rms_norm(y: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Launch:
    """residual += x; y = its rms_norm. x, residual [T, H], each row contiguous; y contiguous."""
    _check_dtypes(x, weight)
    check_norm(x, residual, weight)
    if residual.dtype != x.dtype:
        raise ValueError(f"residual {said(residual)}: want the dtype of x {said(x)}")
    return _launch(y, x, residual, weight, len(x), 1, (x.stride(0), 0, residual.stride(0)), eps, has_residual=True)


def _check_dtypes(x: Tensor, weight: Tensor) -> None:
    check_dtype("x", x)
    check_dtype("weight", weight)


def _launch(
    y: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    num_rows: int,
    inner: int,
    strides: tuple[int, int, int],
    eps: float,
    has_residual: bool,
) -> Launch:
    width = padded(x.shape[-1])
    rows = max(TILE // width, 1)
    return Launch(
        kernel=_rms_norm_kernel,
        grid=(-(-num_rows // rows),),
        arguments=(y, x, residual, weight, num_rows, max(inner, 1), *strides, eps),
        constants={"H": x.shape[-1], "WIDTH": width, "ROWS": rows, "ADD": has_residual},
        num_warps=min(max(rows * width // 512, 1), 16),
        num_stages=1,
    )
