"""How attention is cut up: a table by architecture, dtype and head dimension. Nothing is tuned while a request waits.

    rows       lanes of a tile of queries: (query position, head) pairs of one KV head; a power of two, 16 or more
    positions  positions of the context that a turn of the loop takes
    warps, stages

Batches where every sequence brings one token are `decode`; all others are `ragged`. The table is `tuned.py`, which
`bench/tune_triton.py` writes, and which says of each architecture how its rows were chosen.
"""

import torch

from kilburn.kernels.triton.launch import padded
from kilburn.kernels.triton.tuned import TABLE, Tiling

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


def tiling(architecture: str, dtype: torch.dtype, head_dim: int, group: int, is_decode: bool) -> Tiling:
    """The row of the table, with lanes enough for one query position of all the heads of a group."""
    width = min(max(padded(head_dim), 64), 256)
    found = TABLE[known(architecture), dtype.itemsize, width][0 if is_decode else 1]
    if group <= found.rows:
        return found
    return Tiling(padded(group), min(found.positions, 32), 8, 1)


def known(architecture: str) -> str:
    """The architecture of the table that is nearest: of NVIDIA's the newest that is not newer."""
    if architecture in ARCHITECTURES:
        return architecture
    if architecture.startswith("gfx"):
        return "gfx942"
    number = int(architecture.removeprefix("sm_"))
    return "sm_100" if number >= 100 else "sm_90" if number >= 90 else "sm_80"
