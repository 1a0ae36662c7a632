"""From logits to tokens without a sort: the likeliest token, draws under top-k, top-p and min-p, the best of a row.

    logits [R, V]    row 0   | chunk 0 | chunk 1 | chunk 2 | ...          CHUNK tokens each, the last one masked

    _chunks_kernel   (row, CHUNKS of them)   the highest logit of each chunk                    every program at work
    _odds_kernel     (row)                   highest of all, where the cuts lie, mass of each chunk
    _draw_kernel     (draw)                  u by Philox -> a chunk -> a token
    _likeliest_kernel (row)                  the best chunk, its best token, and again

A cut is found as a number, not as a rank. scaled = (logit - highest) / temperature is 0 or below, and so the bits of
-scaled, read as an integer, grow with the distance from the likeliest token. A distance is searched for by halving: of
the distances up to which there is mass enough (top_p), or tokens enough (top_k), the least.

    distance   0 .......... low ........ middle ............ high .......... FAR        what lies beyond FAR has no mass
               not enough ->|            measured by one pass            |<- enough

The search ends when one token lies between low and high, or one distance: some 20 passes over a row that is in the
cache after the first. Equals have one distance, and stand or fall together, as the reference says; it sums in float64,
and this kernel sums float32 masses CHUNKS * CHUNK lanes apart, and the lanes in float64.

A draw looks at the masses of the chunks, then at one chunk. Only a chunk and a token that have mass can be chosen,
however sums are rounded. Rows of temperature 0, and rows that are not finite, are not weighed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilburn.kernels.checks import check_count, check_odds
from kilburn.kernels.contract import Likeliest, Odds, Sampled
from kilburn.kernels.triton.launch import Launch, check_device, padded

CHUNK = 256
CHUNKS = 16  # of a tile
FAR = tl.constexpr(0x42D00000)  # the bits of 104.0: e^-104 is no float32
ALL = tl.constexpr(0x7F800000)  # the bits of infinity
INF = tl.constexpr(float("inf"))


@triton.jit
def _chunks_kernel(
    highest_ptr,  # float32 [R, num_chunks]; NaN if any of a chunk is
    sums_ptr,  # float32 [R, num_chunks]: sums of e^(logit - highest of the chunk); not written unless SUMS
    logits_ptr,  # [R, V]
    vocab,
    num_chunks,
    stride_row,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SUMS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    o_token = o_chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    b_x = tl.load(logits_ptr + i_row * stride_row + o_token, mask=o_token < vocab, other=-INF)
    b_top = tl.max(tl.where(b_x == b_x, b_x, -INF), axis=1)
    b_is_nan = tl.max((b_x != b_x).to(tl.int32), axis=1)
    o_out, m_chunk = i_row * num_chunks + o_chunk, o_chunk < num_chunks
    tl.store(highest_ptr + o_out, tl.where(b_is_nan > 0, float("nan"), b_top), mask=m_chunk)
    if SUMS:
        b_base = tl.where(b_top == -INF, 0.0, b_top)
        tl.store(sums_ptr + o_out, tl.sum(tl.exp(b_x - b_base[:, None]), axis=1), mask=m_chunk)


@triton.jit
def _scaled(logits_ptr, first_chunk, vocab, top, heat, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """A tile [CHUNKS, CHUNK] of one row, below 0 by its distance; and the distance as an integer."""
    o_token = (first_chunk + tl.arange(0, CHUNKS))[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    b_x = tl.load(logits_ptr + o_token, mask=o_token < vocab, other=-INF)
    b_x = tl.div_rn(b_x - top, heat)  # as the host rounds, so that the same tokens are equals
    return b_x, b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _within(
    logits_ptr, num_chunks, vocab, top, heat, limit, MASS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """(mass, or number, of the tokens up to the distance `limit`; their number)."""
    b_mass = tl.zeros([CHUNKS, CHUNK], tl.float32)
    b_count = tl.zeros([CHUNKS, CHUNK], tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        b_x, b_distance = _scaled(logits_ptr, first, vocab, top, heat, CHUNK, CHUNKS)
        m_in = b_distance <= limit
        b_count += m_in.to(tl.int32)
        if MASS:
            b_mass += tl.where(m_in, tl.exp(b_x), 0.0)
    count = tl.sum(tl.sum(b_count, axis=1), axis=0)
    if MASS:
        return tl.sum(tl.sum(b_mass.to(tl.float64), axis=1), axis=0), count
    return count.to(tl.float64), count


@triton.jit
def _least_distance(
    logits_ptr, num_chunks, vocab, top, heat, high, share, MASS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """The least distance, `high` at most, within which there is `share`."""
    low, count_low, count_high = -1, 0, vocab
    while (high - low > 1) & (count_high - count_low > 1):
        middle = low + (high - low) // 2
        amount, count = _within(logits_ptr, num_chunks, vocab, top, heat, middle, MASS, CHUNK, CHUNKS)
        is_enough = amount >= share
        high, count_high = tl.where(is_enough, middle, high), tl.where(is_enough, count, count_high)
        low, count_low = tl.where(is_enough, low, middle), tl.where(is_enough, count_low, count)
    return high


@triton.jit
def _odds_kernel(
    top_ptr,  # float32 [R]
    best_ptr,  # int64 [R]
    limits_ptr,  # int32 [R]: the distance up to which a token may be drawn; not written for rows that are not weighed
    masses_ptr,  # float32 [R, num_chunks]; likewise
    highest_ptr,  # float32 [R, num_chunks]
    logits_ptr,  # [R, V]
    rows_ptr,  # float64 [R, 4], of Odds; not read unless WEIGHED
    vocab,
    num_chunks,
    stride_row,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    logits_ptr += i_row * stride_row
    o_lane = tl.arange(0, LANES)
    b_top = tl.load(highest_ptr + i_row * num_chunks + o_lane, mask=o_lane < num_chunks, other=-INF)
    is_nan = tl.max((b_top != b_top).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(b_top == b_top, b_top, -INF), axis=0)
    first = tl.min(tl.where(b_top == top, o_lane, 0x7FFFFFF), axis=0)
    o_token = first * CHUNK + tl.arange(0, CHUNK)
    b_best = tl.load(logits_ptr + o_token, mask=o_token < vocab, other=-INF)
    best = tl.min(tl.where(b_best == top, o_token, vocab), axis=0)
    top = tl.where(is_nan, float("nan"), top)
    tl.store(top_ptr + i_row, top)
    tl.store(best_ptr + i_row, tl.where(is_nan, 0, best).to(tl.int64))
    if WEIGHED:
        heat = tl.load(rows_ptr + 4 * i_row).to(tl.float32)
        if (heat > 0.0) & (tl.abs(top) < INF):
            top_k, top_p = tl.load(rows_ptr + 4 * i_row + 1), tl.load(rows_ptr + 4 * i_row + 2)
            least = tl.minimum(tl.load(rows_ptr + 4 * i_row + 3).to(tl.float32), 0.0)
            limit = tl.full([], ALL, tl.int32)
            if (top_k > 0.0) & (top_k < vocab):
                limit = _least_distance(
                    logits_ptr, num_chunks, vocab, top, heat, tl.full([], FAR, tl.int32), top_k, False, CHUNK, CHUNKS
                )
            if top_p < 1.0:
                limit = tl.minimum(limit, FAR)
                total, _ = _within(logits_ptr, num_chunks, vocab, top, heat, limit, True, CHUNK, CHUNKS)
                limit = _least_distance(
                    logits_ptr, num_chunks, vocab, top, heat, limit, top_p * total, True, CHUNK, CHUNKS
                )
            limit = tl.minimum(limit, least.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            tl.store(limits_ptr + i_row, limit)
            for start in range(0, num_chunks, CHUNKS):
                b_x, b_distance = _scaled(logits_ptr, start, vocab, top, heat, CHUNK, CHUNKS)
                b_mass = tl.sum(tl.where(b_distance <= limit, tl.exp(b_x), 0.0), axis=1)
                o_chunk = start + tl.arange(0, CHUNKS)
                tl.store(masses_ptr + i_row * num_chunks + o_chunk, b_mass, mask=o_chunk < num_chunks)


@triton.jit
def _uniform(seed, stream, position):
    """philox.uniform: ten rounds on (position, stream), keyed by seed; 53 bits of the result."""
    c0, c1 = position & 0xFFFFFFFF, position >> 32
    c2, c3 = stream & 0xFFFFFFFF, stream & 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in tl.static_range(10):
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & 0xFFFFFFFF,
            (product_0 >> 32) ^ c3 ^ k1,
            (product_0 & 0xFFFFFFFF),
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return ((c0 >> 5 << 26) | (c1 >> 6)).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _first_beyond(b_mass, b_end, o_lane, target):
    """The first lane that has mass and ends beyond `target`; where none does, the last that has mass."""
    last = tl.max(tl.where(b_mass > 0.0, o_lane, 0), axis=0)
    return tl.min(tl.where((b_mass > 0.0) & (b_end > target), o_lane, last), axis=0)


@triton.jit
def _draw_kernel(
    tokens_ptr,  # int64 [D]
    draws_ptr,  # int64 [D, 4], of Odds
    rows_ptr,  # float64 [R, 4], of Odds
    top_ptr,  # float32 [R]
    limits_ptr,  # int32 [R]
    masses_ptr,  # float32 [R, num_chunks]
    logits_ptr,  # [R, V]
    vocab,
    num_chunks,
    stride_row,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    i_draw = tl.program_id(0).to(tl.int64)
    i_row = tl.load(draws_ptr + 4 * i_draw)
    top, heat = tl.load(top_ptr + i_row), tl.load(rows_ptr + 4 * i_row).to(tl.float32)
    token = tl.full([], 0, tl.int32)
    if (heat > 0.0) & (tl.abs(top) < INF):
        seed = tl.load(draws_ptr + 4 * i_draw + 1).to(tl.uint64)
        stream = tl.load(draws_ptr + 4 * i_draw + 2).to(tl.uint64)
        position = tl.load(draws_ptr + 4 * i_draw + 3).to(tl.uint64)
        o_lane = tl.arange(0, LANES)
        p_mass = masses_ptr + i_row * num_chunks + o_lane
        b_mass = tl.load(p_mass, mask=o_lane < num_chunks, other=0.0).to(tl.float64)
        b_end = tl.cumsum(b_mass, axis=0)
        target = _uniform(seed, stream, position) * tl.max(b_end, axis=0)
        chunk = _first_beyond(b_mass, b_end, o_lane, target)
        target -= tl.sum(tl.where(o_lane == chunk, b_end - b_mass, 0.0), axis=0)
        limit, o_token = tl.load(limits_ptr + i_row), chunk * CHUNK + tl.arange(0, CHUNK)
        b_x = tl.load(logits_ptr + i_row * stride_row + o_token, mask=o_token < vocab, other=-INF)
        b_x = tl.div_rn(b_x - top, heat)
        m_in = (b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) <= limit
        b_mass = tl.where(m_in, tl.exp(b_x), 0.0).to(tl.float64)
        token = _first_beyond(b_mass, tl.cumsum(b_mass, axis=0), o_token, target)
    tl.store(tokens_ptr + i_draw, token.to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def _likeliest_kernel(
    ids_ptr,  # int64 [R, count]
    log_probs_ptr,  # float32 [R, count]
    log_total_ptr,  # float32 [R]
    highest_ptr,  # float32 [R, num_chunks]
    sums_ptr,  # float32 [R, num_chunks]
    logits_ptr,  # [R, V]
    count,
    vocab,
    num_chunks,
    stride_row,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """What is left of a row is all that comes after the last one taken: lower, or equal and of a higher id. A turn
    changes the best that is left of one chunk, the one that it took from."""
    i_row = tl.program_id(0).to(tl.int64)
    logits_ptr += i_row * stride_row
    o_lane = tl.arange(0, LANES)
    m_open = o_lane < num_chunks
    b_top = tl.load(highest_ptr + i_row * num_chunks + o_lane, mask=m_open, other=-INF)
    b_sum = tl.load(sums_ptr + i_row * num_chunks + o_lane, mask=m_open, other=0.0)
    top = tl.max(b_top, axis=0)
    base = tl.where(top == -INF, 0.0, top)
    log_total = base + tl.log(tl.sum(b_sum * tl.exp(tl.where(b_top == -INF, 0.0, b_top) - base), axis=0))
    tl.store(log_total_ptr + i_row, log_total)
    last, last_id = INF, -1
    b_open = m_open.to(tl.int32)
    for i in range(count):
        value = tl.max(tl.where(b_open > 0, b_top, -INF), axis=0)
        chunk = tl.min(tl.where((b_open > 0) & (b_top == value), o_lane, 0x7FFFFFF), axis=0)
        o_token = chunk * CHUNK + tl.arange(0, CHUNK)
        m_token = o_token < vocab
        b_x = tl.load(logits_ptr + o_token, mask=m_token, other=-INF)
        m_left = m_token & ((b_x < last) | ((b_x == last) & (o_token > last_id)))
        token = tl.min(tl.where(m_left & (b_x == value), o_token, vocab), axis=0)
        tl.store(ids_ptr + i_row * count + i, token.to(tl.int64))
        tl.store(log_probs_ptr + i_row * count + i, value - log_total)
        m_left = m_token & ((b_x < value) | ((b_x == value) & (o_token > token)))
        b_top = tl.where(o_lane == chunk, tl.max(tl.where(m_left, b_x, -INF), axis=0), b_top)
        b_open = tl.where(o_lane == chunk, tl.max(m_left.to(tl.int32), axis=0), b_open)
        last, last_id = value, token


def sample(logits: Tensor, odds: Odds | None) -> tuple[Sampled, list[Launch]]:
    """Where the answer will be, and what must run first: two launches, or three where tokens are drawn."""
    check_odds(logits, odds)
    num_rows, vocab = logits.shape
    num_chunks = -(-vocab // CHUNK)

    def room(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    sampled = Sampled(
        top=room(num_rows, dtype=torch.float32),
        best=room(num_rows, dtype=torch.int64),
        tokens=room(0 if odds is None else len(odds.draws), dtype=torch.int64),
    )
    limits, masses = room(num_rows, dtype=torch.int32), room(num_rows, num_chunks, dtype=torch.float32)
    highest, chunks = _chunks(logits, has_sums=False)
    has_draws = odds is not None and len(odds.draws) > 0
    sizes = (vocab, num_chunks, logits.stride(0))
    rows = logits if odds is None else odds.rows
    shared = {"CHUNK": CHUNK, "LANES": padded(num_chunks)}
    weigh = Launch(
        kernel=_odds_kernel,
        grid=(num_rows,),
        arguments=(sampled.top, sampled.best, limits, masses, highest[0], logits, rows, *sizes),
        constants=shared | {"CHUNKS": CHUNKS, "WEIGHED": has_draws},
        num_warps=8,
        num_stages=1,
    )
    if odds is None or not has_draws:
        return sampled, [chunks, weigh]
    check_device("odds.rows", odds.rows, logits)
    check_device("odds.draws", odds.draws, logits)
    draw = Launch(
        kernel=_draw_kernel,
        grid=(len(odds.draws),),
        arguments=(sampled.tokens, odds.draws, rows, sampled.top, limits, masses, logits, *sizes),
        constants=shared,
        num_warps=4,
        num_stages=1,
    )
    return sampled, [chunks, weigh, draw]


def likeliest(logits: Tensor, count: int) -> tuple[Likeliest, list[Launch]]:
    """Where the answer will be, and what must run first."""
    check_odds(logits, None)
    check_count(logits, count)
    num_rows, vocab = logits.shape
    (highest, sums), chunks = _chunks(logits, has_sums=True)
    found = Likeliest(
        log_total=highest.new_empty(num_rows),
        ids=torch.empty((num_rows, count), dtype=torch.int64, device=logits.device),
        log_probs=highest.new_empty(num_rows, count),
    )
    pick = Launch(
        kernel=_likeliest_kernel,
        grid=(num_rows,),
        arguments=(
            *(found.ids, found.log_probs, found.log_total, highest, sums, logits),
            *(count, vocab, highest.shape[1], logits.stride(0)),
        ),
        constants={"CHUNK": CHUNK, "LANES": padded(highest.shape[1])},
        num_warps=4,
        num_stages=1,
    )
    return found, [chunks, pick]


def _chunks(logits: Tensor, has_sums: bool) -> tuple[Tensor, Launch]:
    """(float32 [2, R, num_chunks]: highest, sums; what fills it)."""
    num_rows, vocab = logits.shape
    num_chunks = -(-vocab // CHUNK)
    found = torch.empty((2, num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    launch = Launch(
        kernel=_chunks_kernel,
        grid=(num_rows, -(-num_chunks // CHUNKS)),
        arguments=(found[0], found[1], logits, vocab, num_chunks, logits.stride(0)),
        constants={"CHUNK": CHUNK, "CHUNKS": CHUNKS, "SUMS": has_sums},
        num_warps=8,
        num_stages=1,
    )
    return found, launch
