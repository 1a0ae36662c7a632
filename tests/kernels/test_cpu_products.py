"""Products of few rows over packed weights: what they give, whom they touch, and when they are not taken."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels.cpu.products import PanelProduct, Panels, panels_of
from kilburn.kernels.cpu.team import torch_openmp

ROWS = (1, 2, 3, 4, 5, 7, 16, 33, 64)
SIZES = ((64, 1), (64, 31), (128, 32), (192, 33), (64, 70), (576, 576), (128, 1536))  # (out, in)


def packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def panels(weight: Tensor) -> Panels:
    found = panels_of(packed(weight), weight)
    assert found is not None, "this oneDNN packs in another order: few rows are as slow as its own product"
    return found


@pytest.fixture(scope="module")
def product() -> PanelProduct:
    return PanelProduct(torch_openmp())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_equals_the_product_in_float64(product: PanelProduct, size: tuple[int, int], has_bias: bool) -> None:
    draw = torch.Generator().manual_seed(sum(size))
    weight = torch.randn(size, generator=draw)
    bias = torch.randn(size[0], generator=draw) if has_bias else None
    over = panels(weight)
    for num_rows in ROWS:
        x = torch.randn((num_rows, size[1] + 8), generator=draw)[:, : size[1]]  # rows apart from each other
        want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        bound = F.linear(x.abs(), weight.abs()).max() * 2**-23 * size[1] + 1e-6  # of sums one after another
        got = product(over, x, bias)
        assert got.is_contiguous()
        assert got.shape == want.shape
        assert (got - want).abs().max() <= bound, f"{num_rows} rows"


def test_a_row_does_not_depend_on_its_neighbours(product: PanelProduct) -> None:
    weight = torch.randn(128, 96)
    over, rows = panels(weight), torch.randn(9, 96)
    alone = [product(over, rows[i : i + 1], None) for i in range(9)]
    assert torch.equal(product(over, rows, None), torch.cat(alone))
    rows[4] = torch.nan
    beside = product(over, rows, None)
    assert beside[4].isnan().all()
    assert torch.equal(beside[[0, 1, 2, 3, 5, 6, 7, 8]], torch.cat(alone[:4] + alone[5:]))


def test_what_memory_held_before_does_not_matter(product: PanelProduct) -> None:
    """New tensors are not zeroed, and may hold NaN."""
    weight, x = torch.randn(64, 48), torch.randn(3, 48)
    over, want = panels(weight), F.linear(x, weight)
    for _ in range(20):
        torch.full((3, 64), torch.nan)
        assert torch.allclose(product(over, x, None), want, atol=1e-4)


def test_on_threads_of_python() -> None:
    weight, x = torch.randn(256, 64), torch.randn(5, 64)
    got = PanelProduct(None)(panels(weight), x, None)
    assert torch.allclose(got, F.linear(x, weight), atol=1e-4)


def test_another_order_is_noticed() -> None:
    weight = torch.randn(128, 64)
    assert panels_of(packed(weight.flip(0)), weight) is None
    assert panels_of(packed(torch.randn(64, 64)), weight) is None
    assert panels_of(packed(torch.randn(100, 64)), torch.randn(100, 64)) is None, "not whole panels"


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
        product(panels(torch.randn(64, 64)), x, None)
