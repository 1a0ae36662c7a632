"""Our core and vLLM's V1 scheduler on the same queues, in turn: `bench/core.py --against-vllm PYTHON`.

    decode    N sequences of 128 prompt tokens that all decode: the mean of 96 steps (six lives of a block of 16)
    mixed     2 N requests, prompts 16..512 and outputs 8..128 tokens, uniform, at most N run: the whole queue, from
              taking it in to the last token, by tokens drawn

Ours is plan, commit and encode, and beside it all that `handle` does; vLLM's is schedule and update_from_output, its
plan reaching no wire. Both name their blocks by SHA-256 and find prefixes; both may plan 2,048 positions a step.
Times are CPU time of the one thread that runs, in its own process each; the two take turns, round by round, and what
counts is the ratio within a round.
"""

import json
import random
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import thread_time
from typing import IO, Any, cast

from rich.console import Console
from rich.table import Table

from bench.core import BLOCK_SIZE, NUM_PROMPT, PEER, Echo, Timed, plans_of
from kilburn.controller.collector import rare_collections
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Submit
from kilburn.controller.core.settings import EngineSettings
from kilburn.shared.codec import encode
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.shared.messages import Hello
from kilburn.shared.sampling import Sampling

WARM_STEPS, TIMED_STEPS = 16, 96
MAX_STEP_TOKENS = 2048
BARS = {64: 3.5, 256: 8.0, 1024: 11.0}  # how many times as fast a decode step shall be


@dataclass(frozen=True)
class Queue:
    """Requests that come at once."""

    prompts: list[list[int]]
    num_outputs: list[int]
    max_rows: int
    most_steps: int = 1 << 30
    block_size: int = BLOCK_SIZE
    max_step_tokens: int = MAX_STEP_TOKENS


@dataclass(frozen=True)
class Step:
    rows: int
    positions: int
    drawn: int
    us: float
    all_us: float  # with what stands around plan and commit


@dataclass(frozen=True)
class Run:
    """What a queue took: `begin_us` to take it in, then its steps."""

    begin_us: float
    steps: list[Step]

    def of_decode(self, num_rows: int, is_all: bool = False) -> float:
        """Microseconds of a step in which all decode."""
        plain = [step for step in self.steps if step.rows == step.positions == step.drawn == num_rows][WARM_STEPS:]
        if len(plain) < TIMED_STEPS:
            raise SystemExit(f"{len(plain)} steps of {num_rows} decodes, expected {TIMED_STEPS}")
        return statistics.fmean(step.all_us if is_all else step.us for step in plain[:TIMED_STEPS])

    def of_token(self, is_all: bool = False) -> float:
        """Microseconds of the whole queue, by tokens drawn."""
        spent_us = sum(step.all_us if is_all else step.us for step in self.steps)
        return (self.begin_us + spent_us) / sum(step.drawn for step in self.steps)


def prompt_of(index: int, num_tokens: int) -> list[int]:
    """Prompts that have no block in common."""
    return [index % 30_000 + 5, *range(100, 99 + num_tokens)]


def decode_queue(num_rows: int) -> Queue:
    num_prefill = 3 * num_rows * NUM_PROMPT // (2 * MAX_STEP_TOKENS) + 4  # those that decode already go first
    num_steps = num_prefill + WARM_STEPS + TIMED_STEPS + 8
    return Queue([prompt_of(i, NUM_PROMPT) for i in range(num_rows)], [2 * num_steps] * num_rows, num_rows, num_steps)


def mixed_queue(num_rows: int, seed: int) -> Queue:
    dice = random.Random(seed)
    prompts = [prompt_of(i, dice.randint(16, 512)) for i in range(2 * num_rows)]
    return Queue(prompts, [dice.randint(8, 128) for _ in prompts], num_rows)


def run_ours(queue: Queue) -> Run:
    lengths = [len(p) + n for p, n in zip(queue.prompts, queue.num_outputs, strict=True)]
    hello = Hello(
        name="echo",
        model_digest=bytes(32),
        layout=KVLayout(queue.block_size, 2, 2, 64, "float32"),
        num_blocks=sum(blocks_for(length, queue.block_size) + 1 for length in lengths) + 16,
        num_host_blocks=0,
        max_rows=queue.max_rows,
        max_step_tokens=queue.max_step_tokens,
        max_len=max(lengths) + 1,
        vocab_size=50_000,
    )
    engine = Engine(EngineSettings(max_waiting=len(lengths)))
    engine.handle([Arrived(PEER, hello)], 0.0)
    (home,) = engine._homes.values()  # the parts of the engine are timed where they stand
    plan_clock, commit_clock = Timed(home.scheduler.plan, thread_time), Timed(home.scheduler.commit, thread_time)
    home.scheduler.plan, home.scheduler.commit = plan_clock, commit_clock  # type: ignore[method-assign, assignment]
    sampling, echo, now = Sampling(temperature=0.0, stop_ids=(2,)), Echo(), 0.0
    begun = thread_time()
    asked = zip(queue.prompts, queue.num_outputs, strict=True)
    plans = plans_of(engine.handle([Submit(i, p, n, sampling) for i, (p, n) in enumerate(asked)], now))
    frames = [encode(plan) for plan in plans]
    begin_us = (thread_time() - begun) * 1e6
    steps: list[Step] = []
    while plans and len(steps) < queue.most_steps:
        plan = plans.pop(0)
        result = echo.run(plan)
        now += 1e-3
        plan_clock.taken_us(), commit_clock.taken_us()
        begun = thread_time()
        effects = engine.handle([Arrived(PEER, result)], now)
        handled = thread_time()
        new = plans_of(effects)
        encoding = thread_time()
        frames = [encode(each) for each in new]
        ended = thread_time()
        encode_us = (ended - encoding) * 1e6 if frames else 0.0
        us = plan_clock.taken_us() + commit_clock.taken_us() + encode_us
        all_us = (handled - begun) * 1e6 + encode_us
        steps.append(Step(len(plan.rows), sum(plan.counts), len(result.tokens), us, all_us))
        plans += new
    return Run(begin_us, steps)


