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
"""

import torch
from torch import Tensor

from kilburn.kernels.dispatch import Batch, Kernels, Scales
from kilburn.worker.models.checkpoint import Checkpoint
from kilburn.worker.models.config import LlamaFamily, ModelConfig
from kilburn.worker.models.layers import Linear, embedding, linear, merged, owned, tied_embedding
from kilburn.worker.models.rope_table import rope_table

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
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        at = f"{prefix}layers.{index}."
        hidden, inner, head = config.hidden, config.intermediate, config.head_dim
        q_size, kv_size = config.num_heads * head, config.num_kv_heads * head

        def biased(name: str, out: int, into: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
            weight = weights.take(f"{at}{name}.weight", out, into)
            return weight, weights.take(f"{at}{name}.bias", out) if has_bias else None

        def norm(name: str, size: int) -> Tensor:
            return owned(weights.take(f"{at}{name}.weight", size), device, dtype)

        sizes = (("q", q_size), ("k", kv_size), ("v", kv_size))
        qkv = [biased(f"self_attn.{name}_proj", size, hidden, family.qkv_bias) for name, size in sizes]
        gate_up = [biased(f"mlp.{name}_proj", inner, hidden, family.mlp_bias) for name in ("gate", "up")]
        self.attn_norm = norm("input_layernorm", hidden)
        self.qkv: Linear = merged([w for w, _ in qkv], [b for _, b in qkv], device, dtype)
        self.q_norm = norm("self_attn.q_norm", head) if family.qk_norm else None
        self.k_norm = norm("self_attn.k_norm", head) if family.qk_norm else None
        self.out: Linear = linear(*biased("self_attn.o_proj", hidden, q_size, family.out_bias), device, dtype)
        self.mlp_norm = norm("post_attention_layernorm", hidden)
        self.gate_up: Linear = merged([w for w, _ in gate_up], [b for _, b in gate_up], device, dtype)
        self.down: Linear = linear(*biased("mlp.down_proj", hidden, inner, family.mlp_bias), device, dtype)
        self.window = family.windows[index]
        weights.forget()


class LlamaModel:
    """A decoder of the family, ready to run on one device."""

    def __init__(
        self,
        config: ModelConfig,
        family: LlamaFamily,
        weights: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self._eps = config, family.norm_eps
        prefix = "" if "embed_tokens.weight" in weights else "model."  # a base model is saved without it
        shape = (config.vocab_size, config.hidden)
        if config.tie_word_embeddings:
            self._embed, self._head = tied_embedding(weights, f"{prefix}embed_tokens.weight", shape, device, dtype)
        else:
            self._embed = embedding(weights, f"{prefix}embed_tokens.weight", shape, device, dtype)
            self._head = linear(weights.take("lm_head.weight", *shape), None, device, dtype)
        self._layers = [Layer(config, family, i, prefix, weights, device, dtype) for i in range(config.num_layers)]
        self._norm = owned(weights.take(f"{prefix}norm.weight", config.hidden), device, dtype)
        self._rope = rope_table(family.rope, device)
        self._scale = config.head_dim**-0.5
        self._sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        weights.finish(LEFTOVERS)

    @torch.inference_mode()
    def forward(self, ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels, scales: Scales = None) -> Tensor:
        """ids int64 [T] -> hidden [T, H], normed; writes each token's KV into pool [num_blocks, L, 2, Hkv, bs, D]."""
        config, eps = self.config, self._eps
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
            h = kernels.add_rms_norm(layer.out(attended.flatten(1)), residual, layer.mlp_norm, eps)
            x = layer.down(kernels.silu_mul(layer.gate_up(h)))
        return _normed(kernels, x, residual, self._norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] of the rows that sample -> float32 [R, vocab]."""
        return self._head(hidden).float()


def _normed(kernels: Kernels, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of residual + x, which residual becomes. Before the first layer there is no x."""
    if x is None:
        return kernels.rms_norm(residual, weight, eps)
    return kernels.add_rms_norm(x, residual, weight, eps)
