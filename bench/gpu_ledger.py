"""What `gpu_check.py` asks of the memory ledger: whether a worker on this device measures what the formula says.

Two models of random weights, written here, are started as a worker would start them: every entry of the bill is planned
(shared/ledger.py, as `kilburn plan` does) and measured (worker/measured.py, by the device's own allocator). `ok` where
they agree within the tolerance, or differ by less than an allocator's granularity.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from kilburn.shared import ledger
from kilburn.shared.config import WorkerSettings
from kilburn.worker.start import make_ready

Row = dict[str, Any]

GRAIN_BYTES = 34 << 20  # what a caching allocator rounds to, and a workspace of the products' library
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
TINY |= {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 4096, "max_position_embeddings": 512}


def ledger_rows(device: str, is_dry: bool = False) -> list[Row]:
    """One row for each entry of each model's bill. `device`: as the worker's setting; `is_dry`: tiny models."""
    rows = []
    for name, config in MODELS.items():
        with TemporaryDirectory() as folder:
            write_model(Path(folder), config | (TINY if is_dry else {}))
            settings = WorkerSettings(model=folder, name="ledger", device=device, dtype="bfloat16", host_pool=64 << 20)
            size = {"kv_memory": 8 << 20, "max_step_tokens": 256} if is_dry else {"kv_memory": 1 << 30}
            ready = make_ready(replace(settings, **{"max_step_tokens": 4096, "max_rows": 64, **size}))
        planned, measured = ready.planned.amounts(), ready.ledger.amounts()
        for entry, amount in measured.items():
            gap = abs(planned[entry] - amount)
            is_near = gap <= max(ledger.TOLERANCE * amount, 0 if is_dry else GRAIN_BYTES)
            row: Row = {"model": name, "entry": entry, "planned": planned[entry], "measured": amount}
            rows.append(row | {"off": gap / max(amount, 1), "ok": is_near})
        del ready
    return rows


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A folder in Hugging Face form, of random weights."""
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{at}mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes |= {f"{at}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if config["model_type"] == "qwen3":
            shapes |= {f"{at}self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, shape[-1] ** -0.5, generator=random)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
