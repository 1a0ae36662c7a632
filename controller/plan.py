"""`kilburn plan`: the bill of a worker that does not exist yet.

The formula is the worker's own (shared/ledger.py), and so is the rule for the size of its pools (shared/pool_size.py);
only the memory comes from the user and not from a device. Settings that cannot be met are refused as the worker would
refuse them, with a value that works. With several ranks every amount is of one of them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilburn.shared import ledger, pool_size
from kilburn.shared.config import PlanSettings, SettingsError
from kilburn.shared.kinds import Share
from kilburn.shared.layout import blocks_for
from kilburn.shared.model_files import Bundled, Folder, Gguf, HubId, ModelRefused, gguf_file, prepared_folder, resolve
from kilburn.shared.model_shape import Build, ModelShape, read_shape

_MIB = 1 << 20
_ANY = 1 << 62


@dataclass(frozen=True, slots=True)
class Plan:
    """What there would be."""

    settings: PlanSettings
    dtype: str
    shape: ModelShape
    max_len: int
    bill: ledger.Ledger


def run_plan(settings: PlanSettings) -> int:
    """Prints the plan. Raises SettingsError, ModelRefused."""
    plan = make_plan(settings)
    print(json.dumps(as_json(plan), indent=2) if settings.json else "\n".join(lines(plan)))
    return 0


def files_of(settings: PlanSettings) -> Path:
    """The folder, or the GGUF file, that the model is read from. Nothing is converted and nothing fetched."""
    match resolve(settings.model, settings.revision or None):
        case Folder(path):
            return path
        case Gguf() | Bundled() as source:
            return gguf_file(source)
        case HubId():
            if (snapshot := prepared_folder(settings.model, settings.revision or None)) is not None:
                return snapshot
    raise ModelRefused(
        f"MODEL {settings.model}: not on this machine, and a plan fetches nothing; "
        f"run: python -m kilburn.worker.prepare {settings.model}"
    )


def make_plan(settings: PlanSettings) -> Plan:
    """Raises SettingsError, ModelRefused."""
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    shape = read_shape(files_of(settings), dtype, settings.tp, settings.quantization)
    if settings.max_len > shape.max_len:
        raise SettingsError(
            [f"--max-len: {settings.max_len} is beyond the model's own length; give {shape.max_len} or less"]
        )
    max_len = settings.max_len or shape.max_len
    layout = ledger.layout_for(shape, settings.block_size, dtype, settings.kv_dtype, settings.kv_scales)
    recorded = ledger.recorded_sizes(min(settings.max_rows, settings.max_step_tokens))
    batch = ledger.Batch(settings.max_rows, settings.max_step_tokens, max_len, tuple(recorded), is_fused=True)
    bare = ledger.bill(shape, layout, dtype, batch)
    _check_memory(settings, bare)
    num_blocks = pool_size.sized(
        layout,
        num_blocks=0,
        kv_memory=0,
        spare=settings.memory - bare.weight_bytes,
        share=pool_size.OWN_SHARE,
        workspace=bare.step_bytes,
        wanted=pool_size.blocks_wanted(settings.max_rows, max_len, settings.block_size),
    )
    host_spare = settings.host_memory // settings.tp if settings.host_memory else _ANY
    if isinstance(settings.host_pool, Share) and not settings.host_memory:
        raise SettingsError(["--host-pool: a share of what? give --host-memory too, or a size such as 16GiB"])
    num_host_blocks = pool_size.host_blocks(layout, settings.host_pool, host_spare, host_spare)
    return Plan(settings, dtype, shape, max_len, ledger.bill(shape, layout, dtype, batch, num_blocks, num_host_blocks))


def least_memory(bare: ledger.Ledger) -> int:
    """Bytes, in whole MiB, in which a pool of one block fits beside everything else."""
    least = bare.weight_bytes + (bare.step_bytes + bare.layout.bytes_per_block + 1) / pool_size.HEADROOM
    return -(-int(least + 1) // _MIB) * _MIB


def _check_memory(settings: PlanSettings, bare: ledger.Ledger) -> None:
    least = least_memory(bare)
    if settings.memory >= least:
        return
    raise SettingsError(
        [
            f"--memory: {ledger.shown(settings.memory)} do not hold weights of {ledger.shown(bare.weight_bytes)}, "
            f"{ledger.shown(bare.step_bytes)} for a step and one block of {ledger.shown(bare.layout.bytes_per_block)}; "
            f"give {least // _MIB}MiB or more, a larger --tp, or lower --max-step-tokens or --max-rows"
        ]
    )


# --- showing


def lines(plan: Plan) -> list[str]:
    """The plan as a table."""
    settings, bill = plan.settings, plan.bill
    each = f", each of {settings.tp} ranks" if settings.tp > 1 else ""
    made = f"{plan.shape.num_layers} layers, {plan.shape.num_heads} heads, {plan.shape.num_kv_heads} KV heads"
    found = [
        f"{settings.model} on {ledger.shown(settings.memory)}{each}: {plan.dtype}, {made}",
        *(f"  {line}" for line in bill.lines()),
        f"  {'longest sequence':<18}{_longest(plan)}",
        "",
        f"  {'tokens each':>12}{'sequences':>12}{'tail waste':>12}",
    ]
    for length, count in ledger.sequences_in(bill.num_blocks, settings.block_size, settings.lengths).items():
        waste = ledger.expected_tail_waste(length, settings.block_size)
        beyond = f"   (the model's longest is {plan.max_len})" if length > plan.max_len else ""
        bound = f"   (a batch has {settings.max_rows} rows)" if count > settings.max_rows and not beyond else ""
        found.append(f"  {length:>12}{count:>12}{waste:>11.2%} {beyond}{bound}".rstrip())
    if plan.shape.build is Build.UNKNOWN:
        found += ["", "  activations are an estimate: this architecture runs by transformers' own code"]
    return found


def _longest(plan: Plan) -> str:
    slots = plan.bill.num_blocks * plan.settings.block_size
    if blocks_for(plan.max_len, plan.settings.block_size) <= plan.bill.num_blocks:
        return f"{plan.max_len} tokens"
    return f"{slots} tokens, of the {plan.max_len} that the model could: the pool holds no more"


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as one object; amounts in bytes."""
    settings, bill, layout = plan.settings, plan.bill, plan.bill.layout
    counts = ledger.sequences_in(bill.num_blocks, settings.block_size, settings.lengths)
    return {
        "model": settings.model,
        "memory": settings.memory,
        "ranks": settings.tp,
        "dtype": plan.dtype,
        "kv_dtype": layout.dtype,
        "heads": plan.shape.num_heads,
        "kv_heads": plan.shape.num_kv_heads,
        "max_len": plan.max_len,
        "bytes": {name.replace(" ", "_"): amount for name, amount in bill.amounts().items()},
        "kv_bytes_per_token": layout.bytes_per_token,
        "kv_bytes_per_block": layout.bytes_per_block,
        "block_size": layout.block_size,
        "num_blocks": bill.num_blocks,
        "num_host_blocks": bill.num_host_blocks,
        "longest_sequence": min(plan.max_len, bill.num_blocks * settings.block_size),
        "is_estimate": plan.shape.build is Build.UNKNOWN,
        "sequences": [
            {
                "tokens": length,
                "count": count,
                "tail_slots": ledger.expected_tail_slots(settings.block_size),
                "tail_waste": ledger.expected_tail_waste(length, settings.block_size),
            }
            for length, count in counts.items()
        ],
    }
