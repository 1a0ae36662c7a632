"""How a model turns its queries and keys by their positions: the settings, read from a config. No torch here.

With f_i = theta ** (-2i / dim) radians per position, before scaling:

    default   f_i
    linear    f_i / factor
    dynamic   f_i: NTK scaling sets in beyond max_position_embeddings only, and turns older keys too, which a paged
              cache cannot do. So it is served up to max_position_embeddings, where it changes nothing.
    llama3    long waves / factor, short ones as they are, a ramp between
    yarn      low dimensions as they are, high ones / factor, a ramp between; cos and sin times attention_factor
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kilburn.worker.models.config import Settings


@dataclass(frozen=True, slots=True)
class Default:
    pass


@dataclass(frozen=True, slots=True)
class Linear:
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max: int


@dataclass(frozen=True, slots=True)
class Yarn:
    factor: float
    original_max: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """How a model turns its queries and keys. `dim` of each head's values are turned, in halves."""

    theta: float
    dim: int
    scaling: Default | Linear | Llama3 | Yarn
    max_positions: int


_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"}
    | {"mscale_all_dim", "truncate"},
}


def read_rope(settings: "Settings", head_dim: int, max_positions: int) -> RopeSettings:
    """From rope_parameters (transformers 5) or rope_theta and rope_scaling (before). Raises ModelRefused."""
    key = "rope_parameters" if settings.get("rope_parameters") is not None else "rope_scaling"
    given: dict[str, Any] = settings.get(key, {})
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise settings.refusal(key, "must be one set of values for all layers")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _KEYS:
        raise settings.refusal(key, f"rope_type {kind!r} is not supported; these are: {', '.join(_KEYS)}")
    if unknown := {name for name, value in given.items() if value is not None} - _COMMON - _KEYS[kind]:
        raise settings.refusal(key, f"{', '.join(sorted(unknown))} is not a setting of rope_type {kind}")

    def number(name: str, default: float | None = None) -> float:
        value: Any = given.get(name) if given.get(name) is not None else default
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise settings.refusal(key, f"{name} must be a number above zero")
        return float(value)

    theta = number("rope_theta", settings.real("rope_theta", 10000.0))
    dim = int(head_dim * number("partial_rotary_factor", 1.0))
    if dim > head_dim or dim % 2:
        raise settings.refusal(key, f"partial_rotary_factor must turn an even part of head_dim = {head_dim}")
    scaling: Default | Linear | Llama3 | Yarn = Default()
    match kind:
        case "linear":
            scaling = Linear(number("factor"))
        case "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if low >= high:
                raise settings.refusal(key, "low_freq_factor must be below high_freq_factor")
            scaling = Llama3(
                number("factor"), low, high, int(number("original_max_position_embeddings", max_positions))
            )
        case "yarn":
            original = int(number("original_max_position_embeddings", max_positions))
            factor = number("factor", max_positions / original)
            mscale, mscale_all = given.get("mscale") or 0.0, given.get("mscale_all_dim") or 0.0
            natural = _yarn_mscale(factor, 1.0)
            if mscale and mscale_all:
                natural = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
            attention_factor = number("attention_factor", natural)
            truncate = given.get("truncate") is not False
            fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
            scaling = Yarn(factor, original, fast, slow, attention_factor, truncate)
            # The config may still say how long the model was before it was stretched.
            max_positions = max(max_positions, int(original * factor))
    return RopeSettings(theta, dim, scaling, max_positions)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
