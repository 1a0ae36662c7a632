"""The real engine over several ranks of a real model: rank 0 in this process, each other one in a process of its own.

    crew = Crew(3)                                        three processes, which may load one model after the other
    ranked = Ranked(folder, 2, crew, num_blocks=12)       two ranks: this process and the first of the crew
    answers = ranked.answers(submits)

A member of the crew is asked line by line, in JSON, and answers each line with one. Plans go to all as frames, the
digests of the others come back, and rank 0's result is what the engine hears first. `spoil` may change what a rank is
told: the place for accidents.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kilburn.controller.core.engine import EngineSettings
from kilburn.controller.core.events import Arrived, Event
from kilburn.controller.core.policy import Preemption
from kilburn.shared.agreement import step_digest
from kilburn.shared.codec import decode_from_controller, decode_from_worker, encode
from kilburn.shared.config import WorkerSettings
from kilburn.shared.messages import Hello, StepDone, StepPlan, Welcome
from kilburn.worker.start import make_ready
from tests.worker.served import Answering

STEP_S = 60.0


def loaded_with(folder: Path, world: int, rank: int, **settings: Any) -> WorkerSettings:
    """Settings of one rank, small and on the CPU."""
    small = {"max_rows": 8, "max_step_tokens": 64, "max_len": 96, "block_size": 4, "num_blocks": 200}
    parts = {"model": str(folder), "name": "group", "device": "cpu", "dtype": "float32", "tp": world, "rank": rank}
    return WorkerSettings(**{**parts, **small, **settings})


class Member:
    """One process, a rank > 0 of whatever it was last told to load."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.ranked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def ask(self, what: str, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **words}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(f"a rank ended: {self.process.stderr.read()[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Crew:
    """Processes that are started once and play one rank after the other."""

    def __init__(self, num_members: int) -> None:
        self.members = [Member() for _ in range(num_members)]

    def end(self) -> None:
        for member in self.members:
            member.end()


class Ranked(Answering):
    """As Answering, of several ranks."""

    def __init__(
        self,
        folder: Path,
        world: int,
        crew: Crew,
        *,
        preemption: Preemption = Preemption.AUTO,
        spoil: Callable[[int, StepPlan], StepPlan] = lambda rank, plan: plan,
        **settings: Any,
    ) -> None:
        self.members, self.spoil = crew.members[: world - 1], spoil
        for number, member in enumerate(self.members):
            words = {"folder": str(folder), "world": world, "rank": number + 1}
            member.ask("load", **words, settings=settings)
        ready = make_ready(loaded_with(folder, world, 0, **settings))
        hellos = [ready.hello, *[decode_from_worker(bytes.fromhex(m.answer()["hello"])) for m in self.members]]
        super().__init__(
            ready.executor, EngineSettings(preemption=preemption), [h for h in hellos if isinstance(h, Hello)]
        )

    def hellos(self) -> list[Event]:
        first, *others = self._hellos
        place = self.executor.place()
        return [Arrived(peer(0), replace(first, rendezvous=place)), *[Arrived(peer(h.rank), h) for h in others]]

    def welcomed(self, welcome: Welcome) -> None:
        for member in self.members:
            member.ask("begin", frame=encode(welcome).hex())
        self.executor.begin(welcome.rendezvous, STEP_S)
        for member in self.members:
            assert member.answer() == {"begun": True}

    def gone(self) -> list[Event]:
        """The lease is over for all, and all say Hello again."""
        self.executor.clear()
        for member in self.members:
            member.ask("clear")
            assert member.answer() == {"cleared": True}
        return self.hellos()

    def run(self, plan: StepPlan) -> list[Event]:
        for rank, member in enumerate(self.members, start=1):
            member.ask("run", frame=encode(self.spoil(rank, plan)).hex())
        events = super().run(plan)
        digests = [bytes.fromhex(member.answer()["digest"]) for member in self.members]
        dones = [StepDone(plan.lease, plan.step, digest) for digest in digests]
        return [*events, *[Arrived(peer(rank), done) for rank, done in enumerate(dones, start=1)]]


def peer(rank: int) -> bytes:
    return b"rank.%d" % rank


def main() -> None:
    """One member of the crew."""
    # Whatever else is printed goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    executor: Any = None
    is_careless = False  # the next block that comes back is not what it was
    for line in sys.stdin:
        words = json.loads(line)
        match words.pop("do"):
            case "load":
                settings = words.pop("settings")
                ready = make_ready(loaded_with(Path(words["folder"]), words["world"], words["rank"], **settings))
                executor, answer = ready.executor, {"hello": encode(ready.hello).hex()}
            case "begin":
                welcome = decode_from_controller(bytes.fromhex(words["frame"]))
                assert isinstance(welcome, Welcome)
                executor.begin(welcome.rendezvous, STEP_S)
                answer = {"begun": True}
            case "run":
                plan = decode_from_controller(bytes.fromhex(words["frame"]))
                assert isinstance(plan, StepPlan)
                if is_careless and plan.swaps_in:
                    executor.runner.cache.host_blocks[plan.swaps_in[0][0]].add_(1)
                    is_careless = False
                answer = {"digest": step_digest(plan, executor.run(plan)).hex()}
            case "damage":
                is_careless, answer = True, {"damaging": True}
            case "clear":
                executor.clear()
                answer = {"cleared": True}
            case what:
                raise ValueError(what)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
