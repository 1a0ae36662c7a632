"""The real system: the bundled model on this machine's CPU, in a pool made small enough to be the bottleneck.

The engine and the worker's executor are those that serve, in one process. Every step is computed and timed; requests
come on a clock that adds those times up. Left out is the time between steps (the engine's own, and the wire's).
Baselines are the gates of the simulation, before the same engine and kernels. `static batches` is transformers'
generate on left-padded batches of as many requests as the pool holds at the longest length, a batch at a time.

One core computes, and a step's seconds are those of the processor: whatever else the machine does lengthens none of
them by much. All systems get the same requests, one system after the other, and that again: what drifts meets all.

The calibration fits a step's five prices to one load's measured steps, and simulates other loads with them; what comes
out is compared with what those loads really took.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import process_time
from typing import Any

from bench.paper_data import POLICIES, SHAREGPT, Data
from bench.paper_figures import Figure, Panel, Tell, differs
from kilburn.controller.simulate.cluster import Cluster, Worker
from kilburn.controller.simulate.demand import poisson, submits
from kilburn.controller.simulate.outcome import Outcome, outcome_of
from kilburn.controller.simulate.record import Record, spread
from kilburn.controller.simulate.roofline import Linear, Load
from kilburn.controller.simulate.sizing import Run, Setup, Tally, run_all
from kilburn.controller.simulate.traces import Asked
from kilburn.shared.messages import StepPlan

NUM_SLOTS, MAX_LEN, MAX_ROWS = 2048, 256, 64
SHORTER = 4  # lengths of the sample are divided by this, so that a small model on a CPU gets through
OFF = 0.15  # what a simulated load may be off
STATIC = "static"
FEATURES = ("fixed_s", "row_s", "cell_s", "token_s", "pair_s")


@dataclass(slots=True)
class Measured:
    """Steps of one load: what each held, and how long it took."""

    loads: list[Load] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class RealWorker(Worker):
    """A worker whose steps are computed by a model, and take as long as they take."""

    def __init__(self, executor: Any, setup: Setup, lease_of: Callable[[], int]) -> None:
        super().__init__(b"group-0", setup.hello(0), Linear(), 0)
        self._executor, self._vocab_size, self.measured = executor, setup.vocab_size, Measured()
        executor.clear()

    def work(self, plan: StepPlan, now: float) -> tuple[float, float]:
        _, load = self.rows.run(plan)
        # Tokens of simulated prompts stand for any; here they must be some that the model has.
        admits = [replace(one, tokens=tuple(token % self._vocab_size for token in one.tokens)) for one in plan.admits]
        begun = process_time()
        result = self._executor.run(replace(plan, admits=admits))
        seconds = process_time() - begun
        result.timings = replace(result.timings, idle_s=0.0)
        self.measured.loads.append(load)
        self.measured.seconds.append(seconds)
        begun_s = max(now, self.under.ready_s[-1]) if self.under.ready_s else now
        self.under.ready_s.append(begun_s + seconds)
        self.under.results.append(result)
        return self.under.ready_s[-1], seconds


def fitted(measured: Measured) -> Linear:
    """The prices, none below 0, that explain the steps best, every step counting by the inverse of its seconds."""
    import numpy as np

    rows = np.array([features(load) for load in measured.loads if load.num_tokens])
    seconds = np.array([s for s, load in zip(measured.seconds, measured.loads, strict=True) if load.num_tokens])
    used = list(range(rows.shape[1]))
    while True:
        weighted = rows[:, used] / seconds[:, None]
        scale = np.maximum(np.abs(weighted).max(axis=0), 1e-30)
        prices = np.linalg.lstsq(weighted / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (prices >= 0).all() or len(used) == 1:
            break
        used.pop(int(np.argmin(prices * scale)))
    found = dict.fromkeys(FEATURES, 0.0) | {FEATURES[i]: float(price) for i, price in zip(used, prices, strict=True)}
    return Linear(**found)


def features(load: Load) -> tuple[float, ...]:
    """What each price is paid for."""
    return (1.0, load.num_rows, load.num_cells, load.num_chunk_tokens, load.num_pairs)


def make_ready() -> tuple[Any, Any]:
    """(the worker's ready parts, its folder)."""
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"  # before anybody reads them
    from kilburn.controller.prepared import prepared_folder
    from kilburn.shared.config import WorkerSettings
    from kilburn.shared.model_files import BUNDLED_NAME
    from kilburn.worker.start import make_ready

    folder = prepared_folder(BUNDLED_NAME, "")
    blocks = MAX_ROWS * -(-MAX_LEN // 16) * 101 // 100 + MAX_ROWS + 8
    settings = WorkerSettings(
        str(folder), name="paper", num_blocks=blocks, max_rows=MAX_ROWS, max_len=MAX_LEN, threads=1
    )
    return make_ready(settings), folder


def lengths_of(data: Data) -> list[Asked]:
    found = []
    for one in data.lengths(SHAREGPT):
        num_output = min(max(one.num_output // SHORTER, 2), MAX_LEN // 2)
        found.append(Asked(None, min(max(one.num_prompt // SHORTER, 2), MAX_LEN - num_output), num_output))
    return found


def run_real(ready: Any, setup: Setup, asked: Sequence[Asked], tell: Tell) -> tuple[Outcome, Measured]:
    worker, record, tally = RealWorker(ready.executor, setup, lambda: 1), Record(), Tally()
    cluster = Cluster(setup.engine_settings(), [worker], setup.gate(), record, sample_s=0.5, steps_each=True)
    coming = submits(asked, setup.decoding)
    cluster.run(coming)
    tell(len(asked))
    tally.add(cluster.snapshot())
    tally.num_steps, tally.num_sequence_steps = cluster.num_steps, cluster.num_sequence_steps
    return outcome_of(record, tally), worker.measured


def run_static(model: Any, asked: Sequence[Asked], vocab_size: int, tell: Tell) -> tuple[float, list[float]]:
    """(seconds until the last answer, normalized latencies) of transformers on padded batches."""
    import torch

    rng, now, at, latencies = random.Random(1), 0.0, 0, list[float]()
    while at < len(asked):
        now = max(now, asked[at].at_s or 0.0)
        here = [one for one in asked[at : at + NUM_SLOTS // MAX_LEN] if (one.at_s or 0.0) <= now]
        width, longest = max(one.num_prompt for one in here), max(one.num_output for one in here)
        ids = torch.tensor([[rng.randrange(16, vocab_size) for _ in range(width)] for _ in here])
        mask = torch.tensor([[0] * (width - one.num_prompt) + [1] * one.num_prompt for one in here])
        begun = process_time()
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=longest, min_new_tokens=longest)
        now += process_time() - begun
        latencies += [(now - (one.at_s or 0.0)) / one.num_output for one in here]
        at += len(here)
        tell(len(here))
    return now, latencies


def setup_of(ready: Any, policy: str) -> Setup:
    hello = ready.hello
    return Setup(
        hello.layout, Linear(), NUM_SLOTS // hello.layout.block_size, max_rows=MAX_ROWS, max_step_tokens=256,
        max_len=MAX_LEN, vocab_size=hello.vocab_size, policy=policy,
    )  # fmt: skip


@dataclass(slots=True)
class Contest:
    """What came of each system in each round, over the same requests."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # until all were answered
    latency_s: dict[str, list[float]] = field(default_factory=dict)  # mean normalized
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # of the last round; none of transformers
    again: dict[str, float] = field(default_factory=dict)  # positions computed more than once, of all answers'

    def hear(self, name: str, seconds: float, latency_s: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)
        self.latency_s.setdefault(name, []).append(latency_s)

    def times_paged(self, name: str) -> float:
        """How many times as long as paged in the same round: the median."""
        pairs = zip(self.seconds[name], self.seconds["paged"], strict=True)
        return median(theirs / ours for theirs, ours in pairs)


def contest(ready: Any, model: Any, asked: Sequence[Asked], num_rounds: int, tell: Tell) -> Contest:
    found, needed = Contest(), sum(one.num_prompt + one.num_output - 1 for one in asked)
    for _ in range(num_rounds):
        for policy in POLICIES:
            one, measured = run_real(ready, setup_of(ready, policy), asked, tell)
            found.hear(policy, one.seconds, one.normalized_s["mean"])
            found.outcomes[policy] = one
            found.again[policy] = sum(load.num_tokens for load in measured.loads) / needed - 1
        seconds, latencies = run_static(model, asked, ready.hello.vocab_size, tell)
        found.hear(STATIC, seconds, spread(latencies)["mean"])
    return found


def figure_real(data: Data, tell: Tell) -> Figure:
    """All that come together: throughput is what memory allows. And as they come: what it is worth to who waits."""
    from transformers import AutoModelForCausalLM

    ready, folder = make_ready()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    num_requests, num_rounds = max(int(48 * data.share), 12), max(round(2 * data.share), 1)
    together = [replace(one, at_s=0.0) for one in random.Random(2).sample(lengths_of(data), num_requests)]
    run_real(ready, setup_of(ready, "paged"), together[:4], lambda _: None)  # whatever is slow the first time
    full = contest(ready, model, together, num_rounds, tell)
    rate = 0.7 * num_requests / median(full.seconds["paged"])
    rng, at_s, paced = random.Random(4), 0.0, []
    for one in together:
        paced.append(replace(one, at_s=at_s))
        at_s += rng.expovariate(rate)
    calm = contest(ready, model, paced, 1, tell)
    tokens = sum(one.num_output for one in together)
    rows, speeds, waits = [], Panel("all at once", "", "generated tokens a second", kind="bars"), Panel(
        f"{rate:.2f} requests/s", "", "mean normalized latency, s/token", kind="bars")  # fmt: skip
    for name, title in (POLICIES | {STATIC: "transformers, static batches"}).items():
        speed, one = tokens / median(full.seconds[name]), full.outcomes.get(name)
        told = [f"{NUM_SLOTS // MAX_LEN} at most", "", "", ""]
        if one is not None:
            told = [f"{one.mean_rows:.1f}", f"{100 * one.pool['used']:.0f}", f"{100 * one.tail_waste:.1f}",
                    f"{100 * full.again[name]:.0f}"]  # fmt: skip
        rows.append([title, f"{speed:.1f}", f"{full.times_paged(name):.2f}", *told,
                     f"{1e3 * median(calm.latency_s[name]):.0f}"])  # fmt: skip
        for panel, value in ((speeds, speed), (waits, median(calm.latency_s[name]))):
            panel.names.append(title.replace(", ", ",\n").replace(" (", "\n("))
            panel.lines.setdefault("", ([], []))[1].append(value)
    heads = ["system", "generated tokens/s", "times as long as paged", "rows a step", "pool used %",
             "waste of allocated %", "computed beyond need %", f"at {rate:.2f} requests/s: ms/token"]  # fmt: skip
    notes = [
        "A quarter of ShareGPT's lengths. On a core a row's own products are most of a step, and what a larger batch "
        "saves is reading the weights once for more rows: so ratios are smaller than where a row costs almost nothing.",
        "Computed beyond need: padding of batches, and prompts of the preempted that are computed again.",
    ]
    setup = f"{num_requests} requests, the bundled model (135M) in float32 on one core, a pool of {NUM_SLOTS} slots, "
    setup += f"sequences of {MAX_LEN} at most; seconds of the processor, systems in turn, the median of {num_rounds}"
    return Figure("figure-real", "On the real system", setup, heads, rows, [speeds, waits], notes, SHAREGPT)


def simulated(setup: Setup, prices: Linear, asked: Sequence[Asked]) -> Outcome:
    """What a load comes to where steps take what they were found to cost."""
    ((record, tally),) = run_all([Run(replace(setup, machine=prices), asked)])
    return outcome_of(record, tally)


def figure_calibration(data: Data, tell: Tell) -> Figure:
    """Simulated against real: prices fitted to one load, tried on others."""
    ready, _ = make_ready()
    lengths, num = lengths_of(data), max(int(60 * data.share), 16)
    setup = setup_of(ready, "paged")
    together = [replace(one, at_s=0.0) for one in random.Random(3).sample(lengths, num)]
    _, measured = run_real(ready, setup, together, tell)
    rate = num / sum(measured.seconds)
    # Not just what it can: there a step that is a little slower makes a line that does not end.
    paces = {"half of what it can": 0.5, "four fifths": 0.8, "twice as much": 2.0}
    loads = {name: poisson(lengths, rate * pace, num / (rate * pace), seed=5) for name, pace in paces.items()}
    real = {name: run_real(ready, setup, asked, tell)[0] for name, asked in loads.items()}
    _, after = run_real(ready, setup, together, tell)  # the same load again: what drifts meets both
    prices = fitted(Measured(measured.loads + after.loads, measured.seconds + after.seconds))
    panel, rows, worst = Panel("", "", "simulated / real", kind="bars"), [], 0.0
    for name, asked in loads.items():
        found, truth = simulated(setup, prices, asked), real[name]
        for what, theirs, ours in (
            ("seconds until all are answered", truth.seconds, found.seconds),
            ("mean latency, ms/token", 1e3 * truth.normalized_s["mean"], 1e3 * found.normalized_s["mean"]),
            ("mean to the first token, s", truth.first_s["mean"], found.first_s["mean"]),
        ):
            rows.append([name, what, f"{theirs:.2f}", f"{ours:.2f}", differs(ours, theirs)])
        ratio = found.normalized_s["mean"] / truth.normalized_s["mean"]
        worst = max(worst, abs(ratio - 1), abs(found.seconds / truth.seconds - 1))
        panel.names.append(name)
        panel.lines.setdefault("normalized latency", ([], []))[1].append(ratio)
    told = ", ".join(f"{name} {1e6 * getattr(prices, name):.3g} us" for name in FEATURES)
    heads = ["load", "what", "real", "simulated", "off"]
    setup_told = f"the bundled model on one core, by the processor's seconds; prices fitted to one load ({told})"
    verdict = "within" if worst <= OFF else "NOT within"
    notes = [f"Seconds and latency are {100 * worst:.0f} % off at most, {verdict} the {100 * OFF:.0f} % to be held."]
    return Figure("figure-calibration", "Simulated against real", setup_told, heads, rows, [panel], notes, SHAREGPT)


REAL: dict[str, Callable[[Data, Tell], Figure]] = {"real": figure_real, "calibration": figure_calibration}
