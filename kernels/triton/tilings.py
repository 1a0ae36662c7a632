"""How attention is cut up: a table by architecture, dtype and head dimension. Nothing is tuned while a request waits.

    rows       lanes of a tile of queries: (query position, head) pairs of one KV head; a power of two, 16 or more
    positions  positions of the context that a turn of the loop takes
    warps, stages

Batches where every sequence brings one token are `decode`; all others are `ragged`. `bench/tune_triton.py` measures
candidates on a device and prints rows for this table. The rows here were chosen without a device: the largest tiles
whose binaries keep everything in registers (no spills) and leave shared memory for at least two programs.
"""

from dataclasses import dataclass

import torch

from kilburn.kernels.triton.launch import padded


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    positions: int
    warps: int
    stages: int


ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")

# (architecture, bytes of a value of q, padded head dimension) -> (decode, ragged)
_SM_80 = {
    (2, 64): (Tiling(16, 64, 4, 3), Tiling(64, 64, 4, 2)),
    (2, 128): (Tiling(16, 64, 4, 3), Tiling(64, 64, 8, 2)),
    (2, 256): (Tiling(16, 64, 8, 2), Tiling(64, 32, 8, 2)),
    (4, 64): (Tiling(16, 32, 4, 2), Tiling(16, 32, 4, 2)),
    (4, 128): (Tiling(16, 32, 4, 2), Tiling(16, 32, 4, 2)),
    (4, 256): (Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
}
_SM_90 = _SM_80 | {
    (2, 64): (Tiling(16, 64, 4, 4), Tiling(128, 64, 8, 3)),
    (2, 128): (Tiling(16, 64, 4, 4), Tiling(128, 64, 8, 2)),
    (2, 256): (Tiling(16, 32, 4, 3), Tiling(64, 32, 8, 2)),
    (4, 128): (Tiling(16, 32, 8, 2), Tiling(16, 32, 8, 2)),
}
_GFX942 = _SM_80 | {
    (2, 64): (Tiling(16, 64, 4, 2), Tiling(64, 64, 4, 2)),
    (2, 128): (Tiling(16, 64, 4, 2), Tiling(64, 64, 4, 1)),
    (2, 256): (Tiling(16, 32, 4, 2), Tiling(64, 32, 4, 1)),
}
TABLE = {
    (architecture, *key): pair
    for architecture, rows in (("sm_80", _SM_80), ("sm_90", _SM_90), ("sm_100", _SM_90), ("gfx942", _GFX942))
    for key, pair in rows.items()
}


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
