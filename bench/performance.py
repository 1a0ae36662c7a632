"""Writes what benches measured into docs/PERFORMANCE.md, between its marks, and draws its pictures.

    python bench/performance.py --peers f.json --core c.json --step t.json --scale s.json

Each file is what the bench of that name wrote with `--json`; it is kept as docs/performance/NAME.json, from which the
page can be made again (`python bench/performance.py`). `--quality` takes a text: what `weights_int8.py` and
`kv_dtype.py` printed. A part whose file is not there stays as it is.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

ROOT = Path(__file__).parents[1]
PAGE, KEPT = ROOT / "docs/PERFORMANCE.md", ROOT / "docs/performance"


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def peers(made: dict[str, Any]) -> str:
    from bench.peers import HEADS, WORKLOADS, Turn, rows_of

    read = statistics.median(one["read_bytes_per_s"] for one in made["limits"]) / 1e9
    flops = statistics.median(one["flops_per_s"] for one in made["limits"]) / 1e9
    text = f"Of the machine, in the same runs: read {read:.1f} GB/s, products {flops:.0f} GFLOP/s.\n"
    for name, sides in made["turns"].items():
        load = WORKLOADS[name]
        turns = {side: [Turn(**turn) for turn in own] for side, own in sides.items()}
        num_rounds = len(next(iter(turns.values())))
        text += f"\n**{name}**, {load.num_requests} at once, rounds: {num_rounds}\n\n"
        text += markdown(HEADS, rows_of(turns, made["floors_s"][name]))
    if made["peak_mb"]:
        text += "\n" + markdown(("side", "peak memory MB"), [(s, f"{mb:.0f}") for s, mb in made["peak_mb"].items()])
    return text


def core(made: list[dict[str, Any]]) -> str:
    from bench.core_against import BARS, Line

    rows = []
    for line in (Line(**one) for one in made):
        bar = BARS.get(line.num_rows) if line.queue == "decode" else None
        vllm_us, ours_us, all_us = (statistics.median(us) for us in (line.vllm_us, line.ours_us, line.ours_all_us))
        ratios = line.ratios
        rows.append(
            [line.queue, str(line.num_rows), f"{vllm_us:,.1f}", f"{ours_us:,.1f}", f"{statistics.median(ratios):.1f}",
             f"{min(ratios):.1f} to {max(ratios):.1f}", f"{bar:g}" if bar else "", f"{all_us:,.1f}",
             f"{statistics.median(line.all_ratios):.1f}"]
        )  # fmt: skip
    heads = ("queue", "sequences", "vLLM µs", "ours µs", "times as fast", "over rounds", "bar", "all of `handle` µs")
    return markdown((*heads, "times as fast"), rows)


def step(made: list[dict[str, Any]]) -> str:
    from bench.real_steps import PARTS, Spent
    from bench.step import outside, picture

    found = [Spent(**one) for one in made]
    picture(found, KEPT / "step.svg")
    rows = [
        [str(s.num_rows), f"{1e3 * s.step_s:.1f}", *(f"{1e3 * s.parts_s[part]:.2f}" for part in PARTS),
         f"{100 * outside(s):.1f} %"]
        for s in found
    ]  # fmt: skip
    heads = ("rows", "step ms", *PARTS, "outside kernels")
    return "![how a step spends its time](performance/step.svg)\n\n" + markdown(heads, rows)


def scale(made: dict[str, Any]) -> str:
    from bench.paper_plots import draw
    from bench.scale import Fit, Point, panels_of, power_of

    found = {name: [Point(**one) for one in points] for name, points in made["points"].items()}
    draw(panels_of(found), KEPT / "scale.svg")
    requests = found["requests"]
    power = power_of([p.x for p in requests], [p.controller_s for p in requests])
    rows = [[str(p.x), f"{p.x / p.step_s:.1f}", f"{100 * p.controller_s / p.step_s:.2f} %"] for p in requests]
    text = "![scale in work](performance/scale.svg)\n\n"
    text += markdown(("requests", "tokens/s", "controller, of a step"), rows) + "\n"
    text += "".join(f"* {Fit(**fit)}\n" for fit in made["fits"])
    return text + f"* controller: grows as rows^{power:.2f}\n"


def quality(said: str) -> str:
    return f"```\n{said.strip()}\n```\n"


PARTS_OF_PAGE: dict[str, Callable[[Any], str]] = {
    "peers": peers,
    "core": core,
    "step": step,
    "scale": scale,
    "quality": quality,
}


def written(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- measured: {name} -->\n", f"<!-- end: {name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{PAGE.name}: no marks {begin.strip()} and {end}")
    return f"{before}{begin}{text}{end}{after}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PARTS_OF_PAGE:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    given = vars(parser.parse_args(words))
    KEPT.mkdir(exist_ok=True)
    page = PAGE.read_text()
    for name, part in PARTS_OF_PAGE.items():
        file, kept = given[name.replace("-", "_")], KEPT / (f"{name}.txt" if part is quality else f"{name}.json")
        if file is not None:
            kept.write_text(file.read_text())
        if kept.exists():
            made = kept.read_text()
            page = written(page, name, part(made if part is quality else json.loads(made)))
            print(f"{name}: written")
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
