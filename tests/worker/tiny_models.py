"""Complete model folders with a few thousand random weights, for every test that needs a model.

A folder made here is what a user would bring: config.json, model.safetensors, tokenizer.json, tokenizer_config.json
with a chat template, generation_config.json. The same kind, seed and vocab give the same bytes. The kinds that Kilburn
decodes itself are written from the table of their tensors, without transformers (whose import takes seconds); the
others are made by transformers.

Ids: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>, 3 <|pad|>, then the 256 bytes, then merges of common English.
Weights are scaled so that logits have a spread of about one: the greedy choice is clear, and differs from step to step.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
EOS_IDS = (2, 0)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# fmt: off
MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t",
    "i s", "a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r", "Ġt o", "Ġ m",
    "Ġo f", "Ġ in", "Ġ d", "Ġ h", "Ġan d", "i c", "a s", "l e", "Ġt h", "i on", "o m", "l l", "en t", "Ġ n", "Ġ l",
    "s t", "Ġ re", "v e", "Ġ e", "r o", "l y", "Ġb e", "Ġ g", "Ġ T", "c t", "Ġ S", "i d", "o t", "Ġ I", "u t",
)
# fmt: on

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "do_layer_norm_before": True,
    "tie_word_embeddings": True,
    "pad_token_id": 3,
}

OWN_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama3": {**_LLAMA, "rope_parameters": _LLAMA3_ROPE},
    # Nine query heads on three KV heads, embeddings tied: the shape of the bundled model.
    "smollm": {**_LLAMA, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    | {"tie_word_embeddings": True},
    "mistral": {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen2": {**_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24},
    "opt": _OPT,
    # As OPT-350m: norms after the sums, and embeddings narrower than the rest.
    "opt-post": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
}

# Made by transformers; the class of each config, and its settings.
GENERIC_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt-neox": (
        "GPTNeoXConfig",
        {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"max_position_embeddings": 512, "rotary_pct": 0.5},
    ),
    "phi": (
        "PhiConfig",
        {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "max_position_embeddings": 512},
    ),
    "gemma2": (
        "Gemma2Config",
        {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 24}
        | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
}

KINDS = (*OWN_CONFIGS, *GENERIC_CONFIGS)


def make_tiny(
    folder: Path,
    kind: str = "llama",
    seed: int = 0,
    vocab: int = VOCAB,
    with_tokenizer: bool = True,
    overrides: dict[str, Any] | None = None,
) -> Path:
    """Write a model of one of KINDS into `folder` (made if absent) and return it. `overrides` changes its config."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind in GENERIC_CONFIGS:
        _write_generic(folder, kind, seed, vocab, overrides or {})
    else:
        config = {**OWN_CONFIGS[kind], "vocab_size": vocab, "torch_dtype": "float32", **(overrides or {})}
        _write_json(folder / "config.json", config)
        tensors = opt_shapes(config) if config["model_type"] == "opt" else llama_shapes(config)
        save_file(_random(tensors, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": list(EOS_IDS)})
    if with_tokenizer:
        write_tokenizer(folder, vocab)
    return folder


def write_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE that names every id below `vocab`."""
    names = [*SPECIAL, *_byte_names()]
    merges = [tuple(merge.split(" ")) for merge in MERGES[: max(vocab - len(names), 0)]]
    names += ["".join(merge) for merge in merges]
    if vocab < len(SPECIAL) + 256:
        raise ValueError(f"vocab must be at least {len(SPECIAL) + 256}, to have a token for each byte")
    extra = [f"<|extra_{i}|>" for i in range(vocab - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate([*names, *extra])}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *extra])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama-family checkpoint."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (q, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, q),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
        }
        if config.get("attention_bias"):
            shapes |= {at + f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
            shapes[at + "self_attn.o_proj.bias"] = (hidden,)
        if config.get("mlp_bias"):
            sizes = {"gate": inner, "up": inner, "down": hidden}
            shapes |= {at + f"mlp.{name}_proj.bias": (size,) for name, size in sizes.items()}
        if config["model_type"] == "qwen2":
            shapes |= {at + f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
        if config["model_type"] == "qwen3":
            shapes |= {at + "self_attn.q_norm.weight": (head,), at + "self_attn.k_norm.weight": (head,)}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def opt_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of an OPT checkpoint."""
    hidden, inner, narrow = config["hidden_size"], config["ffn_dim"], config["word_embed_proj_dim"]
    at = "model.decoder."
    shapes: dict[str, tuple[int, ...]] = {
        at + "embed_tokens.weight": (config["vocab_size"], narrow),
        at + "embed_positions.weight": (config["max_position_embeddings"] + 2, hidden),
    }
    if narrow != hidden:
        shapes |= {at + "project_in.weight": (hidden, narrow), at + "project_out.weight": (narrow, hidden)}
    norms = [at + "final_layer_norm"] if config["do_layer_norm_before"] else []
    for i in range(config["num_hidden_layers"]):
        layer = f"{at}layers.{i}."
        norms += [layer + "self_attn_layer_norm", layer + "final_layer_norm"]
        linears = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
        for name, size in (linears | {"fc1": (inner, hidden), "fc2": (hidden, inner)}).items():
            shapes |= {f"{layer}{name}.weight": size, f"{layer}{name}.bias": size[:1]}
    return shapes | {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=rng)
        if len(shape) == 1:  # a norm's weight lies around one, a bias around zero
            tensors[name] = values * 0.1 + (1.0 if name.endswith("norm.weight") else 0.0)
        elif "embed" in name:
            tensors[name] = values * 0.1  # tied, it is the head too, and must not drown what the layers add
        else:
            tensors[name] = values * shape[1] ** -0.5
    return tensors


def _write_generic(folder: Path, kind: str, seed: int, vocab: int, overrides: dict[str, Any]) -> None:
    import transformers  # seconds to import, and only these kinds need it

    class_name, settings = GENERIC_CONFIGS[kind]
    config = getattr(transformers, class_name)(
        **{**settings, "vocab_size": vocab, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, **overrides}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=rng)
            if weight.dim() == 1:
                weight.add_(values * 0.1)  # transformers starts norms at their neutral value, biases at zero
            else:
                weight.copy_(values * (0.1 if "embed" in name or "wte" in name else weight.shape[-1] ** -0.5))
    model.save_pretrained(folder)


def _byte_names() -> list[str]:
    """GPT-2's printable name of each byte, in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [names[byte] for byte in range(256)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))
