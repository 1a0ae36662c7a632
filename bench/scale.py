"""Scale in work: a step's cost against the number of requests, their context, the block size, and a prompt's length.

    python bench/scale.py                                  the whole of it, in about 6 minutes of two quiet cores
    python bench/scale.py --quick                          fewer points and steps
    python bench/scale.py --draw docs/scale.svg --json scale.json

    requests   1 .. 256 that decode at a context of 128          tokens/s, and the controller's share of a step
    context    4 that decode at 128 .. 8,000                     ms of a step
    block size 8 that decode at 1,024, blocks of 8 .. 128        ms of a step
    prompt     steps that compute 16 .. 1,024 tokens of one      ms of a step

Real worker, real engine, one process (`real_steps.py`). Lines are fitted to the steps by least squares, every step
counting by the inverse of its seconds, and printed with what is left over: the root of the mean squared relative
error. The controller (core and wire) is fitted as cost = a x rows^p, too: p at most 1 is a share that does not grow
faster than the batch.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the worker has it
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.progress import track

from bench.paper_plots import draw
from bench.real_steps import CONTROLLER, WIRE, Machine, Spent

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 6144, 8000)
SIZES = (8, 16, 32, 64, 128)
PROMPTS = (16, 32, 64, 128, 256, 512, 1024)
DEEP = 1024  # context at which blocks of all sizes are tried
FEW = 64  # rows up to which weights are read once for all, by panels; beyond, other products


@dataclass(frozen=True)
class Point:
    """`x` is requests, context, block size or tokens of a prompt."""

    x: int
    step_s: float
    controller_s: float


@dataclass(frozen=True)
class Fit:
    """A line through points: step_s = fixed_s + each_s * x."""

    what: str
    fixed_s: float
    each_s: float
    residual: float  # relative, root of the mean square

    def __str__(self) -> str:
        return (
            f"{self.what}: {1e3 * self.fixed_s:.3f} ms + {1e6 * self.each_s:.2f} us each, off by "
            f"{100 * self.residual:.1f} %"
        )


def line_through(what: str, xs: list[int], seconds: list[float]) -> Fit:
    """By relative error, neither price below 0."""
    x, s = np.array(xs, float), np.array(seconds)
    columns = np.stack([1.0 / s, x / s], axis=1)
    fixed_s, each_s = np.linalg.lstsq(columns, np.ones(len(s)), rcond=None)[0]
    if fixed_s < 0:
        fixed_s, each_s = 0.0, float((columns[:, 1] @ np.ones(len(s))) / (columns[:, 1] @ columns[:, 1]))
    left = (fixed_s + each_s * x) / s - 1.0
    return Fit(what, float(fixed_s), float(each_s), float(np.sqrt((left**2).mean())))


def power_of(xs: list[int], seconds: list[float]) -> float:
    """p of cost = a x^p."""
    return float(np.polyfit(np.log(xs), np.log(seconds), 1)[0])


def point_of(x: int, spent: Spent) -> Point:
    return Point(x, spent.step_s, spent.parts_s[CONTROLLER] + spent.parts_s[WIRE])


def measured(machine: Machine, given: argparse.Namespace, console: Console) -> dict[str, list[Point]]:
    steps, longest = given.steps, machine.loaded.config.max_len - given.steps - 8
    contexts, deep = [c for c in given.contexts if c <= longest], min(DEEP, longest)
    jobs: list[tuple[str, int, Any]] = [
        *[("requests", n, lambda n=n: machine.load(n, 128, steps, 16).steps(steps)) for n in given.requests],
        *[("context", c, lambda c=c: machine.load(4, c, steps, 16).steps(steps)) for c in contexts],
        *[("block size", b, lambda b=b: machine.load(8, deep, steps, b).steps(steps)) for b in given.sizes],
        *[("prompt", n, lambda n=n: machine.prompt(n, max(steps // 4, 2))) for n in given.prompts],
    ]
    found: dict[str, list[Point]] = {}
    for what, x, job in track(jobs, "steps", console=console, transient=True):
        found.setdefault(what, []).append(point_of(x, job()))
    return found


def fits_of(found: dict[str, list[Point]]) -> list[Fit]:
    fits = []
    few = [point for point in found["requests"] if point.x <= FEW]
    for what, points in (
        (f"a step by rows, up to {FEW}", few),
        ("a step by rows, all", found["requests"]),
        ("a step by positions of context, 4 rows", found["context"]),
        ("a step by tokens of a prompt", found["prompt"]),
    ):
        if len(points) > 2:
            fits.append(line_through(what, [p.x for p in points], [p.step_s for p in points]))
    requests = found["requests"]
    if len(requests) > 2:
        spent = [p.controller_s for p in requests]
        fits.append(line_through("controller's core and wire by rows", [p.x for p in requests], spent))
    return fits


def told(found: dict[str, list[Point]], console: Console) -> None:
    for what, points in found.items():
        console.print(f"[bold]{what}[/bold]")
        for point in points:
            share = 100 * point.controller_s / point.step_s
            rate = f", {point.x / point.step_s:.1f} tokens/s" if what in ("requests", "prompt") else ""
            console.print(
                f"  {point.x:5}  {1e3 * point.step_s:8.2f} ms{rate}, controller {share:.2f} %", highlight=False
            )


def panels_of(found: dict[str, list[Point]]) -> list[dict[str, Any]]:
    def panel(title: str, y_label: str, x_label: str, lines: dict[str, Any], kind: str = "log x") -> dict[str, Any]:
        labels = {"title": title, "y_label": y_label, "x_label": x_label}
        return {"kind": kind, "names": [], "lines": lines, "y_most": 0} | labels

    def line(what: str, y: Any) -> tuple[list[int], list[float]]:
        return [p.x for p in found[what]], [y(p) for p in found[what]]

    step_ms = "ms of a step"
    blocks = line("block size", lambda p: 1e3 * p.step_s)
    shares = line("requests", lambda p: 100 * p.controller_s / p.step_s)
    return [
        panel("requests", "tokens/s", "requests that decode", {"all": line("requests", lambda p: p.x / p.step_s)}),
        panel("controller's share", "% of a step", "requests that decode", {"core and wire": shares}),
        panel("context", step_ms, "tokens, 4 requests", {"decode": line("context", lambda p: 1e3 * p.step_s)}, "lines"),
        panel("block size", step_ms, "tokens of a block, 8 requests", {"decode": blocks}),
        panel("prompt", step_ms, "tokens", {"one chunk": line("prompt", lambda p: 1e3 * p.step_s)}, "lines"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of blocks")
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="tokens of a chunk")
    parser.add_argument("--steps", type=int, default=16, help="of each point")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="every other point and 4 steps of each")
    parser.add_argument("--draw", type=Path, help="SVG of the plots")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    numbers = (*given.requests, *given.contexts, *given.sizes, *given.prompts, given.steps, given.threads)
    if min(numbers) < 1:
        parser.error("every number of requests, contexts, sizes, prompts, steps and threads must be at least 1")
    if given.quick:
        given.steps = min(given.steps, 4)
        for name in ("requests", "contexts", "sizes", "prompts"):
            setattr(given, name, list(getattr(given, name))[::2])
    console = Console(width=110)
    found = measured(Machine(given.model, given.threads), given, Console(stderr=True))
    told(found, console)
    fits = fits_of(found)
    for fit in fits:
        console.print(str(fit), highlight=False)
    requests = found["requests"]
    if len(requests) > 2:
        power = power_of([p.x for p in requests], [p.controller_s for p in requests])
        console.print(f"controller: grows as rows^{power:.2f}", highlight=False)
    if given.draw:
        draw(panels_of(found), given.draw)
    if given.json:
        made = {name: [asdict(point) for point in points] for name, points in found.items()}
        given.json.write_text(json.dumps({"points": made, "fits": [asdict(fit) for fit in fits]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
