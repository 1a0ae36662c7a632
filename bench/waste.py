"""Where the slots of a KV pool go: blocks on demand beside the contiguous reservations of Orca.

    python bench/waste.py                                   lengths drawn from a log-normal model
    python bench/waste.py --trace sharegpt.jsonl.gz --plot waste.svg

The pool, the longest sequence and the mean lengths are those of the PagedAttention paper's OPT-13B on a 40 GB device
(Kwon et al. 2023, Table 1, Figures 2 and 11). The first four rows are policies under one least scheduler
(controller/simulate/reservations.py, saturated.py); `Kilburn` is the real engine over a worker without a model, its
figures read from the snapshot that /metrics is made of. All requests wait from the beginning, and a mean is over the
steps in which one has to wait for memory. `waste` is the share of the allocated slots that holds no token.

The paper's figures stand beside ours and nothing is fitted to them. They may differ: the paper ran at chosen arrival
rates and not under a queue that is never empty; its lengths are ShareGPT's own, ours a model of two means (or a trace
that is given); its steps take the time that they take, ours count alike; and its share of `external` includes whatever
else it could not use. Here `external` is what is free and too small for whoever is next, and the allocator's rounding.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from kilburn.controller.simulate.fake_daemon import fake_hello
from kilburn.controller.simulate.reservations import Max, Oracle, Paged, Pow2, Reservation, Want
from kilburn.controller.simulate.saturated import by_engine, by_policy, draw_lengths, mean_shares, slots_of
from kilburn.controller.simulate.traces import TraceError, read_trace

KINDS = ("used", "reserved", "internal", "external")
PAPER = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, "paged": 96.3, "Kilburn": 96.3}  # percent used
COLOURS = ("#2b6cb0", "#90cdf4", "#f6ad55", "#cbd5e0")


def lengths_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    """(prompt, output) of each request. Raises TraceError."""
    if options.trace is None:
        return draw_lengths(
            options.requests,
            options.seed,
            mean_prompt=options.mean_prompt,
            mean_output=options.mean_output,
            sigma_prompt=options.sigma,
            sigma_output=options.sigma,
            most=options.max_len,
        )
    found = []
    for asked in read_trace(options.trace):
        num_prompt = min(max(asked.num_prompt, 1), options.max_len - 1)
        found.append((num_prompt, min(asked.num_output, options.max_len - num_prompt)))
    return Random(options.seed).sample(found, min(options.requests, len(found)))


def of_policy(policy: Reservation, lengths: Sequence[tuple[int, int]], options: argparse.Namespace) -> dict[str, Any]:
    wants = [Want(num_prompt, num_output, options.max_len) for num_prompt, num_output in lengths]
    shares, steps = mean_shares(by_policy(policy, wants, options.rows))
    return {"policy": policy.name, **shares, "steps": steps}


def of_engine(lengths: Sequence[tuple[int, int]], options: argparse.Namespace) -> dict[str, Any]:
    hello = fake_hello(
        block_size=options.block_size,
        num_blocks=options.slots // options.block_size,
        max_rows=options.rows,
        max_step_tokens=max(2048, options.rows),
        max_len=options.max_len,
        vocab_size=32_000,
    )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("the engine", total=None)
        groups = []
        for group in by_engine(hello, lengths, options.seed):
            groups.append(group)
            progress.advance(task)
    shares, steps = mean_shares(map(slots_of, groups))
    return {"policy": "Kilburn", **shares, "steps": steps}


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table("policy", *(f"{kind} %" for kind in KINDS), "waste %", "used in the paper %", "steps", title=title)
    for row in rows:
        shares = [f"{row[kind]:.1f}" for kind in KINDS]
        table.add_row(row["policy"], *shares, f"{row['waste']:.2f}", f"{PAPER[row['policy']]:.1f}", str(row["steps"]))
    return table


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Stacked bars, as in the paper's Figure 2."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot: matplotlib is not installed; pip install matplotlib, or leave --plot out") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    names, bottom = [row["policy"] for row in rows], [0.0] * len(rows)
    for kind, colour in zip(KINDS, COLOURS, strict=True):
        heights = [row[kind] for row in rows]
        axes.bar(names, heights, bottom=bottom, label=kind, color=colour, width=0.6)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.plot(names, [PAPER[name] for name in names], "k_", markersize=28, label="used, paper")
    axes.set_ylabel("of the KV pool, %")
    axes.set_ylim(0, 100)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=5, frameon=False)
    figure.savefig(path, bbox_inches="tight")


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--trace", type=Path, help="lengths of a trace instead of the model (forms: controller/simulate/traces.py)"
    )
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--mean-prompt", type=float, default=161.0, help="tokens; of ShareGPT, as the paper has it")
    parser.add_argument("--mean-output", type=float, default=338.0)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of either length")
    parser.add_argument("--slots", type=int, default=15_700, help="of the pool, as for OPT-13B on 40 GB")
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rows", type=int, default=256, help="sequences in one batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-engine", action="store_true", help="policies only")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--plot", type=Path, help="draw them as stacked bars, into this file (svg, png, pdf)")
    options = parser.parse_args(words)
    if options.max_len < 2 or options.block_size < 1 or options.requests < 1 or options.rows < 1:
        parser.error("--max-len must be at least 2; --block-size, --requests and --rows at least 1")
    if options.slots < max(options.max_len, options.block_size):
        parser.error(f"--slots: {options.slots} cannot hold one sequence of --max-len {options.max_len}; give more")
    if not (options.mean_prompt > 0 and options.mean_output > 0 and 0 <= options.sigma <= 4):
        parser.error("--mean-prompt and --mean-output must be above 0, --sigma from 0 to 4")
    try:
        options.lengths = lengths_of(options)
    except TraceError as error:
        parser.error(str(error))
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    slots, lengths = options.slots, options.lengths
    policies: tuple[Reservation, ...] = (Max(slots), Pow2(slots), Oracle(slots), Paged(slots, options.block_size))
    rows = [of_policy(policy, lengths, options) for policy in policies]
    if not options.no_engine:
        rows.append(of_engine(lengths, options))
    for row in rows:
        held = row["used"] + row["reserved"] + row["internal"]
        row["waste"] = 100 * (1 - row["used"] / held)
    means = [sum(length[i] for length in lengths) / len(lengths) for i in (0, 1)]
    title = f"{len(lengths)} requests of {means[0]:.0f} + {means[1]:.0f} tokens on {slots} slots"
    title += f", blocks of {options.block_size}"
    Console(width=110).print(table_of(rows, title))
    if options.json is not None:
        options.json.write_text(json.dumps({"slots": slots, "lengths": means, "rows": rows}, indent=2) + "\n")
    if options.plot is not None:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
