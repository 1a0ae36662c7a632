"""Everything about the Triton set and the worker that only a GPU can tell, in one call of less than six minutes.

`python bench/gpu_check.py FOLDER [--minutes 5.5] [--only decode,prefill]` writes FOLDER/<device>.json after each part,
and prints a short table last. It needs torch, triton, numpy and safetensors, and nothing installed of Kilburn itself.
Each part has its share of the minutes, and ends after the row at which that is over.
`--cpu-dry-run` walks the same code on tiny sizes in Triton's interpreter, however long it takes: its numbers mean
nothing, its verdicts do.

The exit status is 1 if anything is wrong, or a part failed; a number below its goal is shown, and is no fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
VERDICTS = ("twins", "worker", "ledger")  # parts of which only what is wrong is shown
# Seconds that a part may take. What an earlier one has left over is there for the later ones; a part whose time is over
# ends after the row that it is at, and says so. Their sum is the default of --minutes.
SHARES_S = {
    "twins": 80.0,
    "worker": 30.0,
    "ledger": 20.0,
    "decode": 80.0,
    "prefill": 20.0,
    "moves": 25.0,
    "block_sizes": 15.0,
    "steps": 40.0,
    "sampling": 20.0,
}
GOALS = {
    "decode": "of_copy 0.85 at batch >= 16, context >= 2k; paging_costs <= 0.05",
    "moves": "swap_out, swap_in 0.90 of memcpy at any block size",
    "prefill": "of_sdpa 0.70",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the JSON goes")
    parser.add_argument("--minutes", type=float, default=5.5, help="no row of any part begins after this")
    parser.add_argument("--only", default="", help="parts, comma-separated; all of them otherwise")
    parser.add_argument("--cpu-dry-run", action="store_true", help="tiny sizes in the interpreter")
    return parser.parse_args()


def make_importable() -> None:
    """`kilburn` is this tree, whether or not it is installed."""
    package = ModuleType("kilburn")
    package.__path__ = [str(ROOT)]
    sys.modules["kilburn"] = package
    sys.path.insert(0, str(Path(__file__).parent))


def place_of(is_dry: bool) -> Any:
    import torch
    from gpu_kernels import Place

    from kilburn.kernels.triton.kernels import TritonKernels
    from kilburn.kernels.triton.paged_attention import Device
    from kilburn.kernels.triton.streams import beside, device_of

    if is_dry:
        device, torch_device = Device("sm_90", 4), torch.device("cpu")
        return Place(torch_device, device, TritonKernels(torch_device, device, contextlib.nullcontext), is_dry=True)
    torch_device = torch.device("cuda", 0)
    device = device_of(torch_device)
    return Place(torch_device, device, TritonKernels(torch_device, device, beside(torch_device)), is_dry=False)


def run(place: Any, only: set[str], begun: float, seconds: float, path: Path, report: dict[str, Any]) -> None:
    """The parts in order of worth, within `seconds` from `begun`. Each is kept as soon as it is there."""
    import gpu_kernels as kernels
    import gpu_ledger as ledger
    import gpu_worker as worker

    yardstick = kernels.bandwidth(place)
    report["copy_gb_s"] = yardstick / 1e9
    parts = {
        "twins": lambda: kernels.twins(place),
        "worker": lambda: worker.worker_twin(place),
        "ledger": lambda: ledger.ledger_rows("cpu" if place.is_dry else "cuda:0", place.is_dry),
        "decode": lambda: kernels.decode(place, yardstick),
        "prefill": lambda: kernels.prefill(place),
        "moves": lambda: kernels.moves(place, yardstick),
        "block_sizes": lambda: kernels.block_sizes(place, yardstick),
        "steps": lambda: worker.steps(place),
        "sampling": lambda: kernels.sampling(place),
    }
    unknown = only - parts.keys()
    if unknown:
        raise SystemExit(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    end = begun
    for name, part in parts.items():
        if only and name not in only:
            continue
        end += SHARES_S[name] * seconds / sum(SHARES_S.values())
        started = time.monotonic()
        if started > end:
            report["parts"][name] = {"not_run": "out of time"}
        else:
            print(f"{name} ...", flush=True)
            try:
                rows, is_late = until(part(), end)
                report["parts"][name] = {"rows": rows, "late": is_late, "seconds": time.monotonic() - started}
            except Exception as error:  # the other parts may still tell something
                traceback.print_exc()
                report["parts"][name] = {"failed": f"{type(error).__name__}: {error}"}
        path.write_text(json.dumps(report, indent=1) + "\n")


def until(rows: Iterable[Any], end: float) -> tuple[list[Any], bool]:
    """The rows that were begun in time, and whether time was over before it was known that there are no more."""
    taken: list[Any] = []
    for row in rows:
        taken.append(row)
        if time.monotonic() > end and not isinstance(rows, list):
            return taken, True
    return taken, False


def told(report: dict[str, Any]) -> int:
    """Prints the table; returns the number of faults."""
    faults = 0
    print(f"\n{report['device']}, torch {report['torch']}, triton {report['triton']}, {report['date']}")
    print(f"copy {report['copy_gb_s']:.0f} GB/s")
    for name, part in report["parts"].items():
        if "rows" not in part:
            faults += "failed" in part
            print(f"{name}: {part.get('failed', part.get('not_run'))}")
            continue
        bad = [row for row in part["rows"] if row.get("ok") is False]
        faults += len(bad)
        print(f"{name} ({part['seconds']:.0f} s){': goal ' + GOALS[name] if name in GOALS else ''}")
        if part["late"]:
            print("  its time was over: rows are missing")
        if name in VERDICTS:
            print(f"  {len(part['rows'])} checked, {len(bad)} wrong")
        for row in bad if name in VERDICTS else part["rows"]:
            print("  " + "  ".join(f"{key} {_short(value)}" for key, value in row.items()))
    print(f"{faults} faults")
    return faults


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    words = arguments()
    begun = time.monotonic()
    if words.cpu_dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    make_importable()
    import torch
    import triton

    place = place_of(words.cpu_dry_run)
    name = "dry run" if words.cpu_dry_run else torch.cuda.get_device_name(0)
    report: dict[str, Any] = {
        "device": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "parts": {},
    }
    words.folder.mkdir(parents=True, exist_ok=True)
    path = words.folder / (re.sub(r"\W+", "-", name.lower().replace("nvidia", "")).strip("-") + ".json")
    torch.manual_seed(0)
    minutes = math.inf if words.cpu_dry_run else words.minutes
    with torch.inference_mode():
        run(place, set(filter(None, words.only.split(","))), begun, minutes * 60, path, report)
    report["seconds"] = time.monotonic() - begun
    path.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if told(report) else 0


if __name__ == "__main__":
    sys.exit(main())
