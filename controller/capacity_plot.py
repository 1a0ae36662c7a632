"""What simulations came to, as a drawing: a panel for each question, a line for each kind of cluster.

Across is what the runs differ in most: rates, else groups, else sizes of blocks, else policies. Whatever else they
differ in tells the lines apart.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from kilburn.controller.capacity import Result
from kilburn.shared.config import SettingsError

_INCHES = (4.6, 3.4)  # of a panel
_ACROSS = 3

# What a run may differ in, and how that is told.
_TRAITS: Mapping[str, Callable[[Result], str]] = {
    "requests a second": lambda result: f"{result.case.rate:g}" if result.case.rate else "trace",
    "worker groups": lambda result: str(result.case.groups),
    "block size": lambda result: str(result.case.block_size),
    "policy": lambda result: result.case.policy,
}
# A panel's title, and its value.
_PANELS: Mapping[str, Callable[[Result], float]] = {
    "to the first token, p50, s": lambda result: result.outcome.first_s["p50"],
    "to the first token, p99, s": lambda result: result.outcome.first_s["p99"],
    "between tokens, p99, ms": lambda result: 1e3 * result.outcome.gap_s["p99"],
    "mean latency a token, ms": lambda result: 1e3 * result.outcome.normalized_s["mean"],
    "within the objectives, %": lambda result: 100 * result.outcome.good_share,
    "of the pool in use, %": lambda result: 100 * result.outcome.pool["used"],
    "prompt tokens found, %": lambda result: 100 * result.outcome.hit_share,
    "cost of a million tokens": lambda result: result.cost_per_million,
}


def require_drawable(path: Path) -> None:
    """Before anything is simulated. Raises SettingsError."""
    if not os.access(path.parent, os.W_OK):
        raise SettingsError([f"--plot: {path.parent} is no folder that can be written to; give another path"])
    if find_spec("matplotlib") is None:
        raise SettingsError(["--plot: needs matplotlib; pip install 'kilburn[plots]', or leave --plot out"])


def draw(results: Sequence[Result], path: Path) -> None:
    """Into a file whose name's end says its form."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kilburn"  # the same drawing is the same file
    from matplotlib import pyplot

    across, lines = series(results)
    panels = {title: value for title, value in _PANELS.items() if any(value(result) for result in results)}
    width = min(len(panels), _ACROSS)
    height = -(-len(panels) // width)
    figure, grid = pyplot.subplots(height, width, figsize=(_INCHES[0] * width, _INCHES[1] * height), squeeze=False)
    for axes, (title, value) in zip(grid.flat, panels.items(), strict=False):
        for name, some in lines.items():
            axes.plot([_TRAITS[across](one) for one in some], [value(one) for one in some], marker="o", label=name)
        axes.set(title=title, xlabel=across)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    if len(lines) > 1:
        grid.flat[0].legend(fontsize=7, frameon=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    pyplot.close(figure)


def series(results: Sequence[Result]) -> tuple[str, dict[str, list[Result]]]:
    """(what lies across, the runs of each line by its name)."""
    varied = [trait for trait, of in _TRAITS.items() if len({of(result) for result in results}) > 1]
    across, *others = varied or ["requests a second"]
    lines: dict[str, list[Result]] = {}
    for result in results:
        name = ", ".join(f"{trait} {_TRAITS[trait](result)}" for trait in others)
        lines.setdefault(name, []).append(result)
    return across, lines
