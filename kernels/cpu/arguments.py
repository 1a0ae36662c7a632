"""The words in which a launcher tells a compiled kernel what to do: an array of int64, addresses and steps in bytes.

Every kernel's first two words count what its threads have taken and how many threads came (see team.py); the third says
that something was out of bounds, and where. The launchers write these arrays and the kernels read them; neither imports
the other, since a kernel that is already compiled needs no compiler.
"""

import struct
from ctypes import addressof, c_char

TAKEN, WORKERS, FAULT = range(3)  # FAULT: 0, or 1 + the index of the token or sequence that broke a bound

# Addresses come next, for they differ from layer to layer; the rest differs from step to step, or from model to model.
# fmt: off
# -- paged attention
(
    QUERY_START, CONTEXT, TABLES, Q, OUT, KV, SINKS, SCALES,  # SINKS, SCALES: float32, or 0
    NUM_UNITS, NUM_VALUES, NUM_CUT_ROWS, NUM_ARRIVALS, ROWS_START, ROWS_END,  # answers of `survey`
    SCRATCH, SCRATCH_STEP, PIECES, ARRIVALS,  # of a thread; of units that were cut
    NUM_SEQS, NUM_KV_HEADS, GROUP, BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM, WINDOW, NUM_TOKENS, MAX_BLOCKS,
    TABLE_STEP, Q_TOKEN, Q_HEAD, OUT_TOKEN, OUT_HEAD, BLOCK_STEP, VALUE_STEP, HEAD_STEP,  # VALUE_STEP: key to value
    SCALE_BLOCK, SCALE_VALUE, SCALE_HEAD,  # steps of the scales; SCALE_BLOCK is 0 where each head has one
    SCALE, CAP,  # float64; CAP is 0.0 where there is none
) = range(3, 43)

# -- KV write
(
    W_Q, W_K, W_V, W_KV, W_POSITIONS, W_SLOTS, W_COS_SIN, W_SCALES,  # W_COS_SIN, W_SCALES: float32, or 0
    W_NUM_TOKENS, W_NUM_HEADS, W_NUM_KV_HEADS, W_HEAD_DIM, W_BLOCK_SIZE, W_NUM_SLOTS,
    W_Q_TOKEN, W_Q_HEAD, W_K_TOKEN, W_K_HEAD, W_V_TOKEN, W_V_HEAD,
    W_BLOCK_STEP, W_VALUE_STEP, W_HEAD_STEP, W_SCALE_BLOCK, W_SCALE_VALUE, W_SCALE_HEAD,
    W_NUM_POSITIONS, W_ROTARY_DIM, W_INTERLEAVED,
) = range(3, 32)

# -- rows: norms and the activation; a token has R_HEADS of them; R_EPS is float64
(
    R_X, R_RESIDUAL, R_WEIGHT, R_OUT,
    R_NUM_ROWS, R_WIDTH, R_HEADS, R_TOKEN_STEP, R_X_STEP, R_RESIDUAL_STEP, R_GRAIN, R_EPS,
) = range(3, 15)

# -- block moves
M_PAIRS, M_SOURCE, M_TO, M_NUM_PIECES, M_PIECE, M_PER_BLOCK, M_BLOCK_BYTES, M_SOURCE_STEP, M_TO_STEP = range(3, 12)

# -- products with weights in panels; P_BIAS: zeros where there is none
P_X, P_PANELS, P_BIAS, P_OUT, P_NUM_ROWS, P_DEPTH, P_NUM_PANELS, P_X_STEP, P_OUT_STEP = range(3, 12)

# -- products with weights of 8 bits: rows that are quantized first, then panels
Q_X, Q_OUT, Q_SCALES, Q_NUM_ROWS, Q_DEPTH, Q_X_STEP, Q_OUT_STEP, Q_GRAIN, Q_LEVELS = range(3, 12)
(
    I_X, I_ROW_SCALES, I_PANELS, I_SCALES, I_BIAS, I_OUT,  # I_BIAS: zeros where there is none
    I_NUM_ROWS, I_NUM_PAIRS, I_NUM_PANELS, I_X_STEP, I_OUT_STEP,
) = range(3, 14)

# -- rows of a table, by their numbers
E_TABLE, E_IDS, E_OUT, E_NUM_IDS, E_NUM_ROWS, E_WIDTH, E_TABLE_STEP = range(3, 10)

# -- a recorded step: a table of the words of its kernels, each with its function, and how many came and left
S_TABLE, S_STEP, S_COUNT = range(3, 6)
S_FUNCTION, S_IN, S_OUT = range(43, 46)  # beyond the words of any kernel
# fmt: on

# What attention and its launcher agree on.
TILE = 64  # positions scored at a time ...
SMALL_TILE = 16  # ... and for a unit of a few rows, whose reads are better kept near to each other
FEW_ROWS = 32
CUT = 256  # positions of a context that one unit of few rows takes
PANEL = 16  # outputs of a weight that lie together
INT8_PANEL = 32  # ... and in one of 8 bits
MAX_ROWS = 96  # of a unit, unless one position has more query heads of one KV head than that


def lanes(count: int) -> int:
    """Rows in scratch are filled up to whole vectors of eight."""
    return -(-count // 8) * 8


def piece_bytes(head_dim: int) -> int:
    """What a cut unit leaves for each of its rows: sums, top, total."""
    return 4 * lanes(head_dim) + 8


def scratch_bytes(head_dim: int, group: int) -> int:
    """What one thread needs: its unit's words, q, scores, sums, tops, totals; two lists of row addresses, and for a
    cache of 8 bits two of the addresses of their scales and the scales of a tile's keys and values."""
    rows = max(MAX_ROWS, group)
    return -(-(8 * 32 + 4 * rows * (2 * lanes(head_dim) + TILE + 9) + (4 * 8 + 2 * 4) * TILE + 12 * 64) // 64) * 64


class Words:
    """The words of one kernel: an array that stays where it is.

    What a launch derives from shapes and options is written once for as long as these stay the same, which is for all
    layers of a step, and is checked then; what is left for each launch is addresses.
    """

    def __init__(
        self, num_addresses: int, num_others: int, num_numbers: int = 0, rows_at: int = 0, seqs_at: int = 0
    ) -> None:
        """The last `num_numbers` of the others are float64. The first three words count as addresses do.

        `rows_at` and `seqs_at` are the words that grow with a step's tokens and with its sequences; 0: there is none.
        """
        self.rows_at, self.seqs_at = rows_at, seqs_at
        self._addresses = struct.Struct(f"=3q{num_addresses}q")
        self._others = struct.Struct(f"={num_others - num_numbers}q{num_numbers}d")
        self._held = bytearray(self._addresses.size + self._others.size)
        self.address = addressof(c_char.from_buffer(self._held))
        self.key: tuple[object, ...] = ()  # what the others were derived from

    def others(self, key: tuple[object, ...], *values: float) -> None:
        self._others.pack_into(self._held, self._addresses.size, *values)
        self.key = key

    def begin(self, *addresses: int) -> None:
        self._addresses.pack_into(self._held, 0, 0, 0, 0, *addresses)

    def copied(self) -> bytes:
        return bytes(self._held)

    def read(self, start: int, end: int) -> tuple[int, ...]:
        return struct.unpack_from(f"={end - start}q", self._held, 8 * start)

    def write(self, start: int, *values: int) -> None:
        struct.pack_into(f"={len(values)}q", self._held, 8 * start, *values)
