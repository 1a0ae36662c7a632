"""Worker groups of several ranks in the virtual world: the ranks that follow, and what the judge sees of them.

    core <-- StepResult --  rank 0       a body as any other: what becomes of a step is decided there
         <-- StepDone ----  rank 1, 2    followers: each has every plan, and confirms once rank 0 has run it

The judge of plans and answers knows worker groups as one peer, rank 0. `Companies` stands before it: of what the ranks
say it passes on what all have agreed upon, of what they are told what all were told alike; where one rank ends a lease,
rank 0 is said to have left. What it finds itself: ranks that are told differently, a lease that begins without one of
them, or goes on when one of them dropped a step or disagreed.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kilburn.controller.core.events import Arrived, Effect, Event, Left, Send
from kilburn.controller.simulate.body import Body, Surroundings
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.controller.simulate.plan_rules import check_plan
from kilburn.controller.simulate.witness import Leases, WorldBroken, demand
from kilburn.shared.agreement import step_digest
from kilburn.shared.messages import (
    Beat,
    Drain,
    FromWorker,
    Gone,
    Goodbye,
    Hello,
    StepDone,
    StepFailed,
    StepPlan,
    StepResult,
    Welcome,
)

WRONG = b"\xee" * 32


@dataclass(slots=True)
class Follower(Body):
    """A rank > 0: it runs what it is told when rank 0 does, and has its own pool."""

    plans: dict[int, StepPlan] = field(default_factory=dict)  # heard, and not confirmed

    def _work(self, worker: FakeWorker, plan: StepPlan, turn: int, world: Surroundings) -> None:
        if plan.step == 1:
            self.plans.clear()
        if self._is_spared(worker, plan, world):
            check_plan(plan, worker.limits)
            worker.next_step += 1
            self.plans[plan.step] = plan
            self.confirm(world)

    def confirm(self, world: Surroundings) -> None:
        """Whatever rank 0 has run as well is done."""
        while self.is_alive and self.worker is not None and self.plans:
            step = min(self.plans)
            result = world.outcomes.get((self.worker.lease, step))
            if result is None:
                return
            digest = step_digest(self.plans.pop(step), result)
            if world.rng.random() < world.faults().disagrees:
                digest = WRONG
            start_s = max(world.now, self.free_at_s, self.hangs_until_s)
            self.free_at_s = start_s + self.step_s * world.rng.uniform(0.0, 1.0)
            world.to_core(self, StepDone(result.lease, step, digest), self.free_at_s - world.now)


@dataclass(slots=True)
class Company:
    """One lease of several ranks, as the core must see it."""

    peers: list[bytes]
    heard_s: list[float]
    newest: list[int]  # step that each rank answered
    plans: dict[int, StepPlan] = field(default_factory=dict)
    results: dict[int, StepResult] = field(default_factory=dict)
    digests: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    doubt: str = ""  # why it must be over by the end of the turn


class Companies:
    """See the file's head."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._hellos: dict[bytes, Hello] = {}  # of ranks of several
        self._companies: dict[int, Company] = {}  # by lease

    # --- what ranks say

    def heard(self, events: Sequence[Event], now: float) -> list[Event]:
        """The events as the judge is to hear them."""
        return [passed for event in events for passed in self._heard(event, now)]

    def _heard(self, event: Event, now: float) -> list[Event]:
        match event:
            case Arrived(peer, Hello() as hello) if hello.world > 1:
                ended = self._ended_by(peer)
                self._hellos[peer] = hello
                return ended
            case Arrived(peer, message) if peer in self._hellos:
                return self._said(peer, message, now)
            case Left(peer) if peer in self._hellos:
                return self._ended_by(peer)
            case _:
                return [event]

    def _said(self, peer: bytes, message: FromWorker, now: float) -> list[Event]:
        lease, company = self._company_of(peer)
        if company is None or getattr(message, "lease", lease) != lease:
            return []
        rank = company.peers.index(peer)
        company.heard_s[rank] = now
        match message:
            case Goodbye() | StepFailed():
                return self._ended_by(peer)
            case StepResult() | StepDone():
                return self._answered(company, rank, message)
            case Beat():
                return []
            case _:
                return [Arrived(company.peers[0], message)] if rank == 0 else []

    def _answered(self, company: Company, rank: int, message: StepResult | StepDone) -> list[Event]:
        step = message.step
        if step <= company.newest[rank] or company.doubt:
            return []
        if step != company.newest[rank] + 1:
            company.doubt = f"rank {rank} left out a step before {step}"
            return []
        company.newest[rank] = step
        if isinstance(message, StepResult):
            company.results[step] = message
        else:
            company.digests[step].append(message.digest)
        agreed: list[Event] = []
        for step in sorted(company.results):
            if min(company.newest) < step:
                break
            result = company.results.pop(step)
            expected = step_digest(company.plans.pop(step), result)
            if any(digest != expected for digest in company.digests.pop(step)):
                company.doubt = f"the ranks disagree about step {step}"
                break
            agreed.append(Arrived(company.peers[0], result))
        return agreed

    def _company_of(self, peer: bytes) -> tuple[int, Company | None]:
        return next(((lease, c) for lease, c in self._companies.items() if peer in c.peers), (0, None))

    def _ended_by(self, peer: bytes) -> list[Event]:
        lease, company = self._company_of(peer)
        if company is None:
            return []
        del self._companies[lease]
        return [Left(company.peers[0], "one of its ranks is gone")]

    def note_silence(self) -> None:
        """After the judge has heard: a lease was heard when the most silent of its ranks was."""
        for lease, company in self._companies.items():
            if lease in self._leases.views:
                self._leases.views[lease].heard_s = min(company.heard_s)

    # --- what ranks are told

    def told(self, effects: Sequence[Effect], now: float) -> list[Effect]:
        """The effects as the judge is to see them. Raises WorldBroken."""
        passed: list[Effect] = []
        words: dict[bytes, list[Welcome | StepPlan | Beat | Drain | Gone]] = defaultdict(list)
        self._begin(effects, now)
        for effect in effects:
            match effect:
                case Send(peer, message) if peer in self._hellos:
                    lease, company = self._company_of(peer)
                    if isinstance(message, Welcome | StepPlan | Beat | Drain | Gone) and company is not None:
                        words[peer].append(message)
                    if isinstance(message, StepPlan) and company is not None:
                        company.plans[message.step] = message
                    if company is None or peer == company.peers[0]:
                        passed.append(effect)
                    elif isinstance(message, Gone) and message.lease == lease:
                        passed.append(Send(company.peers[0], message))
                case _:
                    passed.append(effect)
        for lease, company in list(self._companies.items()):
            told = [[m for m in words[peer] if m.lease == lease] for peer in company.peers]
            if any(isinstance(message, Gone) for said in told for message in said):
                del self._companies[lease]
                continue
            demand(all(said == told[0] for said in told), f"the ranks of lease {lease} are told differently")
            if company.doubt:
                raise WorldBroken(f"lease {lease} goes on, though {company.doubt}")
        return passed

    def _begin(self, effects: Sequence[Effect], now: float) -> None:
        """Leases that begin, with all ranks or with none."""
        welcomed: dict[int, dict[int, bytes]] = defaultdict(dict)
        for effect in effects:
            match effect:
                case Send(peer, Welcome(lease)) if peer in self._hellos:
                    welcomed[lease][self._hellos[peer].rank] = peer
        for lease, ranks in welcomed.items():
            hellos = [self._hellos[ranks[rank]] for rank in sorted(ranks)]
            world = hellos[0].world
            demand(sorted(ranks) == list(range(world)), f"lease {lease} begins with ranks {sorted(ranks)} of {world}")
            peers = [ranks[rank] for rank in range(world)]
            least = {name: min(getattr(hello, name) for hello in hellos) for name in ("num_blocks", "num_host_blocks")}
            self._leases.hellos[peers[0]] = replace(
                hellos[0], num_blocks=least["num_blocks"], num_host_blocks=least["num_host_blocks"]
            )
            self._companies[lease] = Company(peers, [now] * world, [0] * world)
