"""Benches of steps: the core on queues of requests, a step's parts, scale in work, and the page that tells of them."""

import gc
import json
import sys
from pathlib import Path

import pytest

from bench import core_against, performance, scale, step
from bench.core_against import Line, Vllm, decode_queue, mixed_queue, run_ours
from bench.real_steps import PARTS
from bench.serve import Answer, Spending, report
from kilburn.controller.collector import rare_collections
from tests.worker.tiny_models import make_tiny


def test_a_queue_is_run_to_its_last_token() -> None:
    queue = mixed_queue(4, seed=1)
    run = run_ours(queue)
    assert sum(step.drawn for step in run.steps) == sum(queue.num_outputs)
    assert max(step.rows for step in run.steps) == 4
    assert sum(step.positions for step in run.steps) == sum(
        len(prompt) + num_output - 1 for prompt, num_output in zip(queue.prompts, queue.num_outputs, strict=True)
    )
    assert 0 < run.of_token() < run.of_token(is_all=True)


def test_a_decode_step_is_one_in_which_all_decode() -> None:
    run = run_ours(decode_queue(2))
    assert 0 < run.of_decode(2) < run.of_decode(2, is_all=True)
    with pytest.raises(SystemExit, match="0 steps of 3 decodes"):
        run.of_decode(3)


def test_a_python_without_vllm_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="--against-vllm: ended with 1"):
        Vllm(sys.executable)
    assert "No module named 'vllm'" in capfd.readouterr().err


def test_what_is_measured_stands_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of a tiny model, scale of it, and a comparison, from the benches' own files."""
    model = str(make_tiny(tmp_path / "tiny", with_tokenizer=False))
    small = ["--model", model, "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["step.py", *small, "--rows", "1", "3", "--context", "20", "--steps", "2",
                                      "--json", str(tmp_path / "step.json")])  # fmt: skip
    assert step.main() == 0
    monkeypatch.setattr(
        sys, "argv",
        ["scale.py", *small, "--steps", "2", "--requests", "1", "2", "4", "--contexts", "8", "16", "32",
         "--sizes", "4", "16", "--prompts", "4", "8", "16", "--json", str(tmp_path / "scale.json")],
    )  # fmt: skip
    assert scale.main() == 0
    told = capsys.readouterr().out
    assert "outside" in told
    assert "controller: grows as rows^" in told
    for spent in json.loads((tmp_path / "step.json").read_text()):
        assert all(spent["parts_s"][part] > 0 for part in PARTS)
        assert spent["step_s"] > 0
    assert len(json.loads((tmp_path / "scale.json").read_text())["fits"]) == 5
    line = {"queue": "decode", "num_rows": 64, "vllm_us": [700.0], "ours_us": [100.0], "ours_all_us": [140.0]}
    (tmp_path / "core.json").write_text(json.dumps([line]))
    page = tmp_path / "PERFORMANCE.md"
    before = performance.PAGE.read_text()
    page.write_text(before)
    monkeypatch.setattr(performance, "PAGE", page)
    monkeypatch.setattr(performance, "KEPT", tmp_path / "performance")
    files = [f"--{name}={tmp_path}/{name}.json" for name in ("step", "scale", "core")]
    assert performance.main(files) == 0
    assert performance.main([]) == 0  # again, of what is kept
    text = page.read_text()
    assert "| decode | 64 | 700.0 | 100.0 | 7.0 |" in text
    assert "| outside kernels |" in text
    assert text.count("<!-- end: ") == before.count("<!-- end: ")
    assert (tmp_path / "performance/scale.svg").exists()
    assert (tmp_path / "performance/step.svg").exists()


def test_a_bar_that_is_missed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Line("decode", 64, [300.0], [100.0], [140.0])
    monkeypatch.setattr(core_against, "compared", lambda *_: [slow])
    assert core_against.against("python", [64], 1, None) == 1
    monkeypatch.setattr(core_against, "compared", lambda *_: [Line("decode", 64, [400.0], [100.0], [140.0])])
    assert core_against.against("python", [64], 1, None) == 0


def test_a_line_is_found_and_what_it_leaves_is_told() -> None:
    xs = [1, 2, 4, 8]
    exact = scale.line_through("x", xs, [0.001 + 0.002 * x for x in xs])
    assert (exact.fixed_s, exact.each_s, exact.residual) == pytest.approx((0.001, 0.002, 0.0), abs=1e-9)
    bent = scale.line_through("x", xs, [0.001 * x * x for x in xs])
    assert bent.fixed_s == 0.0
    assert bent.residual > 0.3
    assert scale.power_of(xs, [0.001 * x * x for x in xs]) == pytest.approx(2.0)


def test_the_controllers_share_is_its_cpu_by_the_workers_steps() -> None:
    before = Spending({"idle": 1.0, "forward": 2.0}, num_steps=10, controller_s=0.5)
    after = Spending({"idle": 1.5, "forward": 3.0, "sample": 1.0}, num_steps=30, controller_s=0.6)
    answers = [Answer(0.0, 1.0, 2.0, [0.1], num_prompt=4, num_output=100)]
    told = report(answers, 2.0, after.since(before))["controller"]
    assert told == pytest.approx({"us_per_token": 1000, "us_per_step": 5000, "step_ms": 100, "share_of_step": 0.05})


def test_garbage_is_collected_as_before_once_serving_has_ended() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
