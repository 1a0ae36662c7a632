"""The paper's results, redrawn by this code: docs/EVIDENCE.md and its plots.

    make evidence DATA=folder
    python bench/paper.py --data folder [--only 12,13,real] [--jobs 2] [--share 0.2]
    python bench/paper.py                       the document again, from the figures that are there

Every figure is a JSON file in docs/evidence/ that says what was run, on which data and machine, and when; EVIDENCE.md
is put together from those that are there, so that one may be run again by itself. `--data` is a folder that holds, at
any depth, the public files that the figures name. Simulated figures depend on nothing but code and data; those of the
real system are of the machine at hand.
"""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.paper_blocks import BLOCKS
from bench.paper_data import Data
from bench.paper_figures import FIGURES
from bench.paper_plots import draw
from bench.paper_shape import Figure
from bench.paper_sharing import SHARING
from kilburn.controller.simulate.devices import DEVICES, Reach
from kilburn.controller.simulate.traces import TraceError

# Of the document: the paper's, the real system, recorded traffic, what the paper left open.
ORDER = ("2", "12", "13", "14", "beams", "15", "16", "rows", "17", "18", "19", "real", "calibration")
ORDER += ("azure", "prefixes", "tier", "blocks", "links", "fair")
ROOT = Path(__file__).parents[1]
HEAD = """# The evidence

What paging of the KV cache is worth, by this code. The figures are those of Kwon et al., "Efficient memory management
for large language model serving with PagedAttention" (SOSP 2023), redrawn; then recorded traffic, and questions that
the paper left open. `make evidence DATA=folder` makes all of it again; `docs/evidence/` holds every number.

**Simulated** figures run the engine that serves (`controller/core`) on a virtual clock. A step takes as long as a
roofline says: the larger of operations over peak and bytes over bandwidth, for matrix products and for attention, of
which these shares are assumed to be reached:
{reach}.
The peaks are those of the makers' data sheets ({devices}).
None of it was fitted to the paper. The baselines are gates before the same engine (`controller/simulate/gates.py`): a
request waits until its reservation is there, placed by a buddy allocator; FasterTransformer-like is a batch at a time,
with the reservations of Orca (Max). Scheduler, machine and load are the same for all.

Lengths are of public samples, counted in tokens by the vocabularies of the paper's models; the setups of Figures 2 and
14 say their means (the paper's: 161 in and 338 out for ShareGPT, 19 and 58 for Alpaca). Where a number is more than
15 % off the paper's, the notes below its table say why.
"""


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{os.cpu_count()} x {model}, Python {platform.python_version()}"


def every() -> dict[str, Any]:
    """All figures, in their order in the document."""
    from bench.paper_real import REAL
    from bench.paper_traces import TRACES

    found = FIGURES | SHARING | BLOCKS | TRACES | REAL
    return {name: found[name] for name in ORDER if name in found} | found


def make(name: str, function: Any, data: Data, folder: Path, command: str) -> None:
    """One figure, into its files."""
    begun = perf_counter()
    with Progress(
        SpinnerColumn(), TextColumn(f"figure {name}: {{task.completed:,.0f}} requests"), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=None)
        figure: Figure = function(data, lambda num_done: progress.advance(task, num_done))
    for panel in figure.panels:
        panel.lines = {line: (rounded(xs), rounded(ys)) for line, (xs, ys) in panel.lines.items()}
    draw([asdict(panel) for panel in figure.panels], folder / f"{figure.name}.svg")
    made = asdict(figure) | {
        "command": command,
        "machine": machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(perf_counter() - begun, 1),
    }
    text = json.dumps(made, indent=1)
    numbers = re.compile(r"\[\s+(-?[\d.e+-]+(?:,\s+-?[\d.e+-]+)*)\s+\]")  # a list of them on one line
    text = numbers.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
    (folder / f"{figure.name}.json").write_text(text + "\n")


def rounded(values: Sequence[float]) -> list[float]:
    """To what a drawing can show, so that files are small."""
    return [float(f"{value:.4g}") for value in values]


def document(folder: Path, order: Sequence[str]) -> str:
    """EVIDENCE.md from the figures that are there."""
    reach = Reach()
    shares = f"{reach.flops:.0%} of operations, {reach.bandwidth:.0%} of bandwidth, {reach.link:.0%} of links between "
    shares += f"devices, {reach.host_link:.0%} of the host's, beside {1e3 * reach.step_s:g} ms a step and "
    shares += f"{1e6 * reach.layer_s:g} us a layer"
    used = "; ".join(DEVICES[name].source for name in ("a100-40gb", "a100-80gb", "h100-80gb"))
    text = HEAD.format(reach=shares, devices=used)
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for name in sorted(found, key=lambda name: order.index(name) if name in order else len(order)):
        text += "\n" + section(found[name])
    return text


def section(made: dict[str, Any]) -> str:
    lines = [f"## {made['title']}", "", f"{made['setup']}.", "", f"![{made['title']}](evidence/{made['name']}.svg)", ""]
    lines += ["| " + " | ".join(made["heads"]) + " |", "|" + "---|" * len(made["heads"])]
    lines += ["| " + " | ".join(row) + " |" for row in made["rows"]]
    lines += ["", *(f"{note}\n" for note in made["notes"])]
    lines.append(f"`{made['command']}` on {made['data']}; {made['machine']}; {made['date']}; {made['seconds']:g} s.")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder that holds the public files, at any depth")
    parser.add_argument("--only", default="", help="figures, with commas; all of them otherwise")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of simulated figures")
    parser.add_argument("--share", type=float, default=1.0, help="of the simulated time of each run")
    parser.add_argument("--into", type=Path, default=ROOT / "docs", help="folder of EVIDENCE.md and evidence/")
    options = parser.parse_args(words)
    figures = every()
    only = [name for name in options.only.split(",") if name]
    unknown = [name for name in only if name not in figures]
    if unknown:
        parser.error(f"--only: no figure {', '.join(unknown)}; there are {', '.join(figures)}")
    folder = options.into / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    if options.data is not None:
        data = Data(options.data, max(options.jobs, 1), options.share)
        for name in only or figures:
            command = f"python bench/paper.py --data DATA --only {name}"
            command += f" --share {options.share:g}" if options.share != 1 else ""
            try:
                make(name, figures[name], data, folder, command)
                print(f"figure {name}: done", flush=True)
            except TraceError as error:
                failed += 1
                print(f"figure {name}: left out; {error}", file=sys.stderr)
    (options.into / "EVIDENCE.md").write_text(document(folder, [f"figure-{name}" for name in figures]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
