"""A pool as words: what is moved is moved as bits, in the widest pieces that a row of it is made of."""

import torch
from torch import Tensor

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def in_words(pool: Tensor) -> Tensor:
    """The same memory as integers; every stride and the offset must be whole words."""
    size = pool.element_size()
    steps = [pool.shape[-1], pool.storage_offset(), *pool.stride()[:-1]]
    for width, dtype in WORDS.items():
        if width >= size and all(step * size % width == 0 for step in steps):
            return pool.view(dtype)
    return pool
