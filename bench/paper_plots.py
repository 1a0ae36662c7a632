"""Figures as SVG, by matplotlib: a panel for each drawing, side by side."""

from pathlib import Path
from typing import Any

COLOURS = ("#2b6cb0", "#dd6b20", "#38a169", "#805ad5", "#718096", "#d53f8c", "#319795")
PARTS = ("#2b6cb0", "#90cdf4", "#f6ad55", "#e2e8f0", "#a0aec0", "#d53f8c", "#805ad5")
ACROSS = 3


def draw(panels: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kilburn"  # the same drawing is the same file
    from matplotlib import pyplot

    across = min(len(panels), ACROSS)
    down = -(-len(panels) // across)
    figure, grid = pyplot.subplots(down, across, figsize=(4.6 * across, 3.4 * down), squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        (_bars if panel["kind"] == "bars" else _lines)(axes, panel)
        axes.set_title(panel["title"], fontsize=10)
        axes.set_ylabel(panel["y_label"], fontsize=9)
    for axes in list(grid.flat)[len(panels) :]:
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _lines(axes: Any, panel: dict[str, Any]) -> None:
    for (name, (xs, ys)), colour in zip(panel["lines"].items(), COLOURS, strict=False):
        axes.plot(xs, ys, marker="o", markersize=3, linewidth=1.4, label=name, color=colour)
    if panel["kind"] == "log x":
        axes.set_xscale("log", base=2)
    if panel["y_most"]:
        axes.set_ylim(0, panel["y_most"])
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(panel["x_label"], fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, frameon=False)


def _bars(axes: Any, panel: dict[str, Any]) -> None:
    names, below = panel["names"], [0.0] * len(panel["names"])
    for (name, (_, heights)), colour in zip(panel["lines"].items(), PARTS, strict=False):
        axes.bar(names, heights, bottom=below, label=name, color=colour, width=0.6)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.tick_params(axis="x", labelsize=7)
    if len(panel["lines"]) > 1:
        axes.legend(fontsize=7, frameon=False, ncols=2)
