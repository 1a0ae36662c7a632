"""What `gpu_check.py` asks of the whole worker: one decode step of an 8B-shaped model, and the tokens of a small one.

The small model has weights that are drawn from a seed here; `fixtures/worker_twin.safetensors` holds the tokens and
logits that transformers gave for them on a CPU (`make_worker_twin.py` wrote it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpu_kernels import Place, Row, Shape, batch_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import Admit, StepPlan
from kilburn.shared.sampling import Sampling
from kilburn.worker.graphs import recorder_for
from kilburn.worker.knobs import Knobs
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.model_runner import ModelRunner
from kilburn.worker.models import weights
from kilburn.worker.models.config import ModelConfig, read_config
from kilburn.worker.models.layers import Form
from kilburn.worker.models.llama import LlamaModel
from kilburn.worker.parallel import Ranks
from kilburn.worker.rows import Limits, Rows
from kilburn.worker.step import Executor

FIXTURE = Path(__file__).parent / "fixtures/worker_twin.safetensors"
NUM_OUTPUT = 16
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LARGE = SMALL | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def small_weights() -> dict[str, Tensor]:
    """Drawn by numpy, whose stream for a seed is the same everywhere."""
    random, c = np.random.Generator(np.random.PCG64(7)), SMALL
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes = {
        "model.embed_tokens": (c["vocab_size"], hidden),
        "model.norm": (hidden,),
        "lm_head": (c["vocab_size"], hidden),
    }
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm": (hidden,), at + "post_attention_layernorm": (hidden,)}
        shapes |= {at + f"self_attn.{x}_proj": (n, hidden) for x, n in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {at + "self_attn.o_proj": (hidden, q), at + "mlp.down_proj": (hidden, inner)}
        shapes |= {at + f"mlp.{x}_proj": (inner, hidden) for x in ("gate", "up")}
    tensors = {}
    for name, shape in shapes.items():
        drawn = random.standard_normal(shape)
        value = 1.0 + 0.1 * drawn if len(shape) == 1 else drawn * 1.6 * shape[-1] ** -0.5
        tensors[name + ".weight"] = torch.from_numpy(value.astype(np.float32))
    return tensors


def digest_of(tensors: dict[str, Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(tensors[name].numpy().tobytes())
    return whole.hexdigest()


def small_folder(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SMALL))
    save_file(small_weights(), folder / "model.safetensors", metadata={"format": "pt"})


def prompts() -> list[list[int]]:
    random = np.random.Generator(np.random.PCG64(8))
    return [random.integers(0, 256, length).tolist() for length in (1, 15, 16, 17, 33, 70)]


def worker_twin(place: Place) -> list[Row]:
    """Greedy tokens of six prompts, in chunks and together, and the log probabilities of the first of them, against
    those of transformers on a CPU."""
    told, num_output = load_file(FIXTURE), 2 if place.is_dry else NUM_OUTPUT
    with TemporaryDirectory() as name:
        folder = Path(name)
        small_folder(folder)
        if digest_of(small_weights()) != bytes(told["digest"].tolist()).decode():
            raise RuntimeError("numpy draws other weights than it did for the fixture: run bench/make_worker_twin.py")
        loaded = weights.load(folder, torch.float32, place.torch_device, lambda *_: None)
    c, asked = loaded.config, prompts()[: 2 if place.is_dry else None]
    limits = Limits(8, 64, c.max_len, 16, 64, c.vocab_size)
    layout = KVLayout(16, c.num_layers, c.num_kv_heads, c.head_dim, "float32")
    cache = KVCache(layout, 64, 1, place.torch_device, place.kernels)
    cache.pool.fill_(torch.nan)
    rows = Rows(limits, Knobs(8, c.vocab_size))
    executor = Executor(rows, ModelRunner(loaded.model, cache, rows, place.kernels, place.torch_device))
    tokens, first = _run(executor, asked, num_output)
    found = []
    for i, prompt in enumerate(asked):
        ids, logprobs = first[i]
        wanted = told["logits"][i].log_softmax(dim=-1)[list(ids)]
        error, same = (
            float((torch.tensor(logprobs) - wanted).abs().max()),
            tokens[i] == told["tokens"][i][:num_output].tolist(),
        )
        row: Row = {"what": f"prompt of {len(prompt)}", "tokens_equal": same, "logprob_error": error}
        found.append(row | {"graphs": executor.runner.graphs is not None, "ok": same and error < 1e-3})
    return found


Report = tuple[tuple[int, ...], tuple[float, ...]]


def _run(executor: Executor, asked: list[list[int]], num_output: int) -> tuple[list[list[int]], dict[int, Report]]:
    """Each prompt on its own row: chunks of up to 40 while any is left, then decodes of all together.

    Returns the tokens, and for each prompt the ids and log probabilities beside its first token.
    """
    tokens: list[list[int]] = [[] for _ in asked]
    first: dict[int, Report] = {}
    todo, greedy = [len(prompt) for prompt in asked], Sampling(temperature=0.0, logprobs=8)
    admits = [
        Admit(row, 0, len(prompt), tuple(prompt), (), tuple(range(row * 8, row * 8 + 8)), greedy)
        for row, prompt in enumerate(asked)
    ]
    step = 0
    while any(len(got) < num_output for got in tokens):
        counts: dict[int, int] = {}
        for row in range(len(asked)):
            if len(tokens[row]) < num_output:
                left = 64 - sum(counts.values()) - (len(asked) - row - 1)
                counts[row] = max(1, min(todo[row], 40, left))
                todo[row] = max(todo[row] - counts[row], 0)
        step += 1
        result = executor.run(StepPlan(1, step, list(counts), list(counts.values()), admits=admits))
        admits, drawn, advanced = [], iter(result.tokens), list(counts)
        for report in result.logprobs:
            first.setdefault(advanced[report.index], (report.ids, report.logprobs))
        for row, number in zip(counts, result.num_tokens, strict=True):
            tokens[row] += [next(drawn) for _ in range(number)]
    return tokens, first


# --- a step of a large model


class Drawn:
    """A checkpoint of random numbers, made where they are used."""

    def __init__(self, place: Place, dtype: torch.dtype) -> None:
        self._place, self._dtype = place, dtype

    def __contains__(self, name: str) -> bool:
        return name.startswith("model.") or name == "lm_head.weight"

    def take(self, name: str, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._place.torch_device, dtype=self._dtype) * shape[-1] ** -0.5

    def forget(self) -> None:
        """They lie in no file."""

    def apart(self, name: str) -> Tensor:
        """The embedding, once more; asked for on a CPU only."""
        return self.take(name, SMALL["vocab_size"], SMALL["hidden_size"])

    def finish(self, leftovers: object) -> None:
        """Nothing is left over."""


def config_of(settings: dict[str, Any]) -> ModelConfig:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        return read_config(Path(folder))


def steps(place: Place) -> Iterator[Row]:
    """Tokens a second of one decode step and its greedy choice, asked for launch by launch and as one graph."""
    dtype = torch.float32 if place.is_dry else torch.bfloat16
    config = config_of(SMALL if place.is_dry else LARGE)
    weights: Any = Drawn(place, dtype)
    model: Any = LlamaModel(config, config.family, weights, Form(place.torch_device, dtype), Ranks())  # type: ignore[arg-type]
    record = None if place.is_dry else recorder_for(place.torch_device)
    for seqs in (2,) if place.is_dry else (1, 64, 256):
        shape = Shape(seqs, 40 if place.is_dry else 1024, 1, config.num_kv_heads, head_dim=config.head_dim, dtype=dtype)
        sizes = (seqs * shape.blocks_each, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
        pool, batch = torch.zeros(sizes, dtype=dtype, device=place.torch_device), batch_of(shape, place.torch_device)
        ids = torch.zeros(seqs, dtype=torch.int64, device=place.torch_device)

        def step(ids: Tensor = ids, pool: Tensor = pool, batch: Any = batch) -> Tensor:
            return model.logits(model.forward(ids, pool, batch, place.kernels)).argmax(dim=-1)

        row: Row = {"batch": seqs, "tokens_s": seqs / place.host_seconds(step)}
        if record is not None:
            row["graph_tokens_s"] = seqs / place.host_seconds(record(step))
        yield row
        del pool
