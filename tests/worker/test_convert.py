"""GGUF files written here from models made here: the conversion is the model that went in."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kilburn.shared.model_files import ModelRefused
from kilburn.worker.convert import convert, half_rows
from kilburn.worker.gguf_tokenizer import CUTS, Kind, read_tokenizer
from kilburn.worker.models.config import LlamaFamily, read_config
from tests.worker.paged_harness import load_cpu
from tests.worker.tiny_models import CHAT_TEMPLATE, MERGES, VOCAB, make_tiny

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def gguf_name(name: str) -> str:
    match name.split("."):
        case ["model", "layers", index, *middle, part]:
            return f"blk.{index}.{NAMES['.'.join(middle)]}.{part}"
        case ["model", "embed_tokens", _]:
            return "token_embd.weight"
        case ["model", "norm", _]:
            return "output_norm.weight"
    return "output.weight"


def paired(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as GGUF orders them for Llama: the two of each rotary pair side by side."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path, folder: Path, quant: Quant = Quant.F32, change: Callable[[Any], None] | None = None, more: Any = ()
) -> Path:
    """The model in `folder` as a GGUF file. `change` sees the writer before it writes."""
    config, arch = json.loads((folder / "config.json").read_text()), "llama"
    arch = config["model_type"] if config["model_type"] in ("qwen2", "qwen3") else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocabulary))
    writer.add_token_types([Kind.CONTROL if i < 4 else Kind.NORMAL for i in range(len(vocabulary))])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        target, values = gguf_name(name), tensor.numpy()
        kind = target.split(".")[-2]
        if arch == "llama" and kind in heads:
            values = paired(values, heads[kind])
        chosen = quant if values.ndim > 1 else Quant.F32
        writer.add_tensor(target, gguf.quantize(values, chosen), raw_dtype=chosen)
    for name, values in more:
        writer.add_tensor(name, values)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["llama", "smollm", "mistral", "qwen2", "qwen3"])
def test_a_float_model_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", kind)
    folder = convert(write_gguf(tmp_path / "a.gguf", source), tmp_path / "out")
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ours, theirs = read_config(folder), read_config(source)
    assert (ours.architecture, ours.family, ours.head_dim) == (theirs.architecture, theirs.family, theirs.head_dim)
    assert ours.eos_ids == (2, 0)
    load_cpu(folder)
    text = "the hello <|im_start|>world 🙂"
    tokenizers = [Tokenizer.from_file(str(place / "tokenizer.json")) for place in (source, folder)]
    assert tokenizers[0].encode(text).ids == tokenizers[1].encode(text).ids
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("quant", "dtype"),
    [
        (Quant.F16, torch.float16),
        (Quant.BF16, torch.bfloat16),
        (Quant.Q8_0, torch.float32),
        (Quant.Q4_1, torch.float32),
    ],
)
def test_other_forms_become_what_they_stand_for(quant: Quant, dtype: torch.dtype, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", overrides=WIDE)
    folder = convert(write_gguf(tmp_path / "a.gguf", source, quant), tmp_path / "out")
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    for name, tensor in before.items():
        wanted = tensor
        if tensor.dim() > 1:
            wanted = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), quant), quant))
            assert after[name].dtype == dtype
        assert torch.equal(after[name].float(), wanted), name
    load_cpu(folder)


def test_rows_go_back_to_halves() -> None:
    rows = np.arange(24).reshape(24, 1)
    assert (paired(rows, 2)[half_rows(24, 2)] == rows).all()
    assert half_rows(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_llama3_factors_become_settings(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", "llama3", overrides={"max_position_embeddings": 512})
    wavelength = 2 * np.pi * 500000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = (8192 / wavelength - 1) / 3
    middle = 1 / ((1 - smooth) / 32 + smooth)
    factors = np.where(wavelength < 2048, 1, np.where(wavelength > 8192, 32, middle)).astype(np.float32)
    more = [("rope_freqs.weight", factors)]
    config = read_config(convert(write_gguf(tmp_path / "a.gguf", source, more=more), tmp_path / "out"))
    assert isinstance(config.family, LlamaFamily)
    assert config.family.rope.scaling.factor == 32.0
    with pytest.raises(ModelRefused, match=r"rope_freqs\.weight"):
        convert(write_gguf(tmp_path / "b.gguf", source, more=[("rope_freqs.weight", factors * 2)]), tmp_path / "no")


REFUSED: dict[str, Callable[[Any], None]] = {
    r"general\.architecture": lambda writer: writer.add_string("general.architecture", "mamba"),
    r"llama\.expert_count": lambda writer: writer.add_uint32("llama.expert_count", 8),
    r"rope\.scaling\.type": lambda writer: writer.add_string("llama.rope.scaling.type", "longrope"),
    r"rope\.dimension_count": lambda writer: writer.add_uint32("llama.rope.dimension_count", 8),
    r"tokenizer\.ggml\.pre": lambda writer: writer.add_string("tokenizer.ggml.pre", "unheard-of"),
    r"tokenizer\.ggml\.model": lambda writer: writer.add_string("tokenizer.ggml.model", "bert"),
    r"eos_token_id": lambda writer: writer.add_uint32("tokenizer.ggml.eos_token_id", 9999),
    r"blk\.0\.ffn_gate_exps": lambda writer: writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 2), "f4")),
}


def changed(writer: Any, change: Callable[[Any], None]) -> None:
    """`change`, with keys that may be there already."""
    given = dict(writer.kv_data[0])
    writer.kv_data[0].clear()
    change(writer)
    writer.kv_data[0] = given | writer.kv_data[0]


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_supported_is_refused_by_name(named: str, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source")
    file = write_gguf(tmp_path / "a.gguf", source, change=lambda writer: changed(writer, REFUSED[named]))
    with pytest.raises(ModelRefused, match=named):
        convert(file, tmp_path / "out")
    assert sorted(place.name for place in tmp_path.iterdir()) == [".out.lock", "a.gguf", "source"]


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1])
def test_a_torn_file_is_refused(keep: int, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", make_tiny(tmp_path / "source"))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelRefused, match="not a whole GGUF file"):
        convert(file, tmp_path / "out")


def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    file, out = write_gguf(tmp_path / "a.gguf", make_tiny(tmp_path / "source")), tmp_path / "out"
    told: list[tuple[int, int]] = []

    def interrupt(what: str, done: int, total: int) -> None:
        told.append((done, total))
        if done * 2 > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(file, out, interrupt)
    assert not out.exists()
    assert told == sorted(told)
    assert convert(file, out) == out
    load_cpu(out)
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert convert(file, out, interrupt) == out  # done already: nothing is written
    assert (out / "model.safetensors").stat().st_mtime_ns == before


def test_the_command_prints_the_folder_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "a.gguf", make_tiny(tmp_path / "source"))
    command = [sys.executable, "-m", "kilburn.worker.prepare", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.splitlines()[-1])
    assert folder.parent == tmp_path / "cache" / "converted"
    assert "converting: 100 %" in done.stderr
    load_cpu(folder)


def byte_metadata(pre: str) -> dict[str, Any]:
    source = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = ["<|end|>", "<|begin|>", *source, *("".join(m.split(" ")) for m in MERGES), "12", "123", "the"]
    merges = [*MERGES, "1 2", "12 3", "t he"]
    kinds = [Kind.CONTROL] * 2 + [Kind.NORMAL] * (len(tokens) - 2)
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 0}
    lists = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": kinds}
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, **ids, **lists}


CUT_CASES = {
    "gpt-2": ("1234 the", ["123", "4", "Ġthe"]),
    "smollm": ("1234 the", ["1", "2", "3", "4", "Ġthe"]),
    "llama-bpe": ("1234 the", ["<|begin|>", "123", "4", "Ġthe"]),
    "qwen2": ("1234 the", ["1", "2", "3", "4", "Ġthe"]),
}


@pytest.mark.parametrize("pre", CUT_CASES)
def test_how_text_is_cut_before_it_is_merged(pre: str) -> None:
    text, pieces = CUT_CASES[pre]
    read = read_tokenizer(byte_metadata(pre))
    assert pre in CUTS
    assert read.tokenizer.encode(text).tokens == pieces
    assert read.end_ids == (0,)
    assert read.tokenizer.decode(read.tokenizer.encode("<|end|>the").ids) == "the"  # special, and hidden


PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "c",
    "ab",
    "bc",
    "abc",
    "▁a",
]
SCORES = {"ab": -2.0, "bc": -1.0, "abc": -3.0, "▁a": -4.0}


def naive_pieces(text: str) -> list[str]:
    """SentencePiece as it is told: the neighbours whose union scores best merge, the leftmost first, until none can."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(SCORES.get(a + b, -np.inf), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        if not unions or max(unions)[0] == -np.inf:
            break
        at = -max(unions)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    parts = [[p] if p in PIECES else [f"<0x{byte:02X}>" for byte in p.encode()] for p in pieces]
    return [piece for part in parts for piece in part]


@pytest.mark.parametrize("text", ["abc", "ab c", "a bcabc", "  aab", "cab é", "🙂bc", "abcbcab", ""])
def test_sentence_pieces_merge_by_score(text: str) -> None:
    kinds = [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL, *[Kind.BYTE] * 256, *[Kind.NORMAL] * 8]
    read = read_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": PIECES,
            "tokenizer.ggml.scores": [SCORES.get(piece, 0.0) for piece in PIECES],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    encoded = read.tokenizer.encode(text)
    assert encoded.tokens == (["<s>", *naive_pieces(text)] if text else ["<s>"])
    assert read.tokenizer.decode(encoded.ids) == text
    assert len(PIECES) < VOCAB
