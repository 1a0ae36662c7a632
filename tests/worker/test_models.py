"""Our own decoders against transformers in float32: equal greedy tokens, equal logits, in ragged batches, prompts in
chunks, blocks scattered over a poisoned pool."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from kilburn.kernels.dispatch import kernels_for
from kilburn.shared.model_files import BUNDLED_NAME
from kilburn.worker.models import layers
from kilburn.worker.models.config import LlamaFamily, read_config
from kilburn.worker.models.rope_table import rope_table
from kilburn.worker.prepare import prepare
from tests.worker.paged_harness import CPU, Line, batch_of, check_against, greedy, load_cpu, new_pool, theirs
from tests.worker.tiny_models import OWN_CONFIGS, VOCAB, make_tiny

NUM_NEW = 12
LENGTHS = (1, 3, 16, 29, 50)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("kind", OWN_CONFIGS)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, kind)
    loaded, reference = load_cpu(folder), theirs(folder)
    for seed in range(2):
        check_against(reference, greedy(loaded, prompts(seed), NUM_NEW, seed), NUM_NEW)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads of its own size": ("llama", {"head_dim": 10, "num_key_value_heads": 1}),
    "qwen2, windows from layer 1 on": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3, windows by name": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "opt with gelu, no biases": ("opt", {"activation_function": "gelu"}),
    "opt without last norm": ("opt-post", {"do_layer_norm_before": False, "word_embed_proj_dim": 48}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_mean_what_they_mean_to_transformers(name: str, tmp_path: Path) -> None:
    kind, overrides = VARIANTS[name]
    folder = make_tiny(tmp_path, kind, overrides=overrides)
    check_against(theirs(folder), greedy(load_cpu(folder), prompts(3), NUM_NEW, 3), NUM_NEW)


ROPES: list[dict[str, Any]] = [
    {"rope_theta": 5e5},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_parameters": OWN_CONFIGS["llama3"]["rope_parameters"]},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        }
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 0.9,
        }
    },
]


@pytest.mark.parametrize("overrides", ROPES, ids=range(len(ROPES)))
def test_rotary_angles_are_those_of_transformers(overrides: dict[str, Any], tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = make_tiny(tmp_path, overrides=overrides)
    config = read_config(folder)
    assert isinstance(config.family, LlamaFamily)
    ours = rope_table(config.family.rope, CPU).cos_sin
    positions = torch.arange(512)[None]
    cos, sin = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(folder))(torch.zeros(1), positions)
    half = config.head_dim // 2
    assert ours.shape == (512, config.head_dim)
    torch.testing.assert_close(ours[:, :half], cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[:, half:], sin[0, :, :half], rtol=0, atol=1e-6)


def test_yarn_stretches_the_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read_config(make_tiny(tmp_path, overrides={"rope_scaling": scaling})).max_len == 2048


def test_plain_and_packed_products_are_equal() -> None:
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(48, 32, generator=rng), torch.randn(16, 32, generator=rng)]
    biases = [torch.randn(48, generator=rng), torch.randn(16, generator=rng)]
    x = torch.randn(5, 32, generator=rng)
    expected = torch.cat([x @ w.T + b for w, b in zip(weights, biases, strict=True)], dim=1)
    joined, bias = torch.cat(weights), torch.cat(biases)
    form = layers.Form(CPU, torch.float32)
    packed = layers.merged(weights, list(biases), form)
    assert isinstance(packed, layers.PackedLinear), "without numba linear layers are slow"
    for product in (layers.PlainLinear(joined, bias), packed):
        torch.testing.assert_close(product(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["smollm", "opt"])
def test_half_precision_runs_close_to_full(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from kilburn.worker.models.weights import load

    folder = make_tiny(tmp_path, kind)
    full, half = load_cpu(folder), load(folder, dtype, CPU)
    line = Line(prompts(0)[3], list(range(8)))
    ids, batch = batch_of([(line, 29)])
    kernels = kernels_for(CPU)
    wanted = full.model.logits(full.model.forward(ids, new_pool(full, 8), batch, kernels))
    got = half.model.logits(half.model.forward(ids, new_pool(half, 8).to(dtype), batch, kernels))
    assert got.dtype == torch.float32
    assert float((got - wanted).abs().max()) < 0.1
    assert full.digest != half.digest


def test_the_bundled_model_is_itself() -> None:
    folder = prepare(BUNDLED_NAME)
    config = read_config(folder)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.eos_ids[0]) == (49152, 2)
    loaded = load_cpu(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    line = greedy(loaded, [tokenizer.encode("The capital of France is").ids], 8, seed=0)[0]
    check_against(theirs(folder), [line], 8)
    assert "Paris" in tokenizer.decode(line.tokens)
