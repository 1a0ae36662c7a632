"""Figures as SVG, by matplotlib: panels side by side, one legend below where all of them have the same lines.

Text stays text, so that a file is small, sharp and can be searched. Marks differ as well as colours.
"""

from pathlib import Path
from typing import Any

COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#6b46c1", "#718096", "#b83280", "#319795", "#975a16")
MARKS = "osD^vP*X"
PARTS = ("#2b6cb0", "#90cdf4", "#f6ad55", "#e2e8f0", "#a0aec0", "#d53f8c", "#805ad5")
ACROSS = 3
MOST_UPRIGHT = 6  # bars with names
FEW = 4  # places on an axis, each of which has its number
STYLE = {
    "svg.hashsalt": "kilburn",  # the same drawing is the same file
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#a0aec0",
    "axes.axisbelow": True,
    "xtick.color": "#4a5568",
    "ytick.color": "#4a5568",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def draw(panels: list[dict[str, Any]], path: Path) -> None:
    """The ending of `path` says the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(len(panels), ACROSS)
    down = -(-len(panels) // across)
    with matplotlib.rc_context(STYLE):
        size = (4.4 * across if across > 1 else 6.4, 3.3 * down + 0.3)
        figure, grid = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        for axes, panel in zip(grid.flat, panels, strict=False):
            axes.set_title(panel["title"])
            axes.set_ylabel(panel["y_label"])
            axes.grid(axis="y" if panel["names"] else "both", color="#e2e8f0", linewidth=0.7)
            _BY_KIND.get(panel["kind"], _lines)(axes, panel)
        for axes in list(grid.flat)[len(panels) :]:
            axes.axis("off")
        _legends(figure, list(grid.flat)[: len(panels)], [list(panel["lines"]) for panel in panels])
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
        pyplot.close(figure)


def _legends(figure: Any, every: list[Any], names: list[list[str]]) -> None:
    """One for all, or one each where their lines differ; none where there is nothing to tell apart."""
    if len(names[0]) > 1 and all(some == names[0] for some in names):
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5 if len(every) > 1 else 4))
        return
    for axes, some in zip(every, names, strict=True):
        if len(some) > 1:
            axes.legend()


def _lines(axes: Any, panel: dict[str, Any]) -> None:
    for at, (name, (xs, ys)) in enumerate(panel["lines"].items()):
        way = {"color": COLOURS[at % len(COLOURS)], "marker": MARKS[at % len(MARKS)], "label": name}
        axes.plot(xs, ys, markersize=4, linewidth=1.5, clip_on=True, **way)
    every = sorted({x for xs, _ in panel["lines"].values() for x in xs})
    if len(every) <= FEW:
        axes.set_xticks(every, [f"{x:g}" for x in every])
    if panel["kind"] == "log x":
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [f"{x:g}" for x in every])
        axes.minorticks_off()
    axes.set_ylim(0, panel["y_most"] or None)
    axes.set_xlabel(panel["x_label"])


def _bars(axes: Any, panel: dict[str, Any]) -> None:
    """Parts of one bar, one on the other."""
    names, below = panel["names"], [0.0] * len(panel["names"])
    for (name, (_, heights)), colour in zip(panel["lines"].items(), PARTS, strict=False):
        bars = axes.bar(names, heights, bottom=below, label=name, color=colour, width=0.6)
        if colour == PARTS[0]:
            axes.bar_label(bars, [f"{h:.1f}" for h in heights], label_type="center", color="white", fontsize=8)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    _named(axes, names)


def _groups(axes: Any, panel: dict[str, Any]) -> None:
    """Bars side by side, each with its number; many of them lie, over a scale of powers of ten."""
    names, num = panel["names"], len(panel["lines"])
    wide, lie = 0.8 / num, len(names) > MOST_UPRIGHT
    for at, (name, (_, heights)) in enumerate(panel["lines"].items()):
        places = [i + (at - (num - 1) / 2) * wide for i in range(len(heights))]
        draw_bars = axes.barh if lie else axes.bar
        bars = draw_bars(places, heights, wide * 0.92, label=name, color=COLOURS[at])
        axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=6.5, color="#4a5568", padding=1)
    if not lie:
        axes.set_xticks(range(len(names)), names)
        _named(axes, names)
        return
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(panel["y_label"])
    axes.set_ylabel("")


def _named(axes: Any, names: list[str]) -> None:
    """Names of bars in lines short enough to stand beside each other."""
    broken = [name.replace(" (", "\n(").replace(", ", ",\n") for name in names]
    axes.set_xticks(range(len(names)), broken, fontsize=8)


_BY_KIND = {"bars": _bars, "groups": _groups}
