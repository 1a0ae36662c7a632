"""What a model is, read from its config.json: a frozen value, or a refusal that names the setting.

Nothing is ignored in silence. For the architectures that Kilburn decodes itself every key is either *used* here, or
*inert* (it cannot change what a forward pass computes), or *fixed* (it could, and must have the one value we
implement); any other key with a value refuses the model. Every other architecture is `GenericFamily`: transformers
reads its settings, and `generic.py` finds out its shapes.

This file does not import torch or transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kilburn.shared.model_files import ModelRefused
from kilburn.worker.models.rope import RopeSettings, read_rope
from kilburn.worker.parallel import Part, cut_of


@dataclass(frozen=True, slots=True)
class LlamaFamily:
    """RMS norms before attention and MLP, rotary positions, grouped-query attention, SiLU-gated MLP."""

    norm_eps: float
    rope: RopeSettings
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # of each layer: how many positions a token sees, itself included


@dataclass(frozen=True, slots=True)
class OptFamily:
    """Learned positions, layer norms, biases, an MLP without gate."""

    activation: str  # a key of opt.ACTIVATIONS
    embed_width: int  # of the token embedding; projected to hidden where they differ
    bias: bool
    norm_first: bool  # False: after the sums, as in the 350m model
    final_norm: bool
    norm_affine: bool


@dataclass(frozen=True, slots=True)
class GenericFamily:
    """Run by transformers' own module, with attention over our blocks."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and settings of one model. `max_len` counts prompt and output together."""

    architecture: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_len: int
    tie_word_embeddings: bool
    eos_ids: tuple[int, ...]
    family: LlamaFamily | OptFamily | GenericFamily


def part_of(config: ModelConfig, part: Part) -> ModelConfig:
    """The sizes of what one rank computes; what is whole on every rank stays as it is."""
    cut = cut_of(config.num_heads, config.num_kv_heads, 1, config.intermediate, part)
    heads, kv_heads, inner = (share.stop - share.start for share in (cut.q, cut.kv, cut.inner))
    return replace(config, num_heads=heads, num_kv_heads=kv_heads, intermediate=inner)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys that cannot change what a forward pass computes.
_INERT = _words(
    """_name_or_path architectures model_type transformers_version torch_dtype dtype use_cache initializer_range
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id attention_dropout dropout
    activation_dropout classifier_dropout hidden_dropout resid_pdrop layerdrop init_std pretraining_tp prefix
    is_llama_config transformers.js_config unsloth_version unsloth_fixed gradient_checkpointing attn_implementation
    _attn_implementation _attn_implementation_autoset output_attentions output_hidden_states return_dict torchscript
    problem_type finetuning_task id2label label2id num_labels tokenizer_class task_specific_params do_sample
    max_length min_length temperature top_k top_p typical_p num_beams repetition_penalty length_penalty
    no_repeat_ngram_size early_stopping num_return_sequences chunk_size_feed_forward is_decoder base_model_tp_plan
    base_model_pp_plan use_bfloat16 tf_legacy_loss max_window_layers"""
)
# Keys that could, with the only values that we implement.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "pruned_heads": ({},),
}
_SIZES = _words(
    """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
    max_position_embeddings tie_word_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters
    layer_types"""
)
_USED: Mapping[str, frozenset[str]] = {
    "LlamaForCausalLM": _SIZES | {"attention_bias", "mlp_bias", "sliding_window"},
    "MistralForCausalLM": _SIZES | {"sliding_window"},
    "Qwen2ForCausalLM": _SIZES | {"sliding_window", "use_sliding_window"},
    "Qwen3ForCausalLM": _SIZES | {"sliding_window", "use_sliding_window", "attention_bias"},
    "OPTForCausalLM": _words(
        """hidden_size ffn_dim num_hidden_layers num_attention_heads vocab_size max_position_embeddings
        tie_word_embeddings activation_function word_embed_proj_dim do_layer_norm_before _remove_final_layer_norm
        enable_bias layer_norm_elementwise_affine"""
    ),
}
_TRUNCATED_EOS = 64  # more ids than any model has to end on


class Settings:
    """A config.json as it was read, that says which key is wrong."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def refusal(self, key: str, why: str) -> ModelRefused:
        return ModelRefused(f"{self.path}: {key} = {self.values.get(key)!r}: {why}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self.get(key, default)
        if value is None:
            raise ModelRefused(f"{self.path}: {key} is missing; set it as the model's publisher did")
        if type(value) is not int or not 0 < value < 2**31:
            raise self.refusal(key, "must be a whole number above zero")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refusal(key, "must be true or false")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not value > 0 or value == float("inf"):
            raise self.refusal(key, "must be a number above zero")
        return float(value)


def read_settings(folder: Path) -> Settings:
    """The folder's config.json, after the checks that no model of any architecture may fail. Raises ModelRefused."""
    path = folder / "config.json"
    settings = Settings(_read_json(path), path)
    _refuse_code(settings.values, path)
    if (folder / "adapter_config.json").exists():
        raise ModelRefused(f"{folder}: holds an adapter (adapter_config.json); merge it into its base model first")
    if settings.get("quantization_config") is not None:
        raise settings.refusal("quantization_config", "quantized checkpoints are not read; use the unquantized model")
    return settings


def architecture_of(settings: Settings) -> str:
    """The one class name that the config gives."""
    names = settings.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise settings.refusal("architectures", "must hold exactly one class name, such as LlamaForCausalLM")
    return names[0]


def is_own(architecture: str) -> bool:
    """Whether Kilburn decodes it itself."""
    return architecture in _USED


