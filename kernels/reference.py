"""The meaning of every kernel, in plain torch: short enough to be believed, and the judge of the fast forms.

Works at any float dtype. Sums run in float32, or in float64 where the inputs are; the twins in the tests are called in
float64. Nothing here is fast: attention gathers one sequence's context at a time, which the fast forms never do.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kilburn.kernels.contract import LARGEST, Batch, Likeliest, Odds, Rope, Sampled, Shapes
from kilburn.kernels.philox import uniform

name = "reference (plain torch; slow)"


def warm_up(shapes: Shapes, on_progress: Callable[[str], None] | None = None) -> None:
    """There is nothing to compile."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums run in."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(_wide(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual += x
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(_wide(gate_up.dtype)).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rotated(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """x [T, heads, D] turned by the angles of its positions."""
    rotary_dim = rope.cos_sin.shape[1]
    wide = x.to(_wide(x.dtype))
    cos, sin = rope.cos_sin[positions].to(wide.dtype).unsqueeze(1).chunk(2, dim=-1)
    turned, rest = wide[..., :rotary_dim], wide[..., rotary_dim:]
    if rope.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1).to(x.dtype)


def kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    batch: Batch,
    rope: Rope | None,
    scales: Tensor | None = None,
) -> None:
    if rope is not None:
        q.copy_(rotated(q, batch.positions, rope))
        k = rotated(k, batch.positions, rope)
    written = batch.slots >= 0
    slots, block_size = batch.slots[written], kv.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    for which, new in enumerate((k[written], v[written])):
        if scales is not None:
            wide = new.to(_wide(new.dtype))
            if scales.dim() == 2:
                scale = scales[which].expand(wide.shape[:2])
            else:  # a row of zeros has the scale 0, and a row that is not finite a scale that is not
                scale = (wide.abs().amax(dim=-1) / LARGEST[kv.dtype]).to(scales.dtype)
                scales[blocks, which, :, offsets] = scale
            new = eight_bits(wide / scale[..., None], kv.dtype)
        kv[blocks, which, :, offsets] = new.to(kv.dtype)


def eight_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x limited to what `dtype` holds, and rounded where it holds whole numbers; what is no number is 0."""
    limited = x.nan_to_num(0.0).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (limited.round() if dtype == torch.int8 else limited).to(dtype)


def values_of(kv: Tensor, scales: Tensor | None, table: Tensor, dtype: torch.dtype) -> Tensor:
    """What the blocks of a table hold: [blocks, 2, Hkv, bs, D] of `dtype`."""
    held = kv[table].to(dtype)
    if scales is None:
        return held
    return held * (scales[..., None, None] if scales.dim() == 2 else scales[table][..., None]).to(dtype)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    batch: Batch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    out.zero_()
    bounds, block_size = batch.query_start.tolist(), kv.shape[3]
    for seq, context in enumerate(batch.context_len.tolist()):
        start, end = bounds[seq], bounds[seq + 1]
        if start == end or context == 0:
            continue
        table = batch.tables[seq, : -(-context // block_size)].long()
        held = values_of(kv, scales, table, _wide(q.dtype))
        held = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]  # [2, Hkv, context, D]
        keys, values = held.repeat_interleave(q.shape[1] // kv.shape[2], dim=1)
        score = torch.einsum("qhd,hcd->hqc", q[start:end].to(keys.dtype), keys) * scale
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        seen_by = torch.arange(context - (end - start), context, device=q.device)[:, None]
        position = torch.arange(context, device=q.device)
        hidden = position > seen_by
        if window is not None:
            hidden |= position <= seen_by - window
        score = score.masked_fill(hidden, float("-inf"))
        if sinks is not None:  # one more column, that has no value
            score = torch.cat((score, sinks.to(score.dtype)[:, None, None].expand(-1, end - start, 1)), dim=-1)
        weight = torch.softmax(score, dim=-1)[..., :context].masked_fill(hidden, 0.0)  # a row that sees nothing is NaN
        out[start:end] = torch.einsum("hqc,hcd->qhd", weight, values).to(out.dtype)
    return out


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    swap_blocks(pool, pool, pairs)


def swap_blocks(source_pool: Tensor, destination_pool: Tensor, pairs: Tensor) -> None:
    source, destination = pairs.unbind(1)
    read = source_pool[source.to(source_pool.device)]
    destination_pool[destination.to(destination_pool.device)] = read.to(destination_pool.device)


def sample(logits: Tensor, odds: Odds | None = None) -> Sampled:
    top, best = logits.max(dim=1)
    best = (logits == top[:, None]).to(torch.int8).argmax(dim=1)  # of equals the first
    if odds is None:
        return Sampled(top, best, best[:0])
    mass = torch.stack([_mass(*row) for row in zip(logits, top, odds.rows.tolist(), strict=True)])
    rows, *words = odds.draws.cpu().numpy().T
    u = torch.from_numpy(uniform(*(word.astype(np.uint64) for word in words))).to(logits.device)
    cumulative = mass[torch.from_numpy(rows).to(logits.device)].cumsum(dim=1)
    total = cumulative[:, -1]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))  # rounded up, none is past it
    return Sampled(top, best, (cumulative > target[:, None]).to(torch.int8).argmax(dim=1))


def drawn_from(logits: Tensor, odds: list[float]) -> Tensor:
    """Of one row, logits [V] of the distribution that a draw at these odds is of: -inf where a token is cut off."""
    scaled, floor = _scaled(logits, logits.max(), odds)
    return torch.where(scaled >= floor, scaled, float("-inf")).to(logits.dtype)


def _mass(logits: Tensor, top: Tensor, odds: list[float]) -> Tensor:
    """What each token of one row weighs in a draw: float64 [V], 0 where it is cut off."""
    if odds[0] <= 0.0 or not bool(torch.isfinite(top)):
        return torch.zeros_like(logits, dtype=torch.float64)
    scaled, floor = _scaled(logits, top, odds)
    return torch.where(scaled >= floor, scaled.exp(), 0.0)


def _scaled(logits: Tensor, top: Tensor, odds: list[float]) -> tuple[Tensor, float]:
    """(logits over the temperature, the highest at 0; the lowest that stands), float64."""
    temperature, top_k, top_p, least = odds
    # Rounded as every set does, so that the same tokens are equals.
    scaled = ((logits - top) / torch.tensor(temperature, dtype=torch.float32)).double()
    floor = float(np.float32(least))
    ranked = scaled.sort(descending=True).values
    if 0 < top_k < len(logits):
        kth = float(ranked[int(top_k) - 1])
        floor, ranked = max(floor, kth), ranked[ranked >= kth]
    if top_p < 1.0:
        reached = ranked.exp().cumsum(dim=0)
        floor = max(floor, float(ranked[int((reached < top_p * reached[-1]).sum())]))
    return scaled, floor


def likeliest(logits: Tensor, count: int) -> Likeliest:
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    log_probs = torch.log_softmax(logits.double(), dim=1)
    log_total = torch.logsumexp(logits.double(), dim=1)
    return Likeliest(log_total.float(), ids, log_probs.gather(1, ids).float())


WEIGHT_LEVELS = 127  # of 8 bits, on either side of 0


def levels_for(depth: int) -> int:
    """Of the rows that meet a weight of `depth` inputs: as many as keep a sum of their products within 32 bits."""
    return min((2**31 - 1) // (WEIGHT_LEVELS * depth), 2**15 - 1)


def quantized_rows(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Each row of x [rows, n] by a scale of its own -> (int16 [rows, n] in [-levels, levels], float32 [rows]).

    A row with a NaN or an infinity in it has zeros, and NaN for its scale; one of nothing above 1e-33 zeros, and 0.
    """
    largest = x.abs().amax(1, keepdim=True).float()
    is_broken, is_zero = ~largest.isfinite(), largest <= 1e-33
    per_unit = torch.where(is_broken | is_zero, torch.zeros_like(largest), levels / largest)
    values = torch.where(is_broken, torch.zeros_like(x), x * per_unit).round().to(torch.int16)
    scales = torch.where(is_zero, torch.zeros_like(largest), largest / levels)
    return values, scales.masked_fill(is_broken, torch.nan).squeeze(1)


def int8_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] . weight [out, in]^T + bias [out] -> float32 [rows, out], each row of both quantized by itself."""
    xs, x_scales = quantized_rows(x, levels_for(x.shape[1]))
    ws, w_scales = quantized_rows(weight, WEIGHT_LEVELS)
    sums = xs.double() @ ws.double().T  # whole numbers below 2^53: exact in whatever order
    product = (sums * x_scales.double()[:, None] * w_scales.double()).float()
    return product if bias is None else product + bias
