"""Beam search: which candidates go on, which are kept as finished, and when it is over.

    beams (running)        candidates of all, by cumulative log probability      next beams
    [ A  -1.2 ]  --top K-->   A x -1.5   B y -1.6   A </s> -1.7   B z -2.0   -->  A x, B y
    [ B  -1.3 ]                                     `-> finished, if among the first `width`

K is (stop ids + 1) x width, so that `width` candidates can always go on. A finished one is scored by

    score = cumulative log probability / generated tokens ** length_penalty

and the best `width` finished ones are kept. The rules are those of transformers' generate(num_beams=width), whose
results the search reproduces: only the first `width` candidates may finish, and the search is over when no running
beam can be expected to beat the worst kept one (HEURISTIC: at its present length; NEVER: at the best length that it
could still reach), or, with FULL, as soon as `width` are kept.

The search knows no memory: it names parents and tokens, and the group forks, appends and frees. Source of the rules:
the documentation of transformers' GenerationConfig.early_stopping, and its beam search.
"""

import math
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace

from kilburn.controller.core.events import BeamSettings, EarlyStopping
from kilburn.controller.core.prefix_index import Salt
from kilburn.controller.core.sequence import Group, Place, Sequence, State
from kilburn.shared.sampling import Candidates, Sampling
from kilburn.shared.types import FinishReason, LawBroken


@dataclass(frozen=True, slots=True)
class Continuation:
    """The next beam: `token` after what beam number `parent` holds."""

    parent: int
    token: int
    cumulative: float  # log probability of all generated tokens


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    tokens: tuple[int, ...]  # generated ones, a stop id included
    cumulative: float
    score: float
    reason: FinishReason


class BeamSearch:
    """The search of one request. `cumulative[i]` is the log probability of running beam number i."""

    def __init__(self, settings: BeamSettings, stop_ids: frozenset[int], max_tokens: int) -> None:
        self.settings, self.stop_ids, self.max_tokens = settings, stop_ids, max_tokens
        self.cumulative = [0.0]
        self.kept: list[Hypothesis] = []  # best first, at most `width`

    @property
    def num_candidates(self) -> int:
        """How many candidates each beam must bring."""
        return (1 + max(1, len(self.stop_ids))) * self.settings.width

    def step(
        self, candidates: Listing[Listing[tuple[int, float]]], generated: Listing[Listing[int]]
    ) -> list[Continuation]:
        """One step: for each running beam its candidates (token, log probability) and what it has generated so far.

        Returns the next beams, best first; none when the search is over. `kept` then holds the results.
        """
        ranked = sorted(
            (
                Continuation(parent, token, self.cumulative[parent] + logprob)
                for parent, found in enumerate(candidates)
                for token, logprob in found
            ),
            key=lambda c: -c.cumulative,
        )[: self.num_candidates]
        length = len(generated[0]) + 1
        is_last = length >= self.max_tokens
        for candidate in ranked[: self.settings.width]:
            if is_last or candidate.token in self.stop_ids:
                self._keep(candidate, generated[candidate.parent], length)
        going_on = [] if is_last else [c for c in ranked if c.token not in self.stop_ids][: self.settings.width]
        if not going_on or self._is_over(going_on[0].cumulative, length):
            return []
        self.cumulative = [c.cumulative for c in going_on]
        return going_on

    def _keep(self, candidate: Continuation, generated: Listing[int], length: int) -> None:
        reason = FinishReason.STOP if candidate.token in self.stop_ids else FinishReason.LENGTH
        score = candidate.cumulative / math.pow(length, self.settings.length_penalty)
        tokens = (*generated, candidate.token)
        self.kept.append(Hypothesis(tokens, candidate.cumulative, score, reason))
        self.kept.sort(key=lambda h: -h.score)  # stable: of equals, the earlier stays ahead
        del self.kept[self.settings.width :]

    def _is_over(self, best_running: float, length: int) -> bool:
        if len(self.kept) < self.settings.width:
            return False
        if self.settings.early_stopping is EarlyStopping.FULL:
            return True
        penalty = self.settings.length_penalty
        reaches_on = self.settings.early_stopping is EarlyStopping.NEVER and penalty > 0.0
        best_length = self.max_tokens if reaches_on else length
        return best_running / math.pow(best_length, penalty) <= self.kept[-1].score


class BeamGroup(Group):
    """The beams of one request. They advance in one plan or in none, and wait for its commit at every token."""

    __slots__ = ("_heard", "search")

    def __init__(
        self,
        request_id: int,
        place: Place,
        prompt: Listing[int],
        max_tokens: int,
        sampling: Sampling,
        n: int,
        salt: Salt,
        settings: BeamSettings,
    ) -> None:
        self.search = BeamSearch(settings, frozenset(sampling.stop_ids), max_tokens)
        self._heard: dict[int, list[tuple[int, float]]] = {}  # index of a beam -> its candidates in this step
        super().__init__(request_id, place, prompt, max_tokens, sampling, n, salt)
        self.has_forked, self.num_draws = False, self.search.num_candidates
        self.live[0].sampling = replace(sampling, choose=Candidates(self.search.num_candidates))

    @property
    def most_wide(self) -> int:
        return self.search.settings.width

    @property
    def width(self) -> int:
        return self.search.settings.width

    def indices(self) -> list[int]:
        return list(range(self.n))

    def plan_end_of(self, sequence: Sequence) -> int:
        # All but the newest token, whose position all beams compute together.
        return len(sequence.tokens) - 1 if self.has_forked else super().plan_end_of(sequence)

    @property
    def is_in_step(self) -> bool:
        """Whether every beam has only its newest token to compute, and nothing of it is planned."""
        return bool(self.has_forked) and all(s.num_planned == len(s.tokens) - 1 for s in self.live)

    def interrupted(self) -> None:
        self._heard = {}

    def heard(self, sequence: Sequence, candidates: list[tuple[int, float]]) -> bool:
        """One beam's candidates are in. Returns whether those of all are."""
        self._heard[sequence.index] = candidates
        return len(self._heard) == len(self.live)

    def step(self) -> list[Continuation]:
        """Search on from the candidates of all beams."""
        heard, self._heard = self._heard, {}
        generated = [sequence.tokens[sequence.num_prompt :] for sequence in self.live]
        return self.search.step([heard[sequence.index] for sequence in self.live], generated)

    def go_on(self, continuations: Listing[Continuation]) -> None:
        """The beams become these continuations. Reordering moves table entries, never KV.

        A parent's first continuation goes on in its place, further ones fork off it, and beams that nothing follows
        give their blocks back at once.
        """
        parents, self.has_forked = self.live, True
        followed = {c.parent for c in continuations}
        for i, parent in enumerate(parents):
            if parent.num_planned != parent.num_computed:
                raise LawBroken(f"a beam step with {parent} in flight")
            if i not in followed:
                self.reserved_rows.append(parent.leave(State.FINISHED))
        beams: list[Sequence] = []
        for c in continuations:  # all forks before any append
            parent = parents[c.parent]
            beams.append(parent.fork(len(beams), self.reserved_rows.pop()) if parent in beams else parent)
        for i, (beam, c) in enumerate(zip(beams, continuations, strict=True)):
            beam.index = i
            beam.tokens.append(c.token)
            beam.plan_end = self.plan_end_of(beam)
            beam.is_fresh = True
        self.live = beams
