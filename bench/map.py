"""What the block map costs the controller: a look, and the event made of it, for pools of some sizes in full use.

    python bench/map.py [--blocks 1000 10000 100000] [--sequences 256] [--steps 60] [--json out.json]

The real engine is driven by a worker that answers at once (bench/core.py); its pool is filled with cached prefixes and
decoding sequences. After each step a look is taken, as the feed takes some in a second, and the change since the last
one is made and written as JSON. Figures are medians over steps, in milliseconds of CPU and in bytes. The last column is
how often the feed would look: it spends a fixed share of the loop at most. Nobody looking costs nothing at all.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.core import PEER, Echo
from kilburn.controller.api.layout import to_json
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Send, Submit
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.page.feed import LEAST_INTERVAL_S, MOST_SHARE
from kilburn.controller.page.picture import Picture, Rates, Totals, change, whole
from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import Hello, StepPlan
from kilburn.shared.sampling import Sampling

BLOCK_SIZE = 16


class Load:
    """An engine whose pool is half decoding sequences and half what earlier ones left in the cache."""

    def __init__(self, num_blocks: int, num_sequences: int) -> None:
        self.engine, self.echo = Engine(EngineSettings(max_waiting=1_000_000)), Echo()
        self.plans: list[StepPlan] = []
        layout = KVLayout(BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
        per_sequence = max(num_blocks // 2 // num_sequences, 2) * BLOCK_SIZE
        self.now, self.num_requests, self.num_prompt = 0.0, 0, per_sequence - BLOCK_SIZE
        hello = Hello("echo", b"\1" * 32, layout, num_blocks, 0, num_sequences, 1 << 20, 1 << 20, 512, pid=1)
        self._handle(Arrived(PEER, hello))
        for last in (1, 1_000_000):  # those that end at once, and those that are looked at
            for i in range(num_sequences):
                self._submit(i, min(last, 10_000, num_blocks // 2 * BLOCK_SIZE))
            self._until_decoding(last == 1)

    def _submit(self, i: int, max_tokens: int) -> None:
        self.num_requests += 1
        prompt = [1 + (self.num_requests * 7 + j) % 500 for j in range(self.num_prompt)]
        self._handle(Submit(self.num_requests, prompt, max_tokens, Sampling(temperature=0.0)))

    def _handle(self, *events: Any) -> None:
        for effect in self.engine.handle(events, self.now):
            if isinstance(effect, Send) and isinstance(effect.message, StepPlan):
                self.plans.append(effect.message)

    def step(self) -> None:
        self.now += 0.01
        self._handle(Arrived(PEER, self.echo.run(self.plans.pop(0))))

    def _until_decoding(self, until_idle: bool) -> None:
        while self.plans and (until_idle or len(self.plans[-1].counts) == 0 or max(self.plans[-1].counts) > 1):
            self.step()

    def look(self) -> Picture:
        return Picture("bench", self.now, self.engine.block_map(), Totals(0, 0, 0), Rates(), ())


def spent_ms(act: Callable[[], Any]) -> tuple[float, Any]:
    begun = thread_time()
    made = act()
    return 1000 * (thread_time() - begun), made


def _change_text(before: Picture, picture: Picture, number: int) -> str:
    return to_json(change(before, picture, number))


def _whole_text(picture: Picture, number: int) -> str:
    return to_json(whole(picture, number))


def measured(num_blocks: int, num_sequences: int, steps: int) -> dict[str, float]:
    load = Load(num_blocks, num_sequences)
    before, figures = load.look(), []
    for number in range(steps):
        for _ in range(16):  # so that every sequence grows a block between two looks
            load.step()
        look_ms, picture = spent_ms(load.look)
        change_ms, event = spent_ms(partial(_change_text, before, picture, number))
        whole_ms, full = spent_ms(partial(_whole_text, picture, number))
        figures.append((look_ms, change_ms, len(event), whole_ms, len(full)))
        before = picture
    look_ms, change_ms, event_bytes, whole_ms, whole_bytes = (
        statistics.median(row) for row in zip(*figures, strict=True)
    )
    group = before.map.snapshot.groups[0]
    return {
        "blocks": num_blocks,
        "owned": group.owned_blocks,
        "cached": group.cached_blocks,
        "look_ms": look_ms,
        "change_ms": change_ms,
        "change_bytes": event_bytes,
        "whole_ms": whole_ms,
        "whole_bytes": whole_bytes,
        "looks_per_s": 1 / max(LEAST_INTERVAL_S, (look_ms + change_ms) / 1000 / MOST_SHARE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measured(blocks, min(options.sequences, blocks // 8), options.steps) for blocks in options.blocks]
    table = Table(
        "blocks", "owned", "cached", "look ms", "change ms", "change kB", "whole ms", "whole kB", "looks/s", box=None
    )
    for row in rows:
        table.add_row(
            *(f"{row[name]:,}" for name in ("blocks", "owned", "cached")),
            f"{row['look_ms']:.2f}",
            f"{row['change_ms']:.2f}",
            f"{row['change_bytes'] / 1000:.1f}",
            f"{row['whole_ms']:.2f}",
            f"{row['whole_bytes'] / 1000:.1f}",
            f"{row['looks_per_s']:.1f}",
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
