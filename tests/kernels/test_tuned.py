"""The table of tilings is what its script writes, and has a row for everything that may be asked for."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import torch

from kilburn.kernels.triton import tilings, tuned
from kilburn.kernels.triton.launch import padded

ROOT = Path(__file__).parents[2]


def test_the_file_is_what_the_script_writes() -> None:
    """In a process of its own: the script makes `kilburn` a name for the tree that it lies in."""
    code = (
        "import sys; sys.path.insert(0, 'bench')\n"
        "import tune_triton; tune_triton.gpu_check.make_importable()\n"
        "from kilburn.kernels.triton.tuned import CHOSEN, TABLE\n"
        "sys.stdout.write(tune_triton.text_of(TABLE, CHOSEN))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "kernels/triton/tuned.py").read_text()


def test_every_architecture_dtype_and_head_dimension_has_a_row() -> None:
    assert set(tuned.TABLE) == set(product(tilings.ARCHITECTURES, (2, 4), (64, 128, 256)))
    assert tuned.CHOSEN.keys() == set(tilings.ARCHITECTURES)
    for architecture, dtype, head_dim, group, is_decode in product(
        ("sm_80", "sm_86", "sm_90", "sm_103", "gfx942", "gfx950"),
        (torch.float32, torch.float16, torch.bfloat16),
        (16, 64, 80, 96, 128, 256),
        (1, 3, 8, 71, 128),
        (True, False),
    ):
        cut = tilings.tiling(architecture, dtype, head_dim, group, is_decode)
        assert group <= cut.rows == padded(cut.rows) >= 16
        assert cut.positions == padded(cut.positions) >= 16
