"""Products with weights of 8 bits: what they give, and that no row knows of another."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels.cpu.int8_products import Int8Product, int8_panels
from kilburn.kernels.cpu.products import Product
from kilburn.kernels.cpu.team import torch_openmp
from kilburn.kernels.reference import WEIGHT_LEVELS, int8_product, levels_for, quantized_rows

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 33, 130)
SIZES = ((32, 1), (64, 31), (96, 32), (32, 33), (576, 576), (128, 1536))  # (out, in)


@pytest.fixture(scope="module")
def product() -> Int8Product:
    return Int8Product(torch_openmp())


def over(product: Int8Product, weight: Tensor) -> Product:
    found = product.over(weight)
    assert found is not None
    return found


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_equals_the_reference_in_whole_numbers(product: Int8Product, size: tuple[int, int], has_bias: bool) -> None:
    draw = torch.Generator().manual_seed(sum(size))
    weight = torch.randn(size, generator=draw) * torch.logspace(-3, 3, size[0])[:, None]  # outputs of all magnitudes
    bias = torch.randn(size[0], generator=draw) if has_bias else None
    multiply = over(product, weight)
    for num_rows in ROWS:
        x = torch.randn((num_rows, size[1] + 8), generator=draw)[:, : size[1]]  # rows apart from each other
        got, want = multiply(x, bias), int8_product(x, weight, bias)
        assert got.is_contiguous()
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-4 * float(want.abs().max())), f"{num_rows} rows"
        bound = F.linear(x.abs().amax(1, keepdim=True), weight.abs().amax(1, keepdim=True)) * size[1] / 127
        assert ((got - F.linear(x, weight, bias)).abs() <= bound + 1e-5).all()


def test_a_row_has_to_the_last_bit_what_it_has_alone(product: Int8Product) -> None:
    """Also beside an outlier, for which one scale of the whole batch would take all its digits."""
    multiply, rows = over(product, torch.randn(128, 97)), torch.randn(13, 97)
    alone = [multiply(rows[i : i + 1], None) for i in range(13)]
    assert torch.equal(multiply(rows, None), torch.cat(alone))
    others = [i for i in range(13) if i != 4]
    for outlier in (1e6, torch.inf, torch.nan):
        rows[4, 7] = outlier
        beside = multiply(rows, None)
        assert torch.equal(beside[others], torch.cat([alone[i] for i in others]))
        assert beside[4].isnan().all() == (outlier != 1e6)


def test_rows_of_nothing_are_nothing_and_have_their_bias(product: Int8Product) -> None:
    bias = torch.randn(32)
    got = over(product, torch.randn(32, 40))(
        torch.tensor([0.0, 1e-34, -1e-40])[:, None].expand(3, 40).contiguous(), bias
    )
    assert torch.equal(got, bias.expand(3, 32))
    nothing = over(product, torch.zeros(32, 40))(torch.randn(2, 40), None)
    assert torch.equal(nothing, torch.zeros(2, 32))


def test_the_largest_of_a_row_is_127_and_nothing_is_beyond() -> None:
    values, scales = quantized_rows(torch.tensor([[3.0, -3.0, 1.5, 0.0], [1e30, 1.0, -1e30, 5e29]]), 127)
    assert values.tolist() == [[127, -127, 64, 0], [127, 0, -127, 64]]
    assert scales.tolist() == pytest.approx([3 / 127, 1e30 / 127])


def test_sums_of_the_deepest_weight_fit(product: Int8Product) -> None:
    for depth in (1, 516, 517, 20_000, 133_144):  # the last but one at which x has as many levels as the weight
        got = over(product, torch.ones(32, depth))(torch.ones(1, depth), None)
        assert got.tolist() == [[pytest.approx(depth)] * 32]
        assert depth * WEIGHT_LEVELS * levels_for(depth) < 2**31
    assert levels_for(1) == 2**15 - 1
    assert int8_panels(torch.ones(32, 133_145)) is None


def test_a_weight_of_no_whole_panels_stays_as_it_is(product: Int8Product) -> None:
    assert product.over(torch.randn(33, 64)) is None


def test_on_threads_of_python() -> None:
    weight, x = torch.randn(256, 64), torch.randn(20, 64)
    assert torch.allclose(over(Int8Product(None), weight)(x, None), int8_product(x, weight, None), atol=1e-2)


@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (torch.zeros(2, 63), r"x .*want \[T, 64\]"),
        (torch.zeros(64, 2).t(), "each row contiguous"),
        (torch.zeros(2, 64, dtype=torch.float64), "want float32"),
    ],
    ids=["width", "strides", "dtype"],
)
def test_bad_arguments_are_named(product: Int8Product, x: Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        over(product, torch.randn(64, 64))(x, None)
