"""Ragged paged attention on the CPU: prefill, chunk and decode by one path, and no context is ever gathered.

    a unit of work: one sequence, and up to 96 rows (KV heads x query positions x the query heads of a KV head)

         keys ->     tile 0      tile 1      tile 2          a tile is 64 positions (or 16), wherever their blocks lie
      rows        +-----------+-----------+-----------+
       |   (0,h0) | x x x x x | x         |           |      1. scores = rows x keys, from where the blocks are
       v   (0,h1) | x x x x x | x         |           |      2. cap, mask, running softmax: scores become weights
           (1,h0) | x x x x x | x x       |           |      3. sums += weights x values, from where the blocks are
           (1,h1) | x x x x x | x x       |           |
                  +-----------+-----------+-----------+

Nothing is copied: a tile is a list of row addresses, and so one code serves any block size. A unit of a few rows
(decode) takes all KV heads, and tiles of 16: a block's heads are neighbours in memory, and a near read costs half of a
far one. While keys are scored their values are asked for, and while values are added the keys that come next.

Rows that fit one unit may still have a long context, and so such a unit is cut at every multiple of 256 positions. The
pieces leave sums, tops and totals in scratch, and the last one to finish adds them up in order of position: where the
cuts are depends on the sequence alone, and so its result depends neither on its neighbours nor on the threads.

A cache of int8 becomes float32 in registers. A scale that all rows of a head share is taken into q, and for values into
what is written in the end; scales of single rows are gathered for each tile and meet its scores and its weights.

Scores are kept in base 2 (log2(e) is folded into the scale), where an exponential is an addition to the exponent.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from kilburn.kernels.cpu.arguments import (
    ARRIVALS,
    BLOCK_SIZE,
    BLOCK_STEP,
    CAP,
    CONTEXT,
    CUT,
    FAULT,
    FEW_ROWS,
    GROUP,
    HEAD_DIM,
    HEAD_STEP,
    KV,
    MAX_BLOCKS,
    MAX_ROWS,
    NUM_ARRIVALS,
    NUM_BLOCKS,
    NUM_CUT_ROWS,
    NUM_KV_HEADS,
    NUM_SEQS,
    NUM_TOKENS,
    NUM_UNITS,
    NUM_VALUES,
    OUT,
    OUT_HEAD,
    OUT_TOKEN,
    PIECES,
    Q_HEAD,
    Q_TOKEN,
    QUERY_START,
    ROWS_END,
    ROWS_START,
    SCALE,
    SCALE_BLOCK,
    SCALE_HEAD,
    SCALE_VALUE,
    SCALES,
    SCRATCH,
    SCRATCH_STEP,
    SINKS,
    SMALL_TILE,
    TABLE_STEP,
    TABLES,
    TAKEN,
    TILE,
    VALUE_STEP,
    WINDOW,
    WORKERS,
    Q,
)
from kilburn.kernels.cpu.simd import (
    add_rows,
    dot_four,
    exp2,
    exp2_row,
    fetch_add,
    floats,
    int32s,
    int64s,
    is_above,
    load_one,
    number,
    prefetch,
    row_max,
    store_one,
    tanh,
)
from kilburn.kernels.cpu.vectors import ELEMENT_BYTES, FAST, INT8

LOG2_E = math.log2(math.e)
HIDDEN = np.float32(-1e30)  # finite: the difference of two hidden scores must not be NaN
LEEWAY = np.float32(8)  # powers of 2 by which a score may exceed its row's top before that follows
TOTAL_STEP = 4 * 8  # a row's total is kept as a vector, and summed up in the end

# What a thread keeps of its unit, as words u[...] on top of its scratch. NUM_ROWS counts the rows of one KV head.
# fmt: off
(
    SEQ, HEAD, NUM_HEADS, FIRST_QUERY, NUM_QUERIES, NUM_ROWS, FIRST_POSITION, START, END,
    TILE_SIZE, PIECE, NUM_PIECES, CUT_ROW, ARRIVAL,
    U_Q, U_SCORES, U_SUMS, U_TOPS, U_TOTALS, U_ROWS, U_NEXT_ROWS, STEP,  # STEP: bytes of a row of q and of sums
    U_SCALES, U_NEXT_SCALES, U_KEY_SCALES, U_VALUE_SCALES,  # addresses by row, and what a head has at them
) = range(26)
# fmt: on
UNIT_WORDS = 32


@njit
def _up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


@njit
def _queries(a, seq):
    return np.int64(int32s(a[QUERY_START])[seq + 1] - int32s(a[QUERY_START])[seq])


@njit
def _cuts(a, seq):
    """(KV heads and queries of a unit, units along the queries, first cut, pieces) of a sequence."""
    num_queries, context = _queries(a, seq), np.int64(int32s(a[CONTEXT])[seq])
    per_unit = max(MAX_ROWS // a[GROUP], 1)
    if num_queries > per_unit:
        return 1, per_unit, (num_queries + per_unit - 1) // per_unit, 0, 1
    heads = a[NUM_KV_HEADS] if num_queries * a[GROUP] * a[NUM_KV_HEADS] <= MAX_ROWS else 1
    first_cut = max(context - num_queries - a[WINDOW] + 1, 0) // CUT
    return heads, per_unit, min(num_queries, 1), first_cut, max((context + CUT - 1) // CUT - first_cut, 1)


@njit
def survey(a):
    """Counts what there is to do, and checks what the units rely on."""
    units, values, cut_rows, arrivals = 0, 0, 0, 0
    for seq in range(a[NUM_SEQS]):
        heads, _, across, _, pieces = _cuts(a, seq)
        units += a[NUM_KV_HEADS] // heads * across * pieces
        if pieces > 1:
            cut_rows += pieces * _queries(a, seq) * a[GROUP] * a[NUM_KV_HEADS]
            arrivals += a[NUM_KV_HEADS] // heads
        context = np.int64(int32s(a[CONTEXT])[seq])
        values += (min(context, a[WINDOW]) + _queries(a, seq)) * a[NUM_KV_HEADS] * a[HEAD_DIM]
        begins, ends = int32s(a[QUERY_START])[seq], int32s(a[QUERY_START])[seq + 1]
        if (
            context < 0
            or context > a[MAX_BLOCKS] * a[BLOCK_SIZE]
            or begins < 0
            or ends < begins
            or ends > a[NUM_TOKENS]
        ):
            a[FAULT] = 1 + seq
    a[NUM_UNITS], a[NUM_VALUES], a[NUM_CUT_ROWS], a[NUM_ARRIVALS] = units, values, cut_rows, arrivals
    a[ROWS_START], a[ROWS_END] = np.int64(int32s(a[QUERY_START])[0]), np.int64(int32s(a[QUERY_START])[a[NUM_SEQS]])


@njit
def _take(a, u, unit, seq, before, cut_row, arrival):
    """Walks on to the sequence of a unit. Returns (seq, units before it, cut rows before it, arrivals before it)."""
    while seq < a[NUM_SEQS]:
        heads, per_unit, across, first_cut, pieces = _cuts(a, seq)
        num_queries, columns = _queries(a, seq), a[NUM_KV_HEADS] // heads
        if unit < before + columns * across * pieces:
            break
        before += columns * across * pieces
        if pieces > 1:
            cut_row += pieces * num_queries * a[GROUP] * a[NUM_KV_HEADS]
            arrival += columns
        seq += 1
    if seq == a[NUM_SEQS]:
        return seq, before, cut_row, arrival
    index = unit - before
    column, u[PIECE], u[NUM_PIECES] = index // (across * pieces), index % pieces, pieces
    query = (across - 1 - index // pieces % across) * per_unit  # the last ones see most: longest work first
    u[SEQ], u[HEAD], u[NUM_HEADS] = seq, column * heads, heads
    u[FIRST_QUERY] = np.int64(int32s(a[QUERY_START])[seq]) + query
    u[NUM_QUERIES] = min(per_unit, num_queries - query)
    u[NUM_ROWS] = u[NUM_QUERIES] * a[GROUP]
    u[TILE_SIZE] = SMALL_TILE if heads * u[NUM_ROWS] <= FEW_ROWS else TILE
    u[FIRST_POSITION] = np.int64(int32s(a[CONTEXT])[seq]) - num_queries + query
    u[START] = max(u[FIRST_POSITION] - a[WINDOW] + 1, 0)
    u[END] = max(u[FIRST_POSITION] + u[NUM_QUERIES], 0)
    if pieces > 1:
        cut = (first_cut + u[PIECE]) * CUT
        u[START], u[END] = max(u[START], cut), min(u[END], cut + CUT)
    u[CUT_ROW], u[ARRIVAL] = cut_row + column * pieces * heads * u[NUM_ROWS], arrival + column
    return seq, before, cut_row, arrival


@njit
def _lay_out(a, u):
    """Divides a thread's scratch, which begins with the words u."""
    rows, step = max(MAX_ROWS, a[GROUP]), 4 * _up(a[HEAD_DIM], 8)
    u[STEP], u[U_Q] = step, a[SCRATCH] + a[SCRATCH_STEP] * u[SEQ] + 8 * UNIT_WORDS
    u[U_SCORES] = _up(u[U_Q] + rows * step, 64)
    u[U_SUMS] = _up(u[U_SCORES] + rows * TILE * 4, 64)
    u[U_TOPS] = _up(u[U_SUMS] + rows * step, 64)
    u[U_TOTALS] = _up(u[U_TOPS] + rows * 4, 64)
    u[U_ROWS] = _up(u[U_TOTALS] + rows * TOTAL_STEP, 64)
    u[U_NEXT_ROWS] = _up(u[U_ROWS] + TILE * 8, 64)
    u[U_SCALES] = _up(u[U_NEXT_ROWS] + TILE * 8, 64)
    u[U_NEXT_SCALES] = _up(u[U_SCALES] + TILE * 8, 64)
    u[U_KEY_SCALES] = _up(u[U_NEXT_SCALES] + TILE * 8, 64)
    u[U_VALUE_SCALES] = _up(u[U_KEY_SCALES] + TILE * 4, 64)


