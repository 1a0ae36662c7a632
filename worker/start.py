"""From settings to a worker that is ready for its first plan, in phases whose times are printed.

    loading         weights into memory; their digest names the model
    measuring KV    the scales of 8-bit KV, where they are static and this model was not measured before
    warming up      the same code that will serve runs a few tiny plans on a tiny pool, so that whatever is compiled,
                    loaded or tuned at first use is so before anybody waits for it
    pools           the KV pools, sized by the settings or by what is left
    measuring       what the weights and a step really take; the ledger says where the memory goes, and where the plan
                    (shared/ledger.py, as `kilburn plan` prints it) was wrong

One of several ranks does all this by itself, with its own part of the model; it meets the others when a lease begins.

A setting that cannot be met raises SettingsError, which names it and a value that works.
"""

import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kilburn.kernels.dispatch import (
    Kernels,
    Shapes,
    can_capture,
    has_own_collectives,
    has_products,
    kernels_for,
    kv_forms,
)
from kilburn.shared import ledger
from kilburn.shared.config import SettingsError, WorkerSettings
from kilburn.shared.layout import DTYPE_BYTES, EIGHT_BITS, KVLayout, blocks_for
from kilburn.shared.messages import Admit, Hello, StepPlan, WorkerMemory
from kilburn.shared.model_shape import Build, ModelShape, read_shape, tensor_shapes
from kilburn.shared.pool_size import OWN_SHARE, SHARED_SHARE, blocks_wanted, host_blocks, sized
from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.worker.calibrate import digest_with, kept_scales, static_scales
from kilburn.worker.grammars import Grammars
from kilburn.worker.knobs import Knobs
from kilburn.worker.kv_cache import KVCache, has_own_memory, spare_bytes, spare_host_bytes, total_host_bytes
from kilburn.worker.measured import measured, reserved_bytes, weights_held
from kilburn.worker.model_runner import ModelRunner, records
from kilburn.worker.models import weights
from kilburn.worker.models.config import GenericFamily
from kilburn.worker.models.layers import Form, packs
from kilburn.worker.models.weights import LoadedModel
from kilburn.worker.parallel import Part, Ranks, bound_address, kv_heads_of, use_interface
from kilburn.worker.phases import Progress, phase, say
from kilburn.worker.rows import Limits, Rows
from kilburn.worker.step import Executor
from kilburn.worker.swap_check import SwapCheck


@dataclass(frozen=True, slots=True)
class Ready:
    """All that a daemon needs."""

    hello: Hello
    executor: Executor
    planned: ledger.Ledger
    ledger: ledger.Ledger  # measured


def use_threads(threads: int) -> None:
    torch.set_num_threads(threads)


def device_of(setting: str) -> torch.device:
    if setting == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if accelerator is None or accelerator.type != "cuda" else accelerator
    device = torch.device(setting)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError([f"--device: this torch has no usable {setting} device; give cpu or auto"]) from error
    return device


def ranks_for(settings: WorkerSettings, device: torch.device) -> Ranks:
    """This rank's view of all. Raises SettingsError, and ModelRefused for a model that cannot be split so."""
    part = Part(max(settings.rank, 0), settings.tp)
    if part.world == 1:
        return Ranks(part, device)
    read_shape(Path(settings.model), "float32", part.world)
    address = bound_address(settings.collectives, settings.insecure_collectives)
    if has_own_collectives(device):
        use_interface(address)
        torch.accelerator.set_device_index(part.rank % torch.accelerator.device_count())
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return Ranks(part, device, address)


def dtype_of(setting: str, device: torch.device) -> str:
    return setting if setting != "auto" else "bfloat16" if has_own_memory(device) else "float32"


