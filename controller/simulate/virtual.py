"""A virtual world around the real core: clients, links, worker processes, and a clock that jumps.

    scenario (seed) -> clients, bodies, links --events--> Engine.handle --effects--> judge, links, clients

After every turn the engine validates its own laws, the judge checks the effects, and the fake workers check the plans.
It ends when everybody has an answer and every block is free again; any broken law raises.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import (
    Arrived,
    Beam,
    Cancel,
    Effect,
    Emit,
    Event,
    Finished,
    Left,
    Names,
    Note,
    NoteKind,
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
    Stuck,
    Submit,
    Tick,
    Unpin,
)
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.core.snapshot import Snapshot
from kilburn.controller.simulate.agenda import NEVER_S, Agenda
from kilburn.controller.simulate.body import Body
from kilburn.controller.simulate.company import Companies, Follower
from kilburn.controller.simulate.judge import Judge
from kilburn.controller.simulate.scenario import CALM, Errand, Faults, PinErrand, Scenario, resized
from kilburn.controller.simulate.story import Story
from kilburn.controller.simulate.witness import WorldBroken
from kilburn.shared.messages import FromController, FromWorker, Hello, StepDone, StepFailed, StepPlan, StepResult
from kilburn.shared.types import Tier

PATIENCE_S = 90.0  # without any progress, once nothing fails any more
LATEST_S = 8.0  # a message that is late comes so late at most
MOST_TURNS = 30_000
MOST_TICKS = 50  # at one moment


class World:
    """`agenda`: of a world that this one is a part of."""

    def __init__(self, scenario: Scenario, agenda: Agenda | None = None) -> None:
        self.scenario = scenario
        self.rng = Random(scenario.seed ^ 0x5EED)
        self.agenda = Agenda() if agenda is None else agenda
        self.turn = 0
        self.engine = Engine(
            EngineSettings(
                depth=scenario.depth,
                max_step_tokens=scenario.max_step_tokens,
                beat_s=scenario.beat_s,
                silence_s=scenario.silence_s,
                step_deadline_s=scenario.step_deadline_s,
                recovery_s=scenario.recovery_s,
                max_waiting=scenario.max_waiting,
                most_pinned=scenario.most_pinned,
                preemption=scenario.preemption,
                aging_s=scenario.aging_s,
                step_target_s=scenario.step_target_s,
                is_fair=scenario.is_fair,
                prefix_wait_steps=scenario.prefix_wait_steps,
                max_waiting_tokens=scenario.max_waiting_tokens,
                queue_s=scenario.queue_s,
                request_s=scenario.request_s,
                prepare_s=scenario.prepare_s,
            )
        )
        self.judge = Judge(scenario)
        self.companies = Companies(self.judge.leases)
        self.outcomes: dict[tuple[int, int], StepResult] = {}
        self.story = Story()
        self.seen: Counter[str] = Counter()
        self.bodies: dict[bytes, Body] = {}
        self.num_born = 0
        self.inbox: list[Event] = []
        self.errands = {errand.submit.request_id: errand for errand in scenario.errands}
        self.num_to_come = len(scenario.errands) + len(scenario.pins)
        self.num_emitted: Counter[tuple[int, int]] = Counter()
        self.ready_s: dict[tuple[bytes, str], float] = {}  # when each direction of a link has delivered all
        self._deadline_s = NEVER_S  # of the core, since its last turn
        self._ticked_s, self._ticks_here = 0.0, 0
        self._is_closing = False
        self.retired: set[tuple[str, int]] = set()  # names and ranks that were told to leave, and are not gone yet
        self.num_poisoned: Counter[int] = Counter()  # request -> workers that it ended
        after = dict(scenario.upheaval.poison)
        submits = [errand.submit for errand in scenario.errands if errand.submit.request_id in after]
        self.poison: Mapping[int, int] = {s.request_id: len(s.prompt) - 1 + after[s.request_id] for s in submits}

    @property
    def now(self) -> float:
        return self.agenda.now

    # --- the course of things

    def run(self) -> None:
        """Until everybody has an answer. Raises LawBroken."""
        scenario = self.scenario
        for errand in scenario.errands:
            self.after(errand.at_s, self._submitting(errand))
        for wish in scenario.pins:
            self.after(wish.at_s, self.pinning(wish))
        for at_s, number in scenario.upheaval.retires:
            self.after(at_s, partial(self.retires, scenario.hellos[number].name))
        for hello, join_s in zip(scenario.hellos, scenario.joins_s, strict=True):
            self.after(join_s, partial(self.born_ranks, hello))
        if scenario.shutdown_s is not None:
            self.after(scenario.shutdown_s, lambda: self.inbox.append(Shutdown()))
        while not self._is_over():
            self._next()
        self.judge.clients.check_answered()
        self._close()

    def _is_over(self) -> bool:
        is_calm = self.now >= self.scenario.calm_s or not self.agenda
        return self.num_to_come == 0 and is_calm and not self.judge.clients.live() and not self.inbox

    def _close(self) -> None:
        """Let what is under way come home, shut down, and see that nothing is held."""
        self.seen["host hit"] += sum(group.host_hits for group in self.engine.snapshot().groups)
        # A result that was lost is missed only when its step's deadline has passed.
        pins, patience_s = self.judge.clients.pins, self.scenario.silence_s + self.scenario.step_deadline_s
        self._pass(PATIENCE_S, until=lambda: not pins.missing())
        if pins.missing() and self.scenario.shutdown_s is None:
            raise WorldBroken(pins.missing())
        self._pass(patience_s, until=lambda: not self._leaving())
        if self._leaving():
            raise WorldBroken(f"{self._leaving()} was told to leave, has nothing to do, and stays")
        self.inbox += [Unpin(case.pin.prefix_id) for case in pins.live()]
        self._pass(patience_s, until=lambda: not self.held())
        if self.held():
            raise WorldBroken(f"when everybody is answered, the core still holds {self.held()}")
        self.inbox.append(Shutdown())
        self._pass(self.scenario.silence_s + LATEST_S, until=lambda: not self.judge.leases.views)
        if self.judge.leases.views and self.scenario.shutdown_s is None:
            raise WorldBroken(f"leases {sorted(self.judge.leases.views)} were not drained")

    def _pass(self, seconds: float, until: Callable[[], bool]) -> None:
        end_s = self.now + seconds
        self.after(seconds, lambda: None)
        while self.agenda and self.now < end_s and (self.inbox or not until()):
            self._next()

    def _leaving(self) -> str:
        views = self.judge.leases.views.values()
        return ", ".join(view.hello.name for view in views if view.leaves_s is not None)

    def held(self) -> str:
        """In an engine without requests nothing waits, nothing runs, and no block has an owner."""
        return held_things(self.engine.snapshot())

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.agenda.after(seconds, action)

    def _next(self) -> None:
        """One thing happens, or time reaches the core's deadline; then perhaps the core gets its turn."""
        if self.wanted_s < self.agenda.next_s:
            self.tick()
        elif self.agenda:
            self.agenda.next()
            self.perhaps_take_turn()
        elif self.inbox:
            self._take_turn()
        else:
            live = [case.request_id for case in self.judge.clients.live()]
            raise WorldBroken("nothing will ever happen again", *live)

    @property
    def wanted_s(self) -> float:
        """When the core wants a tick."""
        return max(self._deadline_s, self.now)

    def tick(self) -> None:
        """Time reaches the core's deadline."""
        self._ticks_here = self._ticks_here + 1 if self.wanted_s == self._ticked_s else 0
        if self._ticks_here > MOST_TICKS:
            raise WorldBroken(f"the core wants ticks without end at {self.now}")
        self._ticked_s = self.agenda.now = self.wanted_s
        self.inbox.append(Tick())
        self._take_turn()

    def perhaps_take_turn(self) -> None:
        if self.inbox and (len(self.inbox) > 3 or self.rng.random() < 0.8):
            self._take_turn()

    def _take_turn(self) -> None:
        events, self.inbox = self.inbox, []
        self.turn += 1
        if self.turn > MOST_TURNS:
            raise WorldBroken("no end in sight")
        for event in events:
            self.story.add(self.now, ">", event, _about_event(event))
        self.judge.hear(self.companies.heard(events, self.now), self.now)
        self.companies.note_silence()
        self._count(events)
        effects = self.engine.handle(events, self.now)
        deadline = self.engine.deadline
        self._deadline_s = NEVER_S if deadline is None else deadline
        for effect in effects:
            self.story.add(self.now, "<", effect, self._about_effect(effect))
        self.engine.validate()
        self.judge.see(self.companies.told(effects, self.now), self.now)
        if self.turn % 4 == 0:
            groups = self.engine.snapshot().groups
            self.seen["passed over"] += sum(group.waiting_for_prefix for group in groups)
            self.seen["waited for grammar"] += sum(group.waiting_for_grammar for group in groups)
        self._tell_bodies(len(events))
        for effect in effects:
            self.fulfil(effect)
        waited_s = self.now - max(self.judge.clients.last_progress_s, self.scenario.calm_s)
        if self.judge.clients.live() and waited_s > PATIENCE_S + self.scenario.recovery_s:
            raise WorldBroken("no progress any more", *[case.request_id for case in self.judge.clients.live()])

    def _count(self, events: list[Event]) -> None:
        """So that a test can say that worlds are as eventful as they claim."""
        for event in events:
            match event:
                case Cancel():
                    self.seen["cancel"] += 1
                case Stop():
                    self.seen["stop"] += 1
                case Arrived(_, StepFailed()):
                    self.seen["step failed"] += 1
                case Arrived(_, StepDone()):
                    self.seen["step confirmed"] += 1
                case Arrived(_, StepResult() as result):
                    self.seen["row failed"] += len(result.failed)
                    self.seen["block lost"] += len(result.lost)
                    self.seen["host block lost"] += sum(lost.tier is Tier.HOST for lost in result.lost)
                    self.seen["stale result"] += (result.lease, result.step) not in self.judge.leases.accepted_now
                case _:
                    pass

    def fulfil(self, effect: Effect) -> None:
        match effect:
            case Send(peer, message):
                self._to_worker(peer, message)
            case Emit():
                for request_id, index in zip(effect.request_ids, effect.indices, strict=True):
                    self.seen["token"] += 1
                    self.num_emitted[request_id, index] += 1
                    for at_index, num_tokens in self.errands[request_id].stops:
                        if (at_index, num_tokens) == (index, self.num_emitted[request_id, index]):
                            self.inbox.append(Stop(request_id, index))
            case PromptScored(ranks=ranks):
                self.seen["prompt token scored"] += len(ranks)
            case Beam():
                self.seen["beam"] += 1
            case Pinned():
                self.seen["pinned"] += 1
            case NotPinned():
                self.seen["not pinned"] += 1
            case Started(_, cached_tokens):
                self.seen["started"] += 1
                self.seen["partial block shared"] += cached_tokens % self.scenario.hellos[0].layout.block_size != 0
                self.seen["cached token"] += cached_tokens
            case Finished(reason=reason):
                self.seen[f"finished {reason.value}"] += 1
            case Refused(refusal=refusal):
                self.seen[f"refused {refusal.value}"] += 1
            case Note(kind, text):
                self.seen[kind.value] += 1
                if kind is NoteKind.PREEMPTED and ", by swap" in text:
                    self.seen["preempted by swap"] += 1
                    self._disturb_swapped(int(text.split()[1].rstrip(",")))
            case Names():
                pass

    def _disturb_swapped(self, request_id: int) -> None:
        """Now and then somebody leaves just when his request is on the host."""
        luck, errand = self.rng.random(), self.errands.get(request_id)
        if errand is None:
            return  # a named prefix that was being computed
        self.seen["beams swapped"] += errand.submit.beams is not None
        if luck < 0.1:
            self.walks_away(request_id)
        elif luck < 0.2:
            index = self.rng.randrange(errand.submit.n)
            if self.num_emitted[request_id, index]:  # a stop string is found in something
                self.inbox.append(Stop(request_id, index))
        elif luck < 0.35 and self.faults() != CALM and not self.poison:
            # ... or his worker does.
            for body in [body for body in self.bodies.values() if body.is_alive and body.worker is not None]:
                self.seen["death while swapped"] += 1
                self.died(body, returns=True)

    # --- clients

    def walks_away(self, request_id: int) -> None:
        """Whoever asked leaves, on a whim."""
        self.inbox.append(Cancel(request_id))

    def _submitting(self, errand: Errand) -> Callable[[], None]:
        def submit() -> None:
            self.num_to_come -= 1
            self.inbox.append(errand.submit)
            for cancel_s in errand.cancels_s:
                self.after(cancel_s, lambda: self.inbox.append(Cancel(errand.submit.request_id)))

        return submit

    def pinning(self, wish: PinErrand) -> Callable[[], None]:
        def pin() -> None:
            self.num_to_come -= 1
            self.inbox.append(wish.pin)
            for unpin_s in wish.unpins_s:
                self.after(unpin_s, lambda: self.inbox.append(Unpin(wish.pin.prefix_id)))

        return pin

    # --- workers

    def faults(self) -> Faults:
        return CALM if self.now >= self.scenario.calm_s else self.scenario.faults

    def born_ranks(self, hello: Hello) -> None:
        for rank in range(hello.world):
            self.born(replace(hello, rank=rank))

    def born(self, hello: Hello) -> None:
        self.num_born += 1
        peer = f"{hello.name}-{self.num_born}".encode()
        hello = replace(hello, boot=peer.decode())
        scale = self.scenario
        body = (Follower if hello.rank else Body)(
            peer, hello, scale.silence_s, scale.step_s, self.now, scale.move_s, scale.compute_s
        )
        self.bodies[peer] = body
        body.greet(self)
        self._beating(body)

    def retires(self, name: str) -> None:
        self.retired |= {(name, rank) for rank in range(max(hello.world for hello in self.scenario.hellos))}
        self.inbox.append(Retire(name))
        self.seen["retired"] += any(view.hello.name == name for view in self.judge.leases.views.values())

    def poisoned(self, request: int) -> None:
        self.seen["death by poison"] += 1
        self.num_poisoned[request] += 1
        # Twice in the blast, and once alone; and each plan under way whose result was lost may hide a token's progress.
        if self.num_poisoned[request] > 3 + self.scenario.depth:
            raise WorldBroken(f"a request ended {self.num_poisoned[request]} workers", request)

    def _is_cut(self, peer: bytes) -> bool:
        """Whether nothing gets through between the core and this worker now."""
        hellos, name = self.scenario.hellos, self.bodies[peer].hello.name
        return any(start <= self.now < end and hellos[n].name == name for start, end, n in self.scenario.upheaval.cuts)

    def _beating(self, body: Body) -> None:
        def beat() -> None:
            if body.is_alive:
                body.beat(self)
                self.after(self.scenario.beat_s * 0.9, beat)

        self.after(self.scenario.beat_s * 0.9, beat)

    def died(self, body: Body, returns: bool) -> None:
        """The process ended. Somebody may notice; it may come back."""
        body.is_alive = False
        self.seen["death"] += 1
        if not returns and (body.hello.name, body.hello.rank) in self.retired and not self.judge.clients.is_shut:
            self.seen["left"] += 1
            self.retired.discard((body.hello.name, body.hello.rank))
            returns = self.scenario.upheaval.returns
        self.story.add(self.now, "*", f"{body.peer.decode()} ends")
        if self.rng.random() < 0.5:
            self.after(self.rng.uniform(0, 0.2), lambda: self.inbox.append(Left(body.peer, "the process ended")))
        if returns:
            hello = resized(self.rng, body.hello)
            self.after(self.rng.choice((0.05, 1.0, 5.0)), partial(self.born, hello))

    def _tell_bodies(self, num_events: int) -> None:
        """Bodies remember from which turn on the core knows of their damage."""
        # With several events in a turn the core may have planned before it took the result.
        known_from = self.turn if num_events == 1 else self.turn + 1
        for lease, step in self.judge.leases.accepted_now:
            for body in self.bodies.values():
                if body.worker is not None and body.worker.lease == lease:
                    body.core_learned(step, known_from)

    # --- links: in order, each direction of each peer for itself

    def _arrival_s(self, peer: bytes, way: str, after_s: float) -> float:
        delay_s = after_s + self.scenario.link_s * self.rng.uniform(0.5, 1.5)
        if self.rng.random() < self.faults().late:
            delay_s += self.rng.choice((0.3, 2.0, LATEST_S))
        at_s = max(self.now + delay_s, self.ready_s.get((peer, way), 0.0))
        self.ready_s[peer, way] = at_s
        return at_s

    def _is_lost(self, peer: bytes, message: object) -> bool:
        is_cut = self._is_cut(peer)
        self.seen["cut off"] += is_cut
        if self.rng.random() >= self.faults().lose and not is_cut:
            return False
        self.seen["lost message"] += 1
        self.story.add(self.now, "*", f"lost: {type(message).__name__}")
        return True

    def to_core(self, body: Body, message: FromWorker, after_s: float = 0.0) -> None:
        if isinstance(message, StepResult) and body.hello.world > 1:
            self.outcomes[message.lease, message.step] = message
            self.after(after_s, partial(self._confirmed_by_others, message.lease))
        if self._is_lost(body.peer, message):
            return
        delay_s = self._arrival_s(body.peer, "up", after_s) - self.now
        self.after(delay_s, lambda: self.inbox.append(Arrived(body.peer, message)))
        if isinstance(message, StepResult) and self.rng.random() < self.faults().twice:
            delay_s = self._arrival_s(body.peer, "up", after_s + self.rng.choice((0.0, 0.5))) - self.now
            self.after(delay_s, lambda: self.inbox.append(Arrived(body.peer, message)))

    def _confirmed_by_others(self, lease: int) -> None:
        for body in self.bodies.values():
            if isinstance(body, Follower) and body.worker is not None and body.worker.lease == lease:
                body.confirm(self)

    def _to_worker(self, peer: bytes, message: FromController) -> None:
        if isinstance(message, StepPlan):
            self._count_plan(message)
        body, turn = self.bodies[peer], self.turn
        if self._is_lost(peer, message):
            return

        def hear() -> None:
            if body.is_alive:
                body.hear(message, turn, self)

        self.after(self._arrival_s(peer, "down", 0.0) - self.now, hear)

    def _count_plan(self, plan: StepPlan) -> None:
        self.seen["plan"] += 1
        self.seen["copy"] += len(plan.copies)
        self.seen["swap out"] += len(plan.swaps_out)
        self.seen["swap in"] += len(plan.swaps_in)
        self.seen["plan of moves alone"] += not plan.rows
        self.seen["admit"] += len(plan.admits)
        self.seen["admit with grammar"] += sum(bool(admit.sampling.grammar) for admit in plan.admits)

    def _about_effect(self, effect: Effect) -> frozenset[int]:
        match effect:
            case Send(message=StepPlan() as plan):
                views = self.judge.leases.views
                rows = views[plan.lease].rows if plan.lease in views else {}
                about = {rows[row].request_id for row in plan.rows if row in rows}
                return frozenset(about | {admit.sampling.seed >> 32 for admit in plan.admits})
            case Send() | Note() | Names() | Stuck():
                return frozenset()
            case Pinned(prefix_id) | NotPinned(prefix_id):
                return frozenset({prefix_id})
            case Emit(request_ids):
                return frozenset(request_ids)
            case _:
                return frozenset({effect.request_id})


def _about_event(event: Event) -> frozenset[int]:
    if isinstance(event, Pin | Unpin):
        return frozenset({event.prefix_id})
    return frozenset({event.request_id}) if isinstance(event, Submit | Stop | Cancel) else frozenset()


def held_things(snapshot: Snapshot) -> str:
    """What an idle engine still holds, in words; empty if nothing."""
    held = [f"{snapshot.requests} requests"] if snapshot.requests or snapshot.homeless_requests else []
    for group in snapshot.groups:
        for name in (
            "owned_blocks",
            "quarantined_blocks",
            "shared_refs",
            "running_requests",
            "waiting_requests",
            "flights",
            "owned_host_blocks",
            "pinned_blocks",
            "swapped_requests",
            "grammars",
        ):
            count = getattr(group, name)
            if count:
                held.append(f"{count} {name} of {group.name}")
        if group.free_blocks + group.cached_blocks != group.num_blocks:
            held.append(f"not all of {group.num_blocks} blocks of {group.name}")
        if group.free_host_blocks + group.cached_host_blocks != group.num_host_blocks:
            held.append(f"not all of {group.num_host_blocks} host blocks of {group.name}")
    return ", ".join(held)
