"""Traces of steps by torch's own profiler: what a step's operations took, for chrome://tracing or Perfetto.

    --profile FOLDER    the first `num_steps` steps, then a file; another one each time that `asked` is set (SIGUSR2)

Each step is one stretch of the trace, with its number; within it move, prepare, forward and sample have their names.
Own kernels of the CPU are no operations of torch's, and a recorded step (replays.py) asks for all of them at once: such
a forward is one bar, whose parts bench/step.py tells.
Between traces steps run as they would without. A profiler that fails is told of and given up; steps go on.
"""

import logging
import threading
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kilburn.shared.config import SettingsError
from kilburn.shared.messages import Forget, Prepare, StepPlan, StepResult
from kilburn.worker.grammars import Answer
from kilburn.worker.step import Executor

log = logging.getLogger("kilburn.worker")


class ProfiledSteps:
    """An executor whose steps are traced now and then. Raises SettingsError for a folder that cannot be had."""

    def __init__(self, executor: Executor, folder: str, name: str, num_steps: int, asked: threading.Event) -> None:
        self._executor, self._folder, self._name = executor, Path(folder), name
        self._num_steps, self._asked = num_steps, asked
        self._num_left = 0  # steps of the trace under way
        self._path = self._folder
        self._profile: profile | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError([f"--profile {folder}: {error.strerror}; name a folder that may be written"]) from error
        asked.set()

    def place(self) -> str:
        return self._executor.place()

    def begin(self, rendezvous: str, step_s: float) -> None:
        self._executor.begin(rendezvous, step_s)

    def run(self, plan: StepPlan, idle_s: float = 0.0) -> StepResult:
        if self._profile is None and self._asked.is_set():
            self._begin(plan)
        if self._profile is None:
            return self._executor.run(plan, idle_s)
        try:
            with record_function(f"step {plan.step}: {len(plan.rows)} rows, {sum(plan.counts)} positions"):
                result = self._executor.run(plan, idle_s)
        except BaseException:
            self.close()
            raise
        self._num_left -= 1
        if self._num_left == 0:
            self.close()
        return result

    def prepare(self, asked: Prepare, answer: Answer) -> None:
        self._executor.prepare(asked, answer)

    def forget(self, forgotten: Forget) -> None:
        self._executor.forget(forgotten)

    def clear(self) -> None:
        self._executor.clear()

    def _begin(self, plan: StepPlan) -> None:
        self._asked.clear()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        try:
            self._profile = profile(activities=activities)
            self._profile.start()
        except RuntimeError as error:
            log.warning("no trace of steps can be made: %s", error)
            self._profile = None
            return
        self._num_left = self._num_steps
        self._path = self._folder / f"{self._name}-lease{plan.lease}-step{plan.step}.json"
        self._executor.runner = _Named(self._executor.runner)  # type: ignore[assignment]  # the same, with names

    def close(self) -> None:
        """Write the trace that is under way, if one is."""
        if self._profile is None:
            return
        ending, self._profile = self._profile, None
        runner: Any = self._executor.runner
        self._executor.runner = runner.inner
        part = self._path.with_suffix(".part")
        try:
            ending.stop()
            ending.export_chrome_trace(str(part))
            part.replace(self._path)
        except (RuntimeError, OSError) as error:
            log.warning("the trace of steps could not be written: %s", error)
        else:
            log.info("a trace of %d steps is in %s", self._num_steps - self._num_left, self._path)


class _Named:
    """Whatever the runner or its cache does for a step, under its name in the trace."""

    def __init__(self, inner: Any, names: tuple[str, ...] = ("prepare", "forward", "sample", "move")) -> None:
        self.inner, self._names = inner, names

    @property
    def cache(self) -> "_Named":
        return _Named(self.inner.cache)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in self._names:
            return found

        def named(*arguments: Any) -> Any:
            with record_function(name):
                return found(*arguments)

        return named
