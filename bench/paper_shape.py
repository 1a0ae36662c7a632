"""What a figure is: what was run, rows of numbers, panels to draw, and what there is to say about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.paper_data import ALPACA, SHAREGPT, Data, outcomes, poisson_run, sustained
from kilburn.controller.simulate.sizing import Run, Setup
from kilburn.controller.simulate.traces import Asked

Tell = Callable[[int], None]
MINUTE_S = 60.0
SUSTAINED_S = 0.25  # of mean normalized latency: beyond it a queue grows
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LATENCY = "mean normalized latency, s/token"


@dataclass(slots=True)
class Panel:
    """One drawing: lines (or bars) by name, over x."""

    title: str
    x_label: str
    y_label: str
    lines: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    kind: str = "lines"  # or "log x"; or "bars" (parts of one bar for each of `names`), "groups" (bars side by side)
    names: list[str] = field(default_factory=list)
    y_most: float = 0.0  # 0: as high as it needs

    def add(self, line: str, x: float, y: float) -> None:
        xs, ys = self.lines.setdefault(line, ([], []))
        xs.append(x)
        ys.append(y)

    def bar(self, part: str, height: float) -> None:
        """Of the next name."""
        self.lines.setdefault(part, ([], []))[1].append(height)


@dataclass(slots=True)
class Figure:
    name: str
    title: str
    setup: str
    heads: list[str]
    rows: list[list[str]]
    panels: list[Panel]
    notes: list[str] = field(default_factory=list)
    data: str = ""


def differs(ours: float, papers: float) -> str:
    """By how much ours is off, in percent of the paper's."""
    return f"{100 * (ours / papers - 1):+.0f} %" if papers else ""


def short(name: str) -> str:
    return {SHAREGPT: "ShareGPT", ALPACA: "Alpaca"}.get(name, name)


def swept(
    data: Data,
    tell: Tell,
    panel: Panel,
    made: dict[str, tuple[Setup, Sequence[Asked]]],
    rates: Sequence[float],
    seconds: float,
) -> dict[str, float]:
    """Latency over rates for each line, up to where its queue grows; returns the rate that each sustains."""
    panel.lines = {name: ([], []) for name in made}
    alive = list(made)
    for rate in rates:
        runs: list[Run] = [poisson_run(*made[name], rate, seconds) for name in alive]
        for name, one in zip(alive, outcomes(data, runs, tell), strict=True):
            panel.add(name, rate, one.normalized_s["mean"])
        alive = [name for name in alive if panel.lines[name][1][-1] <= 2 * SUSTAINED_S]
        if not alive:
            break
    panel.y_most = 2 * SUSTAINED_S
    return {name: sustained(*line, SUSTAINED_S) for name, line in panel.lines.items()}


def factor(best: float, rate: float) -> str:
    """How many times the rate is in the best, for a cell."""
    return f"{best / rate:.1f}"
