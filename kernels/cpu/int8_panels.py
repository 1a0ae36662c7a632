"""Products with weights of 8 bits: whole numbers inside, so that the same sum comes out in whatever order it is made.

A weight [out, in] has one scale per output, its largest magnitude over 127; a row of x has one of its own, its largest
magnitude over as many levels as a sum over `in` can bear (29,000 for 576, 11,000 for 1,536), at most 32,767: a finer x
costs nothing, since what multiplies takes 16 bits. What lies between is a sum of products of whole numbers, exact in 32
bits:

    out[r, o] = (sum over i of q_x[r, i] * q_w[o, i]) * row_scale[r] * scale[o] + bias[o]

So no row depends on the rows beside it, and one row alone has to the last bit what it has among hundreds. The rows are
quantized first; a row with a NaN or an infinity in it has NaN for its scale, and so for all its outputs.

A weight lies in panels of 32 outputs; within a panel two neighbours along `in` lie together, which is what one
multiplication takes from each output, and the panel goes along `in`:

               in -> 0, 1                                       2, 3
    panel 0   | w[0, 0] w[0, 1] w[1, 0] w[1, 1] ... w[31, 1] | w[0, 2] w[0, 3] ...       64 bytes each: a cache line
    panel 1   | w[32, 0] w[32, 1] ...

A thread takes a panel, which is read once from memory, and asks for its next one while the last rows of this one are
computed: what is asked for earlier has left the nearest cache when it is its turn. Sums rest in registers from one end
of `in` to the other: of one row or two by 32 outputs, or of four rows by 16, which is as much as sixteen registers hold
beside what is added.
"""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kilburn.kernels.cpu.arguments import (
    I_BIAS,
    I_NUM_PAIRS,
    I_NUM_PANELS,
    I_NUM_ROWS,
    I_OUT,
    I_OUT_STEP,
    I_PANELS,
    I_ROW_SCALES,
    I_SCALES,
    I_X,
    I_X_STEP,
    INT8_PANEL,
    Q_DEPTH,
    Q_GRAIN,
    Q_LEVELS,
    Q_NUM_ROWS,
    Q_OUT,
    Q_OUT_STEP,
    Q_SCALES,
    Q_X,
    Q_X_STEP,
    TAKEN,
)
from kilburn.kernels.cpu.simd import fetch_add, floats, int32s
from kilburn.kernels.cpu.vectors import (
    F32,
    FAST,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    LANES,
    NONE,
    after,
    constant,
    counted,
    fma,
    load_vector,
    pointer,
    pointer_to,
    prefetch_line,
    rows_from,
    shuffle,
    splat,
    store_vector,
)

PAIR_BYTES = 2 * INT8_PANEL  # of a panel, for two positions of `in`
LAST_ROWS = 16  # of a panel's rows, in whose turns the next panel is asked for; in those beyond whole fours, too
OUT_BYTES = 4 * INT8_PANEL  # of a row's outputs of a panel, and of their scales
MAGNITUDE = np.int32(
    0x7FFFFFFF
)  # all bits of a float but its sign: as whole numbers they are ordered as magnitudes are
INFINITE = np.int32(0x7F800000)  # from here on: infinities, and NaN
NEGLIGIBLE = np.float32(1e-33).view(np.int32)  # a row of no more is one of zeros: levels over it would not be finite

