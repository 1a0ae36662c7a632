"""Finds out, once, whether a model of transformers can be served over a paged cache, and with what.

1. `expected`: a pass over a few tokens with transformers' plainest attention.
2. `layers`: a pass with an attention of ours that computes nothing, but notes what each layer asks for (heads,
   scale, cap, sinks, and which positions the mask that was made for it lets a token see), and refuses by name
   what our kernels cannot express.
3. `check_equal`: the tokens once more, through real blocks: one sequence in two chunks beside another in one. The
   logits must be those of the first pass, which also shows that the model takes positions as they are given, and
   that tokens meet nowhere but in attention.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kilburn.kernels import reference
from kilburn.kernels.dispatch import Batch, Kernels
from kilburn.shared.model_files import ModelRefused
from kilburn.worker.models.config import ModelConfig

PROBE = "kilburn_probe"
_NUM_TOKENS = 12
_CHUNK = 7
_BLOCK_SIZE = 4
# What a layer may pass besides what is read: none of it changes the result of a causal pass without a cache.
_INERT_ARGUMENTS = frozenset(
    {"dropout", "use_cache", "position_ids", "cache_position", "output_attentions", "output_hidden_states"}
    | {"is_causal", "return_dict", "position_embeddings", "layer_idx", "output_router_logits", "deterministic"}
)
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_COARSE_TOLERANCE = 5e-2  # of the 16-bit dtypes, whose passes differ by their rounding

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query position, key position -> bool


@dataclass(frozen=True, slots=True)
class Asked:
    """What one layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


