"""What the workers of a world are told: leases, plans under way, and what each row must be doing.

Plans must come in steps without gaps, at most `depth` under way, for a lease that is not over, with rows that continue
exactly what their client saw. Whether blocks hold what a plan believes is the fake worker's to say.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kilburn.controller.core.events import Arrived, Submit
from kilburn.controller.simulate.beams import Search
from kilburn.controller.simulate.scenario import Scenario
from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import Admit, Forget, Hello, Prepare, Prepared, StepPlan, StepResult
from kilburn.shared.sampling import Candidates, Draws
from kilburn.shared.types import FinishReason, LawBroken

LEAST_CHUNK = 16  # tokens of prompts that a step may always have
SHORTEST_S = 5e-6  # a target below this leaves room for less than that


class WorldBroken(LawBroken):
    """The core did what no event justifies. `requests` are those whose story tells why."""

    def __init__(self, law: str, *requests: int) -> None:
        super().__init__(law)
        self.requests = frozenset(requests)


def demand(holds: bool, law: str, *requests: int) -> None:
    if not holds:
        raise WorldBroken(law, *requests)


class Told(Protocol):
    """What a client has been told of its request."""

    submit: Submit
    at_s: float
    emitted: list[list[int]]
    ended: list[FinishReason | None]
    search: Search | None
    is_cancelled: bool

    @property
    def is_live(self) -> bool: ...


@dataclass(slots=True)
class RowView:
    """What a row must be doing, from the plans sent to it."""

    request_id: int
    told: Told
    indices: tuple[int, ...]  # several until the fork
    num_computed: int
    num_known: int
    num_blocks: int


@dataclass(slots=True)
class Flight:
    """A plan under way: for each advance whose it is and the position it draws, if it draws."""

    step: int
    advances: list[tuple[RowView, int | None]]
    num_chunk_tokens: int = 0


@dataclass(slots=True)
class LeaseView:
    lease: int
    peer: bytes
    hello: Hello
    next_step: int = 1
    flights: list[Flight] = field(default_factory=list)
    rows: dict[int, RowView] = field(default_factory=dict)
    is_draining: bool = False
    leaves_s: float | None = None  # since when it is to leave
    pins: dict[int, int] = field(default_factory=dict)  # prefixes that were pinned -> blocks
    pin_tables: dict[int, tuple[int, ...]] = field(default_factory=dict)  # prefix -> the blocks of its row
    users: dict[int, Told] = field(default_factory=dict)  # requests that had a row here, by their numbers
    num_lost: int = 0  # blocks that it lost
    knows_prompts: bool = False  # what a token of a prompt costs it is known from a result
    preempted: set[int] = field(default_factory=set)  # requests that were, and wait
    heard_s: float = 0.0
    prepares: dict[int, bytes] = field(default_factory=dict)  # grammars that it was asked for, by number
    prepared: set[bytes] = field(default_factory=set)  # those that it has, as the core knows


class Leases:
    """Every lease that is not over."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.views: dict[int, LeaseView] = {}
        self.hellos: dict[bytes, Hello] = {}
        self.drawn: set[tuple[int, int, int]] = set()  # (request, index, position) whose result is in
        self.num_losses: Counter[int] = Counter()  # request -> leases that ended with work of it under way
        self.lost_alone: set[int] = set()  # requests with nothing beside them when a lease ended
        self.accepted_now: set[tuple[int, int]] = set()  # (lease, step) of results that came in this turn

    # --- what they say

    def heard(self, event: Arrived, now: float) -> None:
        for view in self.views.values():
            if view.peer == event.peer and getattr(event.message, "lease", view.lease) == view.lease:
                view.heard_s = now

    def answered(self, message: Prepared) -> None:
        """A grammar is compiled."""
        view = self.views.get(message.lease)
        if view is not None and message.number in view.prepares:
            view.prepared.add(view.prepares[message.number])

    def asked(self, message: Prepare | Forget) -> None:
        view = self.views.get(message.lease)
        if view is None:
            raise WorldBroken(f"lease {message.lease}, which is over, is told of a grammar")
        match message:
            case Prepare(number=number, digest=digest):
                demand(number not in view.prepares, f"two Prepares of number {number}")
                view.prepares[number] = digest
            case Forget(digest=digest):
                view.prepares = {n: d for n, d in view.prepares.items() if d != digest}
                view.prepared.discard(digest)

    def end(self, peer: bytes) -> None:
        for lease in [view.lease for view in self.views.values() if view.peer == peer]:
            self.lose(lease)

    def lose(self, lease: int) -> None:
        """A lease is over, if it was not before."""
        view = self.views.pop(lease, None)
        if view is not None:
            requests = {row.request_id for flight in view.flights for row, _ in flight.advances}
            self.num_losses.update(sorted(requests))
            if len(requests) == 1:
                self.lost_alone |= requests

    def retired(self, group: str, now: float) -> None:
        for view in self.views.values():
            if view.hello.name == group and view.leaves_s is None:
                view.leaves_s = now

    def returned(self, result: StepResult) -> set[int]:
        """A result is in. Returns the requests of which a row failed."""
        view = self.views.get(result.lease)
        if view is None or not view.flights or view.flights[0].step != result.step:
            return set()  # stale, or doubled: it proves nothing
        flight = view.flights.pop(0)
        self.accepted_now.add((result.lease, result.step))
        view.num_lost += len(result.lost)
        view.knows_prompts |= flight.num_chunk_tokens >= LEAST_CHUNK and result.timings.forward_s > 0.0
        for i, (row, position) in enumerate(flight.advances):
            if result.num_tokens[i] and position is not None:
                self.drawn.update((row.request_id, index, position) for index in row.indices)
        return {flight.advances[i][0].request_id for i in result.failed}

    # --- what they are told

    def welcomed(self, peer: bytes, lease: int, now: float) -> None:
        if lease in self.views or peer not in self.hellos:
            raise WorldBroken(f"lease {lease} for {peer!r} begins twice, or without a Hello")
        self.end(peer)  # of a Hello said twice in one turn, the second Welcome counts
        self.views[lease] = LeaseView(lease, peer, self.hellos[peer], heard_s=now)

    def planned(self, peer: bytes, plan: StepPlan, requests: Mapping[int, Told], prefixes: Mapping[int, Told]) -> None:
        view = self.views.get(plan.lease)
        if view is None or view.peer != peer:
            raise WorldBroken(f"a plan for lease {plan.lease} of {peer!r}, which is over")
        demand(not view.is_draining, f"a plan after Drain for lease {plan.lease}")
        demand(plan.step == view.next_step, f"plan {plan.lease}.{plan.step}, expected step {view.next_step}")
        demand(bool(plan.rows or plan.swaps_out or plan.copies or plan.swaps_in), "a plan without work")
        demand(bool(plan.rows or not plan.admits), "a plan that admits rows and runs none")
        demand(sum(plan.counts) <= self.scenario.max_step_tokens, f"{sum(plan.counts)} positions in one plan")
        view.next_step += 1
        streaming = view.users.keys() - view.preempted
        for admit in plan.admits:
            view.rows[admit.row] = self._admitted(view, admit, requests, prefixes)
        if not view.num_lost:  # otherwise a prefix may have been let go of
            kept = {block for pin in view.pins if prefixes[pin].is_live for block in view.pin_tables[pin]}
            demand(kept.isdisjoint(device for device, _ in plan.swaps_out), "a pinned block is swapped out")
        grown = dict.fromkeys(range(len(plan.rows)), 0)
        for at in plan.grown_at:
            grown[at] += 1
        advances = [
            self._advanced(view, row, count, grown[i])
            for i, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True))
        ]
        _check_beams(advances)
        num_chunk_tokens = sum(count for count in plan.counts if count > 1)
        view.flights.append(Flight(plan.step, advances, num_chunk_tokens))
        goes_on = any(
            count == 1 and position is not None and position > len(row.told.submit.prompt)
            for (row, position), count in zip(advances, plan.counts, strict=True)
            if row.request_id in streaming
        )
        if goes_on:
            self._check_pace(view, num_chunk_tokens)
        demand(len(view.flights) <= self.scenario.depth, f"{len(view.flights)} plans under way")

    def _check_pace(self, view: LeaseView, num_chunk_tokens: int) -> None:
        """Where no step can be short enough, prompts get the least that they always get beside a stream.

        A stream that comes back with this plan, from the host or another worker group, joins what was planned
        already: nothing is held back for one that was not there.
        """
        if 0.0 < self.scenario.step_target_s < SHORTEST_S and view.knows_prompts:
            told = f"{num_chunk_tokens} tokens of prompts, while others wait for their next token"
            demand(num_chunk_tokens <= LEAST_CHUNK, told)

    def _admitted(
        self, view: LeaseView, admit: Admit, requests: Mapping[int, Told], prefixes: Mapping[int, Told]
    ) -> RowView:
        rid = admit.sampling.seed >> 32
        case, choose = requests.get(rid), admit.sampling.choose
        if case is not None:
            view.users[rid] = case
        if case is not None and view.leaves_s is not None:
            demand(case.at_s <= view.leaves_s, "a request is placed where the worker group is to leave", rid)
        if rid == 0:  # requests are numbered from 1
            case = next((told for told in prefixes.values() if _computes(admit, told)), None)
            if case is not None:
                view.pin_tables[case.submit.request_id] = admit.blocks
        if case is None:
            raise WorldBroken(f"a row for request {rid}, which nobody made")
        submit, rid = case.submit, case.submit.request_id
        demand(replace(admit.sampling, choose=submit.sampling.choose) == submit.sampling, "another sampling", rid)
        grammar = admit.sampling.grammar
        demand(not grammar or grammar in view.prepared, "a row whose grammar is not prepared", rid)
        demand(admit.num_prompt == len(submit.prompt), f"a prompt of {admit.num_prompt} tokens", rid)
        demand(case.is_live or _may_end_at_once(case), "a row for a request that has ended", rid)
        if not isinstance(choose, Draws):
            return self._admitted_beam(admit, case, choose)
        index = choose.first_stream
        demand(submit.beams is None, "a beam that draws", rid)
        if choose.count > 1:
            indices = tuple(range(submit.n))
            demand(choose == Draws(0, submit.n) and not any(case.emitted), f"{choose} after the fork", rid)
        else:
            indices = (index,)
            is_open = index < submit.n and (case.ended[index] is None or _may_end_at_once(case))
            demand(is_open, f"a row for index {index}, which has ended", rid)
            demand(submit.n == 1 or bool(case.emitted[index]), "a sample of its own before the fork", rid)
        tokens = [*submit.prompt, *case.emitted[index]]
        demand(list(admit.tokens) == tokens[admit.start :], "a row's tokens are those that the client saw", rid)
        earlier = [n for n, other in view.rows.items() if (other.request_id, other.indices) == (rid, indices)]
        for number in earlier:
            del view.rows[number]
        return RowView(rid, case, indices, admit.start, len(tokens), len(admit.blocks))

    def _admitted_beam(self, admit: Admit, case: Told, choose: Candidates) -> RowView:
        submit, search, rid = case.submit, case.search, case.submit.request_id
        if submit.beams is None or search is None:
            raise WorldBroken("a row that returns candidates, though nobody asked for beams", rid)
        num_wanted = submit.beams.width * (1 + max(1, len(submit.sampling.stop_ids)))
        demand(choose.count == num_wanted, f"{choose.count} candidates, not the {num_wanted} that are needed", rid)
        num_known, num_prompt = admit.start + len(admit.tokens), len(submit.prompt)
        level = num_known - num_prompt
        demand(0 <= level < len(search.levels), f"a beam of {level} tokens", rid)
        known = [(*submit.prompt, *beam)[admit.start :] for beam in search.levels[level]]
        demand(admit.tokens in known, f"{admit.tokens} is no beam after {level} tokens", rid)
        demand(level == 0 or (rid, 0, num_known - 1) in self.drawn, "a beam before its candidates came", rid)
        return RowView(rid, case, (0,), admit.start, num_known, len(admit.blocks))

    def _advanced(self, view: LeaseView, number: int, count: int, num_grown: int) -> tuple[RowView, int | None]:
        row = view.rows.get(number)
        if row is None:
            raise WorldBroken(f"row {number} of lease {view.lease} advances without a life")
        rid = row.request_id
        case = row.told
        demand(not case.is_cancelled, "work for a cancelled request", rid)
        has_open = any(case.ended[i] is None for i in row.indices) or _may_end_at_once(case)
        demand(has_open, f"work for index {row.indices}, which has ended", rid)
        row.num_computed += count
        row.num_blocks += num_grown
        limit = len(case.submit.prompt) + case.submit.max_tokens - 1
        demand(row.num_computed <= limit, f"position {row.num_computed - 1} is planned, the limit is {limit}", rid)
        demand(row.num_computed <= row.num_known, f"{row.num_computed} positions of {row.num_known} known tokens", rid)
        needed = blocks_for(row.num_computed, view.hello.layout.block_size)
        most = blocks_for(row.num_known, view.hello.layout.block_size)
        demand(needed <= row.num_blocks <= most, f"a table of {row.num_blocks} blocks, not {needed} to {most}", rid)
        if row.num_computed < row.num_known:
            return row, None
        row.num_known += 1
        return row, row.num_known - 1


def _computes(admit: Admit, told: Told) -> bool:
    """Whether a row computes this named prefix."""
    tokens = told.submit.prompt
    return told.is_live and admit.num_prompt == len(tokens) and admit.tokens == tokens[admit.start :]


def _may_end_at_once(case: Told) -> bool:
    """Preempted and admitted again, a request without tokens to draw may end in the turn that planned it."""
    return case.submit.max_tokens == 0 and not case.is_cancelled


def _check_beams(advances: list[tuple[RowView, int | None]]) -> None:
    """All beams of a request take their step in one plan."""
    steps: dict[int, list[int]] = {}
    for row, position in advances:
        if position is not None and row.told.submit.beams is not None:
            steps.setdefault(row.request_id, []).append(position)
    for row, _ in advances:
        search, positions = row.told.search, steps.get(row.request_id)
        if search is not None and positions is not None:
            level = search.levels[positions[0] - len(row.told.submit.prompt)]
            holds = len(set(positions)) == 1 and len(positions) == len(level)
            demand(holds, f"beams advance apart: {positions} of {len(level)}", row.request_id)
