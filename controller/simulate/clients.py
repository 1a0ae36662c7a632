"""What the clients of a world see: each token the oracle's next, one end per sequence, one refusal at most.

It asks the core nothing and repeats none of its accounting: a request's answers are the oracle's, its refusal is
judged by what the workers announced, and the time that it waited by who could have taken it.
"""

from dataclasses import dataclass, field

from kilburn.controller.core.blame import POISON
from kilburn.controller.core.events import (
    Beam,
    Cancel,
    Drawn,
    Finished,
    PromptScored,
    Refusal,
    Refused,
    Started,
    Stop,
    Submit,
)
from kilburn.controller.core.grammars import MOST_ASKED
from kilburn.controller.simulate.beams import Search, search
from kilburn.controller.simulate.fake_worker import UNPREPARABLE, logprobs_of, rank_of
from kilburn.controller.simulate.oracle import Answer, chain_of, finish, mix
from kilburn.controller.simulate.pins import Pins, run_of
from kilburn.controller.simulate.scenario import Scenario
from kilburn.controller.simulate.witness import Leases, WorldBroken, demand
from kilburn.shared.types import FinishReason

FOREVER_S = float("inf")


@dataclass(slots=True)
class Case:
    """What is known of one request."""

    submit: Submit
    at_s: float
    answers: list[Answer]
    emitted: list[list[int]]
    ended: list[FinishReason | None]
    search: Search | None = None
    refused: Refusal | None = None
    is_started: bool = False
    num_scored: int = 1  # positions of the prompt whose log probabilities are known, if it asked; the first has none
    is_cancelled: bool = False
    has_failed_row: bool = False
    stopped: set[int] = field(default_factory=set)  # indices whose Stop was said
    silent: set[int] = field(default_factory=set)  # and is heard: no token may follow
    unplaceable_since_s: float | None = None

    @property
    def is_live(self) -> bool:
        return self.refused is None and not self.is_cancelled and None in self.ended

    @property
    def request_id(self) -> int:
        return self.submit.request_id