SHORTS = ir.VectorType(I16, 2 * LANES)
int16s = pointer_to(types.CPointer(types.int16))


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """The float32 that has these bits."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        return build.bitcast(args[0], FLOAT)

    return types.float32(types.int32), code


def quantize_rows_kernel(_kind: int) -> Any:
    """Rows of float32 -> int16 in [-levels, levels], `in` filled up to pairs with 0, and their scales."""

    @njit(fastmath=FAST)
    def one_row(x, out, depth, levels):
        words, values, narrow = int32s(x), floats(x), int16s(out)
        top = np.int32(0)
        for i in range(depth):
            top = max(top, words[i] & MAGNITUDE)
        if depth % 2:
            narrow[depth] = 0
        if top >= INFINITE or top <= NEGLIGIBLE:
            for i in range(depth):
                narrow[i] = 0
            return np.float32(np.nan) if top >= INFINITE else np.float32(0)
        largest = float_of(top)
        per_unit = levels / largest
        for i in range(depth):
            narrow[i] = np.int16(np.int32(np.rint(values[i] * per_unit)))
        return largest / levels

    def quantize_rows(a):
        while True:
            start = fetch_add(a, TAKEN, a[Q_GRAIN])
            if start >= a[Q_NUM_ROWS]:
                return
            for row in range(start, min(start + a[Q_GRAIN], a[Q_NUM_ROWS])):
                x, out = a[Q_X] + row * a[Q_X_STEP], a[Q_OUT] + row * a[Q_OUT_STEP]
                floats(a[Q_SCALES])[row] = one_row(x, out, a[Q_DEPTH], np.float32(a[Q_LEVELS]))

    return quantize_rows


@intrinsic(prefer_literal=True)
def multiply(
    context: Any,
    x: Any,
    x_step: Any,
    weights: Any,
    num_pairs: Any,
    row_scales: Any,
    scales: Any,
    bias: Any,
    out: Any,
    out_step: Any,
    ask: Any,
    ask_step: Any,
    num_rows: Any,
    num_vectors: Any,
    asks: Any,
) -> Any:
    """out[i] [8 * num_vectors] = x[i] [2 * num_pairs] . those outputs of a panel, scaled, with their bias.

    All at addresses, steps in bytes. Where it `asks` (1), the line at `ask` is asked for at each pair, and goes on by
    its step.
    """

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        x, x_step, weights, num_pairs, row_scales, scales, bias, out, out_step, ask, ask_step = args[:11]
        rows, vectors = range(num_rows.literal_value), range(num_vectors.literal_value)
        xs = rows_from(build, x, x_step, len(rows))

        def step(index: Any, sums: list[Any]) -> list[Any]:
            column, at = build.add(weights, build.mul(index, I64(PAIR_BYTES))), build.shl(index, I64(2))
            if asks.literal_value:
                prefetch_line(build, build.add(ask, build.mul(index, ask_step)))
            pairs = [build.load(pointer(build, build.add(row, at), I32, 1), align=2) for row in xs]
            pairs = [build.bitcast(splat(build, pair, LANES), SHORTS) for pair in pairs]
            new = list(sums)
            for j in vectors:
                place = pointer(build, after(build, column, 2 * LANES * j), I8, 2 * LANES)
                weight = build.sext(build.load(place, align=1), SHORTS)
                for i, pair in enumerate(pairs):
                    at = i * len(vectors) + j
                    new[at] = build.add(sums[at], _products_of_pairs(build, pair, weight))
            return new

        sums = counted(build, num_pairs, [constant(I32, LANES, 0)] * (len(rows) * len(vectors)), step)
        for i, row in enumerate(rows_from(build, out, out_step, len(rows))):
            row_scale = splat(build, load_vector(build, after(build, row_scales, 4 * i), F32, 1), LANES)
            for j in vectors:
                at = 4 * LANES * j
                scale = build.fmul(row_scale, load_vector(build, after(build, scales, at), F32, LANES))
                value = build.sitofp(sums[i * len(vectors) + j], ir.VectorType(FLOAT, LANES))
                value = fma(build, value, scale, load_vector(build, after(build, bias, at), F32, LANES))
                store_vector(build, value, after(build, row, at), F32, LANES)
        return target.get_dummy_value()

    return NONE(*[types.int64] * 11, num_rows, num_vectors, asks), code


def _products_of_pairs(build: Any, a: Any, b: Any) -> Any:
    """Eight sums of two products each, of sixteen whole numbers of 16 bits."""
    if llvm.get_host_cpu_features().get("avx2"):  # one instruction, which LLVM does not always see in what is below
        kind = ir.FunctionType(ir.VectorType(I32, LANES), [SHORTS, SHORTS])
        return build.call(build.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), kind), [a, b])
    wide = ir.VectorType(I32, 2 * LANES)
    products = build.mul(build.sext(a, wide), build.sext(b, wide))
    even, odd = (shuffle(build, products, products, list(range(first, 2 * LANES, 2))) for first in (0, 1))
    return build.add(even, odd)


def panels_kernel(_kind: int) -> Any:
    """out [rows, 32 * panels] float32, of rows that are quantized and a weight that lies in panels."""

    @njit(fastmath=FAST)
    def one_panel(a, panel, next_panel):
        count, weights = a[I_NUM_PAIRS], a[I_PANELS] + panel * a[I_NUM_PAIRS] * PAIR_BYTES
        scales, bias = a[I_SCALES] + panel * OUT_BYTES, a[I_BIAS] + panel * OUT_BYTES
        row, num_few, step, out_step = 0, a[I_NUM_ROWS] % 4, a[I_X_STEP], a[I_OUT_STEP]
        num_asking = min(a[I_NUM_ROWS], LAST_ROWS) // 4 * 2 + num_few // 2 + num_few % 2
        ask, ask_step = a[I_PANELS] + next_panel * count * PAIR_BYTES, PAIR_BYTES // num_asking
        asked_for, first_asking = count * ask_step, a[I_NUM_ROWS] - LAST_ROWS
        while row < a[I_NUM_ROWS]:
            x, out = a[I_X] + row * step, a[I_OUT] + row * out_step + panel * OUT_BYTES
            row_scales = a[I_ROW_SCALES] + 4 * row
            if row >= num_few:
                for half in range(2):
                    w, at = weights + half * (PAIR_BYTES // 2), half * (OUT_BYTES // 2)
                    s, b, o = scales + at, bias + at, out + at
                    if row >= first_asking:
                        multiply(x, step, w, count, row_scales, s, b, o, out_step, ask, ask_step, 4, 2, 1)
                        ask += asked_for
                    else:
                        multiply(x, step, w, count, row_scales, s, b, o, out_step, 0, 0, 4, 2, 0)
                row += 4
            elif num_few - row >= 2:
                multiply(x, step, weights, count, row_scales, scales, bias, out, out_step, ask, ask_step, 2, 4, 1)
                ask += asked_for
                row += 2
            else:
                multiply(x, 0, weights, count, row_scales, scales, bias, out, 0, ask, ask_step, 1, 4, 1)
                ask += asked_for
                row += 1

    def panels(a):
        num_panels = a[I_NUM_PANELS]
        panel = fetch_add(a, TAKEN, 1)
        while panel < num_panels:
            following = fetch_add(a, TAKEN, 1)  # taken before it is its turn, so that it can be asked for
            one_panel(a, panel, following % num_panels)
            panel = following

    return panels
