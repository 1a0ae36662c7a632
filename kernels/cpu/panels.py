"""Products of float32 rows with a weight that lies in panels, as it was stored: in float32, bfloat16 or float16.

A weight [out, in] lies in panels of 16 outputs, which go along `in`, each position a cache line (or half of one):

            in ->  0                1                2
    panel 0    | w[0..16, 0]   | w[0..16, 1]   | w[0..16, 2]   ...      64 bytes each, or 32
    panel 1    | w[16..32, 0]  | ...

    bfloat16   | 0  8 | 1  9 | 2  10 | ...  7  15 |      a word has an output in its lower half and one in its upper:
                                                         a shift makes a vector of the lower, a mask one of the upper

What has 16 bits becomes float32 in registers, exactly; half of the bytes are read, and the results are to the last bit
those of the same values in float32. A thread takes a panel, and up to six rows at a time walk along it:

                   a position of the panel           12 sums in registers from one end of `in` to the other, so that a
                +--------------+--------------+      row's result does not depend on the rows beside it, nor on the
      x row 0   |    8 sums    |    8 sums    |      threads. More rows are divided evenly, 16 into 6 + 5 + 5.
        ...     |              |              |
        row 5   |    8 sums    |    8 sums    |      Hundreds of rows are cut in blocks, all but the last
                +--------------+--------------+      of whole sixes, whose part of x stays near.

While the last of a panel's rows are computed the next panel is asked for, a line now and then, so that its read costs
nothing but its share of the memory; earlier, it would push out what is still needed. Up to three rows are as fast as
the memory, and walk along several panels at once: it answers several streams sooner than one.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kilburn.kernels.cpu.arguments import (
    P_BIAS,
    P_DEPTH,
    P_NUM_PANELS,
    P_NUM_ROWS,
    P_OUT,
    P_OUT_STEP,
    P_PANELS,
    P_X,
    P_X_STEP,
    PANEL,
    TAKEN,
)
from kilburn.kernels.cpu.simd import fetch_add
from kilburn.kernels.cpu.vectors import (
    BF16,
    ELEMENT_BYTES,
    F32,
    FAST,
    FLOAT,
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
    prefetch_line,
    rows_from,
    splat,
    store_vector,
)

VECTORS = PANEL // LANES
OUT_BYTES = 4 * PANEL  # of a row's outputs of a panel
AHEAD = 512  # bytes that a stream asks ahead of itself: of 512, 1024, 2048, 4096 the best
TALLEST = 6  # rows by two vectors: 12 sums, 2 weights and a value, of 16 registers
ROW_BLOCK = 96  # whole sixes
LAST_GROUPS = 4  # of a panel's rows, while which the next panel is asked for


def _weights_at(build: Any, address: Any, kind: int) -> list[Any]:
    """A position of a panel as float32 vectors."""
    if kind != BF16:
        size = LANES * ELEMENT_BYTES[kind]
        return [load_vector(build, after(build, address, size * j), kind, LANES) for j in range(VECTORS)]
    words = build.load(pointer(build, address, I32, LANES), align=4)
    halves = build.shl(words, constant(I32, LANES, 16)), build.and_(words, constant(I32, LANES, -(1 << 16)))
    return [build.bitcast(half, ir.VectorType(FLOAT, LANES)) for half in halves]


@intrinsic(prefer_literal=True)
def multiply(
    context: Any,
    out: Any,
    out_step: Any,
    x: Any,
    x_step: Any,
    panel: Any,
    panel_step: Any,
    depth: Any,
    bias: Any,
    ask: Any,
    ask_step: Any,
    num_rows: Any,
    num_panels: Any,
    kind: Any,
) -> Any:
    """out[i] [16 * num_panels] = bias + x[i] [depth] . those panels, products added one after another.

    All at addresses, steps in bytes. At each position the lines at `ask` are asked for, as far apart as the panels are,
    and `ask` goes on by its step.
    """

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        out, out_step, x, x_step, panel, panel_step, depth, bias, ask, ask_step = args[:10]
        xs, outs = rows_from(build, x, x_step, num_rows.literal_value), range(VECTORS * num_panels.literal_value)
        panels = rows_from(build, panel, panel_step, num_panels.literal_value)
        asks = rows_from(build, ask, panel_step, num_panels.literal_value)
        column_bytes = I64(PANEL * ELEMENT_BYTES[kind.literal_value])

        def step(index: Any, held: list[Any]) -> list[Any]:
            at, at_x, at_ask = (build.mul(index, size) for size in (column_bytes, I64(4), ask_step))
            for line in asks:
                prefetch_line(build, build.add(line, at_ask))
            weights = [w for p in panels for w in _weights_at(build, build.add(p, at), kind.literal_value)]
            values = [splat(build, load_vector(build, build.add(row, at_x), F32, 1), LANES) for row in xs]
            sums = iter(held)
            return [fma(build, value, weight, next(sums)) for value in values for weight in weights]

        start = [load_vector(build, after(build, bias, 4 * LANES * j), F32, LANES) for j in outs]
        sums = iter(counted(build, depth, start * len(xs), step))
        for row in rows_from(build, out, out_step, len(xs)):
            for j in outs:
                store_vector(build, next(sums), after(build, row, 4 * LANES * j), F32, LANES)
        return target.get_dummy_value()

    return NONE(*[types.int64] * 10, num_rows, num_panels, kind), code


def panels_kernel(kind: int) -> Any:
    """out [rows, 16 * panels] = bias + x [rows, depth] . panels; all float32, but for panels of a kind."""
    column_bytes = PANEL * ELEMENT_BYTES[kind]

    @njit(fastmath=FAST)
    def some_rows(a, row, num_rows, panel, ask, ask_step):
        """Up to six rows and one panel."""
        out, x = a[P_OUT] + row * a[P_OUT_STEP] + panel * OUT_BYTES, a[P_X] + row * a[P_X_STEP]
        w, bias = a[P_PANELS] + panel * a[P_DEPTH] * column_bytes, a[P_BIAS] + panel * OUT_BYTES
        s, t, d = a[P_OUT_STEP], a[P_X_STEP], a[P_DEPTH]
        if num_rows == 6:
            multiply(out, s, x, t, w, 0, d, bias, ask, ask_step, 6, 1, kind)
        elif num_rows == 5:
            multiply(out, s, x, t, w, 0, d, bias, ask, ask_step, 5, 1, kind)
        elif num_rows == 4:
            multiply(out, s, x, t, w, 0, d, bias, ask, ask_step, 4, 1, kind)
        elif num_rows == 3:
            multiply(out, s, x, t, w, 0, d, bias, ask, ask_step, 3, 1, kind)
        elif num_rows == 2:
            multiply(out, s, x, t, w, 0, d, bias, ask, ask_step, 2, 1, kind)
        else:
            multiply(out, s, x, t, w, 0, d, bias, ask, ask_step, 1, 1, kind)

    @njit(fastmath=FAST)
    def few_rows(a):
        """Up to three rows, several panels at once."""
        count = 4 if a[P_NUM_ROWS] == 1 else 2
        s, t, d, panel_step = a[P_OUT_STEP], a[P_X_STEP], a[P_DEPTH], a[P_DEPTH] * column_bytes
        while True:
            first = fetch_add(a, TAKEN, count)
            if first >= a[P_NUM_PANELS]:
                return
            out, bias = a[P_OUT] + first * OUT_BYTES, a[P_BIAS] + first * OUT_BYTES
            w = a[P_PANELS] + first * panel_step
            if first + count > a[P_NUM_PANELS]:
                for panel in range(first, a[P_NUM_PANELS]):
                    ask = a[P_PANELS] + panel * panel_step + AHEAD
                    some_rows(a, 0, a[P_NUM_ROWS], panel, ask, column_bytes)
            elif a[P_NUM_ROWS] == 1:
                multiply(out, s, a[P_X], t, w, panel_step, d, bias, w + AHEAD, column_bytes, 1, 4, kind)
            elif a[P_NUM_ROWS] == 2:
                multiply(out, s, a[P_X], t, w, panel_step, d, bias, w + AHEAD, column_bytes, 2, 2, kind)
            else:
                multiply(out, s, a[P_X], t, w, panel_step, d, bias, w + AHEAD, column_bytes, 3, 2, kind)

    @njit(fastmath=FAST)
    def one_panel(a, start, num_rows, panel, next_panel):
        """All rows of a block."""
        groups = (num_rows + TALLEST - 1) // TALLEST
        num_asking = min(groups, LAST_GROUPS)
        ask, ask_step = a[P_PANELS] + next_panel * a[P_DEPTH] * column_bytes, column_bytes // num_asking
        for group in range(groups):
            first, end = group * num_rows // groups, (group + 1) * num_rows // groups
            is_asking = group >= groups - num_asking
            some_rows(a, start + first, end - first, panel, ask, ask_step if is_asking else 0)
            if is_asking:
                ask += ask_step * a[P_DEPTH]

    def panels(a):
        if a[P_NUM_ROWS] <= 3:
            few_rows(a)
            return
        num_blocks, num_panels = (a[P_NUM_ROWS] + ROW_BLOCK - 1) // ROW_BLOCK, a[P_NUM_PANELS]
        per_block = (a[P_NUM_ROWS] + TALLEST * num_blocks - 1) // (TALLEST * num_blocks) * TALLEST
        taken = fetch_add(a, TAKEN, 1)
        while taken < num_blocks * num_panels:
            following = fetch_add(a, TAKEN, 1)  # taken before it is its turn, so that it can be asked for
            block, panel = taken // num_panels, taken % num_panels
            start, end = block * per_block, min((block + 1) * per_block, a[P_NUM_ROWS])
            one_panel(a, start, end - start, panel, following % num_panels)
            taken = following

    return panels
