"""Swap against recompute over block sizes: the PagedAttention paper's Figure 19, on a real worker.

    python bench/preemption.py                              the bundled model, on whatever there is
    python bench/preemption.py --device cuda --tokens 1024 --json found.json --plot found.svg
    python bench/preemption.py --sizes 8,16 --load-sizes 16 --sequences 2

First table: some sequences are computed; their blocks go out to the host and come back to other device blocks (plans
that only move, timed by the worker as it times them for the engine); then the same sequences are computed again from
their tokens, in chunks of --max-step-tokens. Blocks leave in a shuffled order, so that no two are neighbours. The paper
found that swap falls far behind at small blocks, since its copies were small; here a block is one piece whatever its
size, so that the seconds to move the same tokens should hardly depend on it. `auto` is what the engine would choose.

Second table: the real engine over the same worker with a pool of half of what a load needs; tokens a second by each
way of preemption. With few requests its figures are rough.

Both run on this machine and nothing else should: a busy one shows in every figure.
"""

import argparse
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Event, Finished, Refused, Send, Submit
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.prepared import prepared_folder
from kilburn.kernels.dispatch import kernels_for
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.shared.messages import Admit, Hello, StepPlan
from kilburn.shared.model_files import BUNDLED_NAME
from kilburn.shared.sampling import Sampling
from kilburn.worker.knobs import Knobs
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.model_runner import ModelRunner
from kilburn.worker.models import weights
from kilburn.worker.models.weights import LoadedModel
from kilburn.worker.rows import Limits, Rows
from kilburn.worker.start import device_of, dtype_of
from kilburn.worker.step import Executor

SIZES = "1,2,4,8,16,32,64,128,256"
PEER = b"bench.0"


@dataclass(frozen=True)
class Bench:
    """One loaded model, and the shape of what is run on it."""

    loaded: LoadedModel
    device: torch.device
    dtype: str
    max_step_tokens: int
    max_len: int
    num_rows: int

    def executor(self, block_size: int, num_blocks: int, num_host_blocks: int) -> Executor:
        config, kernels = self.loaded.config, kernels_for(self.device)
        layout = KVLayout(block_size, config.num_layers, config.num_kv_heads, config.head_dim, self.dtype)
        limits = Limits(self.num_rows, self.max_step_tokens, self.max_len, block_size, num_blocks, config.vocab_size)
        rows = Rows(limits, Knobs(self.num_rows, config.vocab_size))
        cache = KVCache(layout, num_blocks, num_host_blocks, self.device, kernels)
        return Executor(rows, ModelRunner(self.loaded.model, cache, rows, kernels, self.device))


