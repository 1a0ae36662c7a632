"""The CPU set's norms and activation against the reference in float64: widths that fill no vector, rows as views."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.dispatch import kernels_for
from tests.kernels.shapes import assert_near

KERNELS = kernels_for(torch.device("cpu"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 3, 7, 8, 9, 80, 576, 4096)
ROWS = (0, 1, 5, 60)
EPS = 1e-5

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


def in_columns(x: Tensor) -> Tensor:
    """The same values as a view of a wider tensor that is NaN around them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    view = wide[..., 2 : 2 + x.shape[-1]]
    view.copy_(x)
    return view


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = drawn(rows, width, dtype=dtype), drawn(width, dtype=dtype, seed=1)
    wanted = reference.rms_norm(x.double(), weight.double(), EPS)
    assert_near(KERNELS.rms_norm(x, weight, EPS), wanted, dtype)
    assert_near(KERNELS.rms_norm(in_columns(x), weight, EPS), wanted, dtype)


@every_dtype
@pytest.mark.parametrize("shape", [(5, 3, 64), (2, 3, 4, 80), (64,), (1, 1, 1), (0, 3, 64)], ids=str)
def test_rms_norm_has_any_leading_dimensions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype, seed=1)
    got = KERNELS.rms_norm(x, weight, EPS)
    assert got.shape == shape
    assert_near(got, reference.rms_norm(x.double(), weight.double(), EPS), dtype)


@every_dtype
def test_rms_norm_of_the_heads_of_a_fused_output(dtype: torch.dtype) -> None:
    fused, weight = drawn(7, 3 + 2 + 2, 64, dtype=dtype), drawn(64, dtype=dtype, seed=1)
    for heads in fused.split([3, 2, 2], dim=1):
        wanted = reference.rms_norm(heads.double(), weight.double(), EPS)
        assert_near(KERNELS.rms_norm(heads, weight, EPS), wanted, dtype)


def test_squares_that_no_half_float_holds_are_summed() -> None:
    x, weight = drawn(3, 576, dtype=torch.float16, spread=3000.0), torch.ones(576, dtype=torch.float16)
    wanted = reference.rms_norm(x.double(), weight.double(), EPS)
    assert wanted.abs().max() < 10
    assert_near(KERNELS.rms_norm(x, weight, EPS), wanted, torch.float16)


def test_eps_counts_where_a_row_is_small() -> None:
    x, weight = drawn(4, 64, dtype=torch.float32, spread=1e-4), torch.ones(64)
    x[0] = 0
    for eps in (1e-5, 1e-6, 1e-12):
        assert_near(KERNELS.rms_norm(x, weight, eps), reference.rms_norm(x.double(), weight.double(), eps), x.dtype)


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = drawn(rows, width, dtype=dtype), drawn(rows, width, dtype=dtype, seed=2)
    weight = drawn(width, dtype=dtype, seed=1)
    added = x.double() + residual.double()
    views = [(x, residual.clone()), (in_columns(x), in_columns(residual))]
    for given_x, given_residual in views:
        before = given_x.clone()
        got = KERNELS.add_rms_norm(given_x, given_residual, weight, EPS)
        assert_near(given_residual, added, dtype)
        # The norm is of the sum as it was stored, in its own dtype.
        assert_near(got, reference.rms_norm(given_residual.double(), weight.double(), EPS), dtype)
        assert torch.equal(given_x, before)


def test_add_rms_norm_leaves_what_lies_beside_the_residual() -> None:
    x, residual = drawn(9, 20, dtype=torch.float32), in_columns(drawn(9, 20, dtype=torch.float32))
    KERNELS.add_rms_norm(x, residual, torch.ones(20), EPS)
    whole = residual._base
    assert whole is not None
    assert whole[:, :2].isnan().all()
    assert whole[:, 22:].isnan().all()


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = drawn(rows, 2 * width, dtype=dtype, spread=3.0)
    wanted = reference.silu_mul(gate_up.double())
    assert_near(KERNELS.silu_mul(gate_up), wanted, dtype)
    assert_near(KERNELS.silu_mul(in_columns(gate_up)), wanted, dtype)


@every_dtype
def test_silu_of_gates_far_from_zero(dtype: torch.dtype) -> None:
    gates = torch.tensor([-3e4, -1000.0, -100.0, -80.0, -20.0, -0.0, 0.0, 20.0, 80.0, 1000.0, 3e4], dtype=dtype)
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    assert_near(KERNELS.silu_mul(gate_up), reference.silu_mul(gate_up.double()), dtype)


