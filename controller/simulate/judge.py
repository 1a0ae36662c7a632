"""Who checks the core from the outside: its events, its effects, and the oracle.

Events are noted before the core hears them, effects checked after. In one turn what clients hear comes first: a plan
may build on a token that the same turn brought.
"""

from collections.abc import Sequence

from kilburn.controller.core.events import (
    Arrived,
    Beam,
    Cancel,
    Effect,
    Emit,
    Event,
    Finished,
    Left,
    Note,
    NotPinned,
    Pin,
    Pinned,
    PromptScored,
    Refused,
    Retire,
    Send,
    Shutdown,
    Started,
    Stop,
    Submit,
    Turned,
    Unpin,
)
from kilburn.controller.simulate.clients import Clients
from kilburn.controller.simulate.placing import Placing
from kilburn.controller.simulate.queueing import Queueing
from kilburn.controller.simulate.scenario import Scenario
from kilburn.controller.simulate.witness import Leases
from kilburn.shared.messages import (
    Drain,
    Forget,
    Gone,
    Goodbye,
    Hello,
    Prepare,
    Prepared,
    StepFailed,
    StepPlan,
    StepResult,
    Welcome,
)


class Judge:
    def __init__(self, scenario: Scenario) -> None:
        self.leases = Leases(scenario)
        self.clients = Clients(scenario, self.leases)
        self.queueing = Queueing(scenario, self.leases)
        self.placing = Placing(scenario, self.leases)

    def hear(self, events: Sequence[Event], now: float) -> None:
        """What the core is about to be told. Raises WorldBroken, as `see` does."""
        self.leases.accepted_now, self.clients.late = set(), []
        may_have_spoken = False
        for event in events:
            match event:
                case Submit():
                    self.clients.submitted(event, now)
                    self.queueing.submitted(event, now)
                case Cancel() | Stop():
                    self.clients.left(event, may_have_spoken)
                    continue
                case Pin():
                    self.clients.pins.registered(event, now)
                case Unpin(prefix_id):
                    self.clients.pins.unpinned(prefix_id)
                case Arrived():
                    self._arrived(event, now)
                case Left(peer):
                    self.leases.end(peer)
                case Retire(group):
                    self.leases.retired(group, now)
                case Shutdown():
                    self.clients.is_shut = True
                case _:
                    pass
            may_have_spoken = True

    def _arrived(self, event: Arrived, now: float) -> None:
        self.leases.heard(event, now)
        match event.message:
            case Hello() as hello:
                self.leases.end(event.peer)
                self.leases.hellos[event.peer] = hello
            case StepResult() as result:
                for request_id in self.leases.returned(result) & self.clients.cases.keys():
                    self.clients.cases[request_id].has_failed_row = True
            case Goodbye():
                self.leases.end(event.peer)
            case Prepared() as prepared:
                self.leases.answered(prepared)
            case StepFailed(lease=lease):
                self.leases.lose(lease)
            case _:
                pass

    def see(self, effects: Sequence[Effect], now: float) -> None:
        """What the core did about it."""
        for effect in effects:
            match effect:
                case Emit():
                    for drawn in effect.each():
                        self.clients.emitted(drawn, now)
                case PromptScored():
                    self.clients.scored(effect, now)
                case Finished():
                    self.clients.finished(effect, now)
                case Beam():
                    self.clients.beam(effect, now)
                case Pinned():
                    self.clients.pins.pinned(effect)
                case NotPinned(prefix_id, group):
                    self.clients.pins.not_pinned(prefix_id, group)
                case Refused(request_id=number) if number in self.clients.pins.cases:
                    live = [case.submit for case in self.clients.live()]
                    self.clients.pins.refused(effect, live, self.clients.is_shut)
                case Refused():
                    self.clients.refused(effect, now)
                case Started():
                    self.clients.started(effect, now)
                    submit = self.clients.cases[effect.request_id].submit
                    self.queueing.began(submit, self.clients.still_waiting())
                case Turned():
                    leaving = {late.request_id for late in self.clients.late}
                    self.placing.turned(effect, self.clients.cases, leaving, now)
                case Send(peer, Welcome(lease=lease)):
                    self.leases.welcomed(peer, lease, now)
                case Send(_, Prepare() | Forget() as word):
                    self.leases.asked(word)
                case Send(_, Gone(lease=lease)):
                    self.leases.lose(lease)
                case _:
                    pass
        for late in self.clients.late:
            self.clients.silence(late)
        for effect in effects:
            match effect:
                case Send(peer, StepPlan() as plan):
                    self.leases.planned(peer, plan, self.clients.cases, self.clients.pins.cases)
                    self.queueing.planned(self.leases.views[plan.lease], plan, self.clients.cases)
                case Note():
                    self.queueing.noted(effect, self.clients.cases)
                case Send(_, Drain(lease=lease)) if lease in self.leases.views:
                    self.leases.views[lease].is_draining = True
                case _:
                    pass
        self.clients.pins.turned()
        self.clients.watch(now)
