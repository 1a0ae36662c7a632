"""One worker group as the engine sees it. Groups know nothing of each other: each has its own pool, line and flight.

A step may take TIMES what it was predicted to take (pacing.py), by a floor at least: so a hung step is found soon where
steps are short, and a long one is not taken for hung. Its plan says so to the worker, which ends by the same time.
"""

from dataclasses import replace

from kilburn.controller.core.events import Effect, Stuck
from kilburn.controller.core.lease import Lease, LeaseState
from kilburn.controller.core.ranks import Agreement
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.sequence import Group
from kilburn.controller.core.step import Flight
from kilburn.shared.messages import Beat, Drain, StepPlan

TIMES = 10
MOST_S = 3600.0  # for a step, however dear one hiccup has made tokens look


def _generous_s(flight: Flight) -> float:
    """What a step may take by its prediction alone."""
    return min(TIMES * flight.predicted_s, MOST_S)


class Home:
    """Its lease, what is scheduled on it, and what its ranks agree upon."""

    __slots__ = ("agreement", "is_held", "lease", "scheduler")

    def __init__(self, lease: Lease, scheduler: Scheduler) -> None:
        self.lease, self.scheduler = lease, scheduler
        self.agreement = Agreement(len(lease.peers))
        self.is_held = False  # nothing more is planned: all that is here is about to move elsewhere

    def fits(self, group: Group) -> bool:
        first = group.live[0]
        most = group.most_hit(first.num_prompt)
        shared = self.scheduler.shared_with_pins(first.prompt, group.salt.value, most)
        return self.scheduler.fits(first.num_prompt, first.limit, group.most_wide, shared)

    def allowed_s(self, floor_s: float) -> float:
        """How long the oldest step under way may take."""
        return max(floor_s, _generous_s(self.scheduler.flights[0]))

    def step_deadline(self, floor_s: float) -> float | None:
        """When the oldest step under way is late, counted from the later of its sending and the commit before."""
        flights = self.scheduler.flights
        return max(flights[0].sent_at, self.scheduler.last_commit_at) + self.allowed_s(floor_s) if flights else None

    def overdue(self, now: float, floor_s: float) -> Stuck | None:
        """Why time ends its lease now, if it does, and whose silence or lateness that is."""
        lease = self.lease
        if lease.is_silent(now):
            who = f"rank {lease.most_silent} was " if len(lease.peers) > 1 else ""
            busy_s = max(0.0, (self.step_deadline(0.0) or now) - now)
            return Stuck(lease.silent_peers(now), f"{who}silent for {lease.silence_s:g} s", busy_s)
        late_at = self.step_deadline(floor_s)
        if late_at is not None and now >= late_at:
            return Stuck(lease.peers, f"step {self.scheduler.flights[0].step} took over {self.allowed_s(floor_s):g} s")
        return None

    def plan(self, now: float, floor_s: float, effects: list[Effect]) -> StepPlan | None:
        """The next step's, if there is work; it says what the step may take where that is more than the floor."""
        plan = self.scheduler.plan(now, effects)
        if plan is None:
            return None
        allowed_s = _generous_s(self.scheduler.flights[-1])
        if allowed_s > floor_s:
            plan = replace(plan, allowed_s=allowed_s)
        self.agreement.planned(plan)
        return plan

    @property
    def beat(self) -> Beat | Drain:
        """A sign of life; to a worker that is to leave, that once more, should it have been lost."""
        is_draining = self.lease.state is LeaseState.DRAINING
        return Drain(self.lease.id) if is_draining else Beat(self.lease.id, self.scheduler.counters.steps)
