"""`kilburn simulate`: from settings to runs of a cluster that does not exist, and their outcomes.

    model, device  --> shape, machine, pool         the ledger and the rule for pools are the worker's own
    trace, rates   --> requests                     a trace without times is a distribution of lengths
    every combination of rates, groups, block sizes and policies is a run

`kilburn tune block-size` is the same over block sizes, and a recommendation. What is printed is in capacity_shown.py.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from kilburn.controller.core.policy import Preemption
from kilburn.controller.plan import files_of
from kilburn.controller.simulate.demand import Decoding, best_hit_share, cut, poisson, replayed, superposed
from kilburn.controller.simulate.devices import Device, DeviceError, Reach, device_named, measured
from kilburn.controller.simulate.outcome import Outcome, outcome_of
from kilburn.controller.simulate.record import Objectives
from kilburn.controller.simulate.roofline import KNOWN_MODELS, Roofline, known_shape
from kilburn.controller.simulate.saturated import draw_lengths
from kilburn.controller.simulate.servegen import draw_requests, read_clients
from kilburn.controller.simulate.sizing import GROUPS_EACH, Run, Setup, run_all
from kilburn.controller.simulate.traces import Asked, TraceError, read_trace
from kilburn.shared import ledger, pool_size
from kilburn.shared.config import PlanSettings, SettingsError, SimulateSettings
from kilburn.shared.kinds import Share
from kilburn.shared.model_shape import ModelShape, read_shape

NUM_LENGTHS = 10_000  # drawn where there is no trace
SIGMA = 1.0  # of the logarithm of drawn lengths: conversations are about as uneven


@dataclass(frozen=True, slots=True)
class Case:
    """One run, and what tells it from the others."""

    rate: float  # requests a second; 0: the trace's own times
    groups: int
    block_size: int
    policy: str
    run: Run
    num_cut: int  # requests that were longer than the model


@dataclass(frozen=True, slots=True)
class Result:
    case: Case
    outcome: Outcome
    best_hit_share: float  # of prompt tokens, what a cache without end would have found
    cost_per_million: float  # generated tokens; 0 where there is no price


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated, in a form that can be told."""

    device: Device
    reach: Reach
    shape: ModelShape
    dtype: str
    max_len: int


def cluster_of(settings: SimulateSettings) -> Cluster:
    """Raises SettingsError, ModelRefused."""
    try:
        if settings.measured:
            device, reach = measured(Path(settings.measured))
        else:
            device, reach = device_named(settings.gpu), Reach()
    except DeviceError as error:
        raise SettingsError([f"--{'measured' if settings.measured else 'gpu'}: {error}"]) from error
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    shape = known_shape(settings.model, dtype, settings.tp)
    if shape is None:
        if settings.model in KNOWN_MODELS:
            raise SettingsError([f"--tp: {settings.tp} does not divide {settings.model}; give a power of two, or less"])
        files = files_of(PlanSettings(model=settings.model, revision=settings.revision, memory=1))
        shape = read_shape(files, dtype, settings.tp)
    if settings.max_len > shape.max_len:
        raise SettingsError(
            [f"--max-len: {settings.max_len} is beyond the model's own length; give {shape.max_len} or less"]
        )
    return Cluster(device, reach, shape, dtype, settings.max_len or shape.max_len)


def setup_of(settings: SimulateSettings, cluster: Cluster, groups: int, block_size: int, policy: str) -> Setup:
    """Raises SettingsError."""
    shape, dtype = cluster.shape, cluster.dtype
    layout = ledger.layout_for(shape, block_size, dtype, settings.kv_dtype)
    recorded = tuple(ledger.recorded_sizes(min(settings.max_rows, settings.max_step_tokens)))
    batch = ledger.Batch(settings.max_rows, settings.max_step_tokens, cluster.max_len, recorded, is_fused=True)
    bare = ledger.bill(shape, layout, dtype, batch)
    memory = settings.memory or int(cluster.device.memory_bytes)
    if memory <= bare.weight_bytes:
        raise SettingsError(
            [f"--memory: {ledger.shown(memory)} do not hold weights of {ledger.shown(bare.weight_bytes)}; "
             "give another --gpu or a larger --tp"]
        )  # fmt: skip
    num_blocks = pool_size.sized(
        layout,
        num_blocks=settings.num_blocks,
        kv_memory=0,
        spare=memory - bare.weight_bytes,
        share=pool_size.OWN_SHARE,
        workspace=bare.step_bytes,
        wanted=pool_size.blocks_wanted(settings.max_rows, cluster.max_len, block_size),
    )
    if isinstance(settings.host_pool, Share):
        raise SettingsError(["--host-pool: a share of what? there is no host yet; give a size such as 16GiB"])
    return Setup(
        layout=layout,
        machine=Roofline(cluster.device, cluster.reach, shape, layout, dtype, settings.tp),
        num_blocks=num_blocks,
        num_host_blocks=pool_size.host_blocks(layout, settings.host_pool, 1 << 62, 1 << 62),
        max_rows=settings.max_rows,
        max_step_tokens=settings.max_step_tokens,
        max_len=min(cluster.max_len, num_blocks * block_size),
        vocab_size=shape.vocab_size,
        num_groups=groups,
        policy=policy,
        depth=settings.depth,
        step_target_s=settings.step_target_ms / 1e3,
        preemption=Preemption(settings.preemption),
        decoding=Decoding(n=settings.choices),
    )