class Steps:
    """Plans by hand, numbered."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.step = executor, 0

    def run(self, rows: list[int], counts: list[int], **columns: Any) -> Any:
        self.step += 1
        return self.executor.run(StepPlan(1, self.step, rows, counts, **columns)).timings

    def compute(self, prompts: Sequence[list[int]], tables: Sequence[list[int]], budget: int) -> float:
        """All prompts, in chunks of `budget`; the seconds that the worker says of them."""
        seconds = 0.0
        for row, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
            admits = [Admit(row, 0, len(prompt), tuple(prompt), (), tuple(table), Sampling(temperature=0.0))]
            for start in range(0, len(prompt), budget):
                timings = self.run([row], [min(budget, len(prompt) - start)], admits=admits)
                seconds += timings.forward_s + timings.apply_s
                admits = []
        return seconds


def figure_19(bench: Bench, block_size: int, prompts: Sequence[list[int]], repeats: int) -> dict[str, Any]:
    """Seconds to move the prompts' blocks out and in, and to compute them again: the best of some repeats."""
    num_each = blocks_for(len(prompts[0]), block_size)
    num_blocks = num_each * len(prompts)
    executor = bench.executor(block_size, 2 * num_blocks, num_blocks)
    steps, rng = Steps(executor), Random(block_size)
    budget = bench.max_step_tokens
    tables = [list(range(i * num_each, (i + 1) * num_each)) for i in range(len(prompts))]
    steps.compute(prompts, tables, budget)  # whatever is compiled or touched first
    out_s, in_s, compute_s = [], [], []
    for _ in range(repeats + 1):
        hosts, homes = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))
        rng.shuffle(hosts)
        rng.shuffle(homes)
        out_s.append(steps.run([], [], swaps_out=list(zip(range(num_blocks), hosts, strict=True))).moves_s)
        in_s.append(steps.run([], [], swaps_in=list(zip(hosts, homes, strict=True))).moves_s)
        moved = executor.runner.cache.pool
        if not torch.equal(moved[homes[0]], moved[0]):
            raise SystemExit("a block that came back is not what left")
    for _ in range(repeats):
        compute_s.append(steps.compute(prompts, tables, budget))
    swap_s, recompute_s = min(out_s[1:]) + min(in_s[1:]), min(compute_s)
    num_bytes = 2 * num_blocks * executor.runner.cache.layout.bytes_per_block
    return {
        "block_size": block_size,
        "out_s": min(out_s[1:]),
        "in_s": min(in_s[1:]),
        "swap_s": swap_s,
        "recompute_s": recompute_s,
        "gb_per_s": num_bytes / swap_s / 1e9,
        "cheaper": "swap" if swap_s < recompute_s else "recompute",
    }