@njit
def _ask_for(row, row_bytes):
    """Has the processor fetch a row of the cache while it does something else."""
    for at in range(row, row + row_bytes, 64):
        prefetch(at)


@njit
def _find_rows(a, u, start, row_bytes):
    """Where the unit's first head has its keys of the tile at `start`, into U_NEXT_ROWS.

    A tile that is not full ends, up to a multiple of 8, with its own first row, whose scores will be hidden.
    """
    rows, table = int64s(u[U_NEXT_ROWS]), int32s(a[TABLES] + u[SEQ] * a[TABLE_STEP])
    scales = int64s(u[U_NEXT_SCALES])
    count = max(min(u[END] - start, u[TILE_SIZE]), 0)
    index, offset, done = start // a[BLOCK_SIZE], start % a[BLOCK_SIZE], 0
    while done < count:
        block = np.int64(table[index])
        if block < 0 or block >= a[NUM_BLOCKS]:
            a[FAULT], block = 1 + u[SEQ], 0
        row = a[KV] + u[HEAD] * a[HEAD_STEP] + block * a[BLOCK_STEP] + offset * row_bytes
        run = min(a[BLOCK_SIZE] - offset, count - done)
        for i in range(done, done + run):
            rows[i] = row
            row += row_bytes
        if a[SCALE_BLOCK] != 0:
            scale = a[SCALES] + u[HEAD] * a[SCALE_HEAD] + block * a[SCALE_BLOCK] + 4 * offset
            for i in range(done, done + run):
                scales[i] = scale
                scale += 4
            # A block's scales of one layer lie together.
            _ask_for(scales[done], u[NUM_HEADS] * a[SCALE_HEAD])
            _ask_for(scales[done] + a[SCALE_VALUE], u[NUM_HEADS] * a[SCALE_HEAD])
        done += run
        index += 1
        offset = 0
    for i in range(count, _up(count, 8)):
        rows[i] = rows[0]
        scales[i] = scales[0]


