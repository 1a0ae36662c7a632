"""How a step spends its time: products, attention, other kernels, sampling, the rest of the worker, wire, controller.

    python bench/step.py                                    the bundled model at 1, 16, 32 and 128 rows that decode
    python bench/step.py --draw docs/step.svg --json step.json

`outside kernels` is the share that is neither products, attention, the other kernels nor sampling: Python of the worker
and of the controller's core, and the wire between them. In a service core and wire run beside the next step, in another
process, together with HTTP and text; `bench/serve.py --profile` says what that process takes in all.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the worker has it
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from bench.paper_plots import draw
from bench.real_steps import ATTENTION, OTHERS, PARTS, PRODUCTS, SAMPLING, Machine, Spent

KERNEL_PARTS = (PRODUCTS, ATTENTION, OTHERS, SAMPLING)


def outside(spent: Spent) -> float:
    """The share of a step outside kernels."""
    return 1.0 - sum(spent.parts_s[name] for name in KERNEL_PARTS) / sum(spent.parts_s.values())


def table_of(found: list[Spent]) -> Table:
    table = Table("rows", "step ms", *(f"{name} ms" for name in PARTS), "outside kernels", title="a step that decodes")
    for spent in found:
        parts = [f"{1e3 * spent.parts_s[name]:.2f}" for name in PARTS]
        table.add_row(str(spent.num_rows), f"{1e3 * spent.step_s:.1f}", *parts, f"{100 * outside(spent):.1f} %")
    return table


def picture(found: list[Spent], path: Path) -> None:
    names = [f"{spent.num_rows}\n{1e3 * spent.step_s:.0f} ms" for spent in found]
    shares = {
        part: (names, [100 * spent.parts_s[part] / sum(spent.parts_s.values()) for spent in found]) for part in PARTS
    }
    panel = {
        "kind": "bars", "title": "how a step spends its time", "y_label": "% of the step", "names": names,
        "lines": shares, "x_label": "rows", "y_most": 100,
    }  # fmt: skip
    draw([panel], path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 128])
    parser.add_argument("--context", type=int, default=256, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quantization", choices=("none", "float16", "int8"), default="none")
    parser.add_argument("--draw", type=Path, help="SVG of the parts")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if min(*given.rows, given.context, given.steps, given.block_size, given.threads) < 1:
        parser.error("--rows, --context, --steps, --block-size and --threads must be at least 1")
    machine = Machine(given.model, given.threads, given.quantization)
    found = [machine.load(rows, given.context, given.steps, given.block_size).steps(given.steps) for rows in given.rows]
    Console(width=130).print(table_of(found))
    if given.draw:
        picture(found, given.draw)
    if given.json:
        given.json.write_text(json.dumps([asdict(spent) for spent in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
