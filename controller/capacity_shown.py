"""What `kilburn simulate` and `kilburn tune` print: a table for people, or one JSON object; and drawings of it."""

import json
import resource
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kilburn.controller.capacity import Cluster, Result, cluster_of, recommended, simulate
from kilburn.controller.capacity_plot import draw, require_drawable
from kilburn.shared.config import SimulateSettings, TuneSettings

HEADS = ("rate", "groups", "block", "policy", "requests", "first s", "", "gap ms", "", "norm. ms", "good %", "good /s",
         "hit %", "preempted", "tail waste %", "rows", "cost")  # fmt: skip


def run_simulate(settings: SimulateSettings) -> int:
    """Raises SettingsError, ModelRefused."""
    begun, begun_cpu_s = perf_counter(), _cpu_s()
    results = _simulated(settings)
    if settings.json:
        print(json.dumps(as_json(settings, cluster_of(settings), results), indent=2))
    else:
        _show(settings, results)
        _show_pace(results, perf_counter() - begun, _cpu_s() - begun_cpu_s)
    return 0


def run_tune_block_size(settings: TuneSettings) -> int:
    """Raises SettingsError, ModelRefused."""
    results = _simulated(settings)
    best = recommended(results, settings.within_percent)
    if settings.json:
        made = as_json(settings, cluster_of(settings), results) | {"block_size": best.case.block_size}
        print(json.dumps(made, indent=2))
        return 0
    _show(settings, results)
    Console(width=160).print(
        f"block_size {best.case.block_size}: the largest whose mean normalized latency is within "
        f"{settings.within_percent:g} % of the best"
    )
    return 0


def _simulated(settings: SimulateSettings) -> list[Result]:
    if settings.plot:
        require_drawable(Path(settings.plot))
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=None)

        def tell(num_done: int, total: int) -> None:
            progress.update(bar, advance=num_done, total=total)

        results = simulate(settings, tell)
    if settings.plot:
        draw(results, Path(settings.plot))
    return results


def _show(settings: SimulateSettings, results: list[Result]) -> None:
    console = Console(width=160)
    setup, cluster = results[0].case.run.setup, cluster_of(settings)
    source = f"measured, {settings.measured}" if settings.measured else cluster.device.source
    console.print(
        f"{settings.model} in {cluster.dtype} on {settings.tp} x {cluster.device.name} a group ({source}); "
        f"{setup.num_slots} slots of KV a group",
        markup=False,
    )
    table = Table(*HEADS)
    for result in results:
        table.add_row(*_row(result, bool(settings.price)))
    console.print(table)
    console.print("first, gap: p50 and p99; norm.: mean latency a token; good: within the objectives; hit: of the best")
    num_cut = sum(result.case.num_cut for result in results)
    if num_cut:
        console.print(f"{num_cut} requests were longer than {setup.max_len} tokens and were cut")


def _show_pace(results: list[Result], seconds: float, cpu_s: float) -> None:
    """What simulating cost. A sequence that goes on by a token, or by a chunk of its prompt, is one sequence-step."""
    num_steps = sum(result.outcome.num_sequence_steps for result in results)
    Console(width=160).print(
        f"simulated in {seconds:.1f} s, of CPU {cpu_s:.1f}: {num_steps:,} sequence-steps, "
        f"{num_steps / seconds:,.0f}/s, {num_steps / cpu_s:,.0f} a second of CPU"
    )


def _cpu_s() -> float:
    """Of this process, and of those that it has seen end."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _row(result: Result, is_priced: bool) -> list[str]:
    case, outcome = result.case, result.outcome
    hit = f"{100 * outcome.hit_share:.1f}"
    if result.best_hit_share:
        hit += f" of {100 * result.best_hit_share:.1f}"
    preempted = f"{outcome.preempted_swap + outcome.preempted_recompute}"
    return [
        f"{case.rate:g}" if case.rate else "trace",
        str(case.groups),
        str(case.block_size),
        case.policy,
        str(outcome.num_requests),
        f"{outcome.first_s['p50']:.3f}",
        f"{outcome.first_s['p99']:.2f}",
        f"{1e3 * outcome.gap_s['p50']:.1f}",
        f"{1e3 * outcome.gap_s['p99']:.1f}",
        f"{1e3 * outcome.normalized_s['mean']:.1f}",
        f"{100 * outcome.good_share:.1f}",
        f"{outcome.good_rate:.2f}",
        hit,
        preempted,
        f"{100 * outcome.tail_waste:.1f}",
        f"{outcome.mean_rows:.1f}",
        f"{result.cost_per_million:.2f}" if is_priced else "",
    ]


def as_json(settings: SimulateSettings, cluster: Cluster, results: list[Result]) -> dict[str, Any]:
    """Everything, assumptions too."""
    return {
        "settings": asdict(settings),
        "device": asdict(cluster.device),
        "reach": asdict(cluster.reach),
        "shape": asdict(cluster.shape) | {"build": cluster.shape.build.value},
        "runs": [
            {
                "rate": result.case.rate,
                "groups": result.case.groups,
                "block_size": result.case.block_size,
                "policy": result.case.policy,
                "num_slots": result.case.run.setup.num_slots,
                "num_controllers": result.case.run.num_controllers,
                "num_cut": result.case.num_cut,
                "best_hit_share": result.best_hit_share,
                "cost_per_million": result.cost_per_million,
                **result.outcome.as_json(),
            }
            for result in results
        ],
    }
