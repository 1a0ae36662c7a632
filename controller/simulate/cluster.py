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
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import (
    Arrived,
    Beam,
    Effect,
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
from kilburn.controller.simulate import light
from kilburn.controller.simulate import stretch as stretches
from kilburn.controller.simulate.gates import Gate
from kilburn.controller.simulate.quick import QuickIndex, QuickPool, QuickWorker
from kilburn.controller.simulate.record import Record
from kilburn.controller.simulate.roofline import Machine
from kilburn.controller.simulate.stretch import Under
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
    """One worker group: its rows, and what is under way."""

    def __init__(self, peer: bytes, hello: Hello, machine: Machine, seed: int, sure_share: float = 0.0) -> None:
        self.peer, self.hello, self.machine = peer, hello, machine
        self.rows = QuickWorker(seed, sure_share)
        self.under = Under(deque(), deque())

    def work(self, plan: StepPlan, now: float) -> tuple[float, float]:
        """(when its result is there, the seconds that it takes) of a plan that is sent now."""
        result, load = self.rows.run(plan)
        moves_s, forward_s = self.machine.seconds(load)
        result.timings = Timings(apply_s=moves_s, forward_s=forward_s, moves_s=moves_s)
        begun_s = max(now, self.under.ready_s[-1]) if self.under.ready_s else now
        self.under.ready_s.append(begun_s + moves_s + forward_s)
        self.under.results.append(result)
        return self.under.ready_s[-1], moves_s + forward_s


class Cluster:
    """One engine, its worker groups and its clients."""

    def __init__(
        self,
        settings: EngineSettings,
        workers: Sequence[Worker],
        gate: Gate,
        record: Record,
        sample_s: float = 1.0,
        steps_each: bool = False,
    ) -> None:
        """`steps_each`: every step is a turn of the engine as it serves, though several could be taken at once."""
        self.engine = Engine(settings) if steps_each else Engine(settings, QuickPool, QuickIndex)
        self.record, self.gate = record, gate
        self.num_steps = self.num_sequence_steps = self._num_sent = 0
        self._workers = {worker.peer: worker for worker in workers}
        self._due: list[tuple[float, int, bytes]] = []  # results, as a heap: when, in which order, whose
        self._steps_each = steps_each
        self._coming: Timed | None = None
        self._sample_s, self._next_sample_s = sample_s, 0.0
        self.now = 0.0
        self._turn([Arrived(worker.peer, worker.hello) for worker in workers])

    def run(self, requests: Iterator[Timed], until_s: float = LATEST_S) -> None:
        """All requests, which are in order of time, to their ends; or to a moment, from which it may go on."""
        due = self._due
        self._coming = self._coming or next(requests, None)
        while self._coming is not None or due:
            next_s = due[0][0] if due else LATEST_S
            coming_s = LATEST_S if self._coming is None else self._coming.at_s
            if min(next_s, coming_s) > until_s:
                return
            if coming_s <= next_s:
                self.now = coming_s
                self._come(requests)
                continue
            worker = self._workers[due[0][2]]
            # Whoever comes while others are held back changes nothing: they are let in first.
            apart_s = LATEST_S if self.gate.num_held else coming_s
            if self._leaps(worker, min(apart_s, until_s, self._next_sample_s)):
                continue
            self.now, _, _ = heapq.heappop(due)
            worker.under.ready_s.popleft()
            if self.now >= self._next_sample_s:
                self._sample()
            self._answer(worker.peer, worker.under.results.popleft())
        if self.gate.num_held:  # nobody is left who could make room
            raise LawBroken(f"{self.gate.num_held} requests were never let in")

    def happens(self, events: list[Event], now: float) -> None:
        """Something else than requests that come, at the moment to which all was run."""
        self.now = max(self.now, now)
        self._turn(events)

    def _come(self, requests: Iterator[Timed]) -> None:
        """Those whose time it is."""
        while self._coming is not None and self._coming.at_s <= self.now:
            self.record.arrives(self._coming.submit, self._coming.at_s)
            self.gate.arrives(self._coming.submit)
            self._coming = next(requests, None)
        self._turn(self._admitted())

    def _answer(self, peer: bytes, result: StepResult) -> None:
        home = None if self._steps_each else self.engine.home(peer)
        if home is None:
            self._turn([Arrived(peer, result)])
        elif self._fulfil(light.turn(self.engine, home, peer, result, self.now, self.record)):
            self._turn(self._admitted())

    def _leaps(self, worker: Worker, until_s: float) -> bool:
        """Several steps at once, if that makes no difference."""
        if self._steps_each:
            return False
        home = self.engine.home(worker.peer)
        stretch = (
            None
            if home is None
            else stretches.go(home, worker.peer, worker.machine, worker.under, until_s, self.record)
        )
        if stretch is None or home is None:
            return False
        worker.rows.skip([sequence.row for sequence in home.scheduler.flights[0].sequences], stretch.num_steps)
        self._due[:] = [entry for entry in self._due if entry[2] != worker.peer]
        for ready_s in worker.under.ready_s:
            self._num_sent += 1
            self._due.append((ready_s, self._num_sent, worker.peer))
        self.num_steps += stretch.num_steps
        self.num_sequence_steps += stretch.num_steps * stretch.num_rows
        heapq.heapify(self._due)
        return True

    def snapshot(self) -> Snapshot:
        return self.engine.snapshot(self.now)

    def _admitted(self) -> list[Event]:
        let_in: list[Event] = list(self.gate.let_in(self.now))
        return let_in

    def _turn(self, events: list[Event]) -> None:
        while events:
            has_ended = self._fulfil(self.engine.handle(events, self.now))
            events = self._admitted() if has_ended else []

    def _fulfil(self, effects: list[Effect]) -> bool:
        """Whether somebody ended, so that a gate may open."""
        record, now, has_ended = self.record, self.now, False
        for effect in effects:
            if isinstance(effect, Emit):
                record.emitted_by(effect.request_ids, now)
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
                ready_s, seconds = self._workers[effect.peer].work(plan, self.now)
                self.num_steps, self._num_sent = self.num_steps + 1, self._num_sent + 1
                self.num_sequence_steps += len(plan.rows)
                self.record.step(len(plan.rows), seconds, self.now)
                heapq.heappush(self._due, (ready_s, self._num_sent, effect.peer))
            case Welcome():
                pass

    def _sample(self) -> None:
        self._next_sample_s = self.now + self._sample_s
        self.record.sample(self.engine.snapshot(self.now), self.gate.slots(self.record), self.now)
