"""What the launchers of compiled kernels ask of their arguments. An error names the argument and what it wants."""

import torch
from torch import Tensor

from kilburn.kernels.contract import LARGEST, Batch, Odds, Rope


def said(tensor: Tensor) -> str:
    """A tensor for an error message."""
    return f"({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, strides {list(tensor.stride())})"


def check_rows(what: str, x: Tensor, width: int) -> None:
    if x.dim() != 2 or x.shape[1] != width or (x.stride(1) != 1 and width > 1):
        raise ValueError(f"{what} {said(x)}: want [T, {width}], each row contiguous")


def check_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    check_rows("x", x, x.shape[-1])
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"weight {said(weight)}: want {list(x.shape[1:])}, contiguous, as x is {said(x)}")
    if residual is not None:
        check_rows("residual", residual, x.shape[1])
        if residual.shape != x.shape:
            raise ValueError(f"residual {said(residual)}: want the shape of x {said(x)}")


def check_heads(what: str, x: Tensor, like: Tensor, num_heads: int) -> None:
    """x [T, num_heads, D], with T, D and dtype of `like`."""
    shape = (like.shape[0], num_heads, like.shape[2])
    if x.shape != shape or x.dtype != like.dtype or (x.stride(2) != 1 and shape[2] > 1):
        raise ValueError(f"{what} {said(x)}: want {list(shape)} of {like.dtype}, each head contiguous")


def check_cache(kv: Tensor, q: Tensor) -> None:
    """kv is one layer of a pool: [num_blocks, 2, Hkv, bs, D], each head's piece of a block contiguous."""
    if q.dim() != 3:
        raise ValueError(f"q {said(q)}: want [T, Hq, D]")
    if kv.dim() != 5 or kv.shape[1] != 2 or kv.shape[4] != q.shape[2] or not kv.numel():
        want = f"[num_blocks, 2, Hkv, block_size, {q.shape[2]}], none of them 0, as q is {said(q)}"
        raise ValueError(f"kv {said(kv)}: want {want}")
    if (kv.stride(4) != 1 and kv.shape[4] > 1) or (kv.stride(3) != kv.shape[4] and kv.shape[3] > 1):
        raise ValueError(f"kv {said(kv)}: want the last two dimensions contiguous")
    if q.shape[1] % kv.shape[2]:
        raise ValueError(f"q {said(q)}: want a multiple of the {kv.shape[2]} heads of kv {said(kv)}")
    check_heads("q", q, q, q.shape[1])


def check_scales(kv: Tensor, scales: Tensor | None) -> None:
    """A kv of 8 bits has scales, one a head or one a row, and no other has."""
    if (kv.dtype in LARGEST) != (scales is not None):
        raise ValueError(f"kv {said(kv)}: want scales with a dtype of 8 bits, and with no other")
    if scales is None:
        return
    heads, rows = (2, kv.shape[2]), (kv.shape[0], 2, kv.shape[2], kv.shape[3])
    is_row = scales.shape == rows and (scales.stride(3) == 1 or rows[3] == 1)
    if scales.dtype != torch.float32 or not (is_row or (scales.shape == heads and scales.is_contiguous())):
        raise ValueError(
            f"scales {said(scales)}: want float32 {list(heads)}, contiguous, or {list(rows)}, rows contiguous"
        )


def check_write(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch, rope: Rope | None) -> None:
    check_cache(kv, q)
    check_heads("k", k, q, kv.shape[2])
    check_heads("v", v, q, kv.shape[2])
    for what, tensor in (("positions", batch.positions), ("slots", batch.slots)):
        if tensor.shape != q.shape[:1] or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"batch.{what} {said(tensor)}: want int64 [{q.shape[0]}], contiguous")
    if rope is not None:
        check_rope(rope, q.shape[2])


def check_rope(rope: Rope, head_dim: int) -> None:
    table = rope.cos_sin
    if table.dtype != torch.float32 or table.dim() != 2 or not table.is_contiguous():
        raise ValueError(f"rope.cos_sin {said(table)}: want float32 [max_positions, rotary_dim], contiguous")
    if table.shape[1] % 2 or table.shape[1] > head_dim:
        raise ValueError(f"rope.cos_sin {said(table)}: want an even rotary_dim, {head_dim} or less")


def check_attention(
    q: Tensor, kv: Tensor, out: Tensor, batch: Batch, window: int | None, soft_cap: float | None
) -> None:
    check_cache(kv, q)
    check_heads("out", out, q, q.shape[1])
    num_seqs = batch.context_len.shape[0]
    for what, tensor, shape in (
        ("query_start", batch.query_start, (num_seqs + 1,)),
        ("context_len", batch.context_len, (num_seqs,)),
        ("tables", batch.tables, (num_seqs, batch.tables.shape[-1])),
    ):
        contiguous = tensor.numel() < 2 or tensor.shape[-1] < 2 or tensor.stride(-1) == 1
        if tensor.shape != shape or tensor.dtype != torch.int32 or not contiguous:
            raise ValueError(f"batch.{what} {said(tensor)}: want int32 {list(shape)}, each row contiguous")
    if window is not None and window < 1:
        raise ValueError(f"window {window}: want 1 or more, or None")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap {soft_cap}: want a number above 0, or None")


def check_sinks(sinks: Tensor, num_heads: int) -> None:
    if sinks.shape != (num_heads,):
        raise ValueError(f"sinks {said(sinks)}: want [{num_heads}]")


def check_pools(source: Tensor, destination: Tensor) -> None:
    """Pools of like blocks, each block contiguous."""
    for what, pool in (("source pool", source), ("destination pool", destination)):
        if pool.dim() < 1 or not pool[:1].is_contiguous():
            raise ValueError(f"{what} {said(pool)}: want [num_blocks, ...], each block contiguous")
    if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
        raise ValueError(f"destination pool {said(destination)}: want blocks like the source's {said(source)}")


def check_pairs(pairs: Tensor, num_sources: int, num_destinations: int) -> None:
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        raise ValueError(f"pairs {said(pairs)}: want int64 [n, 2]")
    if not pairs.numel():
        return
    lowest, (source, destination) = int(pairs.min()), pairs.amax(dim=0).tolist()
    if lowest < 0 or source >= num_sources or destination >= num_destinations:
        of = f"{num_sources} and {num_destinations} blocks"
        raise ValueError(f"pairs: {lowest} to ({source}, {destination}) is out of bounds of {of}")


def check_odds(logits: Tensor, odds: Odds | None) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1] or logits.stride(1) != 1:
        raise ValueError(f"logits {said(logits)}: want float32 [R, V], V above 0, each row contiguous")
    if odds is None:
        return
    rows, draws = odds.rows, odds.draws
    if rows.shape != (len(logits), 4) or rows.dtype != torch.float64 or not rows.is_contiguous():
        raise ValueError(f"odds.rows {said(rows)}: want float64 [{len(logits)}, 4], contiguous")
    if draws.dim() != 2 or draws.shape[1] != 4 or draws.dtype != torch.int64 or not draws.is_contiguous():
        raise ValueError(f"odds.draws {said(draws)}: want int64 [D, 4], contiguous")


def check_count(logits: Tensor, count: int) -> None:
    if not 0 <= count <= logits.shape[1]:
        raise ValueError(f"count {count}: want 0 or more, and no more than the {logits.shape[1]} tokens of logits")
