"""The memory formula: numbers that a person can check, and its twin, what a worker measures of itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_ledger import MODELS, ledger_rows
from kilburn.shared import ledger, pool_size
from kilburn.shared.config import WorkerSettings
from kilburn.shared.layout import KVLayout
from kilburn.shared.model_files import ModelRefused
from kilburn.shared.model_shape import ModelShape, read_shape
from kilburn.worker import measured
from kilburn.worker.models import weights
from kilburn.worker.start import Ready, make_ready
from tests.worker.tiny_models import KINDS, make_tiny

LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128256, weight_bytes=16_060_522_496)
KV = KVLayout(16, 32, 8, 128, "bfloat16")

# Sizes that fill whole panels.
WIDE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 3}
WIDE_LLAMA = WIDE | {"num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 256}
WIDE_OPT = WIDE | {"ffn_dim": 512, "word_embed_proj_dim": 128}


def test_a_known_model_adds_up() -> None:
    assert KV.bytes_per_token == 128 << 10  # 32 layers x 2 x 8 heads x 128 x 2 bytes
    assert pool_size.blocks_in(10 << 30, KV) == 5120  # 2 MiB a block
    assert pool_size.blocks_in(-1, KV) == 0
    assert pool_size.blocks_wanted(64, 8193, 16) == 64 * 513
    batch = ledger.Batch(max_rows=64, max_step_tokens=2048, max_len=8192)
    bill = ledger.bill(LLAMA_8B, KV, "bfloat16", batch, num_blocks=5120, num_host_blocks=512)
    assert bill.kv_bytes == 10 << 30
    assert bill.activation_bytes == 2048 * (3 * 4096 + 80 * 128 + 3 * 14336) * 2
    assert bill.logits_bytes == 21 * 128256 * 32  # 32 rows at once fit the tile
    fused = ledger.bill(LLAMA_8B, KV, "bfloat16", replace(batch, is_fused=True))
    assert fused.logits_bytes == 8 * 128256 * 32
    assert bill.buffer_bytes == 24 * 2048 + 4 * 65 + 64 * (4 + 8 + 4 * 512)
    assert bill.graph_bytes == 0
    assert bill.device_bytes == 16_060_522_496 + bill.step_bytes + bill.kv_bytes
    text = "\n".join(bill.lines())
    for part in (
        "14.96 GiB",
        "10.00 GiB (5120 blocks, 81920 tokens)",
        "2.00 MiB (16 tokens, bfloat16)",
        "1.00 GiB (512",
    ):
        assert part in text
    assert "graphs" not in text


def test_recorded_decodes_share_the_memory_of_the_largest_and_keep_their_results() -> None:
    sizes = ledger.recorded_sizes(4)
    assert sizes == [1, 2, 4]
    found = ledger.graph_bytes(LLAMA_8B, "bfloat16", sizes, max_len=64, block_size=16)
    assert found == ledger.activation_bytes(LLAMA_8B, "bfloat16", 4) + 7 * 4096 * 2 + 4 * 4 * 4


def test_scales_in_blocks_are_on_the_bill() -> None:
    plain = ledger.layout_for(LLAMA_8B, 16, "bfloat16")
    assert plain == KV
    static = ledger.layout_for(LLAMA_8B, 16, "bfloat16", "fp8", "static")
    assert static.bytes_per_block == KV.bytes_per_block // 2
    own = ledger.layout_for(LLAMA_8B, 16, "bfloat16", "int8", "block")
    assert own.bytes_per_block == KV.bytes_per_block // 2 + 32 * 2 * 8 * 16 * 4  # a float32 for each row of each head


def test_expected_waste_is_half_a_block() -> None:
    assert ledger.expected_tail_slots(1) == 0
    assert ledger.expected_tail_waste(100, 1) == 0
    lengths = range(1001, 1017)  # every remainder once
    unused = sum(-length % 16 for length in lengths) / 16
    assert ledger.expected_tail_slots(16) == unused == 7.5
    assert ledger.expected_tail_waste(500, 16) == 7.5 / 507.5


# --- the twin


def ready(folder: Path, dtype: str, **changes: Any) -> Ready:
    settings = WorkerSettings(model=str(folder), name="w", device="cpu", dtype=dtype, num_blocks=200)
    return make_ready(replace(settings, max_rows=32, max_step_tokens=256, host_pool=1 << 20, **changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", WIDE_LLAMA),
        ("qwen3", WIDE_LLAMA),  # more heads' worth of attention than hidden: norms on q and k
        ("smollm", WIDE_LLAMA | {"intermediate_size": 640}),
        ("mistral", WIDE_LLAMA | {"num_key_value_heads": 1}),
        ("opt", WIDE_OPT),
        ("opt-post", WIDE_OPT | {"word_embed_proj_dim": 64}),
    ],
)
def test_plan_and_measurement_agree(tmp_path: Path, kind: str, changes: dict[str, Any], dtype: str) -> None:
    found = ready(make_tiny(tmp_path, kind, vocab=4096, with_tokenizer=False, overrides=changes), dtype)
    off = ledger.differences(found.planned, found.ledger)
    assert max(off.values(), default=0.0) <= ledger.TOLERANCE, off
    assert not any("off by" in line for line in ledger.compared(found.planned, found.ledger))
    for name in ("weights", "activations", "logits workspace", "step buffers", "KV pool", "host pool"):
        assert found.ledger.amounts()[name] > 0, name
    is_recorded = dtype == "float32" and not kind.startswith("opt")
    assert (found.ledger.graph_bytes > 0) == is_recorded, "what the host has recorded is on the bill"


@pytest.mark.parametrize("kv_scales", ["static", "block"])
def test_they_agree_with_kv_of_eight_bits(tmp_path: Path, kv_scales: str) -> None:
    folder = make_tiny(tmp_path, vocab=4096, with_tokenizer=False, overrides=WIDE_LLAMA)
    found = ready(folder, "float32", kv_dtype="int8", kv_scales=kv_scales)
    off = ledger.differences(found.planned, found.ledger)
    assert max(off.values(), default=0.0) <= ledger.TOLERANCE, off
    assert found.ledger.kv_bytes == 200 * found.hello.layout.bytes_per_block


def test_what_a_small_step_takes_tells_what_a_large_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny(tmp_path, vocab=4096, with_tokenizer=False, overrides=WIDE_LLAMA)
    small = ready(folder, "float32").ledger
    monkeypatch.setattr(measured, "SMALL_TOKENS", 256)
    monkeypatch.setattr(measured, "SMALL_ROWS", 32)
    large = ready(folder, "float32").ledger
    assert small.activation_bytes == pytest.approx(large.activation_bytes, rel=0.01)
    assert small.logits_bytes == pytest.approx(large.logits_bytes, rel=0.01)


def test_an_architecture_of_others_is_estimated_from_above(tmp_path: Path) -> None:
    found = ready(make_tiny(tmp_path, "gpt2", vocab=4096, with_tokenizer=False), "float32")
    assert found.planned.activation_bytes >= found.ledger.activation_bytes
    off = ledger.differences(found.planned, found.ledger)
    assert all(share <= ledger.TOLERANCE for name, share in off.items() if name != "activations"), off


def test_a_plan_that_is_wrong_is_said_to_be(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, vocab=4096, with_tokenizer=False, overrides=WIDE_LLAMA)
    found = ready(folder, "float32")
    wrong = replace(found.planned, weight_bytes=found.planned.weight_bytes // 2)
    assert any(line.startswith("weights planned as") for line in ledger.compared(wrong, found.ledger))


def test_what_a_gpu_will_be_asked_holds_here() -> None:
    rows = ledger_rows("cpu", is_dry=True)
    assert {row["model"] for row in rows} == set(MODELS)
    assert len(rows) == len(MODELS) * 8
    assert [row for row in rows if not row["ok"]] == []


def test_a_meter_sees_what_is_alive_together_and_no_more() -> None:
    def run() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1  # a and b
        del a
        c = b.view(10, 100).add_(1)  # nothing new
        return (c * 2).sum()  # b, the product, and the sum

    meter = measured.Meter()
    with meter:
        kept = run()
    assert meter.peak == 2 * 4000 + kept.nbytes
    assert meter.now == kept.nbytes
    del kept
    assert meter.now == 0


def test_tables_that_stay_in_their_files_are_not_held(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, vocab=4096, with_tokenizer=False, overrides=WIDE_LLAMA)
    loaded = weights.load(folder, torch.bfloat16, torch.device("cpu"))
    found, shape = measured.held(loaded.model), read_shape(folder, "bfloat16")
    assert found.mapped_bytes == 4096 * 128 * 4  # the embedding, as the file has it
    assert shape.lookup_bytes == 4096 * 128 * 2
    assert found.own_bytes == shape.weight_bytes - shape.lookup_bytes


# --- shapes are read from files as the worker reads them


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_that_is_read_is_that_of_the_model_that_is_loaded(tmp_path: Path, kind: str) -> None:
    folder = make_tiny(tmp_path, kind, with_tokenizer=False)
    loaded = weights.load(folder, torch.float32, torch.device("cpu")).config
    shape = read_shape(folder, "float32")
    for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        assert getattr(shape, name) == getattr(loaded, name), name
    assert shape.max_len == loaded.max_len


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}


def test_a_stretched_model_is_as_long_as_the_worker_says(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llama", with_tokenizer=False, overrides={"rope_parameters": YARN})
    loaded = weights.load(folder, torch.float32, torch.device("cpu")).config
    assert read_shape(folder, "float32").max_len == loaded.max_len == 2048


def test_weights_are_counted_from_the_headers(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "smollm", vocab=300, overrides={"num_hidden_layers": 1})
    hidden, inner, q, kv = 72, 96, 72, 24
    layer = 2 * hidden + (q + 2 * kv) * hidden + hidden * q + 3 * inner * hidden
    values = 300 * hidden + layer + hidden  # tied: the head is the embedding
    rope = 512 * 8 * 4
    assert read_shape(folder, "float32").weight_bytes == 4 * values + rope
    assert read_shape(folder, "bfloat16").weight_bytes == 2 * values + rope
    assert read_shape(folder, "bfloat16").lookup_bytes == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "x"}, ["hidden_size", "whole number above zero"]),
        ({"num_attention_heads": None}, ["num_attention_heads", "missing"]),
        ({"architectures": []}, ["architectures", "exactly one"]),
    ],
)
def test_a_config_without_a_size_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    folder = make_tiny(tmp_path, with_tokenizer=False)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ModelRefused) as caught:
        read_shape(folder, "float32")
    assert all(word in str(caught.value) for word in [*words, "config.json"]), caught.value


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 16, (20).to_bytes(8, "little") + b"[1]" + b" " * 17])
def test_a_damaged_header_is_named(tmp_path: Path, content: bytes) -> None:
    folder = make_tiny(tmp_path, with_tokenizer=False)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelRefused, match=r"model\.safetensors: not a whole safetensors file"):
        read_shape(folder, "float32")


def test_bytes_are_shown_for_people() -> None:
    assert [ledger.shown(n) for n in (0, 1023, 1536, 5 << 20, 3 << 29)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "5.00 MiB",
        "1.50 GiB",
    ]