def make_ready(settings: WorkerSettings) -> Ready:
    """Load, warm up, make the pools. Raises SettingsError, ModelRefused."""
    ranks = ranks_for(settings, device_of(settings.device))
    device = ranks.device
    dtype = dtype_of(settings.dtype, device)
    kept_in = scales_kept_in(settings, kv_forms(device))
    kernels = kernels_for(device)
    kv_dtype = EIGHT_BITS.get(settings.kv_dtype, dtype)
    with phase("loading"):
        loaded = load_for(settings, dtype, kv_dtype, device, ranks)
    limits, shape = limits_for(settings, loaded), shape_of(settings, loaded, dtype, device)
    layout, scales = ledger.layout_for(shape, settings.block_size, dtype, settings.kv_dtype, kept_in), None
    if kept_in == "static":
        with phase("measuring KV"):
            scales = measured_scales(settings, loaded, dtype, kv_dtype, device)
    loaded = replace(loaded, digest=digest_with(loaded.digest, layout, scales))
    if scales is not None:
        scales = scales[:, :, kv_heads_of(scales.shape[2], ranks.part)]
    with phase("warming up"):
        warm_up(loaded, layout, limits, kernels, device, getattr(torch, dtype), scales)
    batch = batch_of(limits, device, ranks)
    with phase("pools"):
        workspace = ledger.bill(shape, layout, dtype, batch).step_bytes
        num_blocks, num_host_blocks = pool_sizes(settings, layout, limits, workspace, device)
        cache = KVCache(layout, num_blocks, num_host_blocks, device, kernels, scales)
        before = reserved_bytes(device)
        grammars = Grammars(Path(settings.model) / "tokenizer.json", limits.vocab_size)
        executor = executor_for(loaded, cache, replace(limits, num_blocks=num_blocks), kernels, device, grammars)
        if settings.verify_swap:
            executor.check = SwapCheck(cache.host_blocks, ranks.any)
        # What the host records takes is known when it has recorded: a share of its memory stays free for such things.
        # The tensors of a recorded step are its activations, which are on the bill.
        recorded_bytes = executor.runner.host_graph_bytes - ledger.bill(shape, layout, dtype, batch).activation_bytes
        batch = replace(batch, host_graph_bytes=max(recorded_bytes, 0))
        graph_bytes = reserved_bytes(device) - before if batch.recorded else batch.host_graph_bytes
    planned = ledger.bill(shape, layout, dtype, batch, num_blocks, num_host_blocks)
    with phase("measuring"):
        is_looked_up = shape.build is not Build.UNKNOWN and not has_own_memory(device)
        weight_bytes = weights_held(loaded.model, is_looked_up)
        found = measured(planned, weight_bytes, executor.runner, graph_bytes, device)
    for line in ledger.compared(planned, found):
        say(f"  {line}")
    return Ready(hello_for(settings, loaded, layout, executor, found), executor, planned, found)


def limits_for(settings: WorkerSettings, loaded: LoadedModel) -> Limits:
    """Limits without a pool."""
    longest = loaded.config.max_len
    if settings.max_len > longest:
        raise SettingsError([f"--max-len: {settings.max_len} is beyond the model's own length; give {longest} or less"])
    return Limits(
        max_rows=settings.max_rows,
        max_step_tokens=settings.max_step_tokens,
        max_len=settings.max_len or longest,
        block_size=settings.block_size,
        num_blocks=0,
        vocab_size=loaded.config.vocab_size,
    )


def load_for(
    settings: WorkerSettings, dtype: str, kv_dtype: str, device: torch.device, ranks: Ranks | None = None
) -> LoadedModel:
    quantization = settings.quantization
    if quantization != "none" and (device.type != "cpu" or dtype != "float32"):
        raise SettingsError(
            [f"--quantization: {quantization} is for the CPU in float32; give none, or --device cpu --dtype float32"]
        )
    if quantization != "none" and not has_products():
        raise SettingsError(
            [
                f"--quantization: {quantization} needs numba and llvmlite, and on x86 a processor with FMA and F16C; "
                "give none"
            ]
        )
    stored = getattr(torch, kv_dtype)
    return weights.load(
        Path(settings.model), getattr(torch, dtype), device, Progress(), stored, ranks=ranks, quantization=quantization
    )


