"""Products of few rows with weights in oneDNN's packed order, read once and in order.

oneDNN keeps a packed weight [out, in] as panels of 64 outputs, and within a panel goes along `in`:

            in ->  0                1                2
    panel 0    | w[0..64, 0]   | w[0..64, 1]   | w[0..64, 2]   ...      256 bytes each, one after another
    panel 1    | w[64..128, 0] | ...

For hundreds of rows its product is as fast as the processor. For few, when a step is as fast as memory, it is half as
fast as that, for it leaps. Here a thread takes a panel and walks along it. CHUNK positions of `in` (8 kB, which stay in
the nearest cache) meet all rows of x before the next ones are read:

                  CHUNK positions of a panel
                +-------------------------------+
      x row 0   |     8 sums in registers       |     whoever comes first reads whole columns, in order;
                +---------------+---------------+
            1   |  12 sums in   |               |     three rows by 32 outputs are read from the cache
            2   |   registers   |               |
            3   |               |               |     sums rest in `out` from chunk to chunk; each is taken along
                +---------------+---------------+     `in` from end to end, whatever the rows beside it
                0              32              64
"""

from typing import Any

from numba import njit

from kilburn.kernels.cpu.arguments import (
    P_DEPTH,
    P_IS_FRESH,
    P_NUM_PANELS,
    P_NUM_ROWS,
    P_OUT,
    P_OUT_STEP,
    P_PANEL_STEP,
    P_PANELS,
    P_X,
    P_X_STEP,
    PANEL,
    TAKEN,
)
from kilburn.kernels.cpu.simd import FAST, add_panel, fetch_add

CHUNK = 32  # of 16, 32, 64, 128 the best, or no worse
COLUMN_BYTES = 4 * PANEL
HALF_BYTES = COLUMN_BYTES // 2


def panels_kernel(_kind: int) -> Any:
    """out [rows, 64 * panels] = x [rows, depth] . panels, or added to what out holds. All float32."""

    @njit(fastmath=FAST)
    def one_row(out, x, weights, count, is_fresh):
        add_panel(out, 0, x, 0, weights, count, is_fresh, 1, 8)

    @njit(fastmath=FAST)
    def three_rows(a, out, x, weights, count, is_fresh):
        add_panel(out, a[P_OUT_STEP], x, a[P_X_STEP], weights, count, is_fresh, 3, 4)
        add_panel(out + HALF_BYTES, a[P_OUT_STEP], x, a[P_X_STEP], weights + HALF_BYTES, count, is_fresh, 3, 4)

    @njit(fastmath=FAST)
    def one_panel(a, panel):
        out, weights = a[P_OUT] + panel * COLUMN_BYTES, a[P_PANELS] + panel * a[P_PANEL_STEP]
        for start in range(0, a[P_DEPTH], CHUNK):
            count = min(CHUNK, a[P_DEPTH] - start)
            is_fresh = a[P_IS_FRESH] if start == 0 else 0
            row, num_single = 0, a[P_NUM_ROWS] % 3
            while row < a[P_NUM_ROWS]:
                at_out, at_x = out + row * a[P_OUT_STEP], a[P_X] + row * a[P_X_STEP] + 4 * start
                if row < num_single:
                    one_row(at_out, at_x, weights + start * COLUMN_BYTES, count, is_fresh)
                    row += 1
                else:
                    three_rows(a, at_out, at_x, weights + start * COLUMN_BYTES, count, is_fresh)
                    row += 3

    def panels(a):
        while True:
            panel = fetch_add(a, TAKEN, 1)
            if panel >= a[P_NUM_PANELS]:
                return
            one_panel(a, panel)

    return panels