def read_config(folder: Path) -> ModelConfig:
    """The config of an architecture of ours. Raises ModelRefused."""
    settings = read_settings(folder)
    architecture = architecture_of(settings)
    if not is_own(architecture):
        raise settings.refusal("architectures", "not one of " + ", ".join(_USED))
    for key, value in settings.values.items():
        if key in _FIXED and value is not None and value not in _FIXED[key]:
            allowed = " or ".join(repr(one) for one in _FIXED[key])
            raise settings.refusal(key, f"not supported; {architecture} is served only with {allowed}")
        if key not in _USED[architecture] | _INERT | _FIXED.keys() and value is not None:
            raise settings.refusal(key, f"not a setting that is known of {architecture}; remove it if it has no effect")
    eos_ids = read_eos_ids(folder, settings)
    return (_opt if architecture == "OPTForCausalLM" else _llama)(settings, architecture, eos_ids)


def _llama(settings: Settings, architecture: str, eos_ids: tuple[int, ...]) -> ModelConfig:
    hidden, num_heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    num_kv_heads = settings.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise settings.refusal("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    if settings.get("head_dim") is None and hidden % num_heads:
        raise settings.refusal("hidden_size", f"must be a multiple of num_attention_heads = {num_heads}")
    head_dim = settings.count("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // num_heads)
    num_layers, max_positions = settings.count("num_hidden_layers"), settings.count("max_position_embeddings")
    rope = read_rope(settings, head_dim, max_positions)
    attention_bias = settings.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden=hidden,
        intermediate=settings.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=settings.count("vocab_size"),
        max_len=rope.max_positions,
        tie_word_embeddings=settings.flag("tie_word_embeddings", False),
        eos_ids=eos_ids,
        family=LlamaFamily(
            norm_eps=settings.real("rms_norm_eps", 1e-6),
            rope=rope,
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            out_bias=attention_bias,
            mlp_bias=settings.flag("mlp_bias", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            windows=_windows(settings, architecture, num_layers),
        ),
    )


def _windows(settings: Settings, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, by the architecture's own rule."""
    kinds = settings.get("layer_types", [])
    known = {"full_attention", "sliding_attention"}
    if kinds and (not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= known):
        raise settings.refusal("layer_types", f"must name one of {sorted(known)} for each of {num_layers} layers")
    match architecture:
        case "MistralForCausalLM":
            # transformers fills in 4096 where the key is absent; null means that there is no window.
            absent = "sliding_window" not in settings.values
            window = None if settings.get("sliding_window") is None else settings.count("sliding_window")
            return (4096 if absent else window,) * num_layers
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM":
            if not settings.flag("use_sliding_window", False):
                if "sliding_attention" in kinds:
                    raise settings.refusal("layer_types", "has sliding layers; set use_sliding_window to true")
                return (None,) * num_layers
            window, first = settings.count("sliding_window", 4096), settings.get("max_window_layers", 28)
            if not kinds:
                return tuple(window if i >= first else None for i in range(num_layers))
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        case _:
            if settings.get("sliding_window") is not None:
                raise settings.refusal("sliding_window", f"{architecture} has no window; set it to null")
            if "sliding_attention" in kinds:
                raise settings.refusal("layer_types", f"{architecture} has no sliding layers")
            return (None,) * num_layers


def _opt(settings: Settings, architecture: str, eos_ids: tuple[int, ...]) -> ModelConfig:
    hidden, num_heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    if hidden % num_heads:
        raise settings.refusal("hidden_size", f"must be a multiple of num_attention_heads = {num_heads}")
    activation = settings.get("activation_function", "relu")
    if activation not in ("relu", "gelu"):
        raise settings.refusal("activation_function", "not supported; OPT is served with relu or gelu")
    norm_first = settings.flag("do_layer_norm_before", True)
    return ModelConfig(
        architecture=architecture,
        num_layers=settings.count("num_hidden_layers"),
        hidden=hidden,
        intermediate=settings.count("ffn_dim"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        vocab_size=settings.count("vocab_size"),
        max_len=settings.count("max_position_embeddings"),
        tie_word_embeddings=settings.flag("tie_word_embeddings", True),
        eos_ids=eos_ids,
        family=OptFamily(
            activation=activation,
            embed_width=settings.count("word_embed_proj_dim", hidden),
            bias=settings.flag("enable_bias", True),
            norm_first=norm_first,
            final_norm=norm_first and not settings.flag("_remove_final_layer_norm", False),
            norm_affine=settings.flag("layer_norm_elementwise_affine", True),
        ),
    )


def read_eos_ids(folder: Path, settings: Settings) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's, else config.json's, else none."""
    path, value = folder / "generation_config.json", None
    if path.is_file():
        value = _read_json(path).get("eos_token_id")
    if value is None:
        path, value = settings.path, settings.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if len(ids) > _TRUNCATED_EOS or any(type(one) is not int or one < 0 for one in ids):
        raise ModelRefused(f"{path}: eos_token_id = {value!r}: must be a token id or a list of some")
    return tuple(dict.fromkeys(ids))


def _refuse_code(value: Any, path: Path, at: str = "") -> None:
    """Nothing that a folder brings is ever run: not modules beside it, not attention kernels from a hub."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            _refuse_code(item, path, f"{at}[{i}]")
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        where = f"{at}.{key}" if at else key
        if key == "auto_map" and item:
            raise ModelRefused(
                f"{path}: {where}: this model needs code of its own, which is never run here; use a checkpoint of an "
                "architecture that is part of transformers, and remove auto_map if this is one"
            )
        if "implementation" in key and "/" in json.dumps(item):
            raise ModelRefused(f"{path}: {where} = {item!r}: kernels are never fetched from a hub; remove the setting")
        _refuse_code(item, path, where)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelRefused(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{path}: must hold a JSON object")
    return value