@njit
def _place(a, u, row):
    """(token, query head) of a row of the unit; rows are ordered by KV head, query, query head of that KV head."""
    head, within = row // u[NUM_ROWS], row % u[NUM_ROWS]
    return u[FIRST_QUERY] + within // a[GROUP], (u[HEAD] + head) * a[GROUP] + within % a[GROUP]


@njit
def _gather_scales(a, u, head, count):
    """The scales of a tile's rows of one head of the unit."""
    scales, offset = int64s(u[U_SCALES]), head * a[SCALE_HEAD]
    keys, values = floats(u[U_KEY_SCALES]), floats(u[U_VALUE_SCALES])
    for i in range(_up(count, 8)):
        keys[i] = floats(scales[i] + offset)[0]
        values[i] = floats(scales[i] + offset + a[SCALE_VALUE])[0]


@njit(fastmath=FAST)
def _scale_columns(a, u, count, scales_at):
    """Scores or weights of one head, times what each row is worth."""
    scales = floats(scales_at)
    for row in range(u[NUM_ROWS]):
        at = floats(u[U_SCORES] + row * (4 * TILE))
        for column in range(_up(count, 8)):
            at[column] *= scales[column]


@njit(fastmath=FAST)
def _hide(a, u, row, start, count):
    """What a row does not see of the tile [start, start + count), and what fills it up."""
    at, position = floats(u[U_SCORES] + row * (4 * TILE)), u[FIRST_POSITION] + row // a[GROUP]
    columns = _up(count, 8)
    for column in range(min(max(position - a[WINDOW] + 1 - start, 0), columns)):
        at[column] = HIDDEN
    for column in range(max(min(position + 1 - start, count), 0), columns):
        at[column] = HIDDEN


