"""The words in which a launcher tells a compiled kernel what to do: an array of int64, addresses and steps in bytes.

Every kernel's first two words count what its threads have taken and how many threads came (see team.py); the third says
that something was out of bounds, and where. The launchers write these arrays and the kernels read them; neither imports
the other, since a kernel that is already compiled needs no compiler.
"""

import struct
from ctypes import addressof, c_char

TAKEN, WORKERS, FAULT = range(3)  # FAULT: 0, or 1 + the index of the token or sequence that broke a bound

# fmt: off
# -- paged attention
(
    NUM_SEQS, NUM_KV_HEADS, GROUP, BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM, WINDOW, NUM_TOKENS,
    QUERY_START, CONTEXT, TABLES, TABLE_STEP, MAX_BLOCKS,
    Q, Q_TOKEN, Q_HEAD, OUT, OUT_TOKEN, OUT_HEAD,
    KV, BLOCK_STEP, VALUE_STEP, HEAD_STEP,  # VALUE_STEP: from a key to its value
    SINKS, SCALE, CAP,  # address of float32, or 0; SCALE and CAP are float64 words, CAP 0.0 where there is none
    SCRATCH, SCRATCH_STEP, PIECES, ARRIVALS,  # of a thread; of units that were cut
    NUM_UNITS, NUM_VALUES, NUM_CUT_ROWS, NUM_ARRIVALS,  # answers of `survey`
) = range(3, 37)
ATTENTION_WORDS = 37

# -- KV write
(
    W_NUM_TOKENS, W_NUM_HEADS, W_NUM_KV_HEADS, W_HEAD_DIM, W_BLOCK_SIZE, W_NUM_SLOTS,
    W_Q, W_Q_TOKEN, W_Q_HEAD, W_K, W_K_TOKEN, W_K_HEAD, W_V, W_V_TOKEN, W_V_HEAD,
    W_KV, W_BLOCK_STEP, W_VALUE_STEP, W_HEAD_STEP,
    W_POSITIONS, W_SLOTS, W_COS_SIN, W_NUM_POSITIONS, W_ROTARY_DIM, W_INTERLEAVED,  # W_COS_SIN: float32, or 0
) = range(3, 28)
WRITE_WORDS = 28

# -- rows: norms and the activation; R_EPS is float64
R_NUM_ROWS, R_WIDTH, R_X, R_X_STEP, R_RESIDUAL, R_RESIDUAL_STEP, R_WEIGHT, R_OUT, R_EPS, R_GRAIN = range(3, 13)
ROWS_WORDS = 13

# -- block moves
M_NUM_PIECES, M_PIECE, M_PER_BLOCK, M_BLOCK_BYTES, M_PAIRS, M_SOURCE, M_SOURCE_STEP, M_TO, M_TO_STEP = range(3, 12)
MOVE_WORDS = 12
# fmt: on

# What attention and its launcher agree on.
TILE = 64  # positions scored at a time
CUT = 128  # positions of a context that one unit of few rows takes
MAX_ROWS = 96  # of a unit, unless one position has more query heads of one KV head than that


def lanes(count: int) -> int:
    """Rows in scratch are filled up to whole vectors of eight."""
    return -(-count // 8) * 8


def piece_bytes(head_dim: int) -> int:
    """What a cut unit leaves for each of its rows: sums, top, total."""
    return 4 * lanes(head_dim) + 8


def scratch_bytes(head_dim: int, group: int) -> int:
    """What one thread needs: its unit's words, q, scores, sums, tops, totals, two lists of row addresses."""
    rows = max(MAX_ROWS, group)
    return 8 * 32 + 4 * rows * (2 * lanes(head_dim) + TILE + 2) + 2 * 8 * TILE + 8 * 64


class Words:
    """The words of one kernel: an array that stays where it is, and is written anew for each launch."""

    def __init__(self, num_words: int, *numbers: int) -> None:
        """Those in `numbers` are float64."""
        self._struct = struct.Struct("=" + "".join("d" if i in numbers else "q" for i in range(num_words)))
        self._held = bytearray(self._struct.size)
        self.address = addressof(c_char.from_buffer(self._held))

    def set(self, *values: float) -> None:
        """All words after the three that every kernel begins with."""
        self._struct.pack_into(self._held, 0, 0, 0, 0, *values)

    def __getitem__(self, index: int) -> int:
        return int(_WORD.unpack_from(self._held, 8 * index)[0])

    def __setitem__(self, index: int, value: int) -> None:
        _WORD.pack_into(self._held, 8 * index, value)


_WORD = struct.Struct("=q")