class Clients:
    """Every request, and what became of it."""

    def __init__(self, scenario: Scenario, leases: Leases) -> None:
        self.scenario, self.leases = scenario, leases
        self.pins = Pins(scenario, leases)
        self.cases: dict[int, Case] = {}
        self.late: list[Cancel | Stop] = []  # came after events of the same turn that may have made tokens
        self.is_shut = False
        self.last_progress_s = 0.0

    def live(self) -> list[Case]:
        return [case for case in self.cases.values() if case.is_live]

    def still_waiting(self) -> list[Submit]:
        """Requests that have not begun and could run on every worker group that there is."""
        leaving = {event.request_id for event in self.late}
        hellos = (self.scenario.hellos[0], *[view.hello for view in self.leases.views.values()])
        return [
            case.submit
            for case in self.live()
            if not case.is_started
            and case.request_id not in leaving
            and all(self.pins.fits(case.submit, hello) for hello in hellos)
            and not self._waits_for_grammar(case)
        ]

    def _waits_for_grammar(self, case: Case) -> bool:
        grammar = case.submit.grammar
        return grammar is not None and not any(grammar.digest in v.prepared for v in self.leases.views.values())

    def _is_nonsense(self, case: Case) -> bool:
        """Whether its grammar is one that nobody gets."""
        return case.submit.grammar is not None and case.submit.grammar.source == UNPREPARABLE

    def _asked_in_vain(self, case: Case, now: float) -> bool:
        """Whether workers may have been asked often enough for its grammar, since the first who needed it."""
        grammar = case.submit.grammar
        if grammar is None:
            return False
        first_s = min(other.at_s for other in self.cases.values() if other.submit.grammar == grammar)
        return now - first_s >= MOST_ASKED * self.scenario.prepare_s - 1e-6

    # --- what they ask

    def submitted(self, submit: Submit, now: float) -> None:
        max_tokens = min(submit.max_tokens, max(self.scenario.max_len - len(submit.prompt), 0))
        if submit.beams is not None:
            found = search(submit.prompt, submit.sampling.stop_ids, max_tokens, submit.beams, self.scenario.vocab_size)
            nothing: list[FinishReason | None] = [None for _ in range(submit.n)]
            self.cases[submit.request_id] = Case(submit, now, [], [[] for _ in nothing], nothing, found)
            return
        answers = finish(submit.prompt, submit.sampling, max_tokens, submit.n, self.scenario.vocab_size)
        self.cases[submit.request_id] = Case(
            submit, now, answers, [[] for _ in range(submit.n)], [None for _ in range(submit.n)]
        )

    def left(self, event: Cancel | Stop, may_have_spoken: bool) -> None:
        """A client cancels, or a stop string was found in its text."""
        if event.request_id not in self.cases:
            return
        if isinstance(event, Stop):
            self.cases[event.request_id].stopped.add(event.index)
        if may_have_spoken:
            self.late.append(event)
        else:
            self.silence(event)

    def silence(self, event: Cancel | Stop) -> None:
        """From here on nothing more may be said of the request, or of the sequence."""
        case = self.cases[event.request_id]
        if isinstance(event, Cancel):
            case.is_cancelled = True
        else:
            case.silent.add(event.index)

    # --- what they hear

    def _case(self, request_id: int) -> Case:
        case = self.cases.get(request_id)
        if case is None:
            raise WorldBroken(f"an effect for request {request_id}, which nobody made")
        return case

    def beam(self, beam: Beam, now: float) -> None:
        """A choice of a search. All numbers are exact: both sides add the same numbers in the same order."""
        case, rid, index = self._case(beam.request_id), beam.request_id, beam.index
        if case.search is None:
            raise WorldBroken("a beam, though nobody asked for any", rid)
        demand(0 <= index < case.submit.n, f"beam {index} of {case.submit.n}", rid)
        demand(not case.is_cancelled and case.refused is None, "a beam after the end", rid)
        demand(case.is_started and case.ended[index] is None, f"beam {index} comes early, or twice", rid)
        demand(index == 0 or case.ended[index - 1] is not None, "beams come best first", rid)
        due = case.search.outcomes[index]
        told = (beam.tokens, beam.cumulative_logprob, beam.score, beam.reason)
        expected = (due.tokens, due.cumulative, due.score, due.reason)
        demand(told == expected, f"beam {index} is {told}, not {expected}", rid)
        case.ended[index] = beam.reason
        self.last_progress_s = now

    def emitted(self, drawn: Drawn, now: float) -> None:
        case, rid = self._case(drawn.request_id), drawn.request_id
        demand(0 <= drawn.index < case.submit.n, f"a token for index {drawn.index} of {case.submit.n}", rid)
        demand(case.search is None, "a token of a beam search", rid)
        demand(not case.is_cancelled, "a token after Cancel", rid)
        demand(case.refused is None and case.ended[drawn.index] is None, "a token after the end", rid)
        demand(case.is_started, "a token before Started", rid)
        demand(drawn.index not in case.silent, "a token after Stop", rid)
        self._check_scored(case)
        done, answer = case.emitted[drawn.index], case.answers[drawn.index].tokens
        position = len(case.submit.prompt) + len(done)
        demand(len(done) < len(answer), f"index {drawn.index} goes on past its end", rid)
        expected = answer[len(done)]
        demand(drawn.token == expected, f"index {drawn.index} token {len(done)} is {drawn.token}, not {expected}", rid)
        demand(
            (rid, drawn.index, position) in self.leases.drawn,
            f"position {position} was drawn by no accepted result",
            rid,
        )
        num_likely = case.submit.sampling.logprobs
        if num_likely >= 0:
            chain = chain_of([*case.submit.prompt, *done])
            likely = tuple(logprobs_of(chain, expected, num_likely, self.scenario.vocab_size))
            demand(tuple(drawn.logprobs) == likely, f"log probabilities {drawn.logprobs}, not {likely}", rid)
        else:
            demand(drawn.logprobs == (), "log probabilities that nobody asked for", rid)
        done.append(drawn.token)
        self.last_progress_s = now

    def scored(self, scored: PromptScored, now: float) -> None:
        """Of a prompt each position once, in order, with the prefix before it, and before anything is drawn."""
        case, rid = self._case(scored.request_id), scored.request_id
        prompt, num_likely = case.submit.prompt, case.submit.sampling.prompt_logprobs
        demand(num_likely >= 0, "log probabilities of a prompt that nobody asked for", rid)
        demand(case.is_live and case.is_started and not any(case.emitted), "scores come first", rid)
        demand(scored.start == case.num_scored, f"scores from {scored.start} on, not from {case.num_scored}", rid)
        end = scored.start + len(scored.ranks)
        demand(scored.start < end <= len(prompt), f"scores of {scored.start} to {end} of {len(prompt)}", rid)
        chain, entries = chain_of(prompt[: scored.start]), list(zip(scored.ids, scored.logprobs, strict=True))
        for i, position in enumerate(range(scored.start, end)):
            token, width = prompt[position], scored.width
            due = logprobs_of(chain, token, num_likely, self.scenario.vocab_size)
            demand(entries[i * width : (i + 1) * width] == due, f"scores of position {position} are not {due}", rid)
            demand(scored.ranks[i] == rank_of(chain, token, self.scenario.vocab_size), "another rank", rid)
            chain = mix(chain, token)
        case.num_scored = end
        self.last_progress_s = now

    def _check_scored(self, case: Case) -> None:
        """Before a first token, and before a good end."""
        if case.submit.sampling.prompt_logprobs >= 0:
            num_prompt = len(case.submit.prompt)
            demand(case.num_scored == num_prompt, f"{case.num_scored} of {num_prompt} are scored", case.request_id)

    def started(self, started: Started, now: float) -> None:
        case = self._case(started.request_id)
        rid, num_prompt = case.request_id, len(case.submit.prompt)
        demand(not case.is_started and case.is_live, "started twice, or after its end", rid)
        size = self.scenario.hellos[0].layout.block_size
        cached = started.cached_tokens
        holds = 0 <= cached < num_prompt and self.pins.may_be_cached(case.submit, cached, size)
        demand(holds, f"{cached} of {num_prompt} tokens from the cache", rid)
        demand(not cached or case.submit.sampling.prompt_logprobs < 0, f"{cached} tokens cannot be scored", rid)
        known = max((_in_common(case, other) for other in self.cases.values()), default=0)
        if cached > known:
            known = max(known, self.pins.known_run(case.submit))
        if cached > known:
            known = max([known, *(_in_beams(case, other) for other in self.cases.values())])
        demand(
            cached <= known, f"{cached} tokens from the cache, where {known} were ever computed for this tenant", rid
        )
        case.is_started = True
        self.last_progress_s = now

    def refused(self, refused: Refused, now: float) -> None:
        case, rid = self._case(refused.request_id), refused.request_id
        touched = case.is_started or any(case.emitted) or any(case.ended) or case.refused is not None
        demand(not touched, "refused after it was taken", rid)
        case.refused = refused.refusal
        demand(bool(refused.message), "a refusal says what to change", rid)
        submit, views = case.submit, list(self.leases.views.values())
        known = [view.hello for view in views] or list(self.leases.hellos.values())
        match refused.refusal:
            case Refusal.TOO_LONG:
                holds = not any(self.pins.fits(submit, hello) for hello in known)
            case Refusal.TOO_WIDE:
                budget = self.scenario.max_step_tokens
                holds = not any(submit.width <= min(h.max_rows, h.max_step_tokens, budget) for h in known)
            case Refusal.QUEUE_FULL:
                others = [len(other.submit.prompt) for other in self.live() if other is not case]
                most = self.scenario.max_waiting_tokens or sum(others) + len(submit.prompt)
                holds = len(others) >= self._most_waiting(submit) or sum(others) + len(submit.prompt) > most
                demand(refused.retry_after_s >= 1, "nobody says when to try again", rid)
            case Refusal.QUEUE_TIMEOUT:
                holds = now - case.at_s >= self.queue_s(case) - 1e-6 and refused.retry_after_s >= 1
            case Refusal.REQUEST_TIMEOUT:
                holds = now - case.at_s >= self.request_s(case) - 1e-6
            case Refusal.NO_WORKER:
                holds = not views or self._waited_in_vain(case, now) or self._asked_in_vain(case, now)
            case Refusal.SHUTTING_DOWN:
                holds = self.is_shut
            case Refusal.EMPTY:
                holds = not submit.prompt
            case Refusal.GRAMMAR:
                holds = self._is_nonsense(case)
            case Refusal.PINS_FULL:
                holds = False
        demand(holds, f"refused ({refused.refusal.value}) although nothing justifies it: {refused.message}", rid)

    def finished(self, finished: Finished, now: float) -> None:
        case, rid, index = self._case(finished.request_id), finished.request_id, finished.index
        demand(0 <= index < case.submit.n, f"index {index} of {case.submit.n} ends", rid)
        demand(case.refused is None and case.ended[index] is None, f"index {index} ends twice", rid)
        case.ended[index] = finished.reason
        self.last_progress_s = now
        if finished.reason is FinishReason.TIMEOUT:
            demand(case.is_started, "its time ran out before it began, and it was not refused", rid)
            demand(now - case.at_s >= self.request_s(case) - 1e-6, "its time ran out early", rid)
            return
        if case.search is not None:
            demand(finished.reason is FinishReason.ERROR, f"a search ends by {finished.reason.value}", rid)
            holds = case.has_failed_row or self._waited_in_vain(case, now) or self._is_poison(finished)
            demand(holds, f"it failed: {finished.message}", rid)
            return
        done, answer = tuple(case.emitted[index]), case.answers[index]
        if finished.reason in (FinishReason.LENGTH, FinishReason.STOP):
            self._check_scored(case)
        match finished.reason:
            case FinishReason.CANCELLED:
                holds = case.is_cancelled or any(late.request_id == rid for late in self.late)
            case FinishReason.LENGTH:
                holds = done == answer.tokens and answer.reason is FinishReason.LENGTH
            case FinishReason.STOP:
                holds = index in case.stopped or (done == answer.tokens and answer.reason is FinishReason.STOP)
            case FinishReason.ERROR:
                is_due = self._asked_in_vain(case, now) or self._is_poison(finished)
                holds = case.has_failed_row or self._waited_in_vain(case, now) or is_due
                demand(bool(finished.message), "an error says what happened", rid)
        why = f"index {index} ended ({finished.reason.value}: {finished.message}) after {len(done)} tokens"
        demand(holds, f"{why}; it should be {len(answer.tokens)}, {answer.reason.value}", rid)

    def _is_poison(self, finished: Finished) -> bool:
        """Whether a request may be said to end workers: it was there three times, and once there was nobody else."""
        rid, poison = finished.request_id, dict(self.scenario.upheaval.poison)
        was_there = self.leases.num_losses[rid] >= 3 and rid in self.leases.lost_alone
        return finished.message == POISON and was_there and (not poison or rid in poison)

    # --- how long they wait

    def _most_waiting(self, submit: Submit) -> int:
        """How many others must live before a request is refused. Where tenants have shares none has all places."""
        scenario = self.scenario
        its = sum(case.submit.tenant == submit.tenant for case in self.live())
        return its if scenario.is_fair and its >= (scenario.max_waiting + 1) // 2 else scenario.max_waiting

    def queue_s(self, case: Case) -> float:
        return min(case.submit.queue_s or FOREVER_S, self.scenario.queue_s or FOREVER_S)

    def request_s(self, case: Case) -> float:
        return min(case.submit.request_s or FOREVER_S, self.scenario.request_s or FOREVER_S)

    def check_limits(self, now: float) -> None:
        """Nobody waits, or takes, longer than he may; no more wait than may."""
        live = self.live()
        waiting = [case for case in live if not case.is_started]
        demand(len(waiting) <= self.scenario.max_waiting, f"{len(waiting)} requests wait")
        num_tokens = sum(len(case.submit.prompt) for case in waiting)
        most = self.scenario.max_waiting_tokens or num_tokens
        demand(num_tokens <= most or len(waiting) == 1, f"{num_tokens} tokens wait")
        for case in waiting:
            demand(now - case.at_s <= self.queue_s(case) + 1e-6, "it waits longer than it may", case.request_id)
        for case in live:
            demand(now - case.at_s <= self.request_s(case) + 1e-6, "it takes longer than it may", case.request_id)

    def watch(self, now: float) -> None:
        self.check_limits(now)
        for case in self.live():
            if self._can_be_placed(case, now):
                case.unplaceable_since_s = None
            elif case.unplaceable_since_s is None:
                case.unplaceable_since_s = now

    def _can_be_placed(self, case: Case, now: float) -> bool:
        """On a worker group that was heard of lately."""
        heard_since_s = now - self.scenario.silence_s / 2
        return any(
            v.leaves_s is None and v.heard_s > heard_since_s and self.pins.fits(case.submit, v.hello)
            for v in self.leases.views.values()
        )

    def _waited_in_vain(self, case: Case, now: float) -> bool:
        since_s = case.at_s if case.unplaceable_since_s is None else case.unplaceable_since_s
        return not self._can_be_placed(case, now) and now - since_s >= self.scenario.recovery_s - 1e-6

    def check_answered(self) -> None:
        """At the end: everybody has an answer."""
        for case in self.cases.values():
            if case.refused is None and not case.is_cancelled:
                demand(None not in case.ended, "a request went quiet", case.request_id)


def _in_common(case: Case, other: Case) -> int:
    """The tokens at the beginning of the prompt that another request of the same tenant has had, too."""
    if other is case or other.submit.salt != case.submit.salt:
        return 0
    return max(run_of(case.submit.prompt, (*other.submit.prompt, *answer)) for answer in other.emitted)


def _in_beams(case: Case, other: Case) -> int:
    """The same of all beams that another search has followed."""
    if other is case or other.search is None or other.submit.salt != case.submit.salt:
        return 0
    theirs = [(*other.submit.prompt, *beam) for level in other.search.levels for beam in level]
    return max(run_of(case.submit.prompt, tokens) for tokens in theirs)
