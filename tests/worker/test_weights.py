"""Every tensor used once or refused by name; and a digest that is equal where KV is equal, in every process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kilburn.shared.model_files import ModelRefused
from kilburn.worker.models.checkpoint import Checkpoint
from kilburn.worker.models.weights import file_hash, load
from tests.worker.paged_harness import CPU, load_cpu
from tests.worker.tiny_models import OWN_CONFIGS, make_tiny

Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", OWN_CONFIGS)
def test_each_tensor_is_needed_and_no_other_is_taken(kind: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, kind)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        rewrite(folder, {other: value for other, value in tensors.items() if other != name})
        with pytest.raises(ModelRefused, match=name.replace(".", r"\.")):
            load_cpu(folder)
        rewrite(folder, tensors | {name: torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)})
        with pytest.raises(ModelRefused, match="shape"):
            load_cpu(folder)
    rewrite(folder, tensors | {"model.layers.7.stray": torch.zeros(1)})
    with pytest.raises(ModelRefused, match=r"model\.layers\.7\.stray"):
        load_cpu(folder)
    rewrite(folder, tensors)
    load_cpu(folder)


def test_weights_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, tensors | {"model.norm.weight": torch.ones(48, dtype=torch.int64)})
    with pytest.raises(ModelRefused, match=r"model\.norm\.weight is I64"):
        load_cpu(folder)


def test_buffers_of_old_checkpoints_are_left_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, tensors | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load_cpu(folder)


def test_a_tied_head_may_be_there_twice_but_must_be_equal(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "smollm")
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    rewrite(folder, tensors | {"lm_head.weight": table.clone()})
    load_cpu(folder)
    rewrite(folder, tensors | {"lm_head.weight": table + 1e-3})
    with pytest.raises(ModelRefused, match="tie_word_embeddings"):
        load_cpu(folder)


def shard(folder: Path) -> dict[str, str]:
    """The folder's weights in two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole, parts = load_cpu(make_tiny(tmp_path / "a")), make_tiny(tmp_path / "b")
    files = shard(parts)
    loaded = load_cpu(parts)
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.model.logits(hidden), whole.model.logits(hidden))
    file = parts / files["lm_head.weight"]
    other = next(name for name in files if files[name] != file.name)
    save_file(load_file(file) | {other: torch.ones(48)}, file)
    with pytest.raises(ModelRefused, match=f"holds {other}"):
        load_cpu(parts)
    file.unlink()
    with pytest.raises(ModelRefused, match=file.name):
        load_cpu(parts)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    file = make_tiny(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelRefused, match="fetch it again"):
        load_cpu(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (make_tiny(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"model\.safetensors"):
        load_cpu(tmp_path)


def test_the_digest_is_equal_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys, torch, pathlib\nfrom kilburn.worker.models.weights import load\n"
        "print(load(pathlib.Path(sys.argv[1]), torch.float32, torch.device('cpu')).digest.hex())"
    )
    here, there = make_tiny(tmp_path / "here"), make_tiny(tmp_path / "there")
    environment = os.environ | {"PYTHONHASHSEED": "1", "KILBURN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, str(there)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    digest = load_cpu(here).digest
    assert done.stdout.strip() == digest.hex()
    assert len(digest) == 32


def test_whatever_changes_kv_changes_the_digest(tmp_path: Path) -> None:
    plain = make_tiny(tmp_path / "plain")
    folders = {
        "plain": plain,
        "weights": make_tiny(tmp_path / "seed", seed=1),
        "kind": make_tiny(tmp_path / "kind", "mistral"),
        "config": make_tiny(tmp_path / "eps", overrides={"rms_norm_eps": 1e-6}),
        "rope": make_tiny(tmp_path / "rope", overrides={"rope_theta": 2e4}),
    }
    digests = {name: load_cpu(folder).digest for name, folder in folders.items()}
    digests["dtype"] = load(plain, torch.bfloat16, CPU, kv_dtype=torch.float32).digest
    digests["kv dtype"] = load(plain, torch.float32, CPU, kv_dtype=torch.bfloat16).digest
    digests["revision"] = load(plain, torch.float32, CPU, revision="0123456789").digest
    digests["shards"] = (shard(make_tiny(tmp_path / "shards")), load_cpu(tmp_path / "shards").digest)[1]
    assert len(set(digests.values())) == len(digests)


def test_one_weight_of_equal_size_changes_the_digest(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    before = load_cpu(folder).digest
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    rewrite(folder, tensors)
    assert load_cpu(folder).digest != before


def test_a_big_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "big"
    file.write_bytes(b"a" * (1 << 20))
    steps: list[int] = []

    def note(what: str, done: int, total: int) -> None:
        steps.append(done)

    first = file_hash(file, note)
    assert steps == [1 << 20]
    assert file_hash(file, note) == first
    assert steps == [1 << 20]
    (kept,) = (tmp_path / "cache" / "hashes").iterdir()
    kept.write_text("{")  # a spoilt entry is written anew
    assert file_hash(file, note) == first
    assert len(steps) == 2
    file.write_bytes(b"b" * (1 << 20))
    os.utime(file, ns=(1, 1))
    assert file_hash(file, note) != first


def test_loading_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    load(make_tiny(tmp_path), torch.float32, CPU, lambda what, done, total: told.append((what, done, total)))
    loading = [(done, total) for what, done, total in told if what == "loading weights"]
    assert loading == [(i + 1, 21) for i in range(21)]
    assert any(what == "hashing weights" and done == total for what, done, total in told)


def resident_mb(of: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{of}:")[2].split()[0]) / 1e3


def test_what_was_taken_is_not_resident_once_it_is_forgotten_and_can_be_read_again(tmp_path: Path) -> None:
    save_file({"big": torch.arange(16_000_000, dtype=torch.float32)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as weights:
        tensor = weights.take("big", 16_000_000)
        total = tensor.sum()
        before_mb = resident_mb("RssFile")
        weights.forget()
        assert before_mb - resident_mb("RssFile") > 60
        assert tensor.sum() == total
