"""The real engine over a fake worker whose steps take as long as a cost model says, on a clock that jumps.

    seconds of a step = fixed + rows x row + cells read x cell + prompt tokens x token + pairs attended x pair

so that what clients would wait for can be measured without a machine: when each token came, and what each step held.
Nothing fails here; for that there are the worlds.
"""

import heapq
from dataclasses import dataclass, field
from itertools import pairwise

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import (
    Arrived,
    Cancel,
    Effect,
    Emit,
    Event,
    Finished,
    Refused,
    Send,
    Started,
    Submit,
)
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.simulate.fake_daemon import limits_of
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.shared.messages import Hello, StepPlan, Timings, Welcome

PEER = b"metered"


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds."""

    fixed_s: float = 2e-3
    row_s: float = 2e-4
    cell_s: float = 1e-7  # of a decode, per position of its context
    token_s: float = 5e-5  # of a prompt
    pair_s: float = 1e-8  # of a prompt, per position attended to by each token

    def of(self, plan: StepPlan, worker: FakeWorker) -> float:
        """Of a plan that has just run."""
        total_s = self.fixed_s
        for row, count in zip(plan.rows, plan.counts, strict=True):
            num_computed = worker.rows[row].num_computed
            if count == 1:
                total_s += self.row_s + num_computed * self.cell_s
            else:
                total_s += count * (self.token_s + (num_computed - count / 2) * self.pair_s)
        return total_s


@dataclass(slots=True)
class Case:
    """What a client saw."""

    submit: Submit
    at_s: float
    started_s: float = -1.0
    ended_s: float = -1.0
    tokens: list[int] = field(default_factory=list)
    tokens_s: list[float] = field(default_factory=list)  # when each came
    is_refused: bool = False

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.tokens_s)]


class Metered:
    """One worker group and its clients."""

    def __init__(self, settings: EngineSettings, hello: Hello, costs: StepCosts) -> None:
        self.engine, self.costs, self.hello = Engine(settings), costs, hello
        self.now = 0.0
        self.cases: dict[int, Case] = {}
        self.plans: list[StepPlan] = []
        self.num_computed = 0  # positions, of all plans
        self._worker: FakeWorker | None = None
        self._free_at_s = 0.0
        self._agenda: list[tuple[float, int, Event]] = []
        self._num_entries = 0
        self._book(0.0, Arrived(PEER, hello))

    def submit(self, at_s: float, submit: Submit) -> None:
        self.cases[submit.request_id] = Case(submit, at_s)
        self._book(at_s, submit)

    def cancel(self, at_s: float, request_id: int) -> None:
        self._book(at_s, Cancel(request_id))

    def run(self, until_s: float = float("inf")) -> None:
        """Until nothing is to come, or it is so late."""
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._agenda)
            events = [event]
            while self._agenda and self._agenda[0][0] == self.now:
                events.append(heapq.heappop(self._agenda)[2])
            for effect in self.engine.handle(events, self.now):
                self._fulfil(effect)
        if until_s < float("inf"):
            self.now = max(self.now, until_s)

    def _book(self, at_s: float, event: Event) -> None:
        self._num_entries += 1
        heapq.heappush(self._agenda, (at_s, self._num_entries, event))

    def _fulfil(self, effect: Effect) -> None:
        match effect:
            case Send(message=Welcome(lease)):
                self._worker = FakeWorker(lease, limits_of(self.hello), self.hello.vocab_size)
            case Send(message=StepPlan() as plan) if self._worker is not None:
                self._work(self._worker, plan)
            case Started(request_id):
                self.cases[request_id].started_s = self.now
            case Emit():
                for drawn in effect.each():
                    self.cases[drawn.request_id].tokens.append(drawn.token)
                    self.cases[drawn.request_id].tokens_s.append(self.now)
            case Finished(request_id):
                self.cases[request_id].ended_s = self.now
            case Refused(request_id):
                self.cases[request_id].is_refused = True
            case _:
                pass

    def _work(self, worker: FakeWorker, plan: StepPlan) -> None:
        result = worker.run(plan)
        seconds = self.costs.of(plan, worker)
        result.timings = Timings(forward_s=seconds)
        self.plans.append(plan)
        self.num_computed += sum(plan.counts)
        self._free_at_s = max(self.now, self._free_at_s) + seconds
        self._book(self._free_at_s, Arrived(PEER, result))
