"""--profile: a trace is JSON that names our steps and their parts, is bounded, and changes no result."""

import json
import threading
from pathlib import Path

import pytest

from kilburn.shared.config import SettingsError, WorkerSettings
from kilburn.shared.messages import StepResult
from kilburn.worker.profiling import ProfiledSteps
from kilburn.worker.start import Ready, make_ready, warm_up_plans
from tests.worker.tiny_models import make_tiny

PLANS = list(warm_up_plans(8, 2, 2))


@pytest.fixture
def ready(tmp_path: Path) -> Ready:
    tiny = make_tiny(tmp_path / "tiny", "llama")
    return make_ready(
        WorkerSettings(model=str(tiny), device="cpu", dtype="float32", num_blocks=8, max_rows=2, threads=1, name="w")
    )


def events_of(file: Path) -> list[str]:
    return [event["name"] for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]


def told(result: StepResult) -> tuple[object, ...]:
    return result.step, result.num_tokens, result.tokens, result.failed


def test_traces_name_the_steps_are_bounded_and_come_again_when_asked_for(ready: Ready, tmp_path: Path) -> None:
    plans = [plan for plan in PLANS if not plan.swaps_out]
    plain = [told(ready.executor.run(plan)) for plan in plans]
    ready.executor.clear()
    asked = threading.Event()
    steps = ProfiledSteps(ready.executor, str(tmp_path / "traces"), "w", 2, asked)
    runner = ready.executor.runner
    assert [told(steps.run(plan)) for plan in plans] == plain
    assert ready.executor.runner is runner, "between traces nothing is in the way"
    (first,) = (tmp_path / "traces").iterdir()
    assert first.name == f"w-lease0-step{plans[0].step}.json"
    names = events_of(first)
    traced = [f"step {plan.step}: {len(plan.rows)} rows, {sum(plan.counts)} positions" for plan in plans]
    assert [name for name in names if name.startswith("step ")] == traced[:2]
    for part in ("move", "prepare", "forward", "sample"):
        assert names.count(part) == 2, part

    asked.set()
    steps.clear()
    steps.run(plans[-1])
    steps.close()  # the worker is told to stop in the middle
    (second,) = set((tmp_path / "traces").iterdir()) - {first}
    assert [name for name in events_of(second) if name.startswith("step ")] == traced[-1:]


def test_a_folder_that_cannot_be_had_is_named(ready: Ready, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="--profile"):
        ProfiledSteps(ready.executor, str(tmp_path / "file" / "x"), "w", 2, threading.Event())
