"""What a folder may not be: settings that we would have to ignore, code of its own, pickles, paths that lead out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kilburn.shared.model_files import ModelRefused
from kilburn.worker.models.config import read_config
from kilburn.worker.models.weights import load
from tests.worker.paged_harness import load_cpu
from tests.worker.tiny_models import make_tiny

UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"attention_softcap": 5.0}, "attention_softcap"),
    ("llama", {"sliding_window": 16}, "sliding_window"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, "factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"num_hidden_layers": "2"}, "num_hidden_layers"),
    ("llama", {"max_position_embeddings": None}, "max_position_embeddings"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"architectures": ["A", "B"]}, "architectures"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("opt", {"activation_function": "swish"}, "activation_function"),
    ("opt", {"rope_theta": 1e4}, "rope_theta"),
]


@pytest.mark.parametrize(("kind", "overrides", "named"), UNSUPPORTED, ids=[f"{k}-{n}" for k, _, n in UNSUPPORTED])
def test_a_setting_that_is_not_supported_is_refused_by_name(
    kind: str, overrides: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = make_tiny(tmp_path, kind)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | overrides))
    with pytest.raises(ModelRefused, match=named) as caught:
        read_config(folder)
    assert str(path) in str(caught.value)


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    plain = read_config(make_tiny(tmp_path / "a"))
    inert = {"use_cache": True, "attention_dropout": 0.1, "sliding_window": None, "pretraining_tp": 2, "unknown": None}
    assert read_config(make_tiny(tmp_path / "b", overrides=inert)) == plain


@pytest.mark.parametrize("text", ["", "[]", "{", '{"architectures": 3}', "[" * 100_000])
def test_a_config_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelRefused, match=r"config\.json"):
        load_cpu(tmp_path)


EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('ran')\n"
ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "code beside a config of ours": ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}),
    "code for the config class": (
        "llama",
        {"model_type": "evil", "architectures": ["Evil"], "auto_map": {"AutoConfig": "modeling_evil.Evil"}},
    ),
    "code in a part of the config": ("phi", {"text_config": {"auto_map": {"AutoModel": "modeling_evil.Evil"}}}),
    "code from a hub": ("phi", {"auto_map": {"AutoModelForCausalLM": "evil/repo--modeling_evil.Evil"}}),
    "an attention kernel from a hub": ("phi", {"attn_implementation": "evil/kernel"}),
    "another, under its other name": ("llama", {"_attn_implementation": {"": "evil/kernel"}}),
}


READ_ALL = """
import pathlib, sys
from kilburn.shared.model_files import ModelRefused
from kilburn.worker.models.config import read_settings
for name in sys.argv[1:]:
    sys.path.insert(0, name)  # even a plain import by name would find the code
    try:
        read_settings(pathlib.Path(name))
        print("read")
    except ModelRefused as refusal:
        print("refused:", refusal)
assert False, "assertions are stripped here"
"""


def test_code_in_a_folder_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, marker = [], tmp_path / "marker"
    for i, (kind, overrides) in enumerate(ATTACKS.values()):
        folder = make_tiny(tmp_path / f"model{i}", kind)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | overrides))
        for name in ("modeling_evil.py", "__init__.py", "configuration_evil.py"):
            (folder / name).write_text(EVIL.format(marker=str(marker)))
        monkeypatch.syspath_prepend(str(folder))
        with pytest.raises(ModelRefused, match=r"auto_map|implementation"):
            load_cpu(folder)
        folders.append(str(folder))
    # The door that every model passes, under -O, where a check that is an assertion would be gone.
    done = subprocess.run([sys.executable, "-O", "-c", READ_ALL, *folders], capture_output=True, text=True, check=True)
    answers = done.stdout.splitlines()
    assert len(answers) == len(ATTACKS)
    assert all(answer.startswith("refused:") for answer in answers), answers
    assert not marker.exists()


def test_no_product_code_trusts_remote_code() -> None:
    root = Path(__file__).parents[2]
    files = [file for room in ("worker", "kernels", "shared", "controller") for file in (root / room).rglob("*.py")]
    said = [line.strip() for file in files for line in file.read_text().splitlines() if "trust_remote_code" in line]
    assert said
    assert all(line == "trust_remote_code=False," or "trust_remote_code=False" in line for line in said), said


class Explosive:
    """What a pickle would do when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unread(name: str, tmp_path: Path) -> None:
    import torch

    folder, marker = make_tiny(tmp_path / "model"), tmp_path / "marker"
    torch.save({"model.embed_tokens.weight": Explosive(marker)}, folder / name)
    load_cpu(folder)  # beside safetensors it is nobody's business
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=name):
        load_cpu(folder)
    assert not marker.exists()


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/../../model.safetensors", "model.bin", 3])
def test_an_index_cannot_name_files_elsewhere(file: Any, tmp_path: Path) -> None:
    make_tiny(tmp_path)
    folder = make_tiny(tmp_path / "inner")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ModelRefused, match="weight_map"):
        load_cpu(folder)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    import torch

    folder = make_tiny(tmp_path)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(ModelRefused, match="adapter"):
        load(folder, torch.float32, torch.device("cpu"))
