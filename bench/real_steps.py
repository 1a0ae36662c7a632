"""Steps of the real worker under the real engine in one process, and where their seconds go.

    result -> encode -> decode -> engine.handle -> plan -> encode -> decode -> executor -> result
              `--- wire ---'     `- controller -'         `--- wire ---'    `-- kernels, and the rest --'

One step after the other, none beside another: what ZeroMQ, two processes and the edge add is not here, nor what they
hide. A load of N sequences that decode at a given context is reached without computing their prompts: an echo answers
the engine until all decode, and the worker's rows are then set to what the engine believes, over KV that is zero. That
costs a step what any KV does.

Seconds are exclusive: a product inside of sampling is a product. The clocks take about half a microsecond a call. Where
steps are recorded and asked for as one launch, the parts are those of the same steps with their calls one by one, and
the step is as it serves.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from bench.core import PEER, Echo, plans_of
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Submit
from kilburn.controller.core.settings import EngineSettings
from kilburn.kernels.dispatch import Shapes, kernels_for
from kilburn.shared.codec import decode_from_controller, decode_from_worker, encode
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.shared.messages import Admit, FromController, Hello, StepPlan
from kilburn.shared.sampling import Sampling
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.models import layers
from kilburn.worker.models.weights import LoadedModel, load
from kilburn.worker.prepare import prepare
from kilburn.worker.rows import Limits
from kilburn.worker.start import executor_for

CPU = torch.device("cpu")
PRODUCTS, ATTENTION, OTHERS, SAMPLING = "products", "attention", "other kernels", "sampling"
REST, WIRE, CONTROLLER = "rest of the worker", "wire", "controller"
PARTS = (PRODUCTS, ATTENTION, OTHERS, SAMPLING, REST, WIRE, CONTROLLER)
KERNELS = {
    "paged_attention": ATTENTION,
    "sample": SAMPLING,
    "likeliest": SAMPLING,
    **dict.fromkeys(("rms_norm", "add_rms_norm", "silu_mul", "kv_write"), OTHERS),
}
GREEDY = Sampling(temperature=0.0)
PROMPT_CHUNK = 1 << 15  # positions of prompts that the echo answers at once


@dataclass
class Clock:
    """Seconds by part; a part within another is not counted there."""

    seconds: dict[str, float] = field(default_factory=dict)
    _parts: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._parts.append(name)
        try:
            yield
        finally:
            self._turn()
            self._parts.pop()

    def _turn(self) -> None:
        now = perf_counter()
        if self._parts:
            part = self._parts[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._turn()
            self._parts.append(name)
            try:
                return function(*arguments, **named)
            finally:
                self._turn()
                self._parts.pop()

        return call


class TimedKernels:
    """A set of kernels with a clock on each that a step runs."""

    def __init__(self, kernels: Any, clock: Clock) -> None:
        self._kernels = kernels
        for name, part in KERNELS.items():
            setattr(self, name, clock.timed(part, getattr(kernels, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


class Machine:
    """A model that is loaded once, and loads of sequences on it."""

    def __init__(self, model: str, threads: int, quantization: str = "none") -> None:
        torch.set_num_threads(threads)
        self.clock, self.folder = Clock(), prepare(model)
        for kind in (layers.PackedLinear, layers.PlainLinear):
            kind.__call__ = self.clock.timed(PRODUCTS, kind.__call__)  # type: ignore[method-assign]
        self.loaded: LoadedModel = load(self.folder, torch.float32, CPU, quantization=quantization)
        self.kernels = TimedKernels(kernels_for(CPU), self.clock)
        self._warmed: set[int] = set()  # block sizes

    def load(self, num_rows: int, context: int, num_steps: int, block_size: int) -> "Load":
        """So many sequences that decode from this context on, with a pool that holds them for so many steps."""
        load = self._place(num_rows, context + num_steps + 8, block_size)
        load.begin([context] * num_rows)
        load.pretend()
        return load

    def prompt(self, num_tokens: int, count: int) -> "Spent":
        """Steps that each compute a prompt of so many tokens, and nothing else."""
        load = self._place(1, num_tokens + 8, 16)
        return load.prompts(num_tokens, count)

    def _place(self, num_rows: int, length: int, block_size: int) -> "Load":
        """A worker with rows for so many sequences of this length, and its engine."""
        config = self.loaded.config
        if length > config.max_len:
            raise SystemExit(f"{length} tokens: the model's sequences have {config.max_len} at most")
        num_blocks = num_rows * (blocks_for(length, block_size) + 1)
        num_blocks += num_blocks // 50 + 4  # the margin that admission keeps
        layout = KVLayout(block_size, config.num_layers, config.num_kv_heads, config.head_dim, "float32")
        limits = Limits(
            max_rows=num_rows,
            max_step_tokens=max(num_rows, length),
            max_len=length,
            block_size=block_size,
            num_blocks=num_blocks,
            vocab_size=config.vocab_size,
        )
        if block_size not in self._warmed:
            sizes = (config.hidden, config.intermediate, config.num_heads, config.num_kv_heads, config.head_dim)
            self.kernels.warm_up(Shapes(*sizes, block_size, torch.float32, vocab=config.vocab_size))
            self._warmed.add(block_size)
        cache = KVCache(layout, num_blocks, 0, CPU, self.kernels)  # type: ignore[arg-type]
        executor = executor_for(self.loaded, cache, limits, self.kernels, CPU)  # type: ignore[arg-type]
        hello = Hello("bench", bytes(32), layout, num_blocks, 0, num_rows, PROMPT_CHUNK, length, config.vocab_size)
        return Load(self.clock, executor, hello)


class Load:
    """An engine and a worker that agree."""

    def __init__(self, clock: Clock, executor: Any, hello: Hello) -> None:
        self.clock, self.executor, self._max_len = clock, executor, hello.max_len
        self.engine, self.now = Engine(EngineSettings(max_waiting=hello.max_rows)), 0.0
        self.engine.handle([Arrived(PEER, hello)], self.now)
        self.plans: list[StepPlan] = []
        self._num_asked = 0

    def begin(self, lengths: list[int], num_outputs: int = 0) -> None:
        """Requests with prompts of these lengths; 0: as many outputs as there is room for."""
        submits = []
        for length in lengths:
            self._num_asked += 1
            prompt = [self._num_asked + 5, *[100] * (length - 1)]
            submits.append(Submit(self._num_asked, prompt, num_outputs or self._max_len - length, GREEDY))
        self.plans += plans_of(self.engine.handle(submits, self.now))
        self._num_rows = len(lengths)

    def pretend(self) -> None:
        """An echo answers until all decode; then the worker's rows are as the engine believes."""
        echo = Echo()
        while any(p.admits or len(p.rows) < self._num_rows or max(p.counts) > 1 for p in self.plans):
            self.plans += plans_of(self.engine.handle([Arrived(PEER, echo.run(self.plans.pop(0)))], self.now))
        grown: dict[int, int] = {}  # blocks that plans under way will tell the worker of
        for plan in self.plans:
            for at in plan.grown_at:
                grown[plan.rows[at]] = grown.get(plan.rows[at], 0) + 1
        home = self.engine.home(PEER)
        running = home.scheduler.line.running if home is not None else []
        for group in running:
            (sequence,) = group.live
            row, start, blocks = sequence.row, sequence.num_computed, sequence.own_table.blocks
            told = tuple(blocks[: len(blocks) - grown.get(row, 0)])
            newest = tuple(sequence.tokens[start:])
            self.executor.rows.admit(Admit(row, start, sequence.num_prompt, newest, (), told, sequence.sampling))

    def step(self) -> float:
        """Seconds of one step, from its plan to the next one's."""
        clock, plan = self.clock, self.plans.pop(0)
        began = perf_counter()
        with clock.part(REST):
            result = self.executor.run(plan)
        self.now += 1e-3
        with clock.part(WIRE):
            result = decode_from_worker(encode(result))
        with clock.part(CONTROLLER):
            effects = self.engine.handle([Arrived(PEER, result)], self.now)
            plans = plans_of(effects)
        with clock.part(WIRE):
            self.plans += [_plan(decode_from_controller(encode(new))) for new in plans]
        return perf_counter() - began

    def steps(self, count: int, num_warm: int = 3) -> "Spent":
        """Medians over so many steps that decode: half of them as they serve, half with their calls one by one."""
        return self._spent(self._clocked, count, num_warm)

    def prompts(self, num_tokens: int, count: int) -> "Spent":
        """Prompts one after the other, each in one step that also draws its only token: so many as they serve, and as
        many with their calls one by one; medians."""

        def prompt() -> tuple[float, dict[str, float]]:
            self.begin([num_tokens], num_outputs=1)
            return self._clocked()

        return self._spent(prompt, 2 * count, num_warm=1)

    def _spent(self, clocked: Callable[[], tuple[float, dict[str, float]]], count: int, num_warm: int) -> "Spent":
        half = max(count // 2, 1)
        for _ in range(num_warm):
            clocked()
        whole_s = statistics.median(clocked()[0] for _ in range(half))
        self.executor.runner.graphs = None  # a step that was recorded is one launch, whose parts no clock can see
        return replace(self._medians([clocked() for _ in range(half)]), step_s=whole_s)

    def _clocked(self) -> tuple[float, dict[str, float]]:
        self.clock.seconds.clear()
        return self.step(), dict(self.clock.seconds)

    def _medians(self, steps: list[tuple[float, dict[str, float]]]) -> "Spent":
        parts_s = {name: statistics.median(parts.get(name, 0.0) for _, parts in steps) for name in PARTS}
        return Spent(self._num_rows, statistics.median(step_s for step_s, _ in steps), parts_s)


@dataclass(frozen=True)
class Spent:
    """Seconds of a step as it serves, and of its parts, each a median: they need not add up to it."""

    num_rows: int
    step_s: float
    parts_s: dict[str, float]


def _plan(message: FromController) -> StepPlan:
    if not isinstance(message, StepPlan):
        raise TypeError(f"a {type(message).__name__} where a plan was encoded")
    return message
