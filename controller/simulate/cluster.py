"""The engine over worker groups whose steps take as long as a machine's model says, on a clock that jumps.

    requests --> gate --> engine --> plans --> group 0   [ step ][ step ][ step ]        depth plans under way
                   ^        |                 group 1    [   step   ][  step  ]
                   '-ended--'<-- results --------'

It is the engine that serves, with the settings that serve: placement, admission, pacing, preemption, prefixes. What is
not here is what the engine cannot see: contents, sockets, and its own seconds. A gate (gates.py) may hold requests
back, as a system with another idea of memory would. What clients see is kept by `record`; what pools hold is looked at
once in `sample_s`.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import (
    Arrived,
    Beam,
    Emit,
    Event,
    Finished,
    Note,
    NoteKind,
    Refused,
    Send,
    Started,
    Submit,
)
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.core.snapshot import Snapshot
from kilburn.controller.simulate.gates import Gate
from kilburn.controller.simulate.quick import QuickWorker
from kilburn.controller.simulate.record import Record
from kilburn.controller.simulate.roofline import Load, Machine
from kilburn.shared.messages import Hello, StepPlan, StepResult, Timings, Welcome
from kilburn.shared.types import LawBroken

FOREVER_S = 1e12  # nobody falls silent here
LATEST_S = 1e11


@dataclass(frozen=True, slots=True)
class Timed:
    """A request and when it comes."""

    at_s: float
    submit: Submit


class Worker:
    """One worker group: its rows, and when it is free."""

    def __init__(self, peer: bytes, hello: Hello, machine: Machine, seed: int) -> None:
        self.peer, self.hello, self._machine = peer, hello, machine
        self._rows = QuickWorker(seed)
        self._free_at_s = 0.0

    def work(self, plan: StepPlan, now: float) -> tuple[float, float, StepResult]:
        """(when its result is there, the seconds that it takes, the result) of a plan that is sent now."""
        result, load = self._rows.run(plan)
        moves_s, forward_s = self.seconds(plan, load)
        result.timings = Timings(apply_s=moves_s, forward_s=forward_s, moves_s=moves_s)
        seconds = moves_s + forward_s
        self._free_at_s = max(now, self._free_at_s) + seconds
        return self._free_at_s, seconds, result

    def seconds(self, plan: StepPlan, load: Load) -> tuple[float, float]:
        return self._machine.seconds(load)


class Cluster:
    """One engine, its worker groups and its clients."""

    def __init__(
        self, settings: EngineSettings, workers: Sequence[Worker], gate: Gate, record: Record, sample_s: float = 1.0
    ) -> None:
        self.engine, self.record, self.gate = Engine(settings), record, gate
        self.num_steps = self.num_sequence_steps = 0
        self._workers = {worker.peer: worker for worker in workers}
        self._results: list[tuple[float, int, bytes, StepResult]] = []  # in order of time
        self._sample_s, self._next_sample_s = sample_s, 0.0
        self.now = 0.0
        self._turn([Arrived(worker.peer, worker.hello) for worker in workers])

    def run(self, requests: Iterator[Timed], until_s: float = LATEST_S) -> None:
        """All requests, which are in order of time, to their ends; or to a moment."""
        coming, results = next(requests, None), self._results
        while coming is not None or results:
            next_s = results[0][0] if results else LATEST_S
            if coming is not None and coming.at_s <= next_s:
                if coming.at_s > until_s:
                    return
                self.now = coming.at_s
                while coming is not None and coming.at_s <= self.now:
                    self.record.arrives(coming.submit, self.now)
                    self.gate.arrives(coming.submit)
                    coming = next(requests, None)
                self._turn(self._admitted())
                continue
            if next_s > until_s:
                return
            self.now, _, peer, result = heapq.heappop(results)
            if self.now >= self._next_sample_s:
                self._sample()
            self._turn([Arrived(peer, result)])
        if self.gate.num_held:
            raise LawBroken(f"{self.gate.num_held} requests were never let in")

    def snapshot(self) -> Snapshot:
        return self.engine.snapshot(self.now)

    def _admitted(self) -> list[Event]:
        let_in: list[Event] = list(self.gate.let_in(self.now))
        return let_in

    def _turn(self, events: list[Event]) -> None:
        while events:
            has_ended = self._fulfil(events)
            events = self._admitted() if has_ended else []

    def _fulfil(self, events: list[Event]) -> bool:
        """Whether somebody ended, so that a gate may open."""
        record, now, has_ended = self.record, self.now, False
        for effect in self.engine.handle(events, now):
            kind = type(effect)
            if kind is Emit:
                record.emitted(effect.request_id, now)  # type: ignore[union-attr]
            elif isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Finished | Beam):
                if effect.reason.value == "error":
                    raise LawBroken(f"a request failed: {effect}")
                if record.ended(effect, now):
                    self.gate.ended(effect.request_id)
                    has_ended = True
            elif isinstance(effect, Started):
                record.started(effect.request_id, effect.cached_tokens, now)
            elif isinstance(effect, Refused):
                record.refused(effect.request_id)
                self.gate.ended(effect.request_id)
                has_ended = True
            elif isinstance(effect, Note) and effect.kind is NoteKind.LEASE_ENDED:
                raise LawBroken(f"a worker that cannot fail was given up: {effect.text}")
        return has_ended

    def _send(self, effect: Send) -> None:
        match effect.message:
            case StepPlan() as plan:
                at_s, seconds, result = self._workers[effect.peer].work(plan, self.now)
                self.num_steps += 1
                self.num_sequence_steps += len(plan.rows)
                self.record.step(len(plan.rows), seconds)
                heapq.heappush(self._results, (at_s, self.num_steps, effect.peer, result))
            case Welcome():
                pass

    def _sample(self) -> None:
        self._next_sample_s = self.now + self._sample_s
        self.record.sample(self.engine.snapshot(self.now), self.gate.slots(self.record))
