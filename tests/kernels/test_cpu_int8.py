"""KV of 8 bits in the CPU set: the same table of ragged shapes, with static scales and with scales in the blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.kernels import reference
from kilburn.kernels.contract import Kernels
from kilburn.kernels.dispatch import kernels_for
from tests.kernels.eight_bits import FORMS, check_attention, check_odd_rows, check_write, stored_world
from tests.kernels.shapes import CASES, MIXED, Case

KERNELS: Kernels = kernels_for(torch.device("cpu"))
SOME = tuple(case for case in CASES if case.name.startswith(("mixed", "long", "group 3", "window 16", "block size 4")))
WRITTEN = tuple(case for case in CASES if case.name.startswith(("prefill", "chunks", "block size", "3 KV")))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_the_table(case: Case, form: str) -> None:
    check_attention(KERNELS, case, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_attention_of_narrow_queries(case: Case, form: str) -> None:
    check_attention(KERNELS, case, form, torch.bfloat16)


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
    check_attention(KERNELS, case, form)


# -- writes


@pytest.mark.parametrize("kernels", [KERNELS, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_a_write_is_within_half_a_step_and_touches_nothing_else(
    case: Case, form: str, dtype: torch.dtype, kernels: Kernels
) -> None:
    check_write(kernels, case, form, dtype)


@pytest.mark.parametrize("kernels", [KERNELS, reference], ids=["cpu", "reference"])
def test_a_row_of_zeros_is_read_as_zeros_and_a_broken_row_as_broken(kernels: Kernels) -> None:
    check_odd_rows(kernels)


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
