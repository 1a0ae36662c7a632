"""What the launchers of compiled kernels ask of their arguments. An error names the argument and what it wants."""

import torch
from torch import Tensor

from kilburn.kernels.contract import Batch, Rope


def said(tensor: Tensor) -> str:
    """A tensor for an error message."""
    return f"({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, strides {list(tensor.stride())})"


def check_rows(what: str, x: Tensor, width: int) -> None:
    if x.dim() != 2 or x.shape[1] != width or (x.stride(1) != 1 and width > 1):
        raise ValueError(f"{what} {said(x)}: want [T, {width}], each row contiguous")


def check_heads(what: str, x: Tensor, shape: tuple[int, int, int]) -> None:
    if x.shape != shape or (x.stride(2) != 1 and shape[2] > 1):
        raise ValueError(f"{what} {said(x)}: want {list(shape)}, each head contiguous")


def check_cache(kv: Tensor, q: Tensor) -> None:
    """kv is one layer of a pool: [num_blocks, 2, Hkv, bs, D], each head's piece of a block contiguous."""
    if kv.dim() != 5 or kv.shape[1] != 2 or kv.shape[4] != q.shape[-1]:
        raise ValueError(f"kv {said(kv)}: want [num_blocks, 2, Hkv, block_size, {q.shape[-1]}], as q is {said(q)}")
    if kv.stride(4) != 1 or kv.stride(3) != kv.shape[4]:
        raise ValueError(f"kv {said(kv)}: want the last two dimensions contiguous")
    if q.shape[1] % kv.shape[2]:
        raise ValueError(f"q {said(q)}: want a multiple of the {kv.shape[2]} heads of kv {said(kv)}")


def check_tokens(batch: Batch, num_tokens: int) -> None:
    for what, tensor in (("positions", batch.positions), ("slots", batch.slots)):
        if tensor.shape != (num_tokens,) or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"batch.{what} {said(tensor)}: want int64 [{num_tokens}], contiguous")


def check_sequences(batch: Batch) -> None:
    num_seqs = batch.context_len.shape[0]
    for what, tensor, shape in (
        ("query_start", batch.query_start, (num_seqs + 1,)),
        ("context_len", batch.context_len, (num_seqs,)),
        ("tables", batch.tables, (num_seqs, batch.tables.shape[-1])),
    ):
        if tensor.shape != shape or tensor.dtype != torch.int32 or (tensor.numel() and tensor.stride(-1) != 1):
            raise ValueError(f"batch.{what} {said(tensor)}: want int32 {list(shape)}, each row contiguous")


def check_rope(rope: Rope, head_dim: int) -> None:
    table = rope.cos_sin
    if table.dtype != torch.float32 or table.dim() != 2 or not table.is_contiguous():
        raise ValueError(f"rope.cos_sin {said(table)}: want float32 [max_positions, rotary_dim], contiguous")
    if table.shape[1] % 2 or table.shape[1] > head_dim:
        raise ValueError(f"rope.cos_sin {said(table)}: want an even rotary_dim, {head_dim} or less")


def check_options(window: int | None, soft_cap: float | None, sinks: Tensor | None, num_heads: int) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window {window}: want 1 or more, or None")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap {soft_cap}: want a number above 0, or None")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks {said(sinks)}: want [{num_heads}]")


def check_pools(source: Tensor, destination: Tensor) -> None:
    """Pools of like blocks, each block contiguous."""
    for what, pool in (("source pool", source), ("destination pool", destination)):
        if not pool[:1].is_contiguous():
            raise ValueError(f"{what} {said(pool)}: want each block contiguous")
    if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
        raise ValueError(f"destination pool {said(destination)}: want blocks like the source's {said(source)}")


def check_pairs(pairs: Tensor, num_sources: int, num_destinations: int) -> None:
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        raise ValueError(f"pairs {said(pairs)}: want int64 [n, 2]")
    if not pairs.numel():
        return
    lowest, (source, destination) = int(pairs.min()), pairs.amax(dim=0).tolist()
    if lowest < 0 or source >= num_sources or destination >= num_destinations:
        raise ValueError(
            f"pairs: up to ({source}, {destination}), from {lowest}, of {num_sources, num_destinations} blocks"
        )
