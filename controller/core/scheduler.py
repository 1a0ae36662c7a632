"""Who computes what next on one worker group, and what became of it.

    plan()    moves num_planned, takes blocks, preempts where none are left   -> StepPlan, a Flight is remembered
    commit()  moves num_computed, appends tokens, names full blocks, forks    -> effects

Up to `depth` plans are under way at once: planning needs counts, not values. A plan is filled in three passes, always
in order of place (priority, then arrival): the sequences that go on by one token, then the rest of prompts, then
those who wait. Only the first pass can run out of blocks, since admission takes the blocks of all tokens known by
then; so a victim, the last in line, never has work in the plan that preempts it.

The worker runs plans as if each ran alone, in order. So blocks and rows are free the moment the core lets go of them,
although a plan in flight may still write them: whoever gets them writes later.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Listing

from kilburn.controller.core import laws
from kilburn.controller.core.admission import TOO_SMALL, Admission
from kilburn.controller.core.beam import BeamGroup
from kilburn.controller.core.blame import is_suspect, was_in_blast
from kilburn.controller.core.commit import Commit
from kilburn.controller.core.departure import Way, Why
from kilburn.controller.core.events import Effect, Refusal
from kilburn.controller.core.fairness import Fairness
from kilburn.controller.core.grammars import Grammars
from kilburn.controller.core.leaving import Leaving
from kilburn.controller.core.lineup import Lineup
from kilburn.controller.core.memory import Memory, Moves
from kilburn.controller.core.pacing import Pacing
from kilburn.controller.core.policy import Costs, Preemption, longest_limit, most_blocks, victim
from kilburn.controller.core.prefixes import PinGroup, longest_pin
from kilburn.controller.core.sequence import Group, Sequence, State
from kilburn.controller.core.step import Counters, Draft, Flight, Sizes
from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import Hello, StepPlan, StepResult
from kilburn.shared.types import LawBroken


class Scheduler:
    """The groups placed on one worker group, and its block pool."""

    def __init__(
        self,
        hello: Hello,
        memory: Memory,
        lease: int,
        max_step_tokens: int,
        preemption: Preemption,
        prefix_wait_steps: int = 0,
        step_target_s: float = 0.0,
        fairness: Fairness | None = None,
        prepare_s: float = 60.0,
    ) -> None:
        self.pacing = Pacing(step_target_s)
        self.memory, self.pool = memory, memory.device
        self.costs = Costs(hello.layout.bytes_per_block)
        self._leaving = Leaving(memory, self.costs, preemption)
        self.lease, self.name = lease, hello.name
        self.block_size = hello.layout.block_size
        self.max_step_tokens = min(hello.max_step_tokens, max_step_tokens)
        self.max_rows, self.max_len, self.vocab_size = hello.max_rows, hello.max_len, hello.vocab_size
        self.line = Lineup(memory, hello.max_rows, hello.name, Grammars(lease, prepare_s), fairness)
        self.flights: deque[Flight] = deque()
        self.last_commit_at = 0.0
        self.last_step = 0  # committed
        self.stalled_since: float | None = None  # since when there is work and yet nothing under way
        self.counters = Counters()
        self.sizes = Sizes()
        self.probe: Group | None = None  # computed alone: see blame.py
        self._next_step = 1
        self.admission = Admission(self.line, self.counters, prefix_wait_steps)
        self._commit = Commit(self.line, self.counters, self.costs, hello.name, hello.vocab_size)

    # --- the door

    def fits(self, num_prompt: int, limit: int, n: int, num_shared: int = 0) -> bool:
        """Whether a group can ever run here, alone if need be. `num_shared`: pinned blocks that it would share."""
        if not self.fits_length(limit) or not self.fits_width(n):
            return False
        return self.most_blocks(num_prompt, limit, n) - num_shared <= self.unpinned_blocks

    @property
    def usable_blocks(self) -> int:
        return self.pool.num_blocks - self.pool.num_quarantined

    def longest_limit(self, num_prompt: int, n: int, num_shared: int) -> int:
        return longest_limit(num_prompt, n, self.unpinned_blocks + num_shared, self.block_size)

    @property
    def unpinned_blocks(self) -> int:
        return self.usable_blocks - self.line.num_pinned_blocks

    def shared_with_pins(self, prompt: Listing[int], salt: bytes, most: int) -> int:
        """Pinned blocks that a prompt begins with, of which `most` tokens need not be computed."""
        _, run = longest_pin(prompt, salt, self.line.all_pins)
        return min(run, most) // self.block_size

    def found_tokens(self, group: Group, chain: list[bytes]) -> int:
        """Known tokens of a group that would not be computed here. `chain`: digests of its blocks, filled as needed."""
        first = group.live[0]
        index, num_spared = self.memory.index, len(first.tokens) - 1
        by_name = len(index.match(chain, first.tokens, group.salt)) * self.block_size
        _, run = longest_pin(first.prompt, group.salt.value, self.line.all_pins)
        return min(max(by_name, run), num_spared, group.most_hit(len(first.tokens)))

    def objection_to_pin(
        self, pin: PinGroup, most_pinned: float, others: Iterable[Group]
    ) -> tuple[Refusal, str] | None:
        """Why this prefix cannot be held here; None where it can. `others`: groups that may yet come here."""
        num_blocks, line = blocks_for(len(pin.prefix.tokens), self.block_size), self.line
        if len(pin.prefix.tokens) + 1 > self.max_len:
            message = f"the prefix has {len(pin.prefix.tokens)} tokens, the model takes {self.max_len - 1}; shorten it"
            return Refusal.TOO_LONG, message
        after = line.num_pinned_blocks + num_blocks
        if after > most_pinned * self.usable_blocks:
            room = int(most_pinned * self.usable_blocks)
            advice = "DELETE a prefix, shorten this one, or raise --pinned-percent"
            return Refusal.PINS_FULL, f"{after} blocks would be pinned, at most {room} may be; {advice}"
        for group in (*line.running, *line.waiting, *others):
            first = group.live[0]
            most = self.most_blocks(first.num_prompt, first.limit, group.most_wide)
            most -= self.shared_with_pins(first.prompt, group.salt.value, group.most_hit(first.num_prompt))
            if not isinstance(group, PinGroup) and self.usable_blocks - after < most <= self.unpinned_blocks:
                message = "requests that were accepted would not fit beside it; try again when they are done"
                return Refusal.PINS_FULL, message
        return None

    def fits_length(self, limit: int) -> bool:
        return limit + 1 <= self.max_len

    def fits_width(self, n: int) -> bool:
        return n <= min(self.max_rows, self.max_step_tokens)

    def most_blocks(self, num_prompt: int, limit: int, n: int) -> int:
        return most_blocks(num_prompt, limit, n, self.block_size)

    # --- plan

    def plan(self, now: float, effects: list[Effect]) -> StepPlan | None:
        """The next step, or None where nothing can be planned now."""
        if not self.line.running and not len(self.line.waiting):
            return None
        if self.probe is not None and not (is_suspect(self.probe) and self.probe in self.line.running):
            self.probe = None
        if self.probe is None and self.line.waiting.suspect is not None:
            if self.flights:
                return None  # it is to be alone
            self.probe = self.line.waiting.suspect
            plan = self._plan(now, effects)
            if plan is not None or self.probe in self.line.running:
                return plan
            self.probe = None  # it does not fit yet: those who run go on
        return self._plan(now, effects)

    def _plan(self, now: float, effects: list[Effect]) -> StepPlan | None:
        draft = Draft(Moves(self._next_step), self.max_step_tokens, self.max_step_tokens)
        sequences: list[Sequence] = []
        while not sequences:
            num_running = len(self.line.running)
            longer = self._plan_decodes(draft, effects)
            self._pace(draft)
            self._plan_chunks(draft, longer)
            if not draft.has_preempted:
                self.admission.admit(draft, self.probe, effects)
            sequences = draft.chunks + draft.decodes
            if not sequences and len(self.line.running) <= num_running:
                break
            # Otherwise: groups that were just admitted with all but their newest tokens in the pool go on at once.
        moves = draft.moves
        self.memory.seal(moves)
        if not sequences and not moves:
            # Whoever was preempted has left room for somebody.
            return self._plan(now, effects) if draft.has_preempted else None
        num_moved = len(moves.swaps_out) + len(moves.swaps_in)
        self.counters.blocks_out += len(moves.swaps_out)
        self.counters.blocks_in += len(moves.swaps_in)
        num_chunks = len(draft.chunks)
        counts = draft.chunk_counts + [1] * len(draft.decodes)
        epochs, num_chunk_tokens = [s.epoch for s in sequences], sum(draft.chunk_counts)
        self.flights.append(
            Flight(
                draft.step,
                now,
                sequences,
                epochs,
                counts,
                num_chunks,
                num_chunk_tokens,
                num_moved,
                moves.shares,
                len(moves.swaps_out),
                self.pacing.predicted_s(len(draft.decodes), num_chunk_tokens) + num_moved * self.costs.move_s_per_block,
            )
        )
        self.planned(len(sequences), self.max_step_tokens - draft.budget)
        return StepPlan(
            lease=self.lease,
            step=draft.step,
            rows=[s.row for s in sequences],
            counts=counts,
            grown_at=[at + num_chunks for at in draft.grown_at],
            grown_blocks=draft.grown_blocks,
            admits=draft.admits,
            swaps_out=moves.swaps_out,
            copies=moves.copies,
            swaps_in=moves.swaps_in,
        )

    def planned(self, num_rows: int, num_positions: int, num_plans: int = 1) -> None:
        """A plan of so many rows is complete, or several that are alike."""
        self._next_step += num_plans
        self.counters.steps += num_plans
        self.sizes.rows.observe(num_rows, num_plans)
        self.sizes.positions.observe(num_positions, num_plans)
        self.sizes.budget_use.observe(num_positions / self.max_step_tokens, num_plans)

    def _plan_decodes(self, draft: Draft, effects: list[Effect]) -> list[Sequence]:
        """One position for each sequence that has only its newest token to compute. Returns those that have more."""
        longer: list[Sequence] = []
        decodes, most = draft.decodes, draft.budget
        for sequence in self.line.sequences if self.probe is None else list(self.probe.live):
            planned = sequence.num_planned
            if sequence.is_steady and planned < sequence.capacity and planned < sequence.plan_end:  # nearly all
                if len(decodes) == most:
                    break
                decodes.append(sequence)
                sequence.num_planned = planned + 1
            elif sequence.state is State.RUNNING:  # not one that was preempted meanwhile
                draft.budget = most - len(decodes)
                if not draft.budget:
                    break
                self._plan_one(draft, sequence, longer, effects)
        draft.budget = most - len(decodes)
        return longer

    def _plan_one(self, draft: Draft, sequence: Sequence, longer: list[Sequence], effects: list[Effect]) -> None:
        """A position for a sequence that begins or grows, unless it has more to compute or has to wait."""
        group = sequence.group
        if type(group) is BeamGroup and group.is_in_step:
            if sequence is group.live[0]:
                self._plan_beams(draft, group, effects)
        elif sequence.num_planned >= sequence.plan_end:
            pass  # until something is committed
        elif len(sequence.tokens) - sequence.num_planned > 1:
            longer.append(sequence)
        elif self._make_room(draft, sequence, effects):  # otherwise it waits for blocks, or its group has just left
            draft.admit_fresh(sequence)
            draft.decodes.append(sequence)
            sequence.num_planned += 1

    def _plan_beams(self, draft: Draft, group: BeamGroup, effects: list[Effect]) -> None:
        """One position for each beam, all in this plan or none."""
        if draft.budget < len(group.live):
            return
        num_needed = self._blocks_to_step(group)
        if not self._make_available(draft, num_needed, group, effects):
            return
        for beam in group.live:
            if not self._make_room(draft, beam, effects):
                raise LawBroken(f"no block for {beam}, though {num_needed} were counted")
            draft.admit_fresh(beam)
            draft.decodes.append(beam)
            beam.num_planned += 1

    def _blocks_to_step(self, group: BeamGroup) -> int:
        """Blocks to take so that each beam may write its next slot: new ones, and copies of shared ones."""
        num_new, holders = 0, dict[int, int]()
        for beam in group.live:
            if beam.num_planned == beam.capacity:
                num_new += 1
            else:
                block = beam.own_table.blocks[beam.num_planned // self.block_size]
                holders[block] = holders.get(block, 0) + 1
        # Nobody but the beams holds a block that is not full, and the last of them writes it where it is.
        return num_new + sum(n - 1 for n in holders.values())

    def _pace(self, draft: Draft) -> None:
        """Bound what this plan computes of prompts by what those who wait for their next token should wait for it."""
        num_decodes = len(draft.decodes)
        if self.flights:  # who waits for a commit (beams, say) is in every other plan
            num_decodes = max(num_decodes, self.flights[-1].num_decodes)
        most = self.pacing.most_prompt_tokens(num_decodes)
        if most is not None:
            draft.prompt_budget = max(most - sum(draft.chunk_counts), 0)
            draft.is_paced = draft.prompt_budget < draft.budget

    def _plan_chunks(self, draft: Draft, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if draft.room and sequence.state is State.RUNNING:
                draft.add_chunk(sequence)

    def _make_room(self, draft: Draft, sequence: Sequence, effects: list[Effect]) -> bool:
        """A writable slot for the next position: a new block, or a copy of a shared one. May preempt."""
        if sequence.num_planned == sequence.capacity:
            return self._grow(draft, sequence, effects)
        table, at = sequence.own_table, sequence.num_planned // self.block_size
        if self.pool.is_writable(table.blocks[at]):
            return True
        if self.pool.refs(table.blocks[at]) > 1 and not self._make_available(draft, 1, sequence.group, effects):
            return False
        copy = table.make_writable(at, draft.step)
        if copy is not None:
            self.memory.copy(*copy, draft.moves)
            self.counters.block_copies += 1
            if not sequence.is_fresh:
                raise LawBroken(f"the table of {sequence} changes under its row")
        return True

    def _grow(self, draft: Draft, sequence: Sequence, effects: list[Effect]) -> bool:
        """One more block at the table's end. May preempt."""
        if not self.pool.num_available and not self._make_available(draft, 1, sequence.group, effects):
            return False
        taken = self.memory.grow(sequence.own_table, 1, draft.moves)
        sequence.capacity += self.block_size
        if not sequence.is_fresh:  # an Admit carries the whole table
            draft.grown_at.append(len(draft.decodes))
            draft.grown_blocks.extend(taken)
        return True

    def _make_available(self, draft: Draft, num_blocks: int, asking: Group, effects: list[Effect]) -> bool:
        """So many blocks can be taken now, if need be by preempting others. False: not in this plan."""
        while self.pool.num_available < num_blocks:
            if self.pool.num_available + len(draft.moves.device_reads) >= num_blocks:
                return False  # blocks of a group that is being swapped out are free for the next plan
            was_granted = bool(draft.decodes) and draft.decodes[-1].group is asking
            loser = victim(self.line.running, self.line.running.index(asking), was_granted)
            if loser is None:
                return False
            if loser is asking and len(self.line.running) == 1 and not self.admission.would_hold_less(asking):
                self.line.fail(loser, TOO_SMALL, effects)
                return False
            self._preempt(draft, loser, effects)
            if loser is asking:
                return False
        return True

    def _preempt(self, draft: Draft, loser: Group, effects: list[Effect]) -> None:
        draft.has_preempted = True
        departure = self._leaving.choose(loser, self.line.pinned_blocks, draft.moves)
        if departure.why is Why.CHEAPER:
            self.counters.chosen_by_cost += 1
            self.counters.compared_swap_s += departure.swap_s
            self.counters.compared_recompute_s += departure.recompute_s
        self.counters.swaps_without_room += departure.why in (Why.NO_ROOM, Why.BOUND)
        match departure.way:
            case Way.SWAP:
                self.line.swap_out(loser, departure, draft.moves, effects)
            case Way.RECOMPUTE:
                self.line.recompute(loser, effects, departure)

    def note_stall(self, now: float) -> None:
        """Called when all that can be planned is planned."""
        if self.flights or not (self.line.running or self.line.waiting):
            self.stalled_since = None
        elif self.stalled_since is None:
            self.stalled_since = now

    @property
    def unanswered_since(self) -> float | None:
        """Since when work here has made no progress; None: there is no work."""
        return max(self.flights[0].sent_at, self.last_commit_at) if self.flights else self.stalled_since

    def lost(self) -> Group | None:
        """The worker is gone, and nobody knows why: who had work under way. Returns who did it, where that is known."""
        groups: dict[int, Group] = {}
        for flight in self.flights:
            for sequence, epoch in zip(flight.sequences, flight.epochs, strict=True):
                if sequence.epoch == epoch and not isinstance(sequence.group, PinGroup):
                    groups[sequence.group.request_id] = sequence.group
        if self.probe is not None and self.probe.request_id in groups:
            return self.probe
        for group in groups.values():
            was_in_blast(group)
        return None

    def evacuate(self) -> list[Group]:
        """Nothing is under way any more, and everybody leaves."""
        self.flights.clear()
        self.probe = None
        return self.line.evacuate()

    # --- commit

    def commit(self, result: StepResult, now: float, effects: list[Effect]) -> None:
        """The oldest flight has landed. Raises Disagreement."""
        flight = self.flights.popleft()
        self.last_commit_at, self.last_step = now, flight.step
        self.sizes.flight_s.observe(now - flight.sent_at)
        timings = result.timings
        seconds = timings.apply_s - timings.moves_s + timings.forward_s + timings.sample_s
        self.pacing.learn(flight.num_decodes, flight.num_chunk_tokens, seconds)
        self._commit.land(flight, result, effects)

    # --- laws

    def validate(self) -> None:
        """Every law, counted anew. Raises LawBroken."""
        under_way = [
            f for flight in self.flights for f in zip(flight.sequences, flight.epochs, flight.counts, strict=True)
        ]
        laws.validate(self.line, under_way, self.block_size)
