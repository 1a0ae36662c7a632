"""RoPE on q and k, and the new k and v into their slots, in one launch.

    one token t                    program (t, 0)   (t, 1) ...      each takes HEADS heads of one kind
    q [Hq, D]   | h h h h | h h h h | h . . .       rotated in place
    k [Hkv, D]  | h h . . |                         rotated, to kv[block, 0, head, offset]
    v [Hkv, D]  | h h . . |                         as it is, to kv[block, 1, head, offset]

    a head      [ first half | second half | rest ]       halves: i turns with i + rotary_dim / 2
                [ 0 1 | 0 1 | 0 1 ...      | rest ]       interleaved: 2i turns with 2i + 1

A half is a tile [HEADS, HALF], HALF the next power of two of rotary_dim / 2, and its lanes beyond are masked; the rest
is a tile of its own. Where each row has its own scale, all its tiles are looked at before one is stored, and the scale
goes to the block's scale area. slot = block * block_size + offset; a token of slot -1 is padding: its q turns, nothing
of it is written. The block is 64 bits wide before it meets a stride.
"""

import triton
import triton.language as tl
from torch import Tensor

from kilburn.kernels.checks import check_write
from kilburn.kernels.contract import Batch, Rope
from kilburn.kernels.triton.launch import Launch, check_dtype, padded
from kilburn.kernels.triton.stored import check_scales, form, steps

HEADS = 8


