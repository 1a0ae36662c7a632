"""Rotary positions as the kernels read them: a table of cosines and sines.

The arithmetic is transformers', in float32 and in its order, so that angles are equal to the last bit or nearly:
inverse frequencies first, scaled by the rope type's rule, then one product with the position.
"""

import math

import torch
from torch import Tensor

from kilburn.kernels.dispatch import Rope
from kilburn.worker.models.rope import Default, Linear, Llama3, RopeSettings, Yarn


def inverse_frequencies(rope: RopeSettings) -> tuple[Tensor, float]:
    """float32 [dim / 2] in radians per position, and the factor on cosines and sines."""
    powers = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim)
    plain = 1.0 / powers
    match rope.scaling:
        case Default():
            return plain, 1.0
        case Linear(factor):
            return plain / factor, 1.0
        case Llama3(factor, low, high, original):
            return _llama3(plain, factor, low, high, original), 1.0
        case Yarn() as yarn:
            keep = 1 - _yarn_ramp(rope, yarn)
            return 1.0 / (yarn.factor * powers) * (1 - keep) + plain * keep, yarn.attention_factor


def _llama3(plain: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn_ramp(rope: RopeSettings, yarn: Yarn) -> Tensor:
    """0 where a dimension turns often within the original length, 1 where it hardly turns."""

    def dimension(turns: float) -> float:
        return rope.dim * math.log(yarn.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def rope_table(rope: RopeSettings, device: torch.device) -> Rope:
    """Cosines and sines of every position that the model can have."""
    frequencies, factor = inverse_frequencies(rope)
    angles = torch.arange(rope.max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return Rope(torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1).to(device))
