"""The script that measures on a GPU, walked through without one: every part runs, and what it checks is right."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench/gpu_check.py"


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, folder, "--cpu-dry-run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_dry_run_reaches_every_part(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 faults"
    report = json.loads((tmp_path / "dry-run.json").read_text())
    parts = ["twins", "worker", "ledger", "decode", "prefill", "moves", "block_sizes", "steps", "sampling"]
    assert list(report["parts"]) == parts
    assert all(part["rows"] for part in report["parts"].values())
    assert all(row["ok"] for name in parts[:3] for row in report["parts"][name]["rows"])


def test_a_part_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "--only", "decoding")
    assert done.returncode == 1
    assert "there are twins, worker, ledger, decode" in done.stderr
