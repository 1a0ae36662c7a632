"""What benches promise: a decode step's cost on the wire, a scrape's cost, and where the slots of a pool go."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import metrics, preemption, structured, waste
from bench.core import measure
from tests.worker.tiny_models import make_tiny


def test_a_decode_step_of_256_sequences_is_under_two_kilobytes_each_way() -> None:
    row = measure(256, num_steps=48, console=Console(quiet=True))
    assert 256 < row["plan_bytes"] < 2000
    assert 4 * 256 < row["result_bytes"] < 2000


def test_what_being_watched_costs_is_told(tmp_path: Path) -> None:
    assert metrics.main(["--sequences", "20", "--scrapes", "2", "--json", str(tmp_path / "m.json")]) == 0
    found = json.loads((tmp_path / "m.json").read_text())
    assert min(found[f"{name}_ms"] for name in ("snapshot", "scrape", "scrape_with_vllm_names")) > 0
    assert found["scrape_bytes"] > 10_000
    assert found["token_us"] > 0


def test_waste_is_told_for_each_policy_and_for_the_engine(tmp_path: Path) -> None:
    words = ["--requests", "30", "--slots", "2000", "--max-len", "512", "--json", str(tmp_path / "w.json")]
    assert waste.main(words) == 0
    rows = json.loads((tmp_path / "w.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged", "Kilburn"]
    assert [row["used"] for row in rows[:4]] == sorted(row["used"] for row in rows[:4])
    for row in rows:
        assert sum(row[kind] for kind in waste.KINDS) == pytest.approx(100)
    assert rows[-1]["waste"] < 4


@pytest.mark.parametrize(
    "words", [["--slots", "100"], ["--trace", "nowhere.csv"], ["--sigma", "9"], ["--max-len", "1"]]
)
def test_waste_names_the_flag_to_change(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        waste.main(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert words[0] in told or words[1] in told


def test_schemas_are_told_by_what_they_admit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    tests = [{"valid": True, "data": {"a": 5}}, {"valid": False, "data": {"a": "x"}}]
    rows = [{"name": "one", "schema": schema, "tests": tests}, {"name": "no", "schema": {"not": {}}, "tests": tests}]
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, rows)))
    structured.main([str(tmp_path / "s.jsonl"), "--against", "nowhere"])
    told = " ".join(capsys.readouterr().out.split())
    for words in (
        "nowhere: not here",
        "2 schemas, 2 instances that are not valid",
        "compile 1 50.0% admit a valid instance 1 100.0% instances wrongly admitted 0 of 1",
        'llguidance cannot 1 Unimplemented keys: ["not"]',
    ):
        assert words in told


def test_preemption_prints_a_row_for_each_block_size_and_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bench itself compares a block that came back with what left."""
    folder, file = make_tiny(tmp_path / "tiny", with_tokenizer=False), tmp_path / "found.json"
    words = ["--model", str(folder), "--sequences=3", "--tokens=48", "--sizes=1,16", "--load-sizes=4", "--repeats=1"]
    assert preemption.main([*words, "--device=cpu", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [row["block_size"] for row in found["moves"]] == [1, 16]
    assert all(row["swap_s"] > 0 < row["recompute_s"] for row in found["moves"])
    loads = {row["way"]: row for row in found["loads"]}
    assert loads.keys() == {"auto", "swap", "recompute"}
    assert loads["swap"]["swaps"] > 0 == loads["recompute"]["swaps"] < loads["recompute"]["recomputes"]
    assert "a load that presses" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--sizes", "0"], ["--sizes", "a"], ["--tokens", "0"], ["--load-sizes", "512"]])
def test_preemption_names_the_flag_to_change(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        preemption.main(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err
