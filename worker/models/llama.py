"""The Llama family: Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM2. What differs between them is in `LlamaFamily`.

    x = embed(ids)
    each layer:   h = norm(x)
                  q, k, v = qkv(h);  [q, k = norm(q), norm(k)]         one product for all three
                  rotate q and k, write k and v to their slots          kernels.kv_write
                  x += out(attention(q, blocks))
                  h = norm(x)
                  x += down(silu(gate(h)) * up(h))                      one product for gate and up
    logits = head(norm(x))                                              for the rows that are asked for

The sum is carried as `residual`, and each addition is fused with the norm that follows it. T tokens of any number of
sequences lie side by side; what belongs to which is the batch's affair and the kernels'.

Of several ranks each has its heads, its share of the MLP's inner values and of the vocabulary; what `out`, `down` and
`embed` give is summed over all of them (worker/parallel.py).
"""

import torch
from torch import Tensor

from kilburn.kernels.dispatch import Batch, Kernels, Scales
from kilburn.worker.models.checkpoint import Checkpoint
from kilburn.worker.models.config import LlamaFamily, ModelConfig, part_of
from kilburn.worker.models.layers import Form, Linear, embedding, linear, merged, owned, split_linear, tied_embedding
from kilburn.worker.models.rope_table import rope_table
from kilburn.worker.parallel import Ranks, cut_of

# Buffers that old versions of transformers saved; they are computed.
LEFTOVERS = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"(model\.)?rotary_emb\.inv_freq")


class Layer:
    """The weights of one layer, merged for as few products as can be."""

    __slots__ = ("attn_norm", "down", "gate_up", "k_norm", "mlp_norm", "out", "q_norm", "qkv", "window")

    def __init__(
        self,
        config: ModelConfig,
        family: LlamaFamily,
        index: int,
        prefix: str,
        weights: Checkpoint,
        form: Form,
        ranks: Ranks,
    ) -> None:
        at = f"{prefix}layers.{index}."
        hidden, inner, head = config.hidden, config.intermediate, config.head_dim
        q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
        cut = cut_of(config.num_heads, config.num_kv_heads, head, inner, ranks.part)

        def biased(name: str, out: int, into: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
            weight = weights.take(f"{at}{name}.weight", out, into)
            return weight, weights.take(f"{at}{name}.bias", out) if has_bias else None

        def outputs(name: str, out: int, has_bias: bool, part: slice) -> tuple[Tensor, Tensor | None]:
            weight, bias = biased(name, out, hidden, has_bias)
            return weight[part], None if bias is None else bias[part]

        def summed(name: str, into: int, has_bias: bool, part: slice) -> Linear:
            return split_linear(*biased(name, hidden, into, has_bias), part, form, ranks)

        def norm(name: str, size: int) -> Tensor:
            return owned(weights.take(f"{at}{name}.weight", size), form)

        sizes = (("q", q_size, cut.q), ("k", kv_size, cut.kv), ("v", kv_size, cut.kv))
        qkv = [outputs(f"self_attn.{name}_proj", size, family.qkv_bias, part) for name, size, part in sizes]
        gate_up = [outputs(f"mlp.{name}_proj", inner, family.mlp_bias, cut.inner) for name in ("gate", "up")]
        self.attn_norm = norm("input_layernorm", hidden)
        self.qkv: Linear = merged([w for w, _ in qkv], [b for _, b in qkv], form)
        self.q_norm = norm("self_attn.q_norm", head) if family.qk_norm else None
        self.k_norm = norm("self_attn.k_norm", head) if family.qk_norm else None
        self.out = summed("self_attn.o_proj", q_size, family.out_bias, cut.q)
        self.mlp_norm = norm("post_attention_layernorm", hidden)
        self.gate_up: Linear = merged([w for w, _ in gate_up], [b for _, b in gate_up], form)
        self.down = summed("mlp.down_proj", inner, family.mlp_bias, cut.inner)
        self.window = family.windows[index]
        weights.forget()


class LlamaModel:
    """A decoder of the family, ready to run on one device."""

    def __init__(
        self,
        config: ModelConfig,
        family: LlamaFamily,
        weights: Checkpoint,
        form: Form,
        ranks: Ranks,
    ) -> None:
        own = self.config = part_of(config, ranks.part)
        self._eps, self._ranks = family.norm_eps, ranks
        prefix = "" if "embed_tokens.weight" in weights else "model."  # a base model is saved without it
        shape = (config.vocab_size, config.hidden)
        if config.tie_word_embeddings:
            name = f"{prefix}embed_tokens.weight"
            self._embed, self._head = tied_embedding(weights, name, shape, form, ranks)
        else:
            self._embed = embedding(weights, f"{prefix}embed_tokens.weight", shape, form, ranks)
            head = weights.take("lm_head.weight", *shape)[ranks.part.share(config.vocab_size)]
            self._head = linear(head, None, form)
        places = range(config.num_layers)
        self._layers = [Layer(config, family, i, prefix, weights, form, ranks) for i in places]
        self._norm = owned(weights.take(f"{prefix}norm.weight", config.hidden), form)
        self._rope = rope_table(family.rope, form.device)
        self._scale = config.head_dim**-0.5
        self._sizes = [own.num_heads * own.head_dim, *[own.num_kv_heads * own.head_dim] * 2]
        weights.finish(LEFTOVERS)

    @torch.inference_mode()
    def forward(self, ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels, scales: Scales = None) -> Tensor:
        """ids int64 [T] -> hidden [T, H], normed; writes each token's KV into pool [num_blocks, L, 2, Hkv, bs, D]."""
        config, eps, ranks = self.config, self._eps, self._ranks
        residual = self._embed(ids)
        x: Tensor | None = None
        for index, layer in enumerate(self._layers):
            kv, scale = pool[:, index], None if scales is None else scales[index]
            h = _normed(kernels, x, residual, layer.attn_norm, eps)
            q, k, v = torch.split(layer.qkv(h), self._sizes, dim=-1)
            q = q.view(-1, config.num_heads, config.head_dim)
            k = k.view(-1, config.num_kv_heads, config.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = kernels.rms_norm(q, layer.q_norm, eps), kernels.rms_norm(k, layer.k_norm, eps)
            kernels.kv_write(q, k, v.view(-1, config.num_kv_heads, config.head_dim), kv, batch, self._rope, scale)
            attended = kernels.paged_attention(q, kv, batch, self._scale, window=layer.window, scales=scale)
            h = kernels.add_rms_norm(ranks.sum(layer.out(attended.flatten(1))), residual, layer.mlp_norm, eps)
            x = ranks.sum(layer.down(kernels.silu_mul(layer.gate_up(h))))
        return _normed(kernels, x, residual, self._norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] of the rows that sample -> float32 [R, vocab]; of ranks > 0 their own columns."""
        return self._ranks.columns(self._head(hidden), self.config.vocab_size).float()


def _normed(kernels: Kernels, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of residual + x, which residual becomes. Before the first layer there is no x."""
    if x is None:
        return kernels.rms_norm(residual, weight, eps)
    return kernels.add_rms_norm(x, residual, weight, eps)
