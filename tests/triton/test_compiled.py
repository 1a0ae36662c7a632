"""What `tests/kernels/aot.py` says: the kernels fit the registers of devices that are not here, and one that does not
is seen; and the oldest Triton that is supported, in an environment beside this one (`make .venv-triton36/.installed`).

In processes of their own, since each wants a Triton that compiles, or another Triton.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
AOT = "tests/kernels/aot.py"
OLDEST = ROOT / ".venv-triton36/bin/python"
KERNELS = {
    *("attention", "rms_norm", "add_rms_norm", "silu_mul", "kv_write", "copy_blocks"),
    *("sample: chunks", "sample: odds", "sample: draws", "sample: likeliest"),
}


def said(python: str | Path, *words: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    plain |= {"PYTHONPATH": str(ROOT / ".namespace"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([python, *words], cwd=ROOT, capture_output=True, text=True, env=plain, timeout=timeout_s)


def check_all(done: subprocess.CompletedProcess[str], version: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"triton {version}")
    assert lines[-1].endswith("kernels, 0 faults")
    for architecture in ("sm_80", "sm_90", "sm_100", "gfx942"):
        names = [line.removeprefix(architecture).strip() for line in lines if line.startswith(architecture + " ")]
        assert all(any(name.startswith(kernel) for name in names) for kernel in KERNELS), (architecture, names)


def test_every_row_of_the_tables_compiles_without_a_spill_for_each_architecture() -> None:
    check_all(said(sys.executable, AOT, "--all"), "3.9.")


def test_a_kernel_made_to_spill_is_a_fault() -> None:
    done = said(sys.executable, AOT, "--spill")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "made to spill" in line]
    assert [line.split()[0] for line in lines] == ["sm_90", "gfx942"]
    assert all(line.endswith("FAULT: spills") for line in lines), done.stdout


def test_the_oldest_triton_compiles_all_of_it_too() -> None:
    assert OLDEST.exists(), f"no {OLDEST}; `make test` makes it, or: make .venv-triton36/.installed"
    check_all(said(OLDEST, AOT, "--all"), "3.6.")


def test_the_oldest_triton_means_the_same() -> None:
    """The boundary rows of the tables, in its interpreter."""
    assert OLDEST.exists(), f"no {OLDEST}; `make test` makes it, or: make .venv-triton36/.installed"
    files = ("tests/kernels/test_triton.py", "tests/kernels/test_sampling.py")
    rows = "boundary or eight_bits or copies_and_swaps or (whole_vocabulary and triton)"
    done = said(OLDEST, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", rows)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
