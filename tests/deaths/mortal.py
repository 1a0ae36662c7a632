"""Workers that die by SIGKILL at a drawn place of a drawn step, life after life.

    python tests/deaths/mortal.py FOLDER_OF_NOTES SEED FLAGS...        FLAGS as of `python -m kilburn.worker`

This process imports what computes, once, and forks a worker for each life, so that a life begins in a moment. Each of
the first NUM_MORTAL lives is drawn from the seed: in which of PHASES it ends, each as often as any other, and how many
steps it does before. It ends once there is a file `mortal` in the folder; where it did is one line of `deaths` there.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kilburn.shared.messages import StepPlan, StepResult
from kilburn.worker import __main__ as program
from kilburn.worker import start
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.link import WorkerLink
from kilburn.worker.model_runner import ModelRunner
from kilburn.worker.step import Executor

PHASES = ("before plan", "mid-swap", "mid-forward", "after send")
NUM_MORTAL = len(PHASES)  # lives


class Life:
    """One worker's, which ends in `phase` of the first step from number `after` on that has it."""

    def __init__(self, notes: Path, phase: str, after: int) -> None:
        self.notes, self.phase, self.after = notes, phase, after
        self.num_steps = 0

    def is_due(self, phase: str) -> bool:
        return phase == self.phase and self.num_steps >= self.after and (self.notes / "mortal").exists()

    def end(self) -> None:
        with (self.notes / "deaths").open("a") as file:
            file.write(f"{self.phase}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def live(self) -> None:
        """Watch the places where it may end."""
        run, move, forward, send = Executor.run, KVCache.move, ModelRunner.forward, WorkerLink.send

        def run_or_end(executor: Executor, plan: StepPlan, *rest: Any) -> StepResult:
            self.num_steps += 1
            if self.is_due("before plan"):
                self.end()
            return run(executor, plan, *rest)

        def move_or_end(cache: KVCache, swaps_out: list[Any], copies: list[Any], swaps_in: list[Any]) -> None:
            if (swaps_out or swaps_in) and self.is_due("mid-swap"):
                half_out, half_in = swaps_out[: len(swaps_out) // 2 + 1], swaps_in[: len(swaps_in) // 2]
                move(cache, half_out, copies, half_in)
                self.end()
            move(cache, swaps_out, copies, swaps_in)

        def forward_or_end(*given: Any) -> Any:
            if self.is_due("mid-forward"):
                threading.Timer(0.0005, self.end).start()
            return forward(*given)

        def send_or_end(link: WorkerLink, message: Any) -> None:
            send(link, message)
            if isinstance(message, StepResult) and self.is_due("after send"):
                time.sleep(0.005)  # it has left
                self.end()

        watched: dict[tuple[type, str], Callable[..., Any]] = {
            (Executor, "run"): run_or_end,
            (KVCache, "move"): move_or_end,
            (ModelRunner, "forward"): forward_or_end,
            (WorkerLink, "send"): send_or_end,
        }
        for (owner, name), function in watched.items():
            setattr(owner, name, function)


def main(notes: Path, seed: str, flags: list[str]) -> int:
    if start.torch.get_num_threads() != 1:
        raise SystemExit("give OMP_NUM_THREADS=1: threads do not outlive a fork")
    rng, parent, lives = random.Random(seed), os.getppid(), 0
    phases = rng.sample(PHASES, NUM_MORTAL)
    while os.getppid() == parent:
        life = Life(notes, phases[lives], rng.randint(1, 10)) if lives < NUM_MORTAL else None
        lives += 1
        child = os.fork()
        if not child:
            if life is not None:
                life.live()
            os._exit(program.main(flags))
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            return os.WEXITSTATUS(status)
        print(f"life {lives} ended by signal {os.WTERMSIG(status)}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
