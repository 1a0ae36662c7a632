"""What the core costs per step: microseconds of plan, commit and encode while 64, 256, 1,024 sequences decode.

    python bench/core.py [--sequences 64 256 1024] [--steps 200] [--json out.json]
    python bench/core.py --against-vllm VENV/bin/python      vLLM's own scheduler beside it: see core_against.py

The real engine is driven by a worker that answers at once with token 7; no socket, no clock. `handle` is all that the
engine does with a result: commit, plan and what stands around them. Figures are medians over steps. Machines differ,
and the same machine differs from minute to minute, so a fixed loop of plain Python is timed between the steps of the
same run: the last column, total over loop, is what can be compared.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from kilburn.controller.collector import rare_collections
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Send, Submit
from kilburn.controller.core.settings import EngineSettings
from kilburn.shared.codec import encode
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.shared.messages import Hello, StepPlan, StepResult
from kilburn.shared.sampling import Sampling

BLOCK_SIZE = 16
NUM_PROMPT = 128
WARM_STEPS = 40
PEER = b"echo.0"
TOKEN = 7


def calibration() -> float:
    """Microseconds of a loop that never changes: the yardstick of this machine at this moment."""
    begun = perf_counter()
    seen: dict[int, int] = {}
    total = 0
    for i in range(2000):
        seen[i & 255] = total
        total += seen.get(i & 127, 1) & 1023
    return (perf_counter() - begun) * 1e6


@dataclass(slots=True)
class Echo:
    """A worker without a model: every row that reaches the end of its known tokens draws TOKEN."""

    position: dict[int, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        for admit in plan.admits:
            self.position[admit.row], self.known[admit.row] = admit.start, admit.start + len(admit.tokens)
        num_tokens = []
        for row, count in zip(plan.rows, plan.counts, strict=True):
            self.position[row] += count
            draws = self.position[row] >= self.known[row]
            if draws:
                self.known[row] = self.position[row] + 1
            num_tokens.append(int(draws))
        return StepResult(plan.lease, plan.step, num_tokens, [TOKEN] * sum(num_tokens))


class Timed:
    """A function that remembers how long its calls took, in microseconds, since it was last asked."""

    def __init__(self, function: Any, clock: Callable[[], float] = perf_counter) -> None:
        self._function, self._clock, self._us = function, clock, 0.0

    def __call__(self, *arguments: Any) -> Any:
        begun = self._clock()
        try:
            return self._function(*arguments)
        finally:
            self._us += (self._clock() - begun) * 1e6

    def taken_us(self) -> float:
        taken, self._us = self._us, 0.0
        return taken


def begin(num_sequences: int, num_steps: int) -> tuple[Engine, list[StepPlan]]:
    """An engine with so many sequences, their prompts not yet computed, and its first plans."""
    max_tokens = 2 * num_steps + 2 * WARM_STEPS + NUM_PROMPT
    max_len = NUM_PROMPT + max_tokens
    hello = Hello(
        name="echo",
        model_digest=bytes(32),
        layout=KVLayout(BLOCK_SIZE, 2, 2, 64, "float32"),
        num_blocks=num_sequences * blocks_for(max_len, BLOCK_SIZE) + num_sequences,
        num_host_blocks=0,
        max_rows=num_sequences,
        max_step_tokens=max(num_sequences, 2048),
        max_len=max_len,
        vocab_size=50_000,
    )
    engine = Engine(EngineSettings(max_waiting=num_sequences))
    engine.handle([Arrived(PEER, hello)], 0.0)
    sampling = Sampling(temperature=0.0, stop_ids=(2,))
    submits = [
        Submit(i, [i % 30_000 + 5, *range(100, 99 + NUM_PROMPT)], max_tokens, sampling) for i in range(num_sequences)
    ]
    return engine, plans_of(engine.handle(submits, 0.0))


def plans_of(effects: Sequence[object]) -> list[StepPlan]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, StepPlan)]


def measure(num_sequences: int, num_steps: int, console: Console) -> dict[str, float]:
    """Medians per decode step, in microseconds, and the bytes of a plan and of its result."""
    engine, plans = begin(num_sequences, num_steps)
    echo, now = Echo(), 0.0
    (home,) = engine._homes.values()  # the parts of the engine are timed where they stand
    plan_clock, commit_clock = Timed(home.scheduler.plan), Timed(home.scheduler.commit)
    home.scheduler.plan, home.scheduler.commit = plan_clock, commit_clock  # type: ignore[method-assign, assignment]
    rows: list[dict[str, float]] = []
    num_warm = 0
    with console.status(f"prompts of {num_sequences} sequences"):
        while num_warm < WARM_STEPS:
            plan = plans.pop(0)
            num_warm += len(plan.rows) == num_sequences and max(plan.counts) == 1
            plans += plans_of(engine.handle([Arrived(PEER, echo.run(plan))], now))
    for _ in track(range(num_steps), f"{num_sequences} sequences", console=console, transient=True):
        result = echo.run(plans.pop(0))
        now += 1e-3
        plan_clock.taken_us(), commit_clock.taken_us()
        begun = perf_counter()
        effects = engine.handle([Arrived(PEER, result)], now)
        handled = perf_counter()
        (plan,) = plans_of(effects)
        frame = encode(plan)
        ended = perf_counter()
        rows.append(
            {
                "plan_us": plan_clock.taken_us(),
                "commit_us": commit_clock.taken_us(),
                "encode_us": (ended - handled) * 1e6,
                "handle_us": (handled - begun) * 1e6,
                "total_us": (ended - begun) * 1e6,
                "loop_us": calibration(),
                "plan_bytes": len(frame),
                "result_bytes": len(encode(result)),
            }
        )
        plans.append(plan)
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--against-vllm", metavar="PYTHON", help="a Python that has vllm.v1.core: compare with it")
    parser.add_argument("--rounds", type=int, default=5, help="of such a comparison")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(words)
    if options.steps < 1 or options.rounds < 1 or min(options.sequences) < 1:
        parser.error("--steps, --rounds and --sequences must be at least 1")
    if options.against_vllm:
        from bench.core_against import against  # which is built of this

        return against(options.against_vllm, options.sequences, options.rounds, options.json)
    console = Console(stderr=True)
    with rare_collections():  # as a controller has them
        found = {count: measure(count, options.steps, console) for count in options.sequences}
    heads = ("sequences", "plan", "commit", "encode", "handle", "total", "plan B", "result B", "loop", "total/loop")
    table = Table(*heads, title="µs per step")
    for count, row in found.items():
        times = [f"{row[name]:.0f}" for name in ("plan_us", "commit_us", "encode_us", "handle_us", "total_us")]
        sizes = [f"{row[name]:.0f}" for name in ("plan_bytes", "result_bytes", "loop_us")]
        table.add_row(str(count), *times, *sizes, f"{row['total_us'] / row['loop_us']:.2f}")
    Console(width=100).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
