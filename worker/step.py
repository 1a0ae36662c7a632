"""One step: a plan goes in, a result comes out, and it is as if each plan ran alone, in order.

    swaps out, copies, swaps in      blocks move before anything is written
    admits                           rows begin new lives
    advances                         one ragged batch of the living; the dead answer what befell them
    draws                            become known tokens, so that the next plan may go on from them

The executor has no policy and keeps no queue. What a plan may not say raises `PlanBroken`, which ends the lease; so
does any other exception, since nobody can tell how far the step had come. A row's own misfortune is its outcome.
"""

from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from kilburn.shared.messages import KvLost, RowLogprobs, StepPlan, StepResult, Timings
from kilburn.worker.model_runner import HIDDEN_NOT_FINITE, Drawn, ModelRunner
from kilburn.worker.outcomes import Failed, Lost
from kilburn.worker.rows import Ints, Rows, Work


@dataclass(slots=True)
class Executor:
    """Runs plans on one worker's rows, cache and model."""

    rows: Rows
    runner: ModelRunner

    def run(self, plan: StepPlan, idle_s: float = 0.0) -> StepResult:
        """Run one plan. `idle_s` is how long the worker waited for it. Raises PlanBroken."""
        with torch.inference_mode():
            return self._run(plan, idle_s)

    def clear(self) -> None:
        """The lease is over: rows and KV are lost."""
        self.rows.clear()

    def _run(self, plan: StepPlan, idle_s: float) -> StepResult:
        began = perf_counter()
        self.runner.cache.move(plan.swaps_out, plan.copies, plan.swaps_in)
        moved = perf_counter()
        for admit in plan.admits:
            self.rows.admit(admit)
        work = self.rows.advance(plan.rows, plan.counts, plan.grown_at, plan.grown_blocks)
        result = StepResult(plan.lease, plan.step, num_tokens=[0] * len(plan.rows), tokens=[])
        if not work.num_seqs:
            self._add_deaths(plan, result)
            result.timings = Timings(idle_s=idle_s, apply_s=perf_counter() - began, moves_s=moved - began)
            return result
        ids, batch = self.runner.prepare(work)
        applied = perf_counter()
        hidden, bad = self.runner.forward(ids, batch, work)
        ran = perf_counter()
        drawn = self.runner.sample(hidden, work, bad)
        self._settle(work, bad, drawn)
        self._add_draws(work, drawn, result)
        if self.rows.deaths:
            self._add_deaths(plan, result)
        ended = perf_counter()
        result.timings = Timings(idle_s, applied - began, ran - applied, ended - ran, moved - began)
        return result

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