@every_dtype
def test_a_broken_row_stays_broken_and_alone(dtype: torch.dtype) -> None:
    x, weight = drawn(5, 72, dtype=dtype), torch.ones(72, dtype=dtype)
    x[2, 70] = torch.nan
    broken = torch.tensor([False, False, True, False, False])
    assert torch.equal(KERNELS.rms_norm(x, weight, EPS).isnan().all(dim=1), broken)
    assert torch.equal(KERNELS.rms_norm(x, weight, EPS).isnan().any(dim=1), broken)
    assert torch.equal(KERNELS.silu_mul(x).isnan().any(dim=1), broken)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from((1e-3, 1.0, 50.0)),
)
def test_drawn_rows(rows: int, width: int, dtype: torch.dtype, spread: float) -> None:
    x, weight = drawn(rows, width, dtype=dtype, seed=width, spread=spread), drawn(width, dtype=dtype, seed=1)
    assert_near(KERNELS.rms_norm(x, weight, EPS), reference.rms_norm(x.double(), weight.double(), EPS), dtype)
    both = torch.cat((x, drawn(rows, width, dtype=dtype, seed=3)), dim=1)
    assert_near(KERNELS.silu_mul(both), reference.silu_mul(both.double()), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_a_weight_of_another_type_is_served_too(dtype: torch.dtype) -> None:
    other = torch.float32 if dtype != torch.float32 else torch.float64
    x, residual, weight = drawn(3, 64, dtype=dtype), drawn(3, 64, dtype=dtype, seed=2), drawn(64, dtype=other, seed=1)
    wanted = reference.rms_norm(x.double(), weight.double(), EPS)
    assert_near(KERNELS.rms_norm(x, weight, EPS), wanted, dtype)
    got = KERNELS.add_rms_norm(x, residual, weight, EPS)
    assert_near(got, reference.rms_norm(residual.double(), weight.double(), EPS), dtype)


@every_dtype
def test_calls_of_many_shapes_in_turn_do_not_disturb_each_other(dtype: torch.dtype) -> None:
    """What a set keeps from call to call must follow what it is given."""
    for rows, width, eps in ((3, 64, 1e-5), (3, 64, 1e-1), (3, 65, 1e-1), (4, 65, 1e-1), (3, 64, 1e-5)):
        x, weight = drawn(rows, width, dtype=dtype), drawn(width, dtype=dtype, seed=1)
        wanted = reference.rms_norm(x.double(), weight.double(), eps)
        assert_near(KERNELS.rms_norm(x, weight, eps), wanted, dtype)
        assert_near(KERNELS.rms_norm(in_columns(x), weight, eps), wanted, dtype)
        residual = torch.zeros_like(x)
        assert_near(KERNELS.add_rms_norm(x, residual, weight, eps), wanted, dtype)
        assert_near(KERNELS.rms_norm(x, weight, eps), wanted, dtype)


def test_what_does_not_fit_is_named() -> None:
    x, weight = torch.randn(4, 64), torch.ones(64)
    for match, wrong in (
        ("weight ", lambda: KERNELS.rms_norm(x, torch.ones(63), EPS)),
        ("weight ", lambda: KERNELS.rms_norm(x, torch.ones(128)[::2], EPS)),
        ("x ", lambda: KERNELS.rms_norm(torch.randn(64, 4).T, weight, EPS)),
        ("residual ", lambda: KERNELS.add_rms_norm(x, torch.randn(3, 64), weight, EPS)),
        ("residual ", lambda: KERNELS.add_rms_norm(x, torch.randn(4, 63), weight, EPS)),
        ("residual ", lambda: KERNELS.add_rms_norm(x, torch.randn(64, 4).T, weight, EPS)),
        ("x ", lambda: KERNELS.add_rms_norm(x[None], x[None].clone(), weight, EPS)),
        ("gate_up ", lambda: KERNELS.silu_mul(torch.randn(4, 7))),
        ("gate_up ", lambda: KERNELS.silu_mul(torch.randn(8))),
        ("gate_up ", lambda: KERNELS.silu_mul(torch.randn(8, 4).T)),
    ):
        with pytest.raises(ValueError, match=f"^{match}"):
            wrong()
        KERNELS.rms_norm(x, weight, EPS)  # and the next call is served
