"""Products over panels: what they give in each type of weights, and that no row knows of another."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels.cpu.products import KINDS, PanelProduct
from kilburn.kernels.cpu.team import torch_openmp

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 16, 33, 97, 200)
SIZES = ((64, 1), (48, 31), (100, 33), (16, 70), (576, 576), (128, 1536))  # (out, in); 100: no whole panels


@pytest.fixture(scope="module")
def product() -> PanelProduct:
    return PanelProduct(torch_openmp())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_equals_the_product_in_float64(product: PanelProduct, size: tuple[int, int], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(sum(size))
    weight = torch.randn(size, generator=draw).to(dtype)
    multiply, in_float32 = product.over(weight), product.over(weight.float())
    for num_rows in ROWS:
        bias = torch.randn(size[0], generator=draw) if num_rows % 2 else None
        x = torch.randn((num_rows, size[1] + 8), generator=draw)[:, : size[1]]  # rows apart from each other
        want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        largest = max(F.linear(x.abs(), weight.float().abs()).flatten().tolist(), default=0.0)
        bound = largest * 2**-23 * size[1] + 1e-6  # of sums one after another
        got = multiply(x, bias)
        assert got.is_contiguous()
        assert got.shape == want.shape
        assert ((got - want).abs() <= bound).all(), f"{num_rows} rows"
        assert torch.equal(got, in_float32(x, bias)), "16 bits are the same values"


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(product: PanelProduct, dtype: torch.dtype) -> None:
    multiply, rows = product.over(torch.randn(112, 96).to(dtype)), torch.randn(200, 96)
    alone = torch.cat([multiply(row[None], None) for row in rows])
    for num_rows in ROWS:
        assert torch.equal(multiply(rows[:num_rows], None), alone[:num_rows])
    rows[4] = torch.nan
    beside, others = multiply(rows, None), torch.arange(200) != 4
    assert beside[4].isnan().all()
    assert torch.equal(beside[others], alone[others])


def test_what_memory_held_before_does_not_matter(product: PanelProduct) -> None:
    """New tensors are not zeroed, and may hold NaN."""
    weight, x = torch.randn(64, 48), torch.randn(3, 48)
    multiply, want = product.over(weight), F.linear(x, weight)
    for _ in range(20):
        torch.full((3, 64), torch.nan)
        assert torch.allclose(multiply(x, None), want, atol=1e-4)


def test_on_threads_of_python() -> None:
    weight, x = torch.randn(256, 64), torch.randn(5, 64)
    assert torch.allclose(PanelProduct(None).over(weight)(x, None), F.linear(x, weight), atol=1e-4)


@pytest.mark.parametrize(
    ("x", "complaint"),
    [
        (torch.zeros(2, 63), r"x .*want \[T, 64\]"),
        (torch.zeros(64), r"x .*want \[T, 64\]"),
        (torch.zeros(64, 2).t(), "each row contiguous"),
        (torch.zeros(2, 64, dtype=torch.float64), "want float32"),
    ],
    ids=["width", "dims", "strides", "dtype"],
)
def test_bad_arguments_are_named(product: PanelProduct, x: Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        product.over(torch.randn(64, 64))(x, None)