def under_load(bench: Bench, block_size: int, way: Preemption, num_requests: int, length: int) -> dict[str, Any]:
    """Requests whose half fits the pool, run by the engine; tokens a second, and how they were preempted."""
    prompt, answer = length // 2, length - length // 2
    most = num_requests * blocks_for(length, block_size)
    num_blocks = max(most // 2, blocks_for(length, block_size) + 1)
    executor = bench.executor(block_size, num_blocks, most)
    limits, layout = executor.rows.limits, executor.runner.cache.layout
    digest, vocab = bench.loaded.digest, limits.vocab_size
    hello = Hello(
        "bench", digest, layout, num_blocks, most, limits.max_rows, limits.max_step_tokens, limits.max_len, vocab
    )
    engine, rng = Engine(EngineSettings(preemption=way, step_deadline_s=1e9, silence_s=1e9)), Random(3)
    events: list[Event] = [Arrived(PEER, hello)]
    for number in range(num_requests):
        ids = [rng.randrange(min(vocab, 5000)) for _ in range(prompt)]
        events.append(Submit(number, ids, answer, Sampling(temperature=0.0)))
    plans, began = deque[StepPlan](), perf_counter()
    while events or plans:
        for effect in engine.handle(events, perf_counter() - began):
            match effect:
                case Send(message=StepPlan() as plan):
                    plans.append(plan)
                case Refused(message=message) | Finished(message=message) if message:
                    raise SystemExit(f"a request failed: {message}")
        events = [Arrived(PEER, executor.run(plans.popleft()))] if plans else []
    seconds, found = perf_counter() - began, engine.snapshot().groups[0]
    return {
        "block_size": block_size,
        "way": way.value,
        "tokens_per_s": num_requests * answer / seconds,
        "swaps": found.preempted_by_swap,
        "recomputes": found.preempted_by_recompute,
        "predicted_s": found.predicted_swap_s + found.predicted_recompute_s,
        "actual_s": found.actual_swap_s + found.actual_recompute_s,
    }


def tables_of(moves: Sequence[dict[str, Any]], loads: Sequence[dict[str, Any]], title: str) -> list[Table]:
    first = Table("block size", "out ms", "in ms", "swap ms", "recompute ms", "GB/s", "cheaper", title=title)
    for row in moves:
        times = [f"{1000 * row[name]:.2f}" for name in ("out_s", "in_s", "swap_s", "recompute_s")]
        first.add_row(str(row["block_size"]), *times, f"{row['gb_per_s']:.2f}", row["cheaper"])
    second = Table(
        "block size", "way", "tokens/s", "swaps", "recomputes", "predicted ms", "actual ms", title="a load that presses"
    )
    for row in loads:
        seconds = [f"{1000 * row[name]:.2f}" for name in ("predicted_s", "actual_s")]
        counts = [str(row[name]) for name in ("swaps", "recomputes")]
        second.add_row(str(row["block_size"]), row["way"], f"{row['tokens_per_s']:.1f}", *counts, *seconds)
    return [first, second] if loads else [first]


def plot(moves: Sequence[dict[str, Any]], path: Path) -> None:
    """As the paper draws its Figure 19 (a)."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SystemExit("--plot: matplotlib is not installed; pip install matplotlib, or leave --plot out") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    sizes = [str(row["block_size"]) for row in moves]
    for name, style in (("recompute_s", "o-"), ("swap_s", "s-"), ("out_s", "^--"), ("in_s", "v--")):
        axes.plot(sizes, [1000 * row[name] for row in moves], style, label=name.removesuffix("_s"))
    axes.set_xlabel("block size")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def numbers(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",") if word]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; give some such as 1,16,256") from None
    if any(not 1 <= number <= 256 for number in found):
        raise argparse.ArgumentTypeError("block sizes are from 1 to 256")
    return found


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Swap against recompute over block sizes (Figure 19).")
    parser.add_argument("--model", default=BUNDLED_NAME, help="as of kilburn serve; the bundled one by default")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"))
    parser.add_argument("--sizes", type=numbers, default=numbers(SIZES), help="block sizes of the first table")
    parser.add_argument("--load-sizes", type=numbers, default=[1, 16, 32], help="of the second; empty: none")
    parser.add_argument("--sequences", type=int, default=4, help="that are moved, or computed again")
    parser.add_argument("--tokens", type=int, default=128, help="of each sequence")
    parser.add_argument("--repeats", type=int, default=2, help="of which the best counts")
    parser.add_argument("--max-step-tokens", type=int, default=512)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the first table into this file (svg, png, pdf)")
    options = parser.parse_args(words)
    for name in ("sequences", "tokens", "repeats", "max_step_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} will not do; give 1 or more")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parsed(words)
    console = Console()
    device = device_of(options.device)
    dtype = dtype_of(options.dtype, device)
    folder = prepared_folder(options.model, "")
    loaded = weights.load(Path(folder), getattr(torch, dtype), device, lambda what, done=0, total=0: None)
    if options.tokens + 1 > loaded.config.max_len:
        raise SystemExit(f"--tokens: {options.tokens} is beyond the model's length; give {loaded.config.max_len - 1}")
    num_rows = max(options.sequences, 8)
    bench = Bench(loaded, device, dtype, max(options.max_step_tokens, num_rows), options.tokens + 1, num_rows)
    rng = Random(1)
    vocab = min(loaded.config.vocab_size, 5000)
    prompts = [[rng.randrange(vocab) for _ in range(options.tokens)] for _ in range(options.sequences)]
    moves, loads = [], []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(options.sizes) + 3 * len(options.load_sizes))
        for block_size in options.sizes:
            progress.update(task, description=f"blocks of {block_size}")
            moves.append(figure_19(bench, block_size, prompts, options.repeats))
            progress.advance(task)
        for block_size in options.load_sizes:
            for way in Preemption:
                progress.update(task, description=f"a load in blocks of {block_size}, {way.value}")
                loads.append(under_load(bench, block_size, way, 2 * options.sequences, min(options.tokens, 96)))
                progress.advance(task)
    title = f"{options.sequences} sequences of {options.tokens} tokens, {device}, {dtype}"
    for table in tables_of(moves, loads, title):
        console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"title": title, "moves": moves, "loads": loads}, indent=1) + "\n")
    if options.plot is not None:
        plot(moves, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
