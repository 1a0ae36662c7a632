"""Weights of 16 and of 8 bits in whole models: as near to float32 as they should be, each row by itself, on the bill,
refused where they are not."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kilburn.kernels.cpu import objects
from kilburn.kernels.dispatch import kernels_for, product_over
from kilburn.shared.config import SettingsError, WorkerSettings
from kilburn.shared.model_files import ModelRefused
from kilburn.shared.model_shape import read_shape
from kilburn.worker import measured
from kilburn.worker.models.weights import LoadedModel, load
from kilburn.worker.start import load_for
from tests.worker.paged_harness import CPU, Line, batch_of, load_cpu, new_pool
from tests.worker.tiny_models import make_tiny

# Whole panels of 32 outputs everywhere, but in the OPT's layers of 48.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "smollm": {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 3, "num_key_value_heads": 1},
    "opt": {},
}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def int8(folder: Path) -> LoadedModel:
    return load(folder, torch.float32, CPU, quantization="int8")


def logits_of(loaded: LoadedModel, prompts: list[list[int]]) -> Tensor:
    """Of each prompt's newest token, all prompts in one batch: [prompts, vocab]."""
    lines = [Line(prompt, list(range(20 * i, 20 * i + 20))) for i, prompt in enumerate(prompts)]
    ids, batch = batch_of([(line, len(line.tokens)) for line in lines])
    hidden = loaded.model.forward(ids, new_pool(loaded, 20 * len(lines)), batch, kernels_for(CPU))
    return loaded.model.logits(hidden[batch.query_start[1:].long() - 1])


@pytest.mark.parametrize("kind", SIZES)
def test_a_model_says_nearly_what_it_says_in_float32(tmp_path: Path, kind: str) -> None:
    folder = make_tiny(tmp_path, kind, with_tokenizer=False, overrides=SIZES[kind])
    exact, narrow = load_cpu(folder), int8(folder)
    prompts = [[7, 8, 9, 10], [50] * 33, list(range(100, 160))]
    want, got = logits_of(exact, prompts), logits_of(narrow, prompts)
    assert 0 < float((got - want).norm() / want.norm()) < 0.02
    assert exact.digest != narrow.digest, "KV of one is not KV of the other"


def test_a_token_does_not_depend_on_an_outlier_beside_it(tmp_path: Path) -> None:
    """One scale for a whole batch, as dynamic quantization often has, would take the neighbour's digits."""
    folder = make_tiny(tmp_path, "llama", with_tokenizer=False, overrides=SIZES["llama"])
    loaded = int8(folder)
    normal, outlier = [7, 8, 9, 10, 11], [12, 13, 14]
    alone = logits_of(loaded, [normal])
    table = loaded.model._embed._table  # type: ignore[attr-defined]
    loaded.model._embed._table = table.clone()  # type: ignore[attr-defined]  # the file's own is read-only
    loaded.model._embed._table[outlier] *= 1e6  # type: ignore[attr-defined]
    assert torch.equal(logits_of(loaded, [normal, outlier])[:1], alone)


def stored_as(folder: Path, dtype: torch.dtype, to: Path) -> Path:
    """The model with its tensors in another type."""
    shutil.copytree(folder, to)
    file = to / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return to


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_file_of_16_bits_keeps_them_and_says_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    wide = make_tiny(tmp_path / "wide", "smollm", with_tokenizer=False, overrides=WIDE)
    narrow = stored_as(wide, dtype, tmp_path / "narrow")
    same = stored_as(narrow, torch.float32, tmp_path / "same")
    prompts = [[7, 8, 9, 10], [50] * 33, list(range(100, 160))]
    loaded = load_cpu(narrow)
    assert torch.equal(logits_of(loaded, prompts), logits_of(load_cpu(same), prompts))
    bill = read_shape(narrow, "float32", keeps_narrow=True).weight_bytes
    assert measured.held(loaded.model).own_bytes == pytest.approx(bill, rel=0.03)
    assert bill < read_shape(same, "float32").weight_bytes * 0.6


def test_float16_by_choice_rounds_and_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    wide = make_tiny(tmp_path / "wide", "smollm", with_tokenizer=False, overrides=WIDE)
    rounded, prompts = load(wide, torch.float32, CPU, quantization="float16"), [[7, 8, 9, 10]]
    want, got = logits_of(load_cpu(wide), prompts), logits_of(rounded, prompts)
    assert 0 < float((got - want).norm() / want.norm()) < 0.002
    assert rounded.digest != load_cpu(wide).digest
    bill = read_shape(wide, "float32", quantization="float16").weight_bytes
    assert measured.held(rounded.model).own_bytes == pytest.approx(bill, rel=0.03)
    tensors = load_file(wide / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = 7e4
    save_file(tensors, wide / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"--quantization: .* beyond what float16 can hold; give none"):
        load(wide, torch.float32, CPU, quantization="float16")


def test_the_bill_has_the_weights_that_are_held(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "smollm", with_tokenizer=False, overrides=WIDE)
    shape, exact = read_shape(folder, "float32", quantization="int8"), read_shape(folder, "float32")
    # Beside them lie the rows of the newest step, quantized.
    assert measured.held(int8(folder).model).own_bytes == pytest.approx(shape.weight_bytes, rel=0.03)
    assert shape.weight_bytes < exact.weight_bytes / 3


def test_where_there_are_no_such_products_it_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "llama", with_tokenizer=False)
    settings = WorkerSettings(model=str(folder), quantization="int8")
    for dtype, device in (("bfloat16", CPU), ("float32", torch.device("meta"))):
        with pytest.raises(SettingsError, match="--quantization: int8 is for the CPU in float32; give none"):
            load_for(settings, dtype, dtype, device)
    with pytest.raises(ModelRefused, match=r"--quantization: .* give none"):
        int8(make_tiny(tmp_path / "generic", "gpt2", with_tokenizer=False))


@pytest.mark.parametrize("quantization", ["float16", "int8"])
def test_where_the_processor_lacks_instructions_torch_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    """Weights of fewer bits are refused then: their values, and the digest of KV, would not be what was asked for."""
    folder, weight = make_tiny(tmp_path, with_tokenizer=False), torch.ones(64, 8)
    assert product_over(weight) is not None
    monkeypatch.setattr(objects, "host_has", lambda feature: feature != "fma")
    assert product_over(weight) is None
    assert len(logits_of(load_cpu(folder), [[7, 8, 9]])) == 1
    with pytest.raises(SettingsError, match=f"--quantization: {quantization} needs numba .* FMA and F16C; give none"):
        load_for(WorkerSettings(model=str(folder), quantization=quantization), "float32", "float32", CPU)
