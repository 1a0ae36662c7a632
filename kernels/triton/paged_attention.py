"""Attention of a ragged batch over block tables: prefill, chunks and decode by one kernel.

    query rows of the batch       sequence 0 | sequence 1          | s. 2        a row of out belongs to one tile, also
    tiles of QUERIES positions    [  tile 0 ]|[  tile 1 ][ tile 2 ]|[ tile 3 ]   the rows of no sequence, which are zero

    one program = (tile, KV head, split of the context)

        lanes of b_q [ROWS, DIM]           position 0: head 0, 1, 2    position 1: head 0, 1, 2    ..    (masked)
                                           the heads of the KV head's group lie side by side, whatever their number
        context  |  . . .  [ POSITIONS ][ POSITIONS ][ POSITIONS ]  |
                            \\ each position finds its block in the table and its place in the block, so that a turn
                              takes several blocks or a part of one; what lies beyond the context is not loaded

    running softmax, base 2:  m' = max(m, max s)    l' = l 2^(m-m') + sum 2^(s-m')    acc' = acc 2^(m-m') + 2^(s-m') v

A pool of 8 bits is turned back in registers. A scale of a whole head is taken into the scale of scores and into what is
written; scales of rows meet the scores of their keys, and their values.

Turns that every lane sees whole need no mask and come first. With more than one split, each leaves its normed part and
log2 of its sum in scratch, and `_join_kernel` weighs the parts:

    out = sum_i part_i 2^(lse_i) / sum_i 2^(lse_i)        a sink is one more lse that has no part

A program finds its sequence by counting the sequences that begin at its tile or before: one load of all starts, where a
search would wait for memory again and again. With one query a sequence there are as many tiles as rows.
"""

from dataclasses import dataclass
from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilburn.kernels.checks import check_attention, check_sinks
from kilburn.kernels.contract import Batch
from kilburn.kernels.triton.launch import Launch, check_dtype, padded
from kilburn.kernels.triton.stored import check_scales, form, steps
from kilburn.kernels.triton.tilings import tiling
from kilburn.kernels.triton.tuned import Tiling

LOG2_E = log2(e)
STARTS = 256  # starts of sequences that are looked at together
WORTH_A_SPLIT = 256  # positions below which a context is not cut
MOST_SPLITS = 64
JOINED = 8  # parts that are weighed together


@triton.jit
def _owner(i_tile, query_start_ptr, num_seqs, QUERIES: tl.constexpr, STARTS: tl.constexpr):
    """(sequence, its first tile): -1 owns the rows before the first sequence, num_seqs those after the last.

    The tiles of i = sequence + 1 begin at (first row + i * (QUERIES - 1)) // QUERIES: never fewer than it needs, no
    table needed, and none to spare where QUERIES is 1.
    """
    count = 0
    for start in range(0, num_seqs + 1, STARTS):
        o_seq = start + tl.arange(0, STARTS)
        m_seq = o_seq <= num_seqs
        b_row = tl.load(query_start_ptr + o_seq, mask=m_seq, other=0)
        b_first = (b_row + (o_seq + 1) * (QUERIES - 1)) // QUERIES
        count += tl.sum((m_seq & (b_first <= i_tile)).to(tl.int32), axis=0)
    return count - 1