def scales_kept_in(settings: WorkerSettings, forms: Mapping[str, tuple[str, ...]]) -> str:
    """Where KV of 8 bits has its scales, "static" or "block"; "auto" for other KV. Refuses what `forms`, those that the
    kernels have, lack."""
    if settings.kv_dtype == "auto":
        return "auto"
    places = forms.get(settings.kv_dtype)
    if places is None:
        able = " or ".join(["auto", *forms])
        raise SettingsError([f"--kv-dtype: this device has no kernels for KV of {settings.kv_dtype}; give {able}"])
    if settings.tp > 1 and settings.kv_scales == "auto" and "block" in places:
        return "block"  # the others are measured by whoever holds the whole model
    if settings.kv_scales not in ("auto", *places):
        able = " or ".join(["auto", *places])
        problem = f"--kv-scales: the kernels of this device do not take {settings.kv_scales} scales; give {able}"
        raise SettingsError([problem])
    return places[0] if settings.kv_scales == "auto" else settings.kv_scales


def shape_of(settings: WorkerSettings, loaded: LoadedModel, dtype: str, device: torch.device) -> ModelShape:
    """What its memory depends on, by the model's files."""
    folder, c = Path(settings.model), loaded.config
    if not isinstance(c.family, GenericFamily):
        keeps_narrow = packs(Form(device, getattr(torch, dtype)))
        shape = read_shape(folder, dtype, settings.tp, settings.quantization, keeps_narrow)
        # Without memory of its own a device looks an embedding up where its file lies.
        return shape if has_own_memory(device) else replace(shape, weight_bytes=shape.weight_bytes - shape.lookup_bytes)
    values = sum(math.prod(sizes) for sizes in tensor_shapes(folder).values())
    sizes = (c.num_layers, c.hidden, c.intermediate, c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size)
    return ModelShape(*sizes, weight_bytes=values * DTYPE_BYTES[dtype], max_len=c.max_len, build=Build.UNKNOWN)


def batch_of(limits: Limits, device: torch.device, ranks: Ranks) -> ledger.Batch:
    sizes = (limits.max_rows, limits.max_step_tokens, limits.max_len)
    recorded: list[int] = []
    if records(device, ranks):
        recorded = ledger.recorded_sizes(min(limits.max_rows, limits.max_step_tokens))
    num_unsampled = 0 if ranks.is_first else ranks.columns_made(limits.vocab_size)
    return ledger.Batch(*sizes, tuple(recorded), can_capture(device), num_unsampled=num_unsampled)


def executor_for(
    loaded: LoadedModel,
    cache: KVCache,
    limits: Limits,
    kernels: Kernels,
    device: torch.device,
    grammars: Grammars | None = None,
    is_recorded: bool = True,
) -> Executor:
    rows = Rows(limits, Knobs(limits.max_rows, limits.vocab_size, grammars, loaded.ranks.is_first))
    return Executor(rows, ModelRunner(loaded.model, cache, rows, kernels, device, loaded.ranks, is_recorded))


def measured_scales(
    settings: WorkerSettings, loaded: LoadedModel, dtype: str, kv_dtype: str, device: torch.device
) -> Tensor:
    """float32 [layers, 2, all KV heads of the model]. Raises SettingsError."""
    if not loaded.ranks.are_several:
        return static_scales(loaded, getattr(torch, dtype), getattr(torch, kv_dtype), device, Progress())
    c, heads = loaded.config, read_shape(Path(settings.model), dtype).num_kv_heads
    scales = kept_scales(loaded.digest, (c.num_layers, 2, heads))
    if scales is None:
        problem = (
            "--kv-scales: static scales are measured with the whole model, which no rank of several holds; start it "
            "once with --tp 1 and these settings on this machine, which keeps what it measures, or give block"
        )
        raise SettingsError([problem])
    return scales