@triton.jit
def _loaded(
    x_ptr,  # [heads, D] of one token
    stride_head,
    i_head,  # [HEADS, 1]
    m_head,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The values [FIRST, HEAD_DIM) of some heads, as float32."""
    o_dim = FIRST + tl.arange(0, WIDTH)[None, :]
    return tl.load(x_ptr + i_head * stride_head + o_dim, mask=m_head & (o_dim < HEAD_DIM), other=0.0).to(tl.float32)


@triton.jit
def _size(b_x):
    """[HEADS, 1] the largest size of a row's values; NaN if one is not finite, which a maximum would pass over."""
    return (tl.max(tl.abs(b_x), axis=1) + tl.sum(b_x * 0.0, axis=1))[:, None]


@triton.jit
def _larger(b_size, b_other):
    return tl.maximum(b_size, b_other) + (b_size + b_other) * 0.0


@triton.jit
def _row_scale(b_size, p_scale, m_head, STORED: tl.constexpr):
    """[HEADS, 1] what brings a row of this size into the range of 8 bits, kept where its block has its scales."""
    b_scale = b_size / (127.0 if tl.int8 == STORED else 448.0)
    tl.store(p_scale, b_scale, mask=m_head)
    return b_scale


@triton.jit
def _narrowed(b_x, b_scale, STORED: tl.constexpr):
    """Values over their scale, within the range of 8 bits and rounded as these are; what is no number is 0."""
    b_x = b_x / tl.where(b_scale == 0.0, 1.0, b_scale)
    b_x = tl.where(b_x == b_x, b_x, 0.0)
    if tl.int8 == STORED:
        b_x = tl.floor(tl.minimum(tl.maximum(b_x, -127.0), 127.0) + 0.5)
    else:
        b_x = tl.minimum(tl.maximum(b_x, -448.0), 448.0)
    return b_x


@triton.jit
def _kv_write_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [T, Hkv, D]
    v_ptr,  # [T, Hkv, D]
    kv_ptr,  # [num_blocks, 2, Hkv, BLOCK_SIZE, D]
    slots_ptr,  # [T]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [max_positions, ROTARY]; not read where ROTARY is 0
    scales_ptr,  # [2, Hkv], or [num_blocks, 2, Hkv, BLOCK_SIZE] where IN_BLOCKS; not read unless SCALED
    num_q_heads,
    num_kv_heads,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_which,
    stride_kv_head,
    stride_scale_block,
    stride_scale_which,
    stride_scale_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    SCALED: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
):
    STORED: tl.constexpr = kv_ptr.dtype.element_ty
    i_token, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_parts, kv_parts = tl.cdiv(num_q_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    slot = tl.load(slots_ptr + i_token).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    o_slot = block * stride_block + offset * HEAD_DIM
    if IN_BLOCKS:
        scales_ptr += block * stride_scale_block + offset
    o_lane = tl.arange(0, HEADS)[:, None]
    if i_part >= q_parts + kv_parts:  # v
        if slot >= 0:
            i_head = (i_part - q_parts - kv_parts) * HEADS + o_lane
            m_head = i_head < num_kv_heads
            b_v = _loaded(v_ptr + i_token * stride_v_token, stride_v_head, i_head, m_head, 0, WIDTH, HEAD_DIM)
            p_scale = scales_ptr + stride_scale_which + i_head * stride_scale_head
            if IN_BLOCKS:
                b_v = _narrowed(b_v, _row_scale(_size(b_v), p_scale, m_head, STORED), STORED)
            elif SCALED:
                b_v = _narrowed(b_v, tl.load(p_scale, mask=m_head, other=1.0), STORED)
            o_dim = tl.arange(0, WIDTH)[None, :]
            p_kv = kv_ptr + o_slot + stride_which + i_head * stride_kv_head + o_dim
            tl.store(p_kv, b_v.to(STORED), mask=m_head & (o_dim < HEAD_DIM))
        return
    is_q = i_part < q_parts
    if (not is_q) & (slot < 0):
        return
    i_head = tl.where(is_q, i_part, i_part - q_parts) * HEADS + o_lane
    m_head = i_head < tl.where(is_q, num_q_heads, num_kv_heads)
    if ROTARY > 0:
        o_half = tl.arange(0, HALF)[None, :]
        m_half = m_head & (o_half < ROTARY // 2)
        position = tl.load(positions_ptr + i_token).to(tl.int64)
        o_angle = position * ROTARY + o_half
        b_cos = tl.load(cos_sin_ptr + o_angle, mask=o_half < ROTARY // 2, other=0.0)
        b_sin = tl.load(cos_sin_ptr + o_angle + ROTARY // 2, mask=o_half < ROTARY // 2, other=0.0)
        if INTERLEAVED:
            o_first, o_second = 2 * o_half, 2 * o_half + 1
        else:
            o_first, o_second = o_half, o_half + ROTARY // 2
        if is_q:
            p_head = q_ptr + i_token * stride_q_token + i_head * stride_q_head
        else:
            p_head = k_ptr + i_token * stride_k_token + i_head * stride_k_head
        b_first = tl.load(p_head + o_first, mask=m_half, other=0.0).to(tl.float32)
        b_second = tl.load(p_head + o_second, mask=m_half, other=0.0).to(tl.float32)
        b_turned = b_first * b_cos - b_second * b_sin
        b_other = b_second * b_cos + b_first * b_sin
        if is_q:
            tl.store(p_head + o_first, b_turned.to(q_ptr.dtype.element_ty), mask=m_half)
            tl.store(p_head + o_second, b_other.to(q_ptr.dtype.element_ty), mask=m_half)
    if not is_q:
        p_kv, p_scale = kv_ptr + o_slot + i_head * stride_kv_head, scales_ptr + i_head * stride_scale_head
        if ROTARY < HEAD_DIM:
            p_k = k_ptr + i_token * stride_k_token
            b_rest = _loaded(p_k, stride_k_head, i_head, m_head, ROTARY, REST, HEAD_DIM)
        if IN_BLOCKS:
            if ROTARY == 0:
                b_size = _size(b_rest)
            else:
                b_size = _larger(_size(b_turned), _size(b_other))
                if ROTARY < HEAD_DIM:
                    b_size = _larger(b_size, _size(b_rest))
            b_scale = _row_scale(b_size, p_scale, m_head, STORED)
        elif SCALED:
            b_scale = tl.load(p_scale, mask=m_head, other=1.0)
        if ROTARY > 0:
            if SCALED:
                b_turned, b_other = _narrowed(b_turned, b_scale, STORED), _narrowed(b_other, b_scale, STORED)
            tl.store(p_kv + o_first, b_turned.to(STORED), mask=m_half)
            tl.store(p_kv + o_second, b_other.to(STORED), mask=m_half)
        if ROTARY < HEAD_DIM:
            if SCALED:
                b_rest = _narrowed(b_rest, b_scale, STORED)
            o_rest = ROTARY + tl.arange(0, REST)[None, :]
            tl.store(p_kv + o_rest, b_rest.to(STORED), mask=m_head & (o_rest < HEAD_DIM))


def kv_write(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch, rope: Rope | None, scales: Tensor | None = None
) -> Launch:
    """See the contract."""
    check_write(q, k, v, kv, batch, rope)
    check_dtype("q", q)
    check_scales(kv, scales, q)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, rotary_dim = kv.shape[2], 0
    if rope is not None:
        rotary_dim = rope.cos_sin.shape[1]
    q_parts = -(-num_q_heads // HEADS) if rotary_dim else 0
    return Launch(
        kernel=_kv_write_kernel,
        grid=(num_tokens, q_parts + 2 * -(-num_kv_heads // HEADS)),
        arguments=(
            *(q, k, v, kv, batch.slots, batch.positions),
            q if rope is None else rope.cos_sin,
            q if scales is None else scales,
            *(num_q_heads if rotary_dim else 0, num_kv_heads),  # without rotation there is nothing to do for q
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *kv.stride()[:3],
            *steps(scales),
        ),
        constants={
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": kv.shape[3],
            "ROTARY": rotary_dim,
            "HALF": padded(rotary_dim // 2),
            "REST": padded(head_dim - rotary_dim),
            "WIDTH": padded(head_dim),
            "INTERLEAVED": rope is not None and rope.interleaved,
            "HEADS": HEADS,
            **form(scales),
        },
        num_warps=4,
        num_stages=1,
    )
