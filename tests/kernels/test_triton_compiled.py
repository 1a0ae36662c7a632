"""What `aot.py` says: the kernels fit the registers of devices that are not here, and one that does not is seen.

In processes of their own, since in this one Triton interprets.
"""

import os
import subprocess
import sys
from pathlib import Path

AOT = Path(__file__).parent / "aot.py"


def compiled(*words: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, AOT, *words], capture_output=True, text=True, env=plain, timeout=240)


def test_a_row_of_each_kind_compiles_without_a_spill_for_each_architecture() -> None:
    done = compiled()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("kernels, 0 faults")
    for architecture in ("sm_80", "sm_90", "sm_100", "gfx942"):
        lines = [line for line in done.stdout.splitlines() if line.startswith(architecture + " ")]
        assert {line[8:].split()[0].rstrip(",") for line in lines} >= {
            *("attention", "rms_norm", "add_rms_norm", "silu_mul", "kv_write", "copy_blocks", "sample:")
        }


def test_a_kernel_made_to_spill_is_a_fault() -> None:
    done = compiled("--spill")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "made to spill" in line]
    assert [line.split()[0] for line in lines] == ["sm_90", "gfx942"]
    assert all(line.endswith("FAULT: spills") for line in lines), done.stdout