@triton.jit
def _turns(
    b_acc,
    b_max,
    b_sum,
    start,
    end,
    b_q,
    o_query,  # [ROWS] position of each lane in its sequence
    kv_ptr,  # at the keys of this KV head in block 0
    scales_ptr,  # likewise, where IN_BLOCKS
    table_ptr,  # at this sequence
    i_seq,
    n_context,
    stride_block,
    stride_values,
    stride_scale_block,
    stride_scale_values,
    scale,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    POSITIONS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAGED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The positions [start, end) of the context, `start` a multiple of POSITIONS."""
    o_dim = tl.arange(0, DIM)
    for first in tl.range(start, end, POSITIONS):
        o_pos = first + tl.arange(0, POSITIONS)
        m_pos = o_pos < n_context
        o_row = o_pos % BLOCK_SIZE
        if not PAGED:
            b_block, o_row = tl.cast(i_seq, tl.int64), o_pos
        elif BLOCK_SIZE % POSITIONS == 0:  # all of a turn lies in one block
            b_block = tl.load(table_ptr + first // BLOCK_SIZE).to(tl.int64)
        elif MASKED:
            b_block = tl.load(table_ptr + o_pos // BLOCK_SIZE, mask=m_pos, other=0).to(tl.int64)
        else:
            b_block = tl.load(table_ptr + o_pos // BLOCK_SIZE).to(tl.int64)
        o_kv = (b_block * stride_block + o_row * HEAD_DIM)[:, None]
        p_k = kv_ptr + o_kv + o_dim[None, :]
        if MASKED:
            m_kv = m_pos[:, None] & (o_dim < HEAD_DIM)[None, :]
            b_k = tl.load(p_k, mask=m_kv, other=0.0)
            b_v = tl.load(p_k + stride_values, mask=m_kv, other=0.0)
        elif HEAD_DIM < DIM:
            m_kv = (o_dim < HEAD_DIM)[None, :]
            b_k = tl.load(p_k, mask=m_kv, other=0.0)
            b_v = tl.load(p_k + stride_values, mask=m_kv, other=0.0)
        else:
            b_k = tl.load(p_k)
            b_v = tl.load(p_k + stride_values)
        b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision=PRECISION) * scale
        if IN_BLOCKS:
            p_scale = scales_ptr + b_block * stride_scale_block + o_row
            m_scale = m_pos if MASKED else o_pos >= 0
            b_s *= tl.load(p_scale, mask=m_scale, other=0.0)[None, :]
            b_of_values = tl.load(p_scale + stride_scale_values, mask=m_scale, other=0.0)
            b_v = b_v.to(tl.float32) * b_of_values[:, None]  # not the weights: these lose digits as halves
        if SOFT_CAP:  # scale and cap are in units of log2 e: cap * tanh(s / cap)
            b_s = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(b_s)))
        if MASKED:
            m_seen = o_pos[None, :] <= o_query[:, None]
            if WINDOW > 0:
                m_seen &= o_pos[None, :] > o_query[:, None] - WINDOW
            b_s = tl.where(m_seen, b_s, -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_base = tl.where(b_new == -float("inf"), 0.0, b_new) if MASKED else b_new
        b_p = tl.exp2(b_s - b_base[:, None])
        b_shrink = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        b_acc = b_acc * b_shrink[:, None]
        b_acc = tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), b_acc, input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_max, b_sum


# What differs from step to step is not specialised, or a number that 16 divides would be compiled for in a request.
@triton.jit(do_not_specialize=["num_seqs", "num_rows", "stride_table"])
def _attention_kernel(
    out_ptr,  # [T, Hq, D]; parts float32 [T, Hq, SPLITS, D] with more than one split
    lse_ptr,  # float32 [T, Hq, SPLITS], log2; not written with one split
    q_ptr,  # [T, Hq, D]
    kv_ptr,  # [num_blocks, 2, Hkv, BLOCK_SIZE, D]
    tables_ptr,  # [num_seqs, max_blocks]
    query_start_ptr,  # [num_seqs + 1]
    context_ptr,  # [num_seqs]
    sinks_ptr,  # [Hq]; not read unless SINKS
    scales_ptr,  # [2, Hkv], or [num_blocks, 2, Hkv, BLOCK_SIZE] where IN_BLOCKS; not read unless SCALED
    num_seqs,
    num_rows,
    num_kv_heads,
    stride_out_row,
    stride_out_head,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_values,
    stride_kv_head,
    stride_scale_block,
    stride_scale_values,
    stride_scale_head,
    stride_table,
    scale,  # with log2 e in it
    soft_cap,  # likewise
    least_split,  # positions that a split takes at least
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    STARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    PAGED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_tile, i_kv, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_owner = _owner(i_tile, query_start_ptr, num_seqs, QUERIES, STARTS) + 1
    i_seq = i_owner - 1
    row_start = 0
    if i_seq >= 0:
        row_start = tl.load(query_start_ptr + i_seq)
    row_end, n_context = num_rows, 0
    if i_seq < num_seqs:
        row_end = tl.load(query_start_ptr + i_seq + 1)
        if i_seq >= 0:
            n_context = tl.load(context_ptr + i_seq)
    first_row = row_start + (i_tile - (row_start + i_owner * (QUERIES - 1)) // QUERIES) * QUERIES
    if first_row >= row_end:
        return

    o_lane = tl.arange(0, ROWS)
    o_row = first_row + o_lane // GROUP
    o_head = i_kv * GROUP + o_lane % GROUP
    m_lane = (o_lane < QUERIES * GROUP) & (o_row < row_end)
    o_query = n_context - row_end + o_row
    o_dim = tl.arange(0, DIM)
    m_q = m_lane[:, None] & (o_dim < HEAD_DIM)[None, :]

    # What the tile sees of the context, and this split's share of it, in whole turns.
    first_query = n_context - row_end + first_row
    last_query = n_context - row_end + tl.minimum(first_row + QUERIES, row_end) - 1
    seen_start = 0
    if WINDOW > 0:
        seen_start = tl.maximum(first_query - WINDOW + 1, 0) // POSITIONS * POSITIONS
    seen_end = last_query + 1
    start, end = seen_start, seen_end
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(tl.maximum(seen_end - seen_start, 0), SPLITS), POSITIONS) * POSITIONS
        share = tl.maximum(share, least_split)
        start = seen_start + i_split * share
        end = tl.minimum(start + share, seen_end)

    b_max = tl.full([ROWS], -float("inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, DIM], tl.float32)
    if SINKS and SPLITS == 1:
        b_max = tl.load(sinks_ptr + o_head, mask=m_lane, other=0.0).to(tl.float32) * 1.4426950408889634
        b_sum += 1.0
    scales_ptr += i_kv * stride_scale_head
    if start < end:
        p_q = q_ptr + o_row.to(tl.int64)[:, None] * stride_q_row + o_head[:, None] * stride_q_head + o_dim[None, :]
        b_q = tl.load(p_q, mask=m_q, other=0.0)
        kv_ptr += i_kv.to(tl.int64) * stride_kv_head
        tables_ptr += i_seq.to(tl.int64) * stride_table
        if SCALED and not IN_BLOCKS:
            scale *= tl.load(scales_ptr)
        whole = start
        if WINDOW == 0:  # turns that end at or before what the first lane sees
            whole = tl.maximum(tl.minimum(first_query + 1, end) // POSITIONS * POSITIONS, start)
            b_acc, b_max, b_sum = _turns(
                b_acc, b_max, b_sum, start, whole, b_q, o_query, kv_ptr, scales_ptr, tables_ptr, i_seq, n_context,
                stride_block, stride_values, stride_scale_block, stride_scale_values, scale, soft_cap, HEAD_DIM, DIM,
                BLOCK_SIZE, POSITIONS, IN_BLOCKS, WINDOW, SOFT_CAP, PAGED, False, PRECISION,
            )  # fmt: skip
        b_acc, b_max, b_sum = _turns(
            b_acc, b_max, b_sum, whole, end, b_q, o_query, kv_ptr, scales_ptr, tables_ptr, i_seq, n_context,
            stride_block, stride_values, stride_scale_block, stride_scale_values, scale, soft_cap, HEAD_DIM, DIM,
            BLOCK_SIZE, POSITIONS, IN_BLOCKS, WINDOW, SOFT_CAP, PAGED, True, PRECISION,
        )  # fmt: skip

    b_out = b_acc / tl.where(b_sum > 0.0, b_sum, 1.0)[:, None]
    if SCALED and not IN_BLOCKS:
        b_out *= tl.load(scales_ptr + stride_scale_values)
    o_row = o_row.to(tl.int64)
    if SPLITS > 1:
        o_part = (o_row * (num_kv_heads * GROUP) + o_head) * SPLITS + i_split
        b_lse = tl.where(b_sum > 0.0, b_max + tl.log2(b_sum), -float("inf"))
        tl.store(lse_ptr + o_part, b_lse, mask=m_lane)
        if start < end:  # what has no sum is not read
            tl.store(out_ptr + o_part[:, None] * HEAD_DIM + o_dim[None, :], b_out, mask=m_q)
    else:
        p_out = out_ptr + o_row[:, None] * stride_out_row + o_head[:, None] * stride_out_head + o_dim[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_q)


@triton.jit
def _join_kernel(
    out_ptr,  # [T, Hq, D]
    parts_ptr,  # float32 [T, Hq, SPLITS, D]
    lse_ptr,  # float32 [T, Hq, SPLITS], log2
    sinks_ptr,  # [Hq]; not read unless SINKS
    stride_out_row,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    JOINED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program a row and head. The parts come JOINED at a time; those of no weight are not read."""
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_part = (i_row * tl.num_programs(1) + i_head) * SPLITS
    o_lane, o_dim = tl.arange(0, LANES), tl.arange(0, DIM)
    b_lse = tl.load(lse_ptr + o_part + o_lane, mask=o_lane < SPLITS, other=-float("inf"))
    top = tl.max(b_lse, axis=0)
    if SINKS:
        sink = tl.load(sinks_ptr + i_head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp2(b_lse - base), axis=0)
    if SINKS:
        total += tl.exp2(sink - base)
    b_out = tl.zeros([DIM], tl.float32)
    for first in range(0, SPLITS, JOINED):
        o_some = first + tl.arange(0, JOINED)
        b_weight = tl.load(lse_ptr + o_part + o_some, mask=o_some < SPLITS, other=-float("inf"))
        b_weight = tl.exp2(b_weight - base)
        m_part = (b_weight > 0.0)[:, None] & (o_dim < HEAD_DIM)[None, :]
        p_part = parts_ptr + (o_part + o_some)[:, None] * HEAD_DIM + o_dim[None, :]
        b_out += tl.sum(b_weight[:, None] * tl.load(p_part, mask=m_part, other=0.0), axis=0)
    b_out = b_out / tl.where(total > 0.0, total, 1.0)
    p_out = out_ptr + i_row * stride_out_row + i_head * stride_out_head + o_dim
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=o_dim < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Device:
    """What the cutting depends on."""

    architecture: str  # a row of tilings.TABLE, or a neighbour of one
    num_units: int  # multiprocessors: programs below this number leave some idle
    cut: Tiling | None = None  # instead of the table's: for those who fill the table


@dataclass(frozen=True, slots=True)
class Options:
    """What a layer asks for beyond plain causal attention. What is None is not compiled."""

    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    scales: Tensor | None = None  # of a kv of 8 bits


def paged_attention(
    device: Device, out: Tensor, q: Tensor, kv: Tensor, batch: Batch, scale: float, options: Options, paged: bool = True
) -> list[Launch]:
    """One launch, or two where the context is split. Not `paged` is for measuring: sequence s then lies in block s."""
    _check(out, q, kv, batch, options)
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_seqs = kv.shape[2], len(batch.context_len)
    group = num_heads // num_kv_heads
    cut = device.cut or tiling(device.architecture, q.dtype, head_dim, group, is_decode=batch.max_query <= 1)
    queries = 1 if batch.max_query <= 1 else cut.rows // group
    num_tiles = (num_rows + (num_seqs + 2) * (queries - 1)) // queries
    least_split = -(-WORTH_A_SPLIT // cut.positions) * cut.positions
    splits = splits_for(batch.max_context, options.window, least_split, num_tiles * num_kv_heads, device.num_units)
    parts, lse = out, out
    strides = (out.stride(0), out.stride(1))
    if splits > 1:
        parts = torch.empty((num_rows, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_rows, num_heads, splits), dtype=torch.float32, device=q.device)
    cap = options.soft_cap
    main = Launch(
        kernel=_attention_kernel,
        grid=(num_tiles if num_rows else 0, num_kv_heads, splits),
        arguments=(
            *(parts, lse, q, kv, batch.tables, batch.query_start, batch.context_len),
            q if options.sinks is None else options.sinks,
            q if options.scales is None else options.scales,
            *(num_seqs, num_rows, num_kv_heads, *strides, q.stride(0), q.stride(1), *kv.stride()[:1]),
            *(kv.stride(1), kv.stride(2), *steps(options.scales), batch.tables.stride(0)),
            # With a cap, e^(2 s / cap) is what tanh is made of.
            scale * LOG2_E if cap is None else 2.0 * scale / cap * LOG2_E,
            0.0 if cap is None else cap * LOG2_E,
            least_split,
        ),
        constants={
            "HEAD_DIM": head_dim,
            "DIM": max(padded(head_dim), 16),
            "BLOCK_SIZE": kv.shape[3],
            "GROUP": group,
            "QUERIES": queries,
            "ROWS": cut.rows,
            "POSITIONS": cut.positions,
            "SPLITS": splits,
            "STARTS": STARTS,
            "WINDOW": options.window or 0,
            "SOFT_CAP": cap is not None,
            "SINKS": options.sinks is not None,
            **form(options.scales),
            "PAGED": paged,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        },
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if splits == 1:
        return [main]
    return [main, _join(out, parts, lse, options.sinks)]


def _join(out: Tensor, parts: Tensor, lse: Tensor, sinks: Tensor | None) -> Launch:
    num_rows, num_heads, splits, head_dim = parts.shape
    return Launch(
        kernel=_join_kernel,
        grid=(num_rows, num_heads),
        arguments=(out, parts, lse, out if sinks is None else sinks, out.stride(0), out.stride(1)),
        constants={
            "HEAD_DIM": head_dim,
            "DIM": padded(head_dim),
            "SPLITS": splits,
            "LANES": padded(splits),
            "JOINED": JOINED,
            "SINKS": sinks is not None,
        },
        num_warps=2,
        num_stages=1,
    )


def splits_for(max_context: int, window: int | None, least_split: int, num_programs: int, num_units: int) -> int:
    """As many as keep every multiprocessor at work, none of them smaller than is worth it; a power of two.

    A function of host numbers alone, and so the same whenever a graph is captured with them.
    """
    reach = max_context if window is None else min(max_context, window + least_split)
    wanted = min(2 * num_units // max(num_programs, 1), reach // least_split, MOST_SPLITS)
    return 1 << max(wanted.bit_length() - 1, 0)


def _check(out: Tensor, q: Tensor, kv: Tensor, batch: Batch, options: Options) -> None:
    check_attention(q, kv, out, batch, options.window, options.soft_cap)
    check_dtype("q", q)
    check_scales(kv, options.scales, q)
    if options.sinks is not None:
        check_sinks(options.sinks, q.shape[1])