# --- requests


def recorded(settings: SimulateSettings) -> list[Asked]:
    """What the trace says, or lengths drawn. Raises SettingsError."""
    if not settings.trace:
        means = {"mean_prompt": settings.prompt_tokens, "mean_output": settings.output_tokens}
        lengths = draw_lengths(
            NUM_LENGTHS, settings.seed, **means, sigma_prompt=SIGMA, sigma_output=SIGMA, most=1 << 24
        )
        return [Asked(None, num_prompt, num_output) for num_prompt, num_output in lengths]
    try:
        path = Path(settings.trace)
        if path.is_dir():
            seconds = settings.seconds or 86400.0
            found = draw_requests(
                read_clients(path), seconds, settings.rates[0] if settings.rates else 0, settings.seed
            )
        else:
            found = together([read_trace(Path(name)) for name in settings.trace.split(",")])
    except TraceError as error:
        raise SettingsError([f"--trace: {error}"]) from error
    if not found:
        raise SettingsError(
            [f"--trace: {settings.trace} holds no request; give a longer --seconds or a higher --rates"]
        )
    if not settings.rates and found[0].at_s is None:
        raise SettingsError(["--rates: the trace has no times of its own; give requests a second, as 1,2,4"])
    return [Asked(a.at_s, a.num_prompt or settings.prompt_tokens, a.num_output, "", a.prefix_blocks) for a in found]


def together(traces: list[list[Asked]]) -> list[Asked]:
    """Traces as one; those with times all begin at the same moment."""
    (first, *others) = traces
    if not others:
        return first
    has_times = [trace[0].at_s is not None for trace in traces]
    if any(has_times) and not all(has_times):
        raise TraceError("only some of the traces have times of their own; give those in runs of their own")
    return sorted([one for trace in traces for one in trace], key=lambda one: one.at_s or 0.0)


def requests_at(settings: SimulateSettings, found: list[Asked], rate: float) -> list[Asked]:
    """`rate`: 0 for the trace's own times."""
    if not rate and settings.load_factor > 1:
        return superposed(replayed(found, settings.speed), settings.load_factor, settings.seconds)
    if not rate:
        return replayed(found, settings.speed, settings.seconds)
    if found[0].prefix_blocks:  # its order is part of it: what comes again comes after
        mean_s = sum(1 for a in found) / rate / max((found[-1].at_s or 0.0) - (found[0].at_s or 0.0), 1e-9)
        return [a for a in replayed(found, 1.0 / mean_s) if (a.at_s or 0.0) < settings.seconds]
    return poisson(found, rate, settings.seconds, settings.seed)


def cases(settings: SimulateSettings, cluster: Cluster) -> Iterator[Case]:
    """Every combination. Raises SettingsError."""
    found = recorded(settings)
    for rate in settings.rates or (0.0,):
        asked = requests_at(settings, found, rate)
        if not asked:
            raise SettingsError([f"--seconds: no request comes in {settings.seconds:g} s; give more"])
        for groups, block_size, policy in product(settings.groups, settings.block_sizes, settings.policies):
            setup = setup_of(settings, cluster, groups, block_size, policy)
            fitting = [cut(a, setup.max_len) for a in asked]
            num_cut = sum(a.num_prompt != b.num_prompt or a.num_output != b.num_output for a, b in
                          zip(asked, fitting, strict=True))  # fmt: skip
            controllers = min(settings.controllers or -(-groups // GROUPS_EACH), groups)
            yield Case(rate, groups, block_size, policy, Run(setup, fitting, controllers), num_cut)


# --- running


def simulate(settings: SimulateSettings, tell: Callable[[int, int], None] | None = None) -> list[Result]:
    """Every run. `tell` hears of (requests done with, requests in all). Raises SettingsError, ModelRefused."""
    every = list(cases(settings, cluster_of(settings)))
    total = sum(len(case.run.asked) for case in every)
    heard = None if tell is None else lambda num_done: tell(num_done, total)
    found = run_all([case.run for case in every], settings.jobs or os.cpu_count() or 1, heard)
    objectives = Objectives(settings.first_seconds, settings.gap_seconds)
    results = []
    for case, (record, tally) in zip(every, found, strict=True):
        outcome = outcome_of(record, tally, objectives)
        hours = outcome.seconds / 3600
        paid = settings.price * case.groups * settings.tp * hours
        cost = 1e6 * paid / outcome.num_output_tokens if outcome.num_output_tokens else 0.0
        has_prefixes = any(a.prefix_blocks for a in case.run.asked[:100])
        best = best_hit_share(case.run.asked, case.block_size) if has_prefixes else 0.0
        results.append(Result(case, outcome, best, cost))
    return results


def recommended(results: list[Result], within_percent: float) -> Result:
    """Of runs that differ in the size of their blocks."""
    chosen = recommended_size({result.case.block_size: result.outcome for result in results}, within_percent)
    return next(result for result in results if result.case.block_size == chosen)


def recommended_size(outcomes: Mapping[int, Outcome], within_percent: float) -> int:
    """The largest block whose latency is within so much of the best: fewer blocks are fewer names and moves."""
    best_s = min(outcome.normalized_s["mean"] for outcome in outcomes.values())
    most_s = best_s * (1 + within_percent / 100)
    return max(size for size, outcome in outcomes.items() if outcome.normalized_s["mean"] <= most_s)