class Vllm:
    """vLLM's scheduler, in the Python that has it."""

    def __init__(self, python: str) -> None:
        command = [python, str(Path(__file__).with_name("peer_scheduler.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer(lambda said: said == "ready")

    def _answer(self, is_it: Any) -> Any:
        for line in cast(IO[str], self._process.stdout):
            try:
                said = json.loads(line)
            except json.JSONDecodeError:
                continue  # its own words
            if is_it(said):
                return said
        raise SystemExit(f"--against-vllm: ended with {self._process.wait()}; what it said is above")

    def run(self, queue: Queue) -> Run:
        print(json.dumps(asdict(queue)), file=cast(IO[str], self._process.stdin), flush=True)
        said = self._answer(lambda said: isinstance(said, dict))
        return Run(said["begin_us"], [Step(*step, step[-1]) for step in said["steps"]])

    def close(self) -> None:
        cast(IO[str], self._process.stdin).close()
        self._process.wait()


@dataclass
class Line:
    """One queue at one size: microseconds of each round."""

    queue: str
    num_rows: int
    vllm_us: list[float]
    ours_us: list[float]
    ours_all_us: list[float]

    @property
    def ratios(self) -> list[float]:
        return [theirs / ours for theirs, ours in zip(self.vllm_us, self.ours_us, strict=True)]

    @property
    def all_ratios(self) -> list[float]:
        return [theirs / ours for theirs, ours in zip(self.vllm_us, self.ours_all_us, strict=True)]


def compared(python: str, sizes: list[int], rounds: int, console: Console) -> Iterator[Line]:
    vllm = Vllm(python)
    try:
        for name in ("decode", "mixed"):
            for num_rows in sizes:
                line = Line(name, num_rows, [], [], [])
                for number in range(rounds):
                    queue = decode_queue(num_rows) if name == "decode" else mixed_queue(num_rows, number)
                    with console.status(f"{name}, {num_rows} sequences, round {number + 1} of {rounds}"):
                        theirs = vllm.run(queue)
                        with rare_collections():  # as a controller has them
                            ours = run_ours(queue)
                    if name == "decode":
                        line.vllm_us.append(theirs.of_decode(num_rows))
                        line.ours_us.append(ours.of_decode(num_rows))
                        line.ours_all_us.append(ours.of_decode(num_rows, is_all=True))
                    else:
                        line.vllm_us.append(theirs.of_token())
                        line.ours_us.append(ours.of_token())
                        line.ours_all_us.append(ours.of_token(is_all=True))
                yield line
    finally:
        vllm.close()


def against(python: str, sizes: list[int], rounds: int, file: Path | None) -> int:
    """Prints the table. 1 where a decode step is below its bar."""
    lines = []
    for line in compared(python, sizes, rounds, Console(stderr=True)):
        lines.append(line)
        print(
            f"{line.queue}, {line.num_rows} sequences: {statistics.median(line.ratios):.1f} times as fast", flush=True
        )
    heads = ("queue", "sequences", "vLLM µs", "ours µs", "ratio", "from", "to", "bar", "all of handle µs", "ratio")
    table = Table(*heads, title="CPU time: of a step (decode), of a token (mixed)")
    for line in lines:
        bar = BARS.get(line.num_rows, 0.0) if line.queue == "decode" else 0.0
        medians = [statistics.median(us) for us in (line.vllm_us, line.ours_us, line.ours_all_us)]
        times = [statistics.median(line.ratios), min(line.ratios), max(line.ratios)]
        table.add_row(
            *(line.queue, str(line.num_rows), f"{medians[0]:.1f}", f"{medians[1]:.1f}"),
            *(f"{ratio:.1f}" for ratio in times),
            *(f"{bar:g}" if bar else "", f"{medians[2]:.1f}", f"{statistics.median(line.all_ratios):.1f}"),
        )
    Console(width=110).print(table)
    for name, of in (("vLLM", "vllm_us"), ("ours", "ours_us")):
        grown = [
            f"{statistics.median(getattr(line, of)) / line.num_rows:.2f}" for line in lines if line.queue == "decode"
        ]
        print(f"decode, µs of a step by sequences: {name} {', '.join(grown)}")
    if file is not None:
        file.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    decodes = [line for line in lines if line.queue == "decode"]
    return int(any(statistics.median(line.ratios) < BARS.get(line.num_rows, 0.0) for line in decodes))
