"""`kilburn plan`: the worker's own bill, before there is a worker."""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from kilburn.controller.plan import as_json, files_of, least_memory, lines, make_plan
from kilburn.shared import ledger
from kilburn.shared.config import PlanSettings, SettingsError, WorkerSettings
from kilburn.shared.gguf_header import read_gguf_header
from kilburn.shared.kinds import Share
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.shared.model_files import BUNDLED_NAME, ModelRefused
from kilburn.shared.model_shape import read_shape, tensor_shapes
from kilburn.shared.pool_size import HEADROOM, host_blocks
from kilburn.shared.settings import declared
from kilburn.worker.convert import convert
from kilburn.worker.start import make_ready
from tests.worker.test_convert import write_gguf
from tests.worker.tiny_models import make_tiny

MIB = 1 << 20
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}


def settings(folder: Path, **changes: Any) -> PlanSettings:
    return replace(PlanSettings(model=str(folder), memory=256 * MIB, dtype="float32"), **changes)


def test_plan_and_worker_make_one_bill(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, with_tokenizer=False)
    asked: dict[str, Any] = {"max_rows": 4, "max_step_tokens": 64, "max_len": 100, "block_size": 8, "dtype": "float32"}
    plan = make_plan(settings(folder, **asked, host_pool=MIB))
    worker = make_ready(WorkerSettings(model=str(folder), name="w", device="cpu", host_pool=MIB, **asked))
    mine, theirs = plan.bill.amounts(), worker.planned.amounts()
    # On a CPU the embedding stays in its file, a step is recorded as words of launches, and sampling makes copies.
    assert mine.pop("weights") - plan.shape.lookup_bytes == theirs.pop("weights")
    assert min(theirs.pop("graphs"), mine.pop("graphs")) > 0
    assert mine.pop("logits workspace") < theirs.pop("logits workspace")
    del mine["device total"], theirs["device total"]
    assert mine == theirs
    assert plan.bill.num_blocks == worker.hello.num_blocks == 4 * 13  # every row at its full length, and no more
    assert plan.bill.num_host_blocks == worker.hello.num_host_blocks
    assert plan.bill.layout == worker.hello.layout


def test_settings_that_a_worker_has_too_are_the_same_settings() -> None:
    mine, theirs = declared(PlanSettings), declared(WorkerSettings)
    shared = mine.keys() & theirs.keys()
    assert {"model", "dtype", "block_size", "host_pool", "max_rows", "max_step_tokens", "max_len"} <= shared
    for name in shared:
        assert mine[name].kind == theirs[name].kind, name
        assert getattr(PlanSettings(), name) == getattr(WorkerSettings(), name), name


