"""Written by bench/tune_triton.py; not by hand. What the numbers mean stands in tilings.py."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    positions: int
    warps: int
    stages: int


# How the rows of an architecture were chosen.
CHOSEN = {
    "sm_80": "by compile-time occupancy, 2026-11-30; to measure on a device: python bench/tune_triton.py",
    "sm_90": "by compile-time occupancy, 2026-11-30; to measure on a device: python bench/tune_triton.py",
    "sm_100": "by compile-time occupancy, 2026-11-30; to measure on a device: python bench/tune_triton.py",
    "gfx942": "by compile-time occupancy, 2026-11-30; to measure on a device: python bench/tune_triton.py",
}

# (architecture, bytes of a value of q, padded head dimension) -> (decode, ragged)
TABLE = {
    ("sm_80", 2, 64): (Tiling(16, 64, 4, 3), Tiling(64, 64, 4, 2)),
    ("sm_80", 2, 128): (Tiling(16, 64, 4, 3), Tiling(64, 64, 8, 2)),
    ("sm_80", 2, 256): (Tiling(16, 64, 4, 3), Tiling(64, 32, 8, 2)),
    ("sm_80", 4, 64): (Tiling(16, 32, 4, 2), Tiling(16, 32, 4, 2)),
    ("sm_80", 4, 128): (Tiling(16, 32, 4, 2), Tiling(16, 32, 4, 2)),
    ("sm_80", 4, 256): (Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
    ("sm_90", 2, 64): (Tiling(16, 64, 4, 4), Tiling(128, 64, 8, 3)),
    ("sm_90", 2, 128): (Tiling(16, 64, 4, 4), Tiling(128, 64, 8, 2)),
    ("sm_90", 2, 256): (Tiling(16, 32, 4, 3), Tiling(64, 32, 8, 2)),
    ("sm_90", 4, 64): (Tiling(16, 32, 4, 2), Tiling(16, 32, 4, 2)),
    ("sm_90", 4, 128): (Tiling(16, 32, 8, 2), Tiling(16, 16, 4, 2)),
    ("sm_90", 4, 256): (Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
    ("sm_100", 2, 64): (Tiling(16, 64, 4, 4), Tiling(128, 64, 8, 2)),
    ("sm_100", 2, 128): (Tiling(16, 64, 4, 4), Tiling(128, 64, 8, 2)),
    ("sm_100", 2, 256): (Tiling(16, 32, 4, 3), Tiling(64, 32, 4, 2)),
    ("sm_100", 4, 64): (Tiling(16, 32, 4, 2), Tiling(16, 32, 4, 2)),
    ("sm_100", 4, 128): (Tiling(16, 32, 8, 2), Tiling(16, 16, 4, 2)),
    ("sm_100", 4, 256): (Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
    ("gfx942", 2, 64): (Tiling(16, 64, 4, 2), Tiling(64, 64, 4, 2)),
    ("gfx942", 2, 128): (Tiling(16, 64, 4, 2), Tiling(64, 64, 4, 1)),
    ("gfx942", 2, 256): (Tiling(16, 32, 4, 2), Tiling(32, 32, 4, 1)),
    ("gfx942", 4, 64): (Tiling(16, 32, 4, 2), Tiling(16, 32, 4, 2)),
    ("gfx942", 4, 128): (Tiling(16, 32, 8, 2), Tiling(32, 32, 8, 2)),
    ("gfx942", 4, 256): (Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
}