@njit(fastmath=FAST)
def _raise(u, row, new_top):
    """Has a row's total and sums follow its new top."""
    tops = floats(u[U_TOPS])
    shrink = exp2(tops[row] - new_top)
    tops[row] = new_top
    totals, sums = floats(u[U_TOTALS] + row * TOTAL_STEP), floats(u[U_SUMS] + row * u[STEP])
    for i in range(TOTAL_STEP // 4):
        totals[i] *= shrink
    for i in range(u[STEP] // 4):
        sums[i] *= shrink


@njit(fastmath=FAST)
def _softmax(a, u, first_row, start, count):
    """The scores of the tile [start, start + count) become weights, which the totals count."""
    cap, columns, num_rows = np.float32(number(a, CAP)), _up(count, 8), u[NUM_ROWS]
    scores, tops, totals = u[U_SCORES], floats(u[U_TOPS] + 4 * first_row), u[U_TOTALS] + first_row * TOTAL_STEP
    sees_all = count == columns and start + count <= u[FIRST_POSITION] + 1
    sees_all = sees_all and start > u[FIRST_POSITION] + u[NUM_QUERIES] - 1 - a[WINDOW]
    for row in range(num_rows):
        score = scores + row * (4 * TILE)
        if cap > np.float32(0):
            at = floats(score)
            for column in range(columns):
                at[column] = cap * tanh(at[column])
        if not sees_all:
            _hide(a, u, row, start, count)
        if is_above(score, columns, tops[row] + LEEWAY):
            _raise(u, first_row + row, row_max(score, columns, tops[row]))
        exp2_row(score, columns, tops[row], totals + row * TOTAL_STEP)


@njit(fastmath=FAST)
def _total(u, row):
    lanes, total = floats(u[U_TOTALS] + row * TOTAL_STEP), np.float32(0)
    for i in range(TOTAL_STEP // 4):
        total += lanes[i]
    return total


@njit(fastmath=FAST)
def _join(a, u):
    """Adds the pieces of a unit into the first one, and takes it back."""
    rows, step, words = u[NUM_HEADS] * u[NUM_ROWS], u[STEP] + 8, u[STEP] // 4
    for row in range(rows):
        kept = a[PIECES] + (u[CUT_ROW] + row) * step
        sums = floats(kept)
        for piece in range(1, u[NUM_PIECES]):
            other = floats(kept + piece * rows * step)
            top = max(sums[words], other[words])
            mine, its = exp2(sums[words] - top), exp2(other[words] - top)
            for i in range(words):
                sums[i] = sums[i] * mine + other[i] * its
            sums[words + 1] = sums[words + 1] * mine + other[words + 1] * its
            sums[words] = top
        own = floats(u[U_SUMS] + row * u[STEP])
        for i in range(words):
            own[i] = sums[i]
        totals = floats(u[U_TOTALS] + row * TOTAL_STEP)
        for i in range(TOTAL_STEP // 4):
            totals[i] = sums[words + 1] if i == 0 else np.float32(0)
        floats(u[U_TOPS])[row] = sums[words]


@njit
def _is_last(a, u):
    """Leaves a piece; the last one of its unit has them all joined."""
    rows, step, words = u[NUM_HEADS] * u[NUM_ROWS], u[STEP] + 8, u[STEP] // 4
    for row in range(rows):
        kept = floats(a[PIECES] + (u[CUT_ROW] + u[PIECE] * rows + row) * step)
        own = floats(u[U_SUMS] + row * u[STEP])
        for i in range(words):
            kept[i] = own[i]
        kept[words], kept[words + 1] = floats(u[U_TOPS])[row], _total(u, row)
    is_last = fetch_add(int64s(a[ARRIVALS]), u[ARRIVAL], 1) == u[NUM_PIECES] - 1
    if is_last:
        int64s(a[ARRIVALS])[u[ARRIVAL]] = 0  # as the next launch expects it
    return is_last


def kernel(kind: int, stored: int) -> Any:
    """The kernel for q and out of one kind and a cache of the same, or of int8."""
    element_bytes, is_int8 = ELEMENT_BYTES[stored], stored == INT8

    @njit(fastmath=FAST)
    def load_queries(a, u):
        scale = np.float32(number(a, SCALE))
        for row in range(u[NUM_HEADS] * u[NUM_ROWS]):
            token, head = _place(a, u, row)
            source = a[Q] + token * a[Q_TOKEN] + head * a[Q_HEAD]
            q, sums = floats(u[U_Q] + row * u[STEP]), floats(u[U_SUMS] + row * u[STEP])
            for i in range(u[STEP] // 4):
                q[i] = np.float32(0)
                sums[i] = np.float32(0)
            share = scale
            if is_int8 and a[SCALE_BLOCK] == 0:
                share *= floats(a[SCALES] + head // a[GROUP] * a[SCALE_HEAD])[0]
            for i in range(a[HEAD_DIM]):
                q[i] = load_one(source, i, kind) * share
            totals = floats(u[U_TOTALS] + row * TOTAL_STEP)
            for i in range(TOTAL_STEP // 4):
                totals[i] = np.float32(0)
            floats(u[U_TOPS])[row] = HIDDEN

    @njit(fastmath=FAST)
    def score(a, u, first_row, count, offset):
        """scores = rows x keys, and asks for the values."""
        dim, step = a[HEAD_DIM], u[STEP]
        for row in range(0, u[NUM_ROWS], 3):
            out, q, left = u[U_SCORES] + row * (4 * TILE), u[U_Q] + (first_row + row) * step, u[NUM_ROWS] - row
            for key in range(0, _up(count, 8), 4):
                rows = int64s(u[U_ROWS] + 8 * key)
                if row == 0:
                    for i in range(4):
                        _ask_for(rows[i] + offset + a[VALUE_STEP], dim * element_bytes)
                if left >= 3:
                    dot_four(out + 4 * key, 4 * TILE, q, step, rows, offset, dim, 3, stored)
                elif left == 2:
                    dot_four(out + 4 * key, 4 * TILE, q, step, rows, offset, dim, 2, stored)
                else:
                    dot_four(out + 4 * key, 4 * TILE, q, step, rows, offset, dim, 1, stored)

    @njit(fastmath=FAST)
    def add_values(a, u, first_row, count, offset, next_rows, next_offset):
        """sums += weights x values, and asks for the keys of what comes next."""
        dim, step = a[HEAD_DIM], u[STEP]
        for row in range(0, u[NUM_ROWS], 3):
            sums, weights = u[U_SUMS] + (first_row + row) * step, u[U_SCORES] + row * (4 * TILE)
            left = u[NUM_ROWS] - row
            for key in range(0, count, 16):
                rows, some = int64s(u[U_ROWS] + 8 * key), min(count - key, 16)
                if row == 0:
                    for i in range(key, key + some):
                        _ask_for(next_rows[i] + next_offset, dim * element_bytes)
                if left >= 3:
                    add_rows(sums, step, weights + 4 * key, 4 * TILE, rows, offset, some, dim, 3, stored)
                elif left == 2:
                    add_rows(sums, step, weights + 4 * key, 4 * TILE, rows, offset, some, dim, 2, stored)
                else:
                    add_rows(sums, step, weights + 4 * key, 4 * TILE, rows, offset, some, dim, 1, stored)

    @njit(fastmath=FAST)
    def attend(a, u):
        """The tiles of a unit, and in each of them its heads."""
        row_bytes = a[HEAD_DIM] * element_bytes
        _find_rows(a, u, u[START], row_bytes)
        for start in range(u[START], u[END], u[TILE_SIZE]):
            u[U_ROWS], u[U_NEXT_ROWS] = u[U_NEXT_ROWS], u[U_ROWS]
            u[U_SCALES], u[U_NEXT_SCALES] = u[U_NEXT_SCALES], u[U_SCALES]
            _find_rows(a, u, start + u[TILE_SIZE], row_bytes)
            count = min(u[END] - start, u[TILE_SIZE])
            for head in range(u[NUM_HEADS]):
                first_row, offset = head * u[NUM_ROWS], head * a[HEAD_STEP]
                next_rows, next_offset = int64s(u[U_NEXT_ROWS]), 0
                if head + 1 < u[NUM_HEADS]:
                    next_rows, next_offset = int64s(u[U_ROWS]), offset + a[HEAD_STEP]
                score(a, u, first_row, count, offset)
                if is_int8 and a[SCALE_BLOCK] != 0:
                    _gather_scales(a, u, head, count)
                    _scale_columns(a, u, count, u[U_KEY_SCALES])
                _softmax(a, u, first_row, start, count)
                if is_int8 and a[SCALE_BLOCK] != 0:
                    _scale_columns(a, u, count, u[U_VALUE_SCALES])
                add_values(a, u, first_row, count, offset + a[VALUE_STEP], next_rows, next_offset)

    @njit(fastmath=FAST)
    def write(a, u):
        """The rows of a whole context, divided by their totals."""
        for row in range(u[NUM_HEADS] * u[NUM_ROWS]):
            token, head = _place(a, u, row)
            out = a[OUT] + token * a[OUT_TOKEN] + head * a[OUT_HEAD]
            total = _total(u, row)
            if a[SINKS] != 0:
                total += exp2(floats(a[SINKS])[head] * np.float32(LOG2_E) - floats(u[U_TOPS])[row])
            share = np.float32(1) / total
            if is_int8 and a[SCALE_BLOCK] == 0:
                share *= floats(a[SCALES] + a[SCALE_VALUE] + head // a[GROUP] * a[SCALE_HEAD])[0]
            sums = floats(u[U_SUMS] + row * u[STEP])
            sees = u[FIRST_POSITION] + token - u[FIRST_QUERY] >= 0
            for i in range(a[HEAD_DIM]):
                store_one(out, i, sums[i] * share if sees else np.float32(0), kind)

    def paged_attention(a):
        worker = fetch_add(a, WORKERS, 1)
        u = int64s(a[SCRATCH] + worker * a[SCRATCH_STEP])
        u[SEQ] = worker
        _lay_out(a, u)
        seq, before, cut_row, arrival = 0, 0, 0, 0
        while True:
            unit = fetch_add(a, TAKEN, 1)
            seq, before, cut_row, arrival = _take(a, u, unit, seq, before, cut_row, arrival)
            if seq == a[NUM_SEQS]:
                return
            load_queries(a, u)
            attend(a, u)
            if u[NUM_PIECES] > 1:
                if not _is_last(a, u):
                    continue
                _join(a, u)
            write(a, u)

    return paged_attention