@pytest.mark.parametrize("changes", [{}, {"max_step_tokens": 4096}, {"block_size": 256}, {"max_rows": 512}])
def test_memory_that_is_too_little_names_the_least_that_works(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path, vocab=4096, with_tokenizer=False)
    with pytest.raises(SettingsError) as caught:
        make_plan(settings(folder, memory=1, **changes))
    (problem,) = caught.value.problems
    assert problem.startswith("--memory: 1 B do not hold weights of ")
    least = int(problem.partition("give ")[2].partition("MiB")[0]) * MIB
    plan = make_plan(settings(folder, memory=least, **changes))
    assert plan.bill.num_blocks >= 1
    assert plan.bill.step_bytes + plan.bill.kv_bytes <= (least - plan.bill.weight_bytes) * HEADROOM
    bare = replace(plan.bill, kv_bytes=0)
    assert least_memory(bare) == least
    with pytest.raises(SettingsError):
        make_plan(settings(folder, memory=least - MIB, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host_pool": 100}, ["--host-pool", "holds no block"]),
        ({"host_pool": 2 * MIB, "host_memory": MIB}, ["--host-pool", "give 1MiB or less"]),
        ({"host_pool": 2 * MIB, "host_memory": 3 * MIB, "tp": 2}, ["--host-pool", "give 1MiB or less"]),
        ({"host_pool": 2 * MIB, "host_memory": 10}, ["--host-pool", "leave it out"]),
        ({"host_pool": Share(0.5)}, ["--host-pool", "give --host-memory too"]),
        ({"host_pool": Share(1e-6), "host_memory": MIB}, ["--host-pool", "(0.0001%)", "holds no block"]),
        ({"max_len": 513}, ["--max-len", "give 512 or less"]),
    ],
)
def test_what_cannot_be_met_is_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    folder = make_tiny(tmp_path, with_tokenizer=False)
    with pytest.raises(SettingsError) as caught:
        make_plan(settings(folder, **changes))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_host_pool_may_be_a_share_and_what_it_names_works() -> None:
    layout = KVLayout(16, 4, 2, 8, "float32")  # 8 KiB a block
    assert host_blocks(layout, Share(0.25), spare=50 * MIB, total=100 * MIB) == 25 * 128
    assert host_blocks(layout, 25 * MIB, spare=50 * MIB, total=100 * MIB) == 25 * 128
    with pytest.raises(SettingsError) as caught:
        host_blocks(layout, Share(0.75), spare=50 * MIB + 1, total=100 * MIB)
    text = str(caught.value)
    assert "--host-pool: 75.00 MiB (75%) do not fit" in text
    assert "give 50% or 50MiB or less" in text
    assert host_blocks(layout, Share(0.5), spare=50 * MIB + 1, total=100 * MIB) == 50 * 128


def test_a_pool_holds_what_it_says(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, with_tokenizer=False)
    plan = make_plan(settings(folder, lengths=(1, 16, 17, 100), max_rows=512))
    for length, count in ledger.sequences_in(plan.bill.num_blocks, 16, (1, 16, 17, 100)).items():
        blocks = blocks_for(length, 16)
        assert count * blocks <= plan.bill.num_blocks < (count + 1) * blocks
    written = as_json(plan)
    assert json.loads(json.dumps(written)) == written
    assert [row["tokens"] for row in written["sequences"]] == [1, 16, 17, 100]
    text = "\n".join(lines(plan))
    for part in ("KV per token", "KV per block", "logits workspace", "longest sequence", "tail waste", "weights"):
        assert part in text


def test_a_pool_too_small_for_the_longest_says_what_it_holds(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, with_tokenizer=False, overrides={"max_position_embeddings": 1 << 16})
    plan = make_plan(settings(folder, memory=32 * MIB, max_step_tokens=128))
    slots = plan.bill.num_blocks * 16
    assert slots < 1 << 16
    assert any(f"{slots} tokens, of the {1 << 16}" in line for line in lines(plan))


# --- several ranks


