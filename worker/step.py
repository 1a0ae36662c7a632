"""One step: a plan goes in, a result comes out, and it is as if each plan ran alone, in order.

    swaps out, copies, swaps in      blocks move before anything is written
    admits                           rows begin new lives
    advances                         one ragged batch of the living; the dead answer what befell them
    draws                            become known tokens, so that the next plan may go on from them

Of several ranks each runs every plan on its part of the model; what became of the rows is the same on all of them, but
for log probabilities, which rank 0 alone knows.

The executor has no policy and keeps no queue. What a plan may not say raises `PlanBroken`, which ends the lease; so
does any other exception, since nobody can tell how far the step had come. A row's own misfortune is its outcome.
"""

from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import Forget, KvLost, Prepare, RowLogprobs, StepPlan, StepResult, Timings, Unpreparable
from kilburn.worker.grammars import Answer
from kilburn.worker.model_runner import HIDDEN_NOT_FINITE, Drawn, ModelRunner
from kilburn.worker.outcomes import Failed, Lost
from kilburn.worker.rows import Ints, Rows, Work
from kilburn.worker.sampler import NOT_FINITE
from kilburn.worker.swap_check import SwapCheck


@dataclass(frozen=True, slots=True)
class Moves:
    """Seconds that a plan's moves took."""

    asked_s: float  # to ask for them, which on the CPU is to do them
    late_s: float = 0.0  # beyond that, on a device that goes on by itself
    check_s: float = 0.0  # their checksums

    @property
    def total_s(self) -> float:
        return self.asked_s + self.late_s + self.check_s


