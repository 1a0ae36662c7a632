"""Which set of kernels a device gets. This is the one place that asks "is this CUDA?"."""

from importlib.util import find_spec

import torch

from kilburn.kernels import reference
from kilburn.kernels.contract import Batch, Kernels, Rope, Shapes

__all__ = ["Batch", "Kernels", "Rope", "Shapes", "can_capture", "kernels_for"]


def kernels_for(device: torch.device) -> Kernels:
    """The fastest set that runs on `device`."""
    if device.type == "cpu" and find_spec("numba") and find_spec("llvmlite"):
        from kilburn.kernels.cpu.kernels import CpuKernels
        from kilburn.kernels.cpu.team import torch_openmp

        return CpuKernels(torch_openmp())
    if device.type == "cuda" and find_spec("triton"):
        from kilburn.kernels.triton.kernels import TritonKernels
        from kilburn.kernels.triton.streams import beside, device_of

        return TritonKernels(device, device_of(device), beside(device))
    return reference


def can_capture(device: torch.device) -> bool:
    """Whether launches on `device` can be recorded as a graph and asked for again as one."""
    return device.type == "cuda" and find_spec("triton") is not None
