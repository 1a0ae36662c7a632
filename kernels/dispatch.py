"""Which set of kernels a device gets. This is the one place that asks "is this CUDA?"."""

import torch

from kilburn.kernels import reference
from kilburn.kernels.contract import Batch, Kernels, Rope, Shapes

__all__ = ["Batch", "Kernels", "Rope", "Shapes", "kernels_for"]


def kernels_for(device: torch.device) -> Kernels:
    """The fastest set that runs on `device`."""
    return reference
