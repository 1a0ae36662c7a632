"""Any causal language model of transformers, with its attention done by our kernels over our blocks.

transformers lets a function be registered by name as the attention of every model that is written against its
interface. Ours gets the q, k, v of a layer, already rotated, writes k and v to their slots and attends over the block
tables of the batch at hand. No cache object of transformers is ever made: `use_cache=False`, positions are given, and
all tokens of the ragged batch go in as one row.

Whether a model can be served so is found out by trying, once, at load (`generic_probe.py`). The head may do more than
a product (caps, scales), so `logits` runs the model's own forward, with its decoder replaced by one that hands over
the hidden rows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from kilburn.kernels.dispatch import Batch, Kernels, Scales
from kilburn.shared.model_files import ModelRefused
from kilburn.shared.types import LawBroken
from kilburn.worker.models.checkpoint import Checkpoint
from kilburn.worker.models.config import GenericFamily, ModelConfig, Settings, architecture_of, read_eos_ids
from kilburn.worker.models.generic_probe import Asked, Probe, check_equal

PAGED = "kilburn_paged"
_ATTRIBUTE = "kilburn_layer"
_SOME_LEN = 2048  # to examine a model whose config gives no length; it is refused, but for the better reason


@dataclass(slots=True)
class _Step:
    """What is being computed."""

    pool: Tensor
    batch: Batch
    kernels: Kernels
    scales: Scales


class _Holder:
    """The place where the layers of one model find the step at hand."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: _Step | None = None


@dataclass(frozen=True, slots=True)
class _PagedLayer:
    """Hangs on each attention module of the model."""

    index: int
    asked: Asked
    holder: _Holder


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """q [1, Hq, T, D], k and v [1, Hkv, T, D] -> [1, T, Hq, D]. The signature is transformers'."""
    layer: _PagedLayer = getattr(module, _ATTRIBUTE)
    step, asked = layer.holder.step, layer.asked
    if step is None:
        raise LawBroken(f"{type(module).__name__} attends outside of a step")
    q, k, v = [part[0].transpose(0, 1).contiguous() for part in (q, k, v)]
    kv, scales = step.pool[:, layer.index], None if step.scales is None else step.scales[layer.index]
    step.kernels.kv_write(q, k, v, kv, step.batch, None, scales)
    out = step.kernels.paged_attention(
        *(q, kv, step.batch, asked.scale),
        window=asked.window,
        soft_cap=asked.soft_cap,
        sinks=asked.sinks,
        scales=scales,
    )
    return out.unsqueeze(0), None


class _Handed:
    """What a decoder returns, to the head that comes after it: hidden states, and None for whatever else it may name
    (caches, attentions, routers), as if none had been asked for."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


class GenericModel:
    """A model of transformers, ready to run on one device."""

    def __init__(self, config: ModelConfig, model: Any, layers: list[tuple[nn.Module, Asked]]) -> None:
        self.config, self._model, self._holder = config, model, _Holder()
        for index, (module, asked) in enumerate(layers):
            setattr(module, _ATTRIBUTE, _PagedLayer(index, asked, self._holder))
        ALL_ATTENTION_FUNCTIONS.register(PAGED, _attend)
        model.set_attn_implementation(PAGED)
        self._decode = model.base_model.forward
        self._handed: _Handed | None = None
        model.base_model.forward = self._hand_over

    def _hand_over(self, *_: Any, **__: Any) -> _Handed | None:
        return self._handed

    @torch.inference_mode()
    def forward(self, ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels, scales: Scales = None) -> Tensor:
        """ids int64 [T] -> hidden [T, H]; writes each token's KV into pool [num_blocks, L, 2, Hkv, bs, D]."""
        self._holder.step = _Step(pool, batch, kernels, scales)
        try:
            out = self._decode(input_ids=ids[None], position_ids=batch.positions[None], use_cache=False)
        finally:
            self._holder.step = None
        hidden: Tensor = out[0][0]
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] of the rows that sample -> float32 [R, vocab]."""
        self._handed = _Handed(hidden[None])
        try:
            ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._handed = None
        return logits.float()


def load(
    folder: Path, settings: Settings, weights: Checkpoint, device: torch.device, dtype: torch.dtype
) -> GenericModel:
    """The model in `folder`, of an architecture that Kilburn does not decode itself. Raises ModelRefused."""
    architecture = architecture_of(settings)
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise settings.refusal("architectures", "not a causal language model that the installed transformers knows")
    transformers_logging.disable_progress_bar()
    try:
        theirs = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=theirs,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise ModelRefused(f"{folder}: transformers cannot load this {architecture}: {error}") from error
    model: Any = loaded[0]
    _refuse_strays(folder, loaded[1])
    if type(model).__name__ != architecture:
        raise settings.refusal("architectures", f"model_type makes it a {type(model).__name__}; the two must agree")
    model = model.to(device).eval()
    if model.base_model is model:
        raise ModelRefused(f"{architecture}: has no decoder apart from its head; this model cannot be served here")
    max_len = _max_len(theirs)
    probe = Probe(architecture, model, int(theirs.num_hidden_layers), int(theirs.vocab_size), max_len or _SOME_LEN)
    expected = probe.expected()
    layers = probe.layers()
    if max_len is None:
        raise settings.refusal("max_position_embeddings", "must say how many positions the model has")
    config = _config(folder, settings, theirs, architecture, layers[0][1], max_len)
    served = GenericModel(config, model, layers)
    check_equal(served, probe, expected, device, dtype)
    return served


def _refuse_strays(folder: Path, info: dict[str, Any]) -> None:
    """Every tensor used, and every parameter given."""
    for kind, story in (
        ("missing_keys", "the checkpoint lacks {}, which this model needs"),
        ("unexpected_keys", "the checkpoint holds {}, which this model has no use for"),
        ("mismatched_keys", "{} has another shape than config.json asks for"),
        ("error_msgs", "{}"),
    ):
        if found := sorted(map(str, info.get(kind) or ())):
            raise ModelRefused(f"{folder}: {story.format(found[0])}")


def _max_len(theirs: Any) -> int | None:
    """The most positions, prompt and output together; None where the config does not say."""
    longest = getattr(theirs, "max_position_embeddings", None)
    if type(longest) is not int or longest < 1:
        return None
    rope = getattr(theirs, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        # Past this length the angles of older keys would change too, which a paged cache cannot follow.
        if one.get("rope_type") == "longrope":
            longest = min(longest, int(one["original_max_position_embeddings"]))
    return longest


def _config(
    folder: Path, settings: Settings, theirs: Any, architecture: str, asked: Asked, max_len: int
) -> ModelConfig:
    inner = getattr(theirs, "intermediate_size", None) or getattr(theirs, "n_inner", None) or 4 * theirs.hidden_size
    return ModelConfig(
        architecture=architecture,
        num_layers=int(theirs.num_hidden_layers),
        hidden=int(theirs.hidden_size),
        intermediate=int(inner) if type(inner) is int else 4 * int(theirs.hidden_size),
        num_heads=asked.num_heads,
        num_kv_heads=asked.num_kv_heads,
        head_dim=asked.head_dim,
        vocab_size=int(theirs.vocab_size),
        max_len=max_len,
        tie_word_embeddings=bool(theirs.tie_word_embeddings),
        eos_ids=read_eos_ids(folder, settings),
        family=GenericFamily(),
    )
