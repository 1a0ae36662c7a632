"""As much of a model as its memory depends on, read from config.json and the headers of its safetensors files, or from
the header of a GGUF file.

Nothing is loaded, and nothing but the standard library is needed: a controller plans with what a worker will find. Of
several ranks each holds a part of the model:

    q, gate, up, fc1              split by their outputs
    k, v                          split by their heads; a head that fewer ranks than there are could have is held by
                                  several of them
    o, down, fc2                  split by their inputs, their biases whole
    embedding, head               split by the vocabulary, rounded up
    norms, positions              whole

Architectures that Kilburn does not decode itself are read by the names that transformers gives their settings; what a
step of theirs needs is an estimate, and the worker's own measurement is better.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from kilburn.shared.gguf_header import read_gguf_header
from kilburn.shared.layout import DTYPE_BYTES
from kilburn.shared.model_files import ModelRefused


class Build(Enum):
    """How a layer is made, as far as what it holds at its height goes."""

    GATED = "gated MLP"
    GATED_QK_NORM = "gated MLP, norms on q and k"
    PLAIN_NORM_FIRST = "plain MLP, norms first"
    PLAIN_NORM_LAST = "plain MLP, norms after the sums"
    UNKNOWN = "another architecture"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model, or of one rank's part of it."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    weight_bytes: int  # in the dtype that is computed in, tables of positions included
    lookup_bytes: int = 0  # of these, an embedding that is no head as well: it can be looked up where its file lies
    max_len: int = 0
    build: Build = Build.GATED


GATED = {
    "LlamaForCausalLM": Build.GATED,
    "MistralForCausalLM": Build.GATED,
    "Qwen2ForCausalLM": Build.GATED,
    "Qwen3ForCausalLM": Build.GATED_QK_NORM,
}
OPT = "OPTForCausalLM"
INT8_PANEL = 32  # outputs of a layer whose weights have 8 bits come in such numbers; another layer keeps its own
_INT8_OUTPUT_BYTES = 8  # beside its weights: a scale, and a bias of zero
_OPT_PADDING_ROWS = 2  # of its table of positions, which are never read

# transformers' names of a size, the commonest first.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "max_len": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    "vocab_size": ("vocab_size",),
}
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_SPLIT_OUTPUTS = re.compile(r".*\.(q_proj|gate_proj|up_proj|fc1)\.(weight|bias)")
_SPLIT_HEADS = re.compile(r".*\.(k_proj|v_proj)\.(weight|bias)")
_SPLIT_INPUTS = re.compile(r".*\.(o_proj|out_proj|down_proj|fc2)\.weight")
_EMBEDDING = re.compile(r"(.*\.)?embed_tokens\.weight")
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq")  # saved by old versions of transformers


class Config:
    """A config.json, or what another file says in its words, whose sizes are asked for by name."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def find(self, names: tuple[str, ...]) -> int | None:
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 < value < 2**31:
                raise ModelRefused(f"{self.path}: {name} = {value!r}: must be a whole number above zero")
            return value
        return None

    def size(self, what: str) -> int:
        found = self.find(_NAMES[what])
        if found is None:
            raise ModelRefused(f"{self.path}: {_NAMES[what][0]} is missing; set it as the model's publisher did")
        return found

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    @property
    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise ModelRefused(f"{self.path}: architectures = {names!r}: must hold exactly one class name")
        return names[0]


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of the folder's safetensors files. Reads their headers only. Raises ModelRefused."""
    return {name: shape for name, (shape, _) in _tensors(folder).items()}


def _tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as source:
                num_bytes = int.from_bytes(source.read(8), "little")
                if not 0 < num_bytes <= file.stat().st_size - 8:
                    raise ValueError("its header is longer than the file")
                header = json.loads(source.read(num_bytes))
            told = [(name, info) for name, info in header.items() if name != "__metadata__"]
            found |= {name: (tuple(info["shape"]), str(info["dtype"])) for name, info in told}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelRefused(f"{file}: not a whole safetensors file ({error}); fetch it again") from error
    if not found:
        raise ModelRefused(f"{folder}: holds no .safetensors files, so that its weights cannot be counted")
    return found


def read_shape(
    source: Path, dtype: str, ranks: int = 1, quantization: str = "none", keeps_narrow: bool = False
) -> ModelShape:
    """What each of `ranks` holds of the model in a folder or a GGUF file, computing in `dtype`. Raises ModelRefused.

    `quantization`: as in the settings, of the weights of linear layers. `keeps_narrow`: those of 16 bits stay so.
    """
    if source.is_dir():
        tensors = _tensors(source)
        narrow = {name for name, (_, stored) in tensors.items() if keeps_narrow and stored in ("BF16", "F16")}
        shapes = {name: shape for name, (shape, _) in tensors.items()}
        return _shape(_read_config(source / "config.json"), shapes, narrow, dtype, ranks, quantization)
    header = read_gguf_header(source)
    return _shape(Config(source, header.config), header.tensors, set(), dtype, ranks, quantization)


