"""A worker without contents: it counts what each step holds, and draws tokens that mean nothing.

It checks nothing: for that there is `fake_worker`. Its Load is exact, so that a machine's model can say how long the
step takes; its tokens are one and the same, but for beams, whose candidates have log probabilities drawn by seed: steps
of an exponential, so that some beams die and some branch. At a share of positions one candidate is all but certain, as
language models have it; there, every beam goes on. Nothing depends on anything but the plans and the seed.
"""

from collections.abc import Iterable, Sequence
from random import Random

from kilburn.controller.simulate.roofline import Load
from kilburn.shared.messages import RowLogprobs, StepPlan, StepResult
from kilburn.shared.sampling import Candidates

TOKEN = 7
FIRST_ID = 8  # of tokens in prompts
BEAM_STEP = 1.0  # nats between one candidate and the next, in the mean; what happens does not depend on the scale
SURE_STEPS = (0.01, 6.0)  # of the first two, where one is all but certain


class QuickWorker:
    """Rows of one lease."""

    def __init__(self, seed: int = 0, sure_share: float = 0.0) -> None:
        self._computed: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._several: dict[int, int] = {}  # rows that return more than one token
        self._candidates: dict[int, int] = {}  # rows of beams
        self._rng, self._sure_share = Random(seed), sure_share

    def run(self, plan: StepPlan) -> tuple[StepResult, Load]:
        load = Load(num_moved=len(plan.swaps_out) + len(plan.swaps_in), num_copied=len(plan.copies))
        for admit in plan.admits:
            self._admit(admit.row, admit.start, admit.start + len(admit.tokens), admit.sampling.choose)
        computed, known, counts = self._computed, self._known, plan.counts
        result = StepResult(plan.lease, plan.step, [], [])
        num_chunks = 0 if counts.count(1) == len(counts) else len(counts)
        while num_chunks and counts[num_chunks - 1] == 1:  # chunks stand first; a chunk may be of one token
            num_chunks -= 1
        for index in range(num_chunks):
            self._chunk(plan.rows[index], counts[index], load)
            self._draw(index, plan.rows[index], result)
        rows = plan.rows[num_chunks:]
        cells = 0
        if not self._several and not self._candidates:  # the common case, without a call for each row
            for row in rows:
                computed[row] = after = computed[row] + 1
                cells += after
                if after >= known[row]:
                    known[row] = after + 1
                    result.num_tokens.append(1)
                    result.tokens.append(TOKEN)
                else:
                    result.num_tokens.append(0)
        else:
            for index, row in enumerate(rows, num_chunks):
                computed[row] += 1
                cells += computed[row]
                self._draw(index, row, result)
        load.num_rows, load.num_cells = len(rows), cells
        load.num_sampled = len(result.num_tokens) - result.num_tokens.count(0)
        return result, load

    def skip(self, rows: Iterable[int], num_steps: int) -> None:
        """Rows that went on by so many tokens each, all of them their own."""
        for row in rows:
            self._computed[row] += num_steps
            self._known[row] += num_steps

    def _admit(self, row: int, start: int, end: int, choose: object) -> None:
        self._computed[row], self._known[row] = start, end
        self._several.pop(row, None)
        self._candidates.pop(row, None)
        if isinstance(choose, Candidates):
            self._candidates[row] = choose.count
        elif getattr(choose, "count", 1) > 1:
            self._several[row] = choose.count  # type: ignore[attr-defined]

    def _chunk(self, row: int, count: int, load: Load) -> None:
        start = self._computed[row]
        self._computed[row] = start + count
        load.num_chunks += 1
        load.num_chunk_tokens += count
        load.num_chunk_cells += start
        load.num_pairs += count * start + count * (count + 1) // 2

    def _draw(self, index: int, row: int, result: StepResult) -> None:
        """What a row that reached the end of its known tokens returns."""
        if self._computed[row] < self._known[row]:
            result.num_tokens.append(0)
            return
        num_candidates = self._candidates.get(row, 0)
        count = num_candidates or self._several.get(row, 1)
        result.num_tokens.append(count)
        if not num_candidates:
            result.tokens.extend([TOKEN] * count)
            self._known[row] += count == 1
            return
        ids = [FIRST_ID + i for i in range(count)]
        logprob, logprobs = 0.0, []
        is_sure = self._sure_share and self._rng.random() < self._sure_share
        for at in range(count):
            is_given = is_sure and at < len(SURE_STEPS)
            logprob -= SURE_STEPS[at] if is_given else self._rng.expovariate(1.0 / BEAM_STEP)
            logprobs.append(logprob)
        result.tokens.extend(ids)
        result.logprobs = (*result.logprobs, RowLogprobs(index, 1, tuple(ids), tuple(logprobs)))


class QuickHasher:
    """Names of blocks that are told apart as surely as need be in one process, at a fifth of a real one's seconds."""

    def __init__(self, model_digest: bytes, block_size: int) -> None:
        pass

    def digest(self, parent: bytes, tokens: Sequence[int], salt: bytes = b"") -> bytes:
        return hash((parent, *tokens, salt)).to_bytes(8, "little", signed=True)
