"""Models of transformers over our blocks: served where their attention can be expressed, refused by name elsewhere."""

import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils

from kilburn.shared.model_files import ModelRefused
from kilburn.worker.models.config import GenericFamily
from tests.worker.paged_harness import check_against, greedy, load_cpu, theirs
from tests.worker.tiny_models import GENERIC_CONFIGS, VOCAB, make_tiny

NUM_NEW = 10
SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for length in (1, 16, 29, 50)]


def forbid_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every class that holds keys and values for transformers fails when one is made."""
    holders = (cache_utils.Cache, cache_utils.CacheLayerMixin)

    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"a {type(self).__name__} was built")

    for _, cls in inspect.getmembers(cache_utils, inspect.isclass):
        if issubclass(cls, holders):
            monkeypatch.setattr(cls, "__init__", fail)


@pytest.mark.parametrize("kind", GENERIC_CONFIGS)
def test_greedy_tokens_are_those_of_transformers_and_no_cache_is_built(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny(tmp_path, kind)
    reference = theirs(folder)
    with monkeypatch.context() as patch:
        forbid_caches(patch)
        loaded = load_cpu(folder)
        lines = greedy(loaded, prompts(), NUM_NEW, seed=2)
        with pytest.raises(RuntimeError, match="Cache was built"):  # the trap itself works
            reference(torch.tensor([[5, 6]]), use_cache=True)
    assert isinstance(loaded.config.family, GenericFamily)
    check_against(reference, lines, NUM_NEW)


def make(folder: Path, class_name: str, model_class: str, **settings: Any) -> Path:
    """A folder of any model of transformers."""
    config = getattr(transformers, class_name)(**{"vocab_size": VOCAB, **settings})
    getattr(transformers, model_class)(config).save_pretrained(folder)
    return folder


def test_sinks_are_served(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    more = {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 8, "max_position_embeddings": 256}
    folder = make(tmp_path, "GptOssConfig", "GptOssForCausalLM", **SMALL, **experts, **more)
    check_against(theirs(folder), greedy(load_cpu(folder), prompts(), NUM_NEW, seed=2), NUM_NEW)


LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("BloomConfig", "BloomForCausalLM", {"hidden_size": 48, "n_layer": 2, "n_head": 4}, "BloomForCausalLM"),
    (
        "MambaConfig",
        "MambaForCausalLM",
        {"hidden_size": 48, "num_hidden_layers": 2},
        "only 0 of its 2 layers",
    ),
    ("DeepseekV3Config", "DeepseekV3ForCausalLM", SMALL | LATENT | ROUTED, "DeepseekV3Attention has queries"),
    (
        "BartConfig",
        "BartForCausalLM",
        {"d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
        "BartForCausalLM",
    ),
    ("BertConfig", "BertForMaskedLM", SMALL, "BertForMaskedLM"),
    ("GPTNeoXConfig", "GPTNeoXForCausalLM", SMALL | {"max_position_embeddings": 8}, "max_position_embeddings = 8"),
]


@pytest.mark.parametrize(("config", "model", "settings", "named"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_cannot_be_expressed_is_refused_by_name(
    config: str, model: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = make(tmp_path, config, model, **settings)
    with pytest.raises(ModelRefused, match=named):
        load_cpu(folder)


def test_a_head_that_disagrees_with_its_config_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny(tmp_path, "phi")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.gate.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"model\.layers\.0\.mlp\.gate\.weight"):
        load_cpu(folder)
    gone = tensors.pop("model.layers.1.mlp.fc1.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"model\.layers\.1\.mlp\.fc1\.weight"):
        load_cpu(folder)
    assert gone.shape == (96, 48)
