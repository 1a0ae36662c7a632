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
        self._submits: list[Submit] = []
        self._overtaken: dict[int, int] = {}  # request -> the step in which it first was
        self._slack = scenario.depth  # plans that a turn may bring
        # Nothing but the line decides: one worker group that never fails or leaves, and only requests in its pool.
        is_sound = scenario.faults == Faults() and not scenario.upheaval.retires
        is_plain = is_sound and not scenario.pins and len(scenario.hellos) == 1
        self._is_strict = is_plain and scenario.shutdown_s is None and not scenario.is_fair

    def submitted(self, submit: Submit, now: float) -> None:
        aging_s = self.scenario.aging_s
        due = now + submit.priority * aging_s if aging_s else float(submit.priority)
        self._turns[submit.request_id] = (due, len(self._turns))
        self._submits.append(submit)

    def _place(self, submit: Submit) -> tuple[int, int]:
        return submit.priority, self._turns[submit.request_id][1]

    def began(self, submit: Submit, waiting: list[Submit]) -> None:
        """A request is started; `waiting` are those that could be instead."""
        if not self._is_strict or len(submit.prompt) + submit.max_tokens <= 1:  # nothing to compute: it never waits
            return
        turn = self._turns[submit.request_id]
        for other in waiting:
            number = other.request_id
            if turn < self._turns[number]:
                continue
            steps = sum(view.next_step for view in self.leases.views.values())  # there is one
            since = self._overtaken.setdefault(number, steps)
            told = f"it began before request {number}, whose turn it was"
            demand(self._has_prefix_in_common(other), told, submit.request_id)
            holds = self.scenario.prefix_wait_steps and steps - since <= self.scenario.prefix_wait_steps + self._slack
            demand(bool(holds), f"{told} {steps - since} steps ago", submit.request_id)

    def _has_prefix_in_common(self, submit: Submit) -> bool:
        """A block with some other request of the same tenant: only for its sake may this one be passed over."""
        size = self.scenario.hellos[0].layout.block_size
        head = tuple(submit.prompt[:size])
        others = (other for other in self._submits if other is not submit and other.salt == submit.salt)
        return len(submit.prompt) > size and any(tuple(other.prompt[:size]) == head for other in others)

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
