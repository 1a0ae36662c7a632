"""OPT: learned positions, layer norms, biases everywhere, an MLP with no gate.

    x = embed(ids) [projected to hidden] + place(position)
    each layer:   norm_first (all but the 350m model)       norm after the sum (350m)
                  x += out(attention(norm(x)))               x = norm(x + out(attention(x)))
                  x += fc2(act(fc1(norm(x))))                x = norm(x + fc2(act(fc1(x))))
    logits = head([projected](norm(x)))

The table of positions starts with two rows that stand for padding and are never read. Of several ranks each has its
heads, its share of the MLP and of the vocabulary; what `out`, `fc2` and `embed` give is summed over all of them.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels.dispatch import Batch, Kernels, Scales
from kilburn.worker.models.checkpoint import Checkpoint
from kilburn.worker.models.config import ModelConfig, OptFamily, part_of
from kilburn.worker.models.layers import (
    Embedding,
    Form,
    Linear,
    embedding,
    linear,
    merged,
    owned,
    split_linear,
    tied_embedding,
)
from kilburn.worker.parallel import Ranks, cut_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
LEFTOVERS = ()
_POSITION_OFFSET = 2
_NORM_EPS = 1e-5  # torch's own default: OPT's config has no setting for it


class _Taker:
    """Takes the parameters of one model, with its prefix, in its form."""

    def __init__(self, weights: Checkpoint, family: OptFamily, form: Form, ranks: Ranks) -> None:
        self.weights, self.family, self.form, self.ranks = weights, family, form, ranks
        # Checkpoints from before the head had a module of its own lack the first part.
        self.prefix = "decoder." if "decoder.embed_tokens.weight" in weights else "model.decoder."

    def raw(self, name: str, out: int, into: int) -> tuple[Tensor, Tensor | None]:
        weight = self.weights.take(f"{self.prefix}{name}.weight", out, into)
        return weight, self.weights.take(f"{self.prefix}{name}.bias", out) if self.family.bias else None

    def outputs(self, names: list[str], out: int, into: int, part: slice) -> Linear:
        """Layers side by side, of each these outputs."""
        taken = [self.raw(name, out, into) for name in names]
        biases = [None if bias is None else bias[part] for _, bias in taken]
        return merged([weight[part] for weight, _ in taken], biases, self.form)

    def summed(self, name: str, out: int, into: int, part: slice) -> Linear:
        """What takes these inputs of a layer; its results are summed over the ranks."""
        return split_linear(*self.raw(name, out, into), part, self.form, self.ranks)

    def plain_linear(self, name: str, out: int, into: int) -> Linear:
        return linear(self.weights.take(f"{self.prefix}{name}.weight", out, into), None, self.form)

    def norm(self, name: str, size: int) -> "Norm":
        if not self.family.norm_affine:
            return Norm(size, None, None)
        parts = [self.weights.take(f"{self.prefix}{name}.{part}", size) for part in ("weight", "bias")]
        weight, bias = [owned(part, self.form) for part in parts]
        return Norm(size, weight, bias)


class Norm:
    """Layer norm over the last dimension."""

    __slots__ = ("_bias", "_shape", "_weight")

    def __init__(self, size: int, weight: Tensor | None, bias: Tensor | None) -> None:
        self._shape, self._weight, self._bias = (size,), weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, _NORM_EPS)


class Layer:
    """The weights of one layer."""

    __slots__ = ("attn_norm", "fc1", "fc2", "mlp_norm", "out", "qkv")

    def __init__(self, config: ModelConfig, index: int, take: _Taker) -> None:
        at, hidden, inner = f"layers.{index}.", config.hidden, config.intermediate
        cut = cut_of(config.num_heads, config.num_kv_heads, config.head_dim, inner, take.ranks.part)
        self.qkv = take.outputs([f"{at}self_attn.{name}_proj" for name in "qkv"], hidden, hidden, cut.q)
        self.out = take.summed(f"{at}self_attn.out_proj", hidden, hidden, cut.q)
        self.attn_norm = take.norm(f"{at}self_attn_layer_norm", hidden)
        self.fc1 = take.outputs([f"{at}fc1"], inner, hidden, cut.inner)
        self.fc2 = take.summed(f"{at}fc2", hidden, inner, cut.inner)
        self.mlp_norm = take.norm(f"{at}final_layer_norm", hidden)
        take.weights.forget()


class OptModel:
    """An OPT decoder, ready to run on one device."""

    def __init__(
        self,
        config: ModelConfig,
        family: OptFamily,
        weights: Checkpoint,
        form: Form,
        ranks: Ranks,
    ) -> None:
        self.config, self._ranks, self._norm_first = part_of(config, ranks.part), ranks, family.norm_first
        self._activation = ACTIVATIONS[family.activation]
        take = _Taker(weights, family, form, ranks)
        hidden, width = config.hidden, family.embed_width
        name, shape = f"{take.prefix}embed_tokens.weight", (config.vocab_size, width)
        if config.tie_word_embeddings:
            self._embed, self._head = tied_embedding(weights, name, shape, form, ranks)
        else:
            self._embed = embedding(weights, name, shape, form, ranks)
            head = weights.take("lm_head.weight", *shape)[ranks.part.share(config.vocab_size)]
            self._head = linear(head, None, form)
        places = weights.take(f"{take.prefix}embed_positions.weight", config.max_len + _POSITION_OFFSET, hidden)
        self._places = Embedding(owned(places[_POSITION_OFFSET:], form), form.dtype)
        projected = width != hidden
        self._project_in = take.plain_linear("project_in", hidden, width) if projected else None
        self._project_out = take.plain_linear("project_out", width, hidden) if projected else None
        self._layers = [Layer(config, i, take) for i in range(config.num_layers)]
        self._norm = take.norm("final_layer_norm", hidden) if family.final_norm else None
        self._scale = config.head_dim**-0.5
        weights.finish(LEFTOVERS)

    @torch.inference_mode()
    def forward(self, ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels, scales: Scales = None) -> Tensor:
        """ids int64 [T] -> hidden [T, embed_width]; writes each token's KV into pool [num_blocks, L, 2, Hkv, bs, D]."""
        heads, ranks = (-1, self.config.num_heads, self.config.head_dim), self._ranks
        x = self._embed(ids)
        if self._project_in is not None:
            x = self._project_in(x)
        x = x + self._places(batch.positions)
        for index, layer in enumerate(self._layers):
            kv, scale = pool[:, index], None if scales is None else scales[index]
            h = layer.attn_norm(x) if self._norm_first else x
            q, k, v = [part.view(heads) for part in layer.qkv(h).chunk(3, dim=-1)]
            kernels.kv_write(q, k, v, kv, batch, None, scale)
            # Without a name for what attention gave: it is not to live on beside the MLP.
            x = x + ranks.sum(layer.out(kernels.paged_attention(q, kv, batch, self._scale, scales=scale).flatten(1)))
            x = x if self._norm_first else layer.attn_norm(x)
            h = layer.mlp_norm(x) if self._norm_first else x
            x = x + ranks.sum(layer.fc2(self._activation(layer.fc1(h))))
            x = x if self._norm_first else layer.mlp_norm(x)
        if self._norm is not None:
            x = self._norm(x)
        return x if self._project_out is None else self._project_out(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, embed_width] of the rows that sample -> float32 [R, vocab]; of ranks > 0 their own columns."""
        return self._ranks.columns(self._head(hidden), self.config.vocab_size).float()
