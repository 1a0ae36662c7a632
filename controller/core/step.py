"""One step as the core sees it: the draft of its plan, its flight, and what is counted.

Draft   being filled, by passes over the groups          -> StepPlan
Flight  sent, its result not back: whose rows advance, in which life, by how much
"""

from dataclasses import dataclass, field

from kilburn.controller.core.departure import Departure
from kilburn.controller.core.histogram import Histogram
from kilburn.controller.core.memory import Moves
from kilburn.controller.core.sequence import Sequence
from kilburn.shared.messages import Admit
from kilburn.shared.types import LawBroken

POWERS_OF_TWO = tuple(float(2**i) for i in range(15))
SHARES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
FLIGHTS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
FIRST_CHUNK = 512  # tokens: see pacing.py
MOST_SCORES = 1 << 18  # log probabilities of prompts that the result of one step may carry


@dataclass(slots=True)
class Flight:
    """A plan whose result is not back: whose rows advanced, in which life, by how much."""

    step: int
    sent_at: float
    sequences: list[Sequence]
    epochs: list[int]
    counts: list[int]
    num_chunks: int = 0  # rows, the first ones
    num_chunk_tokens: int = 0  # their positions; the other rows go on by one
    num_moved: int = 0  # blocks swapped in or out
    shares: list[tuple[Departure, int]] = field(default_factory=list)  # of these, for groups that leave or return
    num_out: int = 0  # of those moved, out
    predicted_s: float = 0.0  # what the worker is expected to take for it; 0: nothing is known

    @property
    def num_decodes(self) -> int:
        return len(self.sequences) - self.num_chunks


@dataclass(slots=True)
class Counters:
    """Since the lease began. Only ever grow."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_host_hit_tokens: int = 0  # of these, brought back from the host
    block_copies: int = 0
    blocks_out: int = 0  # swapped to the host
    blocks_in: int = 0
    chosen_by_cost: int = 0  # preemptions whose way was open, and the predictions decided
    compared_swap_s: float = 0.0  # of these, what either way was predicted to take
    compared_recompute_s: float = 0.0
    swaps_without_room: int = 0  # preempted by recompute, since the host had no room within the bound
    returned_by_swap: int = 0  # preempted groups that were all there again: of these what was predicted, and the truth
    predicted_swap_s: float = 0.0
    actual_swap_s: float = 0.0
    returned_by_recompute: int = 0
    predicted_recompute_s: float = 0.0
    actual_recompute_s: float = 0.0
    swap_out_s: float = 0.0  # the worker's time for moves; of steps that move both ways, by the blocks of each
    swap_in_s: float = 0.0
    copy_s: float = 0.0  # of steps that only copy
    worker_idle_s: float = 0.0
    worker_apply_s: float = 0.0
    worker_forward_s: float = 0.0
    worker_sample_s: float = 0.0


@dataclass(slots=True)
class Sizes:
    """How large the steps were since the lease began, and how long they took."""

    rows: Histogram = field(default_factory=lambda: Histogram(POWERS_OF_TWO))
    positions: Histogram = field(default_factory=lambda: Histogram(POWERS_OF_TWO))
    budget_use: Histogram = field(default_factory=lambda: Histogram(SHARES))  # positions, of those that may be planned
    flight_s: Histogram = field(default_factory=lambda: Histogram(FLIGHTS_S))  # from sending a plan to its commit


@dataclass(slots=True)
class Draft:
    """A plan being filled."""

    moves: Moves
    budget: int  # positions that may still be planned
    prompt_budget: int  # of these, positions of prompts
    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    chunk_counts: list[int] = field(default_factory=list)
    grown_at: list[int] = field(default_factory=list)  # indices into decodes
    grown_blocks: list[int] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    has_preempted: bool = False
    is_paced: bool = False  # prompts get less than the step has room for: see pacing.py
    scores_left: int = MOST_SCORES

    @property
    def step(self) -> int:
        return self.moves.step

    @property
    def room(self) -> int:
        """Positions of prompts that may still be planned."""
        return min(self.budget, self.prompt_budget)

    def add_chunk(self, sequence: Sequence) -> None:
        """As much of the known tokens as the budget allows. Their blocks are there since admission."""
        planned = sequence.num_planned
        count = min(len(sequence.tokens), sequence.plan_end) - planned
        count = min(count, self.room)
        if self.is_paced and count > max(planned, FIRST_CHUNK):
            count = self.prompt_budget = max(planned, FIRST_CHUNK)  # what is left is nobody's: see admission.py
        if sequence.group.num_scored < sequence.num_prompt:
            width = 1 + sequence.sampling.prompt_logprobs
            count = min(count, max(self.scores_left // width, 1))
            self.scores_left -= count * width
        self.admit_fresh(sequence)
        self.chunks.append(sequence)
        self.chunk_counts.append(count)
        sequence.num_planned = planned + count
        self.budget -= count
        self.prompt_budget -= count

    def admit_fresh(self, sequence: Sequence) -> None:
        """Begin a new life on the row where one is due."""
        if not sequence.is_fresh:
            return
        if sequence.num_planned != sequence.num_computed:
            raise LawBroken(f"{sequence} admitted anew with work in flight")
        start, sampling = sequence.num_computed, sequence.sampling
        self.admits.append(
            Admit(
                row=sequence.row,
                start=start,
                num_prompt=sequence.num_prompt,
                tokens=tuple(sequence.tokens[start:]),
                history=tuple(sequence.tokens[:start]) if sampling.needs_history else (),
                blocks=tuple(sequence.own_table.blocks),
                sampling=sampling,
                scored_from=sequence.group.num_scored if sampling.prompt_logprobs >= 0 else 0,
            )
        )
        sequence.epoch += 1
        sequence.is_fresh = False
