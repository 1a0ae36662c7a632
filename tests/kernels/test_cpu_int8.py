"""KV of 8 bits in the CPU set: the same table of ragged shapes, with static scales and with scales in the blocks.

Attention is held against the reference in float64 over the same stored bytes, so that nothing but sums can differ; what
must not be read is loud (all of it 127, its scales NaN). A write is held against what it should be: within half a step
of the value, and not a byte beside.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import Kernels, Rope
from kilburn.kernels.dispatch import kernels_for
from tests.kernels.shapes import CASES, LAYER, MIXED, AttentionWorld, Case, assert_near, attention_world, rope_table
from tests.kernels.shapes import write_world as plain_write_world

KERNELS: Kernels = kernels_for(torch.device("cpu"))
FORMS = ("static", "block")
SOME = tuple(case for case in CASES if case.name.startswith(("mixed", "long", "group 3", "window 16", "block size 4")))
WRITTEN = tuple(case for case in CASES if case.name.startswith(("prefill", "chunks", "block size", "3 KV")))


def draws(case: Case) -> torch.Generator:
    return torch.Generator().manual_seed(case.seed)


def stored_world(case: Case, form: str, dtype: torch.dtype = torch.float32) -> tuple[AttentionWorld, Tensor, Tensor]:
    """A world, its KV in 8 bits, and the scales: a view with steps of its own, as in a block's scale area."""
    world, generator = attention_world(case, dtype), draws(case)
    num_blocks, _, heads, size, _ = world.kv.shape
    is_poison = world.kv.isnan()
    kv = torch.randint(-127, 128, world.pool.shape, generator=generator, dtype=torch.int8)[:, LAYER]
    kv[is_poison] = 127
    if form == "static":
        return world, kv, torch.rand((2, heads), generator=generator) * 0.02 + 0.001
    area = torch.rand((num_blocks, 3, 2, heads, size), generator=generator) * 0.02 + 0.001
    scales = area[:, LAYER]
    scales[is_poison[..., 0]] = math.nan
    return world, kv, scales


def held_against_the_reference(case: Case, form: str, dtype: torch.dtype = torch.float32) -> None:
    world, kv, scales = stored_world(case, form, dtype)
    got = KERNELS.paged_attention(world.q, kv, world.batch, scales=scales, **world.options)
    sinks = None if world.sinks is None else world.sinks.double()
    options = world.options | {"sinks": sinks, "scales": scales.nan_to_num(0.0)}
    assert_near(got, reference.paged_attention(world.q.double(), kv, world.batch, **options), dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_the_table(case: Case, form: str) -> None:
    held_against_the_reference(case, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_attention_of_narrow_queries(case: Case, form: str) -> None:
    held_against_the_reference(case, form, torch.bfloat16)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    contexts = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    return Case(
        f"drawn {draw(st.integers(0, 1000))}",
        tuple((draw(st.integers(0, min(context + 2, 40))), context) for context in contexts),
        kv_heads=draw(st.integers(1, 4)),
        group=draw(st.sampled_from((1, 2, 3, 5, 8, 33))),
        head_dim=draw(st.sampled_from((1, 7, 8, 20, 31, 64, 100))),
        block_size=draw(st.sampled_from((1, 3, 4, 16, 100))),
        window=draw(st.sampled_from((None, 1, 7, 40))),
        soft_cap=draw(st.sampled_from((None, 4.0))),
        sinks=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(FORMS))
def test_attention_of_whatever_shape(case: Case, form: str) -> None:
    held_against_the_reference(case, form)


# -- writes


def write(case: Case, form: str, dtype: torch.dtype, kernels: Kernels) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(KV, scales, wanted keys and values [tokens, 2, Hkv, D], slots) after a write; every third token is padding."""
    world = plain_write_world(case, dtype, rope=Rope(rope_table(case.head_dim - case.head_dim % 2)))
    shape = world.pool[:, LAYER].shape
    kv = torch.full(shape, 99, dtype=torch.int8)
    scales = torch.full(shape[:4], 0.25) if form == "block" else torch.rand((2, case.kv_heads)) * 0.02 + 0.01
    batch, slots = world.batch, world.batch.slots
    keys = reference.rotated(world.qkv[1].double(), batch.positions, world.rope).to(dtype)
    values = world.qkv[2].clone()
    kernels.kv_write(*world.qkv, kv, batch, world.rope, scales)
    written = slots >= 0
    return kv, scales, torch.stack((keys, values), dim=1)[written].double(), slots[written]


@pytest.mark.parametrize("kernels", [KERNELS, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_a_write_is_within_half_a_step_and_touches_nothing_else(
    case: Case, form: str, dtype: torch.dtype, kernels: Kernels
) -> None:
    kv, scales, wanted, slots = write(case, form, dtype, kernels)
    blocks, offsets = slots // case.block_size, slots % case.block_size
    held = kv[blocks, :, :, offsets].double()
    if form == "block":
        step = scales[blocks, :, :, offsets].double()
        near = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(step, wanted.abs().amax(dim=-1) / 127, rtol=near, atol=0)
        scales[blocks, :, :, offsets] = 0.25
        assert (scales == 0.25).all(), "a scale was written that is no token's"
    else:
        step = scales.double()[None].expand(wanted.shape[:3])
    limited = wanted.clamp(-127 * step[..., None], 127 * step[..., None])
    # What is turned is rounded once more, to its own type, before it is stored.
    slack = 1e-5 if dtype == torch.float32 else 1e-2
    assert ((held * step[..., None] - limited).abs() <= 0.501 * step[..., None] + slack * wanted.abs()).all()
    kv[blocks, :, :, offsets] = 99
    assert (kv == 99).all(), "a slot was written that is no token's"


@pytest.mark.parametrize("kernels", [KERNELS, reference], ids=["cpu", "reference"])
def test_a_row_of_zeros_is_read_as_zeros_and_a_broken_row_as_broken(kernels: Kernels) -> None:
    """With a scale of its own, what is not finite stays so: nobody may mistake it for a number."""
    case = Case("odd rows", ((4, 4),), kv_heads=1, group=1, head_dim=8, block_size=4)
    world = plain_write_world(case, padding=0)
    q, k, v = world.qkv
    k[0], v[0] = 0.0, 0.0
    v[1, 0, 3] = math.nan
    v[2, 0, 5] = math.inf
    kv, scales = torch.full(world.pool[:, LAYER].shape, 99, dtype=torch.int8), torch.zeros(len(world.pool), 2, 1, 4)
    kernels.kv_write(q, k, v, kv, world.batch, None, scales)
    block = int(world.batch.tables[0, 0])
    back = kv[block, 1, 0].float() * scales[block, 1, 0][:, None]
    assert (back[0] == 0).all()
    assert not back[1:3].isfinite().any()
    assert back[3].isfinite().all()


# -- what fits nothing


def test_scales_that_do_not_fit_are_refused_by_name() -> None:
    world, kv, static = stored_world(Case("refused", MIXED), "static")
    fitting = stored_world(Case("refused", MIXED), "block")[2]
    for scales in (
        None,
        static.double(),
        static[:, :1],
        static.t().contiguous().t(),
        fitting[:-1],
        fitting.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        with pytest.raises(ValueError, match="scales"):
            KERNELS.paged_attention(world.q, kv, world.batch, scales=scales, **world.options)
    with pytest.raises(ValueError, match="scales"):
        KERNELS.paged_attention(world.q, world.kv, world.batch, scales=static, **world.options)
    KERNELS.paged_attention(world.q, kv, world.batch, scales=fitting, **world.options)