def hello_for(
    settings: WorkerSettings, loaded: LoadedModel, layout: KVLayout, executor: Executor, found: ledger.Ledger
) -> Hello:
    limits = executor.rows.limits
    memory = WorkerMemory(
        found.weight_bytes, found.activation_bytes, found.logits_bytes, found.buffer_bytes, found.graph_bytes
    )
    return Hello(
        name=settings.name,
        model_digest=loaded.digest,
        layout=layout,
        num_blocks=limits.num_blocks,
        num_host_blocks=found.num_host_blocks,
        max_rows=limits.max_rows,
        max_step_tokens=limits.max_step_tokens,
        max_len=limits.max_len,
        vocab_size=limits.vocab_size,
        rank=max(settings.rank, 0),
        world=settings.tp,
        pid=os.getpid(),
        memory=memory,
        boot=secrets.token_hex(8),
    )


def pool_sizes(
    settings: WorkerSettings, layout: KVLayout, limits: Limits, workspace: int, device: torch.device
) -> tuple[int, int]:
    """Blocks of the device pool and of the host pool. `workspace`: bytes that steps need beside them."""
    num_blocks = sized(
        layout,
        num_blocks=settings.num_blocks,
        kv_memory=settings.kv_memory,
        spare=spare_bytes(device) // settings.sharers // (1 if has_own_memory(device) else settings.tp),
        share=OWN_SHARE if has_own_memory(device) else SHARED_SHARE,
        workspace=workspace,
        wanted=blocks_wanted(limits.max_rows, limits.max_len, layout.block_size),
    )
    # Of the host's memory each rank takes its share, as if all of them were here.
    host_spare = spare_host_bytes() // settings.sharers // settings.tp
    host_spare -= 0 if has_own_memory(device) else num_blocks * layout.bytes_per_block
    return num_blocks, host_blocks(layout, settings.host_pool, host_spare, total_host_bytes() // settings.tp)


def warm_up(
    loaded: LoadedModel,
    layout: KVLayout,
    limits: Limits,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    scales: Tensor | None = None,
) -> None:
    """Run what serving will run: a chunk, a mixed batch, decodes, a copy; greedy, drawn, cut, penalised."""
    config = loaded.config
    kernels.warm_up(
        Shapes(
            hidden=config.hidden,
            intermediate=config.intermediate,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=layout.block_size,
            dtype=dtype,
            vocab=config.vocab_size,
            kv_dtype=getattr(torch, layout.dtype),
        ),
        Progress(),
    )
    prompt = max(1, min(16, limits.max_len - 4, limits.max_step_tokens - 1))
    blocks = blocks_for(prompt + 4, layout.block_size)
    small = replace(limits, num_blocks=2 * blocks, max_rows=min(limits.max_rows, 2))
    cache = KVCache(layout, small.num_blocks, 1, device, kernels, scales)
    executor = executor_for(loaded, cache, small, kernels, device, is_recorded=False)
    for plan in warm_up_plans(prompt, blocks, small.max_rows):
        executor.run(plan)


def warm_up_plans(prompt: int, blocks: int, max_rows: int) -> Iterator[StepPlan]:
    """A prompt alone, one beside a decode, decodes with blocks that move, a fork; each way to choose a token."""

    def born(row: int, sampling: Sampling) -> Admit:
        table = tuple(range(row * blocks, (row + 1) * blocks))
        return Admit(row, 0, prompt, (0,) * prompt, (), table, sampling)

    greedy, last = Sampling(temperature=0.0), max_rows - 1
    cut = Sampling(top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1)
    yield StepPlan(0, 1, [0], [prompt], admits=[born(0, greedy)])
    if last:
        yield StepPlan(0, 2, [0, last], [1, prompt], admits=[born(last, cut)])
    else:
        yield StepPlan(0, 2, [0], [prompt], admits=[born(0, cut)])
    decodes = StepPlan(0, 3, list(range(max_rows)), [1] * max_rows)
    decodes.swaps_out, decodes.copies, decodes.swaps_in = [(0, 0)], [(0, 2 * blocks - 1)], [(0, 0)]
    yield decodes
    yield StepPlan(0, 4, [0], [prompt], admits=[born(0, replace(cut, choose=Draws(0, 2)))])
    yield StepPlan(0, 5, [last], [prompt], admits=[born(last, Sampling(choose=Candidates(2)))])