class Served(Protocol):
    """The model as it will be served."""

    config: ModelConfig

    def forward(self, ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Probe:
    """One model's examination."""

    def __init__(self, architecture: str, model: Any, num_layers: int, vocab_size: int, max_len: int) -> None:
        self._architecture, self._model, self._num_layers, self._max_len = architecture, model, num_layers, max_len
        if max_len < _NUM_TOKENS:
            raise self.refusal(f"max_position_embeddings = {max_len} is too short")
        # Any ids do, as long as they differ.
        self.ids = torch.arange(1, _NUM_TOKENS + 1, device=model.device) * 7919 % vocab_size
        self._layers: list[tuple[nn.Module, Asked]] = []
        self._masks: list[tuple[Tensor, int | None]] = []  # each mask made in this pass, kept alive, and its window

    def refusal(self, why: str) -> ModelRefused:
        return ModelRefused(f"{self._architecture}: {why}; this model cannot be served over a paged cache")

    @torch.inference_mode()
    def expected(self) -> Tensor:
        """float32 [tokens, vocab]: the model's own logits."""
        return self._run().float()

    @torch.inference_mode()
    def layers(self) -> list[tuple[nn.Module, Asked]]:
        """Each attention module, in the order of the layers, and what it asks for. Raises ModelRefused."""
        ALL_ATTENTION_FUNCTIONS.register(PROBE, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, self._make_mask)
        try:
            self._model.set_attn_implementation(PROBE)
            if self._model.config._attn_implementation != PROBE:
                raise self.refusal("its attention is not written against transformers' attention interface")
            self._run()
        finally:
            for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                table._global_mapping.pop(PROBE, None)
            self._masks.clear()
        if len(self._layers) != self._num_layers:
            raise self.refusal(f"only {len(self._layers)} of its {self._num_layers} layers attend by the interface")
        kinds = {(asked.num_heads, asked.num_kv_heads, asked.head_dim) for _, asked in self._layers}
        if len(kinds) > 1:
            raise self.refusal(f"its layers differ in heads or head size ({sorted(kinds)})")
        return self._layers

    def _run(self) -> Tensor:
        positions = torch.arange(_NUM_TOKENS, device=self.ids.device)[None]
        try:
            logits: Tensor = self._model(input_ids=self.ids[None], position_ids=positions, use_cache=False).logits[0]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            raise self.refusal(f"it does not run without a cache and with given positions ({error})") from error
        return logits

    def _make_mask(self, q_length: int, mask_function: Visible, **given: Any) -> Tensor:
        """A mask in the form that layers expect, once it is known which window it is. The signature is theirs."""
        device = self.ids.device
        rows, keys = torch.arange(q_length, device=device)[:, None], torch.arange(q_length, device=device)[None, :]
        zero = torch.zeros((), dtype=torch.int64, device=device)
        seen = mask_function(zero, zero, rows, keys).expand(q_length, q_length)
        mask = torch.zeros(1, 1, q_length, q_length, device=device, dtype=given.get("dtype", torch.float32))
        mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
        self._masks.append((mask, self._window_of(mask_function)))
        return mask

    def _window_of(self, mask_function: Visible) -> int | None:
        """The window (i - window, i] as it is seen from far on, where one that never closes is None. Rows that are
        not far apart tell a window from chunks."""
        device = self.ids.device
        keys = torch.arange(self._max_len + 8, device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        windows: set[int | None] = set()
        for back in (0, 1, 7):
            row = self._max_len + 7 - back
            seen = mask_function(zero, zero, torch.tensor(row, device=device), keys).expand(keys.shape)
            first = int(seen.to(torch.int8).argmax())
            if not torch.equal(seen, (keys >= first) & (keys <= row)):
                raise self.refusal("its attention mask is neither causal nor a window")
            windows.add(None if first == 0 else row + 1 - first)
        if len(windows) > 1:
            raise self.refusal("its attention mask is not the same window for every token")
        return windows.pop()

    def _attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        """Notes the layer. The signature is transformers'."""
        name = type(module).__name__
        scale, cap = given.pop("scaling", None), given.pop("softcap", None)
        sinks, told = given.pop("s_aux", None), given.pop("sliding_window", None)
        sinks = getattr(module, "sinks", None) if sinks is None else sinks
        if unknown := [key for key, value in given.items() if key not in _INERT_ARGUMENTS and value is not None]:
            raise self.refusal(f"{name} passes {unknown[0]} to attention, which the kernels do not know")
        if any(module is one for one, _ in self._layers):
            raise self.refusal(f"{name} attends twice in one pass")
        if k.shape != v.shape or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
            shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
            raise self.refusal(f"{name} has queries, keys and values that do not fit each other ({shapes})")
        window = self._window_asked(name, mask)
        if told is not None and told != window and not (window is None and told >= self._max_len):
            raise self.refusal(f"{name} says sliding_window = {told}, but its mask says {window}")
        asked = Asked(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
            scale=q.shape[3] ** -0.5 if scale is None else float(scale),
            window=window,
            soft_cap=float(cap) if cap else None,
            sinks=None if sinks is None else sinks.detach().reshape(-1),
        )
        self._layers.append((module, asked))
        return torch.zeros_like(q).transpose(1, 2), None  # only what is asked for matters in this pass

    def _window_asked(self, name: str, mask: Any) -> int | None:
        for made, window in self._masks:
            if isinstance(mask, Tensor) and mask.untyped_storage().data_ptr() == made.untyped_storage().data_ptr():
                return window
        raise self.refusal(f"{name} uses an attention mask or bias of its own making")


def check_equal(served: Served, probe: Probe, expected: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ModelRefused unless the logits through our blocks are `expected`, those of the model itself."""
    config = served.config
    per_sequence = -(-_NUM_TOKENS // _BLOCK_SIZE)
    shape = (2 * per_sequence, config.num_layers, 2, config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
    pool = torch.full(shape, math.nan, device=device, dtype=dtype)
    blocks = torch.arange(2 * per_sequence - 1, -1, -1)  # not in the order of the pool
    tables = blocks.view(2, per_sequence)
    for spans in (((0, _CHUNK), (0, _NUM_TOKENS)), ((_CHUNK, _NUM_TOKENS), (0, 0))):
        ids, batch = _batch(probe.ids, tables, spans, device)
        logits = served.logits(served.forward(ids, pool, batch, reference))
        wanted = torch.cat([expected[start:end] for start, end in spans])
        gap, spread = float((logits - wanted).abs().max()), max(1.0, float(wanted.abs().max()))
        if not gap <= _TOLERANCE.get(dtype, _COARSE_TOLERANCE) * spread:  # so put, it is true of NaN
            raise probe.refusal(f"its logits over our blocks differ from its own by {gap:.2g}")


def _batch(
    ids: Tensor, tables: Tensor, spans: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, Batch]:
    """The positions [start, end) of each sequence. All sequences have the same tokens."""
    positions = torch.cat([torch.arange(start, end) for start, end in spans])
    owner = torch.cat([torch.full((end - start,), i) for i, (start, end) in enumerate(spans)])
    slots = tables[owner, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    counts = torch.tensor([0, *(end - start for start, end in spans)])
    batch = Batch(
        query_start=counts.cumsum(0).to(device=device, dtype=torch.int32),
        context_len=torch.tensor([end for _, end in spans], dtype=torch.int32, device=device),
        tables=tables.to(device=device, dtype=torch.int32),
        positions=positions.to(device),
        slots=slots.to(device),
        max_query=max(end - start for start, end in spans),
        max_context=max(end for _, end in spans),
    )
    return ids[positions.to(device)], batch
