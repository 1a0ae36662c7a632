"""What being watched costs: a scrape while so many sequences run, and what each token adds at the edge.

    python bench/metrics.py [--sequences 1000] [--scrapes 50] [--json out.json]

The engine is that of bench/core.py, in the middle of decoding; its snapshot, the whole text with and without vLLM's
names, and the edge's account of one token are timed in this process. Medians, in milliseconds and microseconds.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.core import PEER, WARM_STEPS, Echo, begin, plans_of
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived
from kilburn.controller.counts import Counts, Pace
from kilburn.controller.link import ControllerLink
from kilburn.controller.metrics import Metrics, Sources
from kilburn.controller.onlookers import Onlookers
from kilburn.controller.registry import RegistryCounters
from kilburn.controller.story import Chronicle
from kilburn.controller.streams import Streams
from kilburn.controller.text import Text

TOKENS = 200  # of each sequence, where one token's cost is measured


def decoding(num_sequences: int) -> Engine:
    """An engine whose sequences are all in the batch."""
    engine, plans = begin(num_sequences, WARM_STEPS)
    echo, num_warm = Echo(), 0
    while num_warm < WARM_STEPS:
        plan = plans.pop(0)
        num_warm += len(plan.rows) == num_sequences and max(plan.counts) == 1
        plans += plans_of(engine.handle([Arrived(PEER, echo.run(plan))], 0.0))
    return engine


def metrics_of(engine: Engine, vllm_names: bool) -> Metrics:
    chronicle, onlookers = Chronicle(lambda: 0.0), Onlookers()
    streams = Streams(lambda event: None, Text.detokenizer, chronicle, onlookers)  # type: ignore[arg-type]  # not asked
    link = ControllerLink("tcp://127.0.0.1:0", lambda events: None)
    sources = Sources(
        lambda: 0.0, engine.snapshot, lambda seen: True, lambda: 0.0, streams, link, RegistryCounters(), ()
    )
    return Metrics(sources, vllm_names)


def timed_ms(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        begun = perf_counter()
        work()
        taken.append((perf_counter() - begun) * 1e3)
    return statistics.median(taken)


def token_us(num_sequences: int) -> float:
    """The account of one token, of sequences that all go on in the same steps."""
    counts = Counts()
    paces = [Pace(counts, 1, TOKENS, 0.0) for _ in range(num_sequences)]
    begun = perf_counter()
    for step in range(TOKENS):
        now = 0.01 * step * (1.0 + step % 7)
        for pace in paces:
            pace.token(0, now)
    return (perf_counter() - begun) * 1e6 / (num_sequences * TOKENS)


async def measured(num_sequences: int, num_scrapes: int) -> dict[str, float]:
    engine = decoding(num_sequences)
    plain, both = metrics_of(engine, False), metrics_of(engine, True)
    return {
        "sequences": num_sequences,
        "snapshot_ms": timed_ms(engine.snapshot, num_scrapes),
        "scrape_ms": timed_ms(plain.text, num_scrapes),
        "scrape_with_vllm_names_ms": timed_ms(both.text, num_scrapes),
        "scrape_bytes": len(plain.text()),
        "token_us": token_us(num_sequences),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(words)
    if options.sequences < 1 or options.scrapes < 1:
        parser.error("--sequences and --scrapes must be at least 1")
    found = asyncio.run(measured(options.sequences, options.scrapes))
    table = Table("figure", "median")
    for name, value in found.items():
        table.add_row(name, f"{value:.3g}" if value < 1000 else f"{value:.0f}")
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