def _read_config(path: Path) -> Config:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelRefused(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ModelRefused(f"{path}: must hold a JSON object")
    return Config(path, values)


def _shape(
    config: Config,
    tensors: Mapping[str, tuple[int, ...]],
    narrow: set[str],
    dtype: str,
    ranks: int,
    quantization: str,
) -> ModelShape:
    """`narrow`: tensors that keep 16 bits where they are of linear layers."""
    architecture = config.architecture
    hidden, num_heads = config.size("hidden"), config.size("num_heads")
    whole = ModelShape(
        num_layers=config.size("num_layers"),
        hidden=hidden,
        intermediate=config.find(_INTERMEDIATE) or 4 * hidden,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, num_heads),
        head_dim=config.find(("head_dim",)) or (128 if architecture == "Qwen3ForCausalLM" else hidden // num_heads),
        vocab_size=config.size("vocab_size"),
        weight_bytes=0,
        max_len=_max_len(config),
        build=_build(config, architecture),
    )
    _check_split(config, architecture, whole, ranks)
    part = replace(
        whole,
        intermediate=whole.intermediate // ranks,
        num_heads=whole.num_heads // ranks,
        num_kv_heads=max(whole.num_kv_heads // ranks, 1),
    )
    is_tied = config.flag("tie_word_embeddings", architecture == OPT)
    size = DTYPE_BYTES[dtype]
    weight_bytes = lookup = 0
    for name, shape in tensors.items():
        held = _held_values(name, shape, whole, part, is_tied, ranks)
        is_embedding = _EMBEDDING.fullmatch(name) is not None
        if is_embedding and not is_tied and whole.build is not Build.UNKNOWN:
            lookup += held
        is_linear = len(shape) == 2 and (is_tied or not is_embedding) and not name.endswith("embed_positions.weight")
        if quantization == "int8" and is_linear and shape[0] % INT8_PANEL == 0:
            weight_bytes += held + _INT8_OUTPUT_BYTES * held // shape[1]
        elif is_linear and (quantization == "float16" or name in narrow):
            weight_bytes += 2 * held
        else:
            weight_bytes += held * size
    weight_bytes += _rope_bytes(config, architecture, whole)
    return replace(part, weight_bytes=weight_bytes, lookup_bytes=lookup * size)


def _kv_heads(config: Config, num_heads: int) -> int:
    if config.values.get("multi_query") is True:
        return 1
    return config.find(("num_key_value_heads", "n_head_kv", "num_kv_heads")) or num_heads


def _build(config: Config, architecture: str) -> Build:
    if architecture == OPT:
        return Build.PLAIN_NORM_FIRST if config.flag("do_layer_norm_before", True) else Build.PLAIN_NORM_LAST
    return GATED.get(architecture, Build.UNKNOWN)


def _held_values(
    name: str, shape: tuple[int, ...], whole: ModelShape, part: ModelShape, is_tied: bool, ranks: int
) -> int:
    """Values of a tensor that one rank holds."""
    values = math.prod(shape)
    is_head = name == "lm_head.weight"
    if _COMPUTED.fullmatch(name) or (is_head and is_tied):
        return 0
    if name.endswith("embed_positions.weight"):
        return values - _OPT_PADDING_ROWS * shape[-1]
    if ranks == 1:
        return values
    if is_head or _EMBEDDING.fullmatch(name):
        return -(-shape[0] // ranks) * math.prod(shape[1:])
    if _SPLIT_HEADS.fullmatch(name):
        return values * part.num_kv_heads // whole.num_kv_heads
    if _SPLIT_OUTPUTS.fullmatch(name) or _SPLIT_INPUTS.fullmatch(name):
        return values // ranks
    return values


def _check_split(config: Config, architecture: str, whole: ModelShape, ranks: int) -> None:
    """Raises ModelRefused for a split that does not divide the model, naming those that do."""
    if ranks == 1:
        return
    if whole.build is Build.UNKNOWN:
        raise ModelRefused(f"--tp {ranks}: {architecture} is served by one rank; give 1")
    works = [n for n in range(1, whole.num_heads + 1) if _divides(n, whole)]
    if ranks not in works:
        raise ModelRefused(
            f"--tp {ranks}: does not divide {whole.num_heads} heads, {whole.num_kv_heads} KV heads and an MLP of "
            f"{whole.intermediate} ({config.path}); give one of {', '.join(map(str, works))}"
        )


def _divides(ranks: int, whole: ModelShape) -> bool:
    kv_heads = whole.num_kv_heads
    is_even = kv_heads % ranks == 0 or ranks % kv_heads == 0
    return whole.num_heads % ranks == 0 and whole.intermediate % ranks == 0 and is_even


# --- rotary positions


def _rope(config: Config) -> dict[str, Any]:
    given = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    return given if isinstance(given, dict) else {}


def _number(value: object, default: float) -> float:
    """A number above zero, or the default where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return default
    return float(value)


def _max_len(config: Config) -> int:
    """Positions that the model was made for, or stretched to."""
    longest, rope = config.size("max_len"), _rope(config)
    if rope.get("rope_type", rope.get("type")) == "yarn":
        original = _number(rope.get("original_max_position_embeddings"), longest)
        stretched = original * _number(rope.get("factor"), longest / original)
        if stretched >= 2**31:
            raise ModelRefused(f"{config.path}: rope factor: stretches the model to {stretched:g} positions")
        return max(longest, int(stretched))
    return longest


def _rope_bytes(config: Config, architecture: str, whole: ModelShape) -> int:
    """Of the table of cosines and sines: float32, every position, the dimensions that are turned. Each rank's own."""
    if architecture not in GATED:
        return 0
    turned = int(whole.head_dim * _number(_rope(config).get("partial_rotary_factor"), 1.0))
    return 4 * whole.max_len * turned
