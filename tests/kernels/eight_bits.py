"""KV of 8 bits for any set of kernels: worlds of stored bytes with scales of either form, and what a write must leave.

check_attention(kernels, case, "block")     over the same stored bytes as the reference in float64, so that nothing
                                            but sums can differ; what must not be read is loud, or NaN where e4m3
                                            has one, and so are its scales
check_write(kernels, case, "block")         each value within half a step of what it should be, and not a byte
                                            beside
check_odd_rows(kernels)                     a row of zeros, rows that are not finite
"""

import math

import torch
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import LARGEST, Kernels, Rope
from tests.kernels.shapes import (
    LAYER,
    AttentionWorld,
    Case,
    WriteWorld,
    assert_near,
    attention_world,
    rope_table,
    write_world,
)

FORMS = ("static", "block")
CANARY = 99  # a byte that is a number of either type


def stored_world(
    case: Case, form: str, dtype: torch.dtype = torch.float32, stored: torch.dtype = torch.int8
) -> tuple[AttentionWorld, Tensor, Tensor]:
    """A world, its KV in 8 bits, and the scales: a view with steps of its own, as in a block's scale area."""
    world, generator = attention_world(case, dtype), torch.Generator().manual_seed(case.seed)
    num_blocks, _, heads, size, _ = world.kv.shape
    is_poison = world.kv.isnan()
    held = torch.randint(-127, 127, world.pool.shape, generator=generator, dtype=torch.int8)[:, LAYER]
    held[held == -1] = 0  # with all bits set e4m3 is no number
    held[is_poison] = 127
    kv = held.view(stored)
    spread = 2.54 / LARGEST[stored]
    if form == "static":
        return world, kv, torch.rand((2, heads), generator=generator) * spread + 0.001
    area = torch.rand((num_blocks, 3, 2, heads, size), generator=generator) * spread + 0.001
    scales = area[:, LAYER]
    scales[is_poison[..., 0]] = math.nan
    return world, kv, scales


def check_attention(
    kernels: Kernels, case: Case, form: str, dtype: torch.dtype = torch.float32, stored: torch.dtype = torch.int8
) -> None:
    world, kv, scales = stored_world(case, form, dtype, stored)
    got = kernels.paged_attention(world.q, kv, world.batch, scales=scales, **world.options)
    sinks = None if world.sinks is None else world.sinks.double()
    options = world.options | {"sinks": sinks, "scales": scales.nan_to_num(0.0)}
    assert_near(got, reference.paged_attention(world.q.double(), kv, world.batch, **options), dtype)


def check_write(
    kernels: Kernels, case: Case, form: str, dtype: torch.dtype = torch.float32, stored: torch.dtype = torch.int8
) -> None:
    """Every third token is padding; what a head of odd width has left over is not turned."""
    world = write_world(case, dtype, rope=Rope(rope_table(case.head_dim - case.head_dim % 2)))
    check_written(kernels, world, form, stored)


def check_written(kernels: Kernels, world: WriteWorld, form: str, stored: torch.dtype = torch.int8) -> None:
    case, batch, dtype, largest = world.case, world.batch, world.fused.dtype, LARGEST[stored]
    shape = world.pool[:, LAYER].shape
    held = torch.full(shape, CANARY, dtype=torch.uint8)
    scales = torch.full(shape[:4], 0.25)
    if form == "static":
        scales = (torch.rand((2, case.kv_heads)) * 2.54 + 1.27) / largest
    keys = world.qkv[1].double()
    if world.rope is not None:
        keys = reference.rotated(keys, batch.positions, world.rope).to(dtype).double()
    is_token = batch.slots >= 0
    wanted = torch.stack((keys, world.qkv[2].double()), dim=1)[is_token]
    kernels.kv_write(*world.qkv, held.view(stored), batch, world.rope, scales)
    slots = batch.slots[is_token]
    blocks, offsets = slots // case.block_size, slots % case.block_size
    # What is turned is rounded once more, to its own type, before it is stored.
    slack = 1e-5 if dtype == torch.float32 else 1e-2
    if form == "block":
        step = scales[blocks, :, :, offsets].double()
        torch.testing.assert_close(step, wanted.abs().amax(dim=-1) / largest, rtol=slack, atol=0)
        scales[blocks, :, :, offsets] = 0.25
        assert (scales == 0.25).all(), "a scale was written that is no token's"
    else:
        step = scales.double()[None].expand(wanted.shape[:3])
    step = step[..., None]
    limited = torch.minimum(torch.maximum(wanted, -largest * step), largest * step)
    # e4m3 keeps 4 digits of a number, and steps of 2^-9 near 0.
    half = 0.501 * step if stored == torch.int8 else limited.abs() / 15.9 + step / 1000
    back = held.view(stored)[blocks, :, :, offsets].double() * step
    assert ((back - limited).abs() <= half + slack * wanted.abs()).all()
    held[blocks, :, :, offsets] = CANARY
    assert (held == CANARY).all(), "a slot was written that is no token's"


def check_odd_rows(kernels: Kernels, stored: torch.dtype = torch.int8) -> None:
    """With a scale of its own, what is not finite stays so: nobody may mistake it for a number."""
    case = Case("odd rows", ((4, 4),), kv_heads=1, group=1, head_dim=8, block_size=4)
    for rope in (None, Rope(rope_table(8)), Rope(rope_table(4))):
        world = write_world(case, padding=0)
        q, k, v = world.qkv
        k[0], v[0] = 0.0, 0.0
        k[1, 0, 6] = v[1, 0, 3] = math.nan
        k[2, 0, 1] = v[2, 0, 5] = math.inf
        kv, scales = torch.zeros(world.pool[:, LAYER].shape).to(stored), torch.zeros(len(world.pool), 2, 1, 4)
        kernels.kv_write(q, k, v, kv, world.batch, rope, scales)
        block = int(world.batch.tables[0, 0])
        back = kv[block, :, 0].float() * scales[block, :, 0][..., None]
        assert (back[:, 0] == 0).all()
        assert not back[:, 1:3].isfinite().any()
        assert back[:, 3].isfinite().all()
