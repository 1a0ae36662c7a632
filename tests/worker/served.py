"""The real engine and a real worker on the toy model, one plan after the other, in one process.

    served = Served(ToyModel(0), num_blocks=12, num_host_blocks=12, preemption=Preemption.SWAP)
    answers = served.answers(submits)          by (request, index)

`Answering` is that of any worker, of one rank or several (ranked.py); `Served` of the toy model.

`before_step` is called with the executor and each plan before it runs: the place for accidents.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Queue

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Beam, Emit, Event, Finished, Note, Refused, Send, Submit
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.core.snapshot import GroupSnapshot
from kilburn.shared.messages import (
    Forget,
    FromController,
    Gone,
    Hello,
    Prepare,
    Prepared,
    StepPlan,
    StepResult,
    Unpreparable,
    Welcome,
)
from kilburn.worker.grammars import Grammars
from kilburn.worker.step import Executor
from kilburn.worker.swap_check import SwapCheck
from tests.worker.toy import MAX_LEN, VOCAB, ToyModel, layout, toy_executor

PEER = b"toy.0"


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    reason: str = ""
    score: float = 0.0


class Answering:
    """An engine, and the executor of a worker's rank 0. `hellos`: of all its ranks."""

    def __init__(self, executor: Executor, settings: EngineSettings, hellos: Sequence[Hello]) -> None:
        self.executor, self.engine, self._hellos = executor, Engine(settings), hellos
        self.results: list[StepResult] = []
        self.notes: list[Note] = []

    # --- what a worker of several ranks does in its own way

    def hellos(self) -> list[Event]:
        return [Arrived(PEER, hello) for hello in self._hellos]

    def welcomed(self, welcome: Welcome) -> None:
        """A lease begins."""

    def gone(self) -> list[Event]:
        """A lease is over."""
        raise AssertionError("the lease is over")

    def run(self, plan: StepPlan) -> list[Event]:
        self.results.append(self.executor.run(plan))
        return [Arrived(self.first, self.results[-1])]

    @property
    def first(self) -> bytes:
        """The peer that is rank 0."""
        arrived = self.hellos()[0]
        assert isinstance(arrived, Arrived)
        return arrived.peer

    # --- what all do alike

    def answers(self, submits: Sequence[Submit]) -> dict[tuple[int, int], Answer]:
        """All of them, submitted at once. Nothing is left afterwards."""
        found: dict[tuple[int, int], Answer] = {}
        first, events = self.first, [*self.hellos(), *submits]
        plans: deque[StepPlan] = deque()
        asked: deque[Prepare] = deque()
        while events or plans or asked:
            more: list[Event] = []
            for effect in self.engine.handle(events, now=0.0):
                match effect:
                    case Send(peer, message) if peer == first:
                        more += self._told(message, plans, asked)
                    case Emit():
                        for drawn in effect.each():
                            answer = found.setdefault((drawn.request_id, drawn.index), Answer())
                            assert not answer.reason, "a token after the end"
                            answer.tokens.append(drawn.token)
                            answer.logprobs.append(drawn.logprobs)
                    case Finished(request_id, index, reason):
                        found.setdefault((request_id, index), Answer()).reason = reason.value
                    case Beam(request_id, index, tokens, _, score, reason):
                        found[request_id, index] = Answer(list(tokens), [], reason.value, score)
                    case Refused():
                        raise AssertionError(effect)
                    case Note():
                        self.notes.append(effect)
                    case _:
                        pass
            self.engine.validate()
            events = more
            if plans and not events:
                events = self.run(plans.popleft())
            elif asked and not events:
                events = [self._prepare(asked.popleft())]
        assert self.engine.is_idle
        assert (self.snapshot.owned_blocks, self.snapshot.owned_host_blocks) == (0, 0)
        return found

    def _told(self, message: FromController, plans: deque[StepPlan], asked: deque[Prepare]) -> list[Event]:
        match message:
            case StepPlan():
                plans.append(message)
            case Prepare():
                asked.append(message)
            case Forget():
                self.executor.forget(message)
            case Welcome():
                self.welcomed(message)
            case Gone():
                plans.clear()
                asked.clear()
                return self.gone()
            case _:
                pass
        return []

    def _prepare(self, asked: Prepare) -> Event:
        answers: Queue[Prepared | Unpreparable] = Queue()
        self.executor.prepare(asked, answers.put)
        return Arrived(self.first, answers.get(timeout=60))

    @property
    def snapshot(self) -> GroupSnapshot:
        return self.engine.snapshot().groups[0]


class Served(Answering):
    """See the file's head."""

    def __init__(
        self,
        model: ToyModel,
        *,
        num_blocks: int,
        num_host_blocks: int,
        preemption: Preemption = Preemption.AUTO,
        block_size: int = 4,
        max_rows: int = 8,
        depth: int = 2,
        is_verified: bool = False,
        before_step: Callable[[Executor, StepPlan], None] = lambda executor, plan: None,
        grammars: Grammars | None = None,
    ) -> None:
        executor = toy_executor(
            model,
            block_size=block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_rows=max_rows,
            grammars=grammars,
        )
        if is_verified:
            executor.check = SwapCheck(executor.runner.cache.host_blocks)
        hello = Hello("toy", b"t" * 32, layout(block_size), num_blocks, num_host_blocks, max_rows, 128, MAX_LEN, VOCAB)
        super().__init__(executor, EngineSettings(depth=depth, preemption=preemption), [hello])
        self.before_step = before_step

    def run(self, plan: StepPlan) -> list[Event]:
        self.before_step(self.executor, plan)
        return super().run(plan)

    @property
    def num_lost(self) -> int:
        return sum(len(result.lost) for result in self.results)