@dataclass(slots=True)
class Executor:
    """Runs plans on one worker's rows, cache and model."""

    rows: Rows
    runner: ModelRunner
    check: SwapCheck | None = None  # of the host pool, where swaps are verified

    def run(self, plan: StepPlan, idle_s: float = 0.0) -> StepResult:
        """Run one plan. `idle_s` is how long the worker waited for it. Raises PlanBroken."""
        self.runner.ranks.allow(plan.allowed_s)
        with torch.inference_mode():
            return self._run(plan, idle_s)

    def place(self) -> str:
        """Where the other ranks are to find this one in the next lease, if that is its task."""
        return self.runner.ranks.place()

    def begin(self, rendezvous: str, step_s: float) -> None:
        """A lease begins: the ranks meet. No collective may take longer than `step_s`, or than its plan allows."""
        self.runner.ranks.meet(rendezvous, step_s)

    def prepare(self, asked: Prepare, answer: Answer) -> None:
        """Have a grammar compiled, beside the steps."""
        grammars = self.rows.knobs.grammars
        if grammars is None:
            answer(Unpreparable(asked.lease, asked.number, "this worker follows no grammars"))
        else:
            grammars.prepare(asked, answer)

    def forget(self, forgotten: Forget) -> None:
        if self.rows.knobs.grammars is not None:
            self.rows.knobs.grammars.forget(forgotten)

    def clear(self) -> None:
        """The lease is over: rows and KV are lost, no grammar is held, and the ranks part."""
        self.runner.ranks.part_ways()
        self.rows.clear()
        if self.rows.knobs.grammars is not None:
            self.rows.knobs.grammars.clear()
        if self.check is not None:
            self.check.clear()

    def _run(self, plan: StepPlan, idle_s: float) -> StepResult:
        began = perf_counter()
        spoiled = self._move(plan)
        moved = perf_counter()
        for admit in plan.admits:
            self.rows.admit(admit)
        if self.check is not None and self.check.has_doubts:
            self._lose_rows(plan, self.check)
        work = self.rows.advance(plan.rows, plan.counts, plan.grown_at, plan.grown_blocks)
        if self.check is not None and self.check.has_doubts:
            size = self.rows.limits.block_size
            self.check.written((work.slots[work.slots % size == 0] // size).tolist())
        result = StepResult(plan.lease, plan.step, num_tokens=[0] * len(plan.rows), tokens=[])
        if not work.num_seqs:
            self._add_deaths(plan, result)
            moves = self._end_moves(plan, spoiled, moved - began)
            result.timings = Timings(idle_s=idle_s, apply_s=perf_counter() - began, moves_s=moves.total_s)
            return result
        ids, batch = self.runner.prepare(work)
        applied = perf_counter()
        hidden, bad = self.runner.forward(ids, batch, work)
        ran = perf_counter()
        if work.spans:
            scored, unscored = self.runner.score(hidden, work, bad)
            result.prompt_logprobs = tuple(scored)
            for row in work.rows[unscored].tolist():
                self.rows.kill(row, Failed(NOT_FINITE))
            bad = np.union1d(bad, unscored)
        drawn = self.runner.sample(hidden, work, bad)
        self._settle(work, bad, drawn)
        self._add_draws(work, drawn, result)
        if self.rows.deaths:
            self._add_deaths(plan, result)
        ended = perf_counter()
        moves = self._end_moves(plan, spoiled, moved - began)
        # Where moves were only asked for, it was the forward pass that waited for them.
        late_s = min(moves.late_s, ran - applied)
        result.timings = Timings(
            idle_s=idle_s,
            apply_s=applied - began + late_s + moves.check_s,
            forward_s=ran - applied - late_s,
            sample_s=ended - ran,
            moves_s=moves.total_s,
        )
        return result

    def _move(self, plan: StepPlan) -> set[int]:
        """The plan's moves are asked for. Returns the host blocks that get what is unreadable."""
        self.runner.cache.move(plan.swaps_out, plan.copies, plan.swaps_in)
        if self.check is None:
            return set()
        spoiled = self.check.leaving(plan.swaps_out)
        self.check.moved(plan.copies, plan.swaps_in)
        return spoiled

    def _end_moves(self, plan: StepPlan, spoiled: set[int], asked_s: float) -> Moves:
        """The plan's moves have ended. `asked_s`: what it took to ask for them."""
        if not (plan.swaps_out or plan.copies or plan.swaps_in):
            return Moves(asked_s)
        late_s = max(self.runner.cache.finish() - asked_s, 0.0)
        began = perf_counter()
        if self.check is not None:
            self.check.after(plan.swaps_out, spoiled)
        return Moves(asked_s, late_s, perf_counter() - began)

    def _lose_rows(self, plan: StepPlan, check: SwapCheck) -> None:
        """Rows that would read what did not come back as it left are dead until the core admits them anew."""
        rows = self.rows
        for row in plan.rows:
            num_read = blocks_for(int(rows.num_computed[row]), rows.limits.block_size)
            lost = check.lost(rows.tables[row, :num_read].tolist())
            if lost:
                rows.kill(row, Lost(lost, plan.step))

    def _settle(self, work: Work, bad: Ints, drawn: Drawn) -> None:
        """Rows learn what they drew, or die of what they could not."""
        for row in work.rows[bad].tolist():
            self.rows.kill(row, Failed(HIDDEN_NOT_FINITE))
        chosen, rows = drawn.chosen, work.rows[drawn.seqs]
        for place, reason in chosen.failed.items():
            self.rows.kill(int(rows[place]), Failed(reason))
        learns = self.rows.knobs.feeds_itself[rows] & (chosen.num_tokens == 1)
        if learns.all():
            self.rows.learn(rows, chosen.tokens)
        elif learns.any():
            first = np.cumsum(chosen.num_tokens) - chosen.num_tokens
            self.rows.learn(rows[learns], chosen.tokens[first[learns]])

    def _add_draws(self, work: Work, drawn: Drawn, result: StepResult) -> None:
        chosen, index = drawn.chosen, work.index[drawn.seqs]
        if len(index) == len(result.num_tokens):
            result.num_tokens = chosen.num_tokens.tolist()
        else:
            for i, num_tokens in zip(index.tolist(), chosen.num_tokens.tolist(), strict=True):
                result.num_tokens[i] = num_tokens
        result.tokens = chosen.tokens.tolist()
        result.logprobs = tuple(
            RowLogprobs(int(index[place]), report.width, report.ids, report.logprobs)
            for place, report in sorted(chosen.reports.items())
        )

    def _add_deaths(self, plan: StepPlan, result: StepResult) -> None:
        """The outcomes of the dead, in this plan and in every later one until they are admitted anew."""
        lost: list[KvLost] = []
        for index, row in enumerate(plan.rows):
            match self.rows.deaths.get(row):
                case Failed(reason):
                    result.failed[index] = reason
                case Lost(blocks, step):
                    lost += [KvLost(index, tier, block, step) for tier, block in blocks]
                case None:
                    pass
        result.lost = tuple(lost)
