"""In which order the requests of a world begin, and who is preempted: judged from submits, plans and notes alone.

    fresh      among those who wait on one worker group, turns are in order of (arrival + priority x aging), wherever
               nothing but the line can decide who is next
    returned   no fresh request of equal or lower priority begins before one that was preempted
    victims    are the last by (priority, arrival) of those who run, however long they waited

Here no list is kept in order and nothing is incremental: every rule is asked of every request.
"""

from collections.abc import Mapping

from kilburn.controller.core.departure import Why
from kilburn.controller.core.events import Note, NoteKind, Submit
from kilburn.controller.simulate.scenario import Faults, Scenario
from kilburn.controller.simulate.witness import Leases, LeaseView, Told, demand
from kilburn.shared.messages import StepPlan


class Queueing:
    def __init__(self, scenario: Scenario, leases: Leases) -> None:
        self.scenario, self.leases = scenario, leases
        self._turns: dict[int, tuple[float, int]] = {}
        self._begun: set[int] = set()
        # Nothing but the line decides: one worker group that never fails, and nobody but requests in its pool.
        is_plain = scenario.faults == Faults() and not scenario.pins and len(scenario.hellos) == 1
        self._is_strict = is_plain and scenario.shutdown_s is None

    def submitted(self, submit: Submit, now: float) -> None:
        aging_s = self.scenario.aging_s
        due = now + submit.priority * aging_s if aging_s else float(submit.priority)
        self._turns[submit.request_id] = (due, len(self._turns))

    def _place(self, submit: Submit) -> tuple[int, int]:
        return submit.priority, self._turns[submit.request_id][1]

    def began(self, submit: Submit, waiting: list[Submit]) -> None:
        """A request is started; `waiting` are those that could be instead."""
        if not self._is_strict or len(submit.prompt) + submit.max_tokens <= 1:  # nothing to compute: it never waits
            return
        turn = self._turns[submit.request_id]
        for other in waiting:
            first = other.request_id
            demand(turn < self._turns[first], f"it began before request {first}, whose turn it was", submit.request_id)

    def noted(self, note: Note, requests: Mapping[int, Told]) -> None:
        """In order with the plans of the turn."""
        if note.kind is not NoteKind.PREEMPTED:
            return
        number = int(note.text.split()[1].rstrip(","))
        told = requests.get(number)
        for view in self.leases.views.values():
            rows = {row.request_id for row in view.rows.values()}
            if told is None or number not in rows:
                continue
            if not note.text.endswith(Why.LOST.value):
                self._check_victim(told.submit, rows - view.preempted, requests)
            view.preempted.add(number)

    def _check_victim(self, submit: Submit, running: set[int], requests: Mapping[int, Told]) -> None:
        for number in running:
            other = requests.get(number)
            if other is not None and other.is_live and number != submit.request_id:
                is_last = self._place(other.submit) < self._place(submit)
                demand(is_last, f"it was preempted, and request {number} behind it was not", submit.request_id)

    def planned(self, view: LeaseView, plan: StepPlan, requests: Mapping[int, Told]) -> None:
        admitted = {view.rows[admit.row].request_id for admit in plan.admits if admit.row in view.rows}
        view.preempted -= admitted
        waiting = [
            requests[number].submit
            for number in view.preempted
            if requests[number].is_live and requests[number].search is None
        ]
        for number in admitted - self._begun:
            told = requests.get(number)
            for other in waiting if told is not None else ():
                holds = told is not None and told.submit.priority < other.priority
                demand(holds, f"it began before request {other.request_id}, which was preempted", number)
        self._begun |= admitted