def test_ranks_together_hold_the_model_once_and_what_is_not_split_each(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llama", with_tokenizer=False, overrides=HEADS)
    whole, half = read_shape(folder, "float32"), read_shape(folder, "float32", 2)
    assert (half.num_heads, half.num_kv_heads, half.intermediate, half.hidden) == (4, 1, 48, 48)
    norms = sum(shape[0] for name, shape in tensor_shapes(folder).items() if name.endswith("norm.weight"))
    each = norms * 4 + 512 * 16 * 4  # norms and the table of positions are every rank's own
    assert 2 * (half.weight_bytes - each) == whole.weight_bytes - each
    plans = [make_plan(settings(folder, tp=n)) for n in (1, 2)]
    assert plans[1].bill.layout.bytes_per_block * 2 == plans[0].bill.layout.bytes_per_block
    assert plans[1].bill.logits_bytes == plans[0].bill.logits_bytes  # one rank samples from all of them


def test_kv_heads_are_held_by_several_ranks_where_there_are_too_few(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "llama", with_tokenizer=False, overrides=HEADS)
    quarter, eighth = read_shape(folder, "float32", 4), read_shape(folder, "float32", 8)
    assert (quarter.num_heads, quarter.num_kv_heads) == (2, 1)
    assert (eighth.num_heads, eighth.num_kv_heads) == (1, 1)
    k_and_v = 2 * 2 * (16 * 48)  # of both layers, one head each
    split = {4: 2 * (8 * 16 * 48 * 2 + 3 * 96 * 48) // 4, 8: 2 * (8 * 16 * 48 * 2 + 3 * 96 * 48) // 8}
    for ranks, shape in ((4, quarter), (8, eighth)):
        vocabulary = 2 * 320 // ranks * 48
        rest = 5 * 48 + 512 * 16  # norms, positions
        assert shape.weight_bytes == 4 * (k_and_v + split[ranks] + vocabulary + rest)


@pytest.mark.parametrize(
    ("kind", "changes", "ranks", "works"),
    [
        ("llama", HEADS, 3, "1, 2, 4, 8"),
        ("llama", HEADS, 16, "1, 2, 4, 8"),
        ("smollm", {}, 2, "1, 3"),
        ("smollm", {"intermediate_size": 90}, 2, "1, 3, 9"),
        ("llama", HEADS | {"num_key_value_heads": 4, "intermediate_size": 42}, 4, "1, 2"),
    ],
)
def test_a_split_that_does_not_divide_names_those_that_do(
    tmp_path: Path, kind: str, changes: dict[str, Any], ranks: int, works: str
) -> None:
    folder = make_tiny(tmp_path, kind, with_tokenizer=False, overrides=changes)
    with pytest.raises(ModelRefused, match=rf"^--tp {ranks}: .*; give one of {works}$"):
        make_plan(settings(folder, tp=ranks))
    for ranks in map(int, works.split(", ")):
        assert make_plan(settings(folder, tp=ranks)).bill.num_blocks > 0


@pytest.mark.parametrize("kind", ["llama", "smollm", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_is_planned_by_its_header_as_its_conversion_is(tmp_path: Path, kind: str) -> None:
    file = write_gguf(tmp_path / "a.gguf", make_tiny(tmp_path / "source", kind))
    before = sorted(tmp_path.iterdir())
    planned = make_plan(settings(file)).bill
    assert sorted(tmp_path.iterdir()) == before, "nothing is converted"
    assert planned == make_plan(settings(convert(file, tmp_path / "out"))).bill
    if kind != "qwen3":
        ranks = 3 if kind == "smollm" else 2
        assert read_shape(file, "bfloat16", ranks) == read_shape(tmp_path / "out", "bfloat16", ranks)


def test_the_bundled_model_is_planned_without_being_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILBURN_CACHE", str(tmp_path / "none"))
    plan = make_plan(PlanSettings(model=BUNDLED_NAME, memory=1 << 30))
    shape = (plan.shape.num_layers, plan.shape.num_heads, plan.shape.num_kv_heads, plan.shape.vocab_size)
    assert shape == (30, 9, 3, 49152)
    assert plan.bill.layout.bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("end", [3, 4, 20, 100, 5000])
def test_a_gguf_file_that_ends_early_is_named(tmp_path: Path, end: int) -> None:
    file = write_gguf(tmp_path / "a.gguf", make_tiny(tmp_path / "source"))
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ModelRefused, match=r"a\.gguf: not a whole GGUF file"):
        make_plan(settings(file))


@settings_of_hypothesis(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_header_is_worse_than_a_refusal(damaged: tuple[Path, bytes], data: st.DataObject) -> None:
    file, whole = damaged
    bytes_now = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        bytes_now[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes_now)
    with contextlib.suppress(ModelRefused, SettingsError):
        make_plan(settings(file))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file to be damaged, and the bytes of its header."""
    folder = tmp_path_factory.mktemp("damaged")
    file = write_gguf(folder / "a.gguf", make_tiny(folder / "source"))
    data = sum(4 * math.prod(shape) for shape in read_gguf_header(file).tensors.values())
    return file, file.read_bytes()[:-data]


def test_nothing_is_fetched_for_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelRefused, match="a plan fetches nothing"):
        files_of(settings(Path("owner/name")))
