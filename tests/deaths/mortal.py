"""Workers that die by SIGKILL at a drawn place of a drawn step, life after life, or of a request that none survives.

    python tests/deaths/mortal.py FOLDER_OF_NOTES NAME WORLD RANK FLAGS...      FLAGS as of `python -m kilburn.worker`

This process imports what computes, once, and forks a worker for each life, so that a life begins in a moment. The name
is the seed by which its group's deaths are drawn: each of its PHASES once, in an order, of a rank, after so many steps.
They begin once there is a file `mortal` in the folder. Later lives end by poison alone: the step that admits a request
drawn by the seed POISON. Each death is one line of `deaths` there.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilburn.shared.messages import StepDone, StepPlan, StepResult
from kilburn.worker import __main__ as program
from kilburn.worker import start
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.link import WorkerLink
from kilburn.worker.model_runner import ModelRunner
from kilburn.worker.parallel import Ranks
from kilburn.worker.step import Executor
from kilburn.worker.watchdog import EXIT_CODE as STUCK

ALONE = ("before plan", "mid-swap", "mid-forward", "after send")
TOGETHER = "in a collective"
PHASES = (*ALONE, TOGETHER)
POISON = 666  # no worker survives a request with this seed
BY_POISON = "by poison"


def phases_of(world: int) -> tuple[str, ...]:
    """Where the lives of a worker group of so many ranks end."""
    return PHASES if world > 1 else ALONE


@dataclass(frozen=True, slots=True)
class Death:
    at: float  # on the clock of this machine
    name: str  # of the worker group
    phase: str

    @classmethod
    def all_in(cls, notes: Path) -> "list[Death]":
        file = notes / "deaths"
        lines = [line.split(" ", 2) for line in file.read_text().splitlines()] if file.exists() else []
        return [cls(float(at), name, phase) for at, name, phase in lines]


class Life:
    """One process's, which ends in `phase` of the first step from number `after` on that has it."""

    def __init__(self, notes: Path, name: str, phase: str = BY_POISON, after: int = 0) -> None:
        self.notes, self.name, self.phase, self.after = notes, name, phase, after
        self.num_steps = 0

    def is_due(self, phase: str) -> bool:
        return phase == self.phase and self.num_steps >= self.after and (self.notes / "mortal").exists()

    def end(self) -> None:
        with (self.notes / "deaths").open("a") as file:
            file.write(f"{time.time()} {self.name} {self.phase}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def live(self) -> None:
        """Watch the places where it may end."""
        run, move, forward, send, add = Executor.run, KVCache.move, ModelRunner.forward, WorkerLink.send, Ranks.sum

        def run_or_end(executor: Executor, plan: StepPlan, *rest: Any) -> StepResult:
            self.num_steps += 1
            if self.is_due("before plan"):
                self.end()
            if any(admit.sampling.seed == POISON for admit in plan.admits):
                self.phase = BY_POISON
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
            if isinstance(message, StepResult | StepDone) and self.is_due("after send"):
                time.sleep(0.005)  # it has left
                self.end()

        def add_or_end(ranks: Ranks, x: Any) -> Any:
            if ranks._values is not None and self.is_due(TOGETHER):
                ranks._values.allreduce([x.contiguous()])  # what it adds is under way, the sum is not back
                self.end()
            return add(ranks, x)

        watched: dict[tuple[type, str], Callable[..., Any]] = {
            (Executor, "run"): run_or_end,
            (KVCache, "move"): move_or_end,
            (ModelRunner, "forward"): forward_or_end,
            (WorkerLink, "send"): send_or_end,
            (Ranks, "sum"): add_or_end,
        }
        for (owner, name), function in watched.items():
            setattr(owner, name, function)


def lives_of(notes: Path, name: str, world: int, rank: int) -> list[Life]:
    """Those of a rank that end in a phase."""
    rng = random.Random(name)
    in_order = rng.sample(phases_of(world), len(phases_of(world)))
    dealt = [(rng.randrange(world), phase, rng.randint(1, 10)) for phase in in_order]
    return [Life(notes, name, phase, after) for whose, phase, after in dealt if whose == rank]


def main(notes: Path, name: str, world: int, rank: int, flags: list[str]) -> int:
    if start.torch.get_num_threads() != 1:
        raise SystemExit("give OMP_NUM_THREADS=1: threads do not outlive a fork")
    lives, parent = lives_of(notes, name, world, rank), os.getppid()
    while os.getppid() == parent:
        life = lives.pop(0) if lives else Life(notes, name)
        child = os.fork()
        if not child:
            life.live()
            os._exit(program.main(flags))
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) != STUCK:
            return os.WEXITSTATUS(status)
        if os.WIFEXITED(status):
            lives.insert(0, life)  # it found itself stuck: that was not the end that was drawn
        print(f"{name}, rank {rank}: ended with {status:#x}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
