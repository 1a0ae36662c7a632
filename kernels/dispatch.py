"""Which set of kernels a device gets. This is the one place that asks "is this CUDA?"."""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import (
    Batch,
    IdleWatch,
    Kernels,
    Likeliest,
    Odds,
    Rope,
    Sampled,
    Scales,
    Shapes,
    Stopwatch,
)

if TYPE_CHECKING:
    from kilburn.kernels.cpu.int8_products import Int8Product
    from kilburn.kernels.cpu.lookups import RowLookup
    from kilburn.kernels.cpu.products import PanelProduct, Product
    from kilburn.kernels.cpu.recording import Recorder

__all__ = [
    "Batch",
    "Kernels",
    "Likeliest",
    "Odds",
    "Rope",
    "Sampled",
    "Scales",
    "Shapes",
    "can_capture",
    "has_own_collectives",
    "has_products",
    "int8_product_over",
    "kernels_for",
    "kv_forms",
    "product_over",
    "recorder_of",
    "row_lookup",
    "stopwatch_for",
]


def kernels_for(device: torch.device) -> Kernels:
    """The fastest set that runs on `device`."""
    if device.type == "cpu" and _can_compile():
        from kilburn.kernels.cpu.kernels import CpuKernels
        from kilburn.kernels.cpu.team import torch_openmp

        return CpuKernels(torch_openmp())
    if device.type == "cuda" and find_spec("triton"):
        from kilburn.kernels.triton.kernels import TritonKernels
        from kilburn.kernels.triton.streams import beside, device_of

        return TritonKernels(device, device_of(device), beside(device))
    return reference


def product_over(weight: Tensor) -> "Product | None":
    """(x, bias) -> x . weight^T + bias in float32, on the CPU, over a copy of `weight` [out, in] in its own type,
    float32, bfloat16 or float16. None where nothing is faster than torch's own product. Holds nothing of `weight`."""
    product = _panel_product() if has_products() else None
    return None if product is None else product.over(weight)


def int8_product_over(weight: Tensor) -> "Product | None":
    """(x, bias) -> x . weight^T + bias for any number of rows, on the CPU, over a copy of `weight` [out, in] that has 8
    bits a value. None where the weight has to stay as it is. Holds nothing of `weight`."""
    product = _int8_product()
    return None if product is None else product.over(weight)


def has_products() -> bool:
    """Whether `product_over` has one. Without instructions for them, fused products and halves would be calls."""
    if not _can_compile():
        return False
    from kilburn.kernels.cpu.objects import host_has

    return host_has("fma") and host_has("f16c")


@cache
def row_lookup() -> "RowLookup | None":
    """(table, ids) -> the rows of a table on the CPU in float32; None where nothing is better than torch's own."""
    if not has_products():
        return None
    from kilburn.kernels.cpu.lookups import RowLookup
    from kilburn.kernels.cpu.team import torch_openmp

    return RowLookup(torch_openmp())


def recorder_of(kernels: Kernels) -> "Recorder | None":
    """Records a step of `kernels` on the CPU, to be asked for again as one launch; None where nothing can."""
    make = getattr(kernels, "recorder", None)
    return None if make is None else make()


def _can_compile() -> bool:
    return find_spec("numba") is not None and find_spec("llvmlite") is not None


@cache
def _int8_product() -> "Int8Product | None":
    if not _can_compile():
        return None
    from kilburn.kernels.cpu.int8_products import Int8Product
    from kilburn.kernels.cpu.team import torch_openmp

    return Int8Product(torch_openmp())


@cache
def _panel_product() -> "PanelProduct | None":
    """One for the process: it holds machine code and the words of one call, and nothing of any model."""
    if not _can_compile():
        return None
    from kilburn.kernels.cpu.products import PanelProduct
    from kilburn.kernels.cpu.team import torch_openmp

    return PanelProduct(torch_openmp())


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Times what is asked of `device` between start and stop, where asking is not doing."""
    if device.type == "cuda":
        from kilburn.kernels.triton.streams import EventWatch

        return EventWatch(device)
    return IdleWatch()


def kv_forms(device: torch.device) -> dict[str, tuple[str, ...]]:
    """The types of 8 bits that the kernels of `device` store KV in, each with where its scales may be; the first of
    these is what is taken where nobody says."""
    forms = {"int8": ("block", "static")}
    # Ada and Hopper were the first to convert e4m3; AMD's cards before gfx950 have another one.
    if device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9):
        forms["fp8"] = ("block", "static")
    return forms


def can_capture(device: torch.device) -> bool:
    """Whether launches on `device` can be recorded as a graph and asked for again as one."""
    return device.type == "cuda" and find_spec("triton") is not None


def has_own_collectives(device: torch.device) -> bool:
    """Whether values on `device` go from rank to rank by a library of its own (NCCL), and not by the host's."""
    return device.type == "cuda"
