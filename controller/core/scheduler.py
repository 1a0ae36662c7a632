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
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from kilburn.controller.core import laws
from kilburn.controller.core.beam import BeamGroup
from kilburn.controller.core.block_table import BlockTable
from kilburn.controller.core.events import Beam, Effect, Emit, Pinned, Started
from kilburn.controller.core.lineup import Lineup
from kilburn.controller.core.memory import Memory, Moves
from kilburn.controller.core.policy import Costs, Need, Preemption, longest_limit, most_blocks, victim
from kilburn.controller.core.prefixes import PinGroup, longest_pin
from kilburn.controller.core.sequence import Group, Sequence, State
from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import Admit, Hello, KvLost, RowLogprobs, StepPlan, StepResult
from kilburn.shared.types import FinishReason, LawBroken, Tier


class Disagreement(Exception):
    """The worker's outcomes do not fit the plan. Ends the lease."""


@dataclass(slots=True)
class Flight:
    """A plan whose result is not back: whose rows advanced, in which life, by how much."""

    step: int
    sent_at: float
    sequences: list[Sequence]
    epochs: list[int]
    counts: list[int]
    num_moved: int  # blocks swapped in or out


@dataclass(slots=True)
class Counters:
    """Since the lease began. Only ever grow."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    block_copies: int = 0
    blocks_out: int = 0  # swapped to the host
    blocks_in: int = 0
    worker_idle_s: float = 0.0
    worker_apply_s: float = 0.0
    worker_forward_s: float = 0.0
    worker_sample_s: float = 0.0


@dataclass(slots=True)
class _Draft:
    """A plan being filled."""

    moves: Moves
    budget: int  # positions that may still be planned
    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    chunk_counts: list[int] = field(default_factory=list)
    grown_at: list[int] = field(default_factory=list)  # indices into decodes
    grown_blocks: list[int] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    has_preempted: bool = False

    @property
    def step(self) -> int:
        return self.moves.step


class Scheduler:
    """The groups placed on one worker group, and its block pool."""

    def __init__(self, hello: Hello, memory: Memory, lease: int, max_step_tokens: int, preemption: Preemption) -> None:
        self.memory, self.pool = memory, memory.device
        self.preemption = preemption
        self.costs = Costs(hello.layout.bytes_per_block)
        self.lease, self.name = lease, hello.name
        self.block_size = hello.layout.block_size
        self.max_step_tokens = min(hello.max_step_tokens, max_step_tokens)
        self.max_rows, self.max_len, self.vocab_size = hello.max_rows, hello.max_len, hello.vocab_size
        self.line = Lineup(memory, hello.max_rows)
        self.flights: deque[Flight] = deque()
        self.last_commit_at = 0.0
        self.last_step = 0  # committed
        self.counters = Counters()
        self._next_step = 1
        self._stuck: tuple[int, int, bool] | None = None  # what was so when the head of the line last did not fit
        # A margin kept when others run, so that a newcomer is not preempted by their next few blocks.
        self._watermark = self.pool.num_blocks // 100

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

    def shared_with_pins(self, prompt: Listing[int], salt: bytes) -> int:
        """Pinned blocks that a prompt begins with, that of its newest token excepted."""
        _, run = longest_pin(prompt, salt, self.line.all_pins)
        return min(run, len(prompt) - 1) // self.block_size

    def objection_to_pin(self, pin: PinGroup, most_pinned: float) -> str | None:
        """Why this prefix cannot be held here; None where it can."""
        num_blocks, line = blocks_for(len(pin.prefix.tokens), self.block_size), self.line
        if len(pin.prefix.tokens) + 1 > self.max_len:
            return f"the prefix has {len(pin.prefix.tokens)} tokens, the model takes {self.max_len - 1}"
        after = line.num_pinned_blocks + num_blocks
        if after > most_pinned * self.usable_blocks:
            return f"{after} blocks would be pinned, at most {int(most_pinned * self.usable_blocks)} may be"
        for group in (*line.running, *line.waiting):
            first = group.live[0]
            most = self.most_blocks(first.num_prompt, first.limit, group.most_wide)
            most -= self.shared_with_pins(first.prompt, group.salt.value)
            if not isinstance(group, PinGroup) and most > self.usable_blocks - after:
                return "requests that were accepted would not fit beside it; try again when they are done"
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
        draft = _Draft(Moves(self._next_step), self.max_step_tokens)
        sequences: list[Sequence] = []
        while not sequences:
            num_running = len(self.line.running)
            self._plan_chunks(draft, self._plan_decodes(draft, effects))
            if not draft.has_preempted:
                self._plan_admissions(draft, effects)
            sequences = draft.chunks + draft.decodes
            if not sequences and len(self.line.running) <= num_running:
                break
            # Otherwise: groups that were just admitted with all but their newest tokens in the pool go on at once.
        moves = draft.moves
        self.memory.seal(moves)
        if not sequences and not moves:
            # Whoever was preempted has left room for somebody.
            return self.plan(now, effects) if draft.has_preempted else None
        num_moved = len(moves.swaps_out) + len(moves.swaps_in)
        self.counters.blocks_out += len(moves.swaps_out)
        self.counters.blocks_in += len(moves.swaps_in)
        num_chunks = len(draft.chunks)
        counts = draft.chunk_counts + [1] * len(draft.decodes)
        self.flights.append(Flight(draft.step, now, sequences, [s.epoch for s in sequences], counts, num_moved))
        self._next_step += 1
        self.counters.steps += 1
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

    def _plan_decodes(self, draft: _Draft, effects: list[Effect]) -> list[Sequence]:
        """One position for each sequence that has only its newest token to compute. Returns those that have more."""
        longer: list[Sequence] = []
        place = 0
        while place < len(self.line.running):
            group = self.line.running[place]
            was_granted = False
            for sequence in group.live:
                planned = sequence.num_planned
                if planned >= sequence.plan_end:
                    continue
                if len(sequence.tokens) - planned > 1:
                    longer.append(sequence)
                    continue
                if draft.budget == 0:
                    return longer
                if sequence.is_fresh or planned == sequence.capacity:
                    if not self._make_room(draft, sequence, place, was_granted, effects):
                        continue  # it waits for blocks, or its group has just left the list
                    self._admit_fresh(draft, sequence)
                draft.decodes.append(sequence)
                sequence.num_planned = planned + 1
                draft.budget -= 1
                was_granted = True
            if isinstance(group, BeamGroup) and group.is_in_step:
                self._plan_beams(draft, group, place, effects)
            place += 1
        return longer

    def _plan_beams(self, draft: _Draft, group: BeamGroup, place: int, effects: list[Effect]) -> None:
        """One position for each beam, all in this plan or none."""
        if draft.budget < len(group.live):
            return
        num_needed = self._blocks_to_step(group)
        if not self._make_available(draft, num_needed, group, place, False, effects):
            return
        for beam in group.live:
            if not self._make_room(draft, beam, place, True, effects):
                raise LawBroken(f"no block for {beam}, though {num_needed} were counted")
            self._admit_fresh(draft, beam)
            draft.decodes.append(beam)
            beam.num_planned += 1
            draft.budget -= 1

    def _blocks_to_step(self, group: BeamGroup) -> int:
        """Blocks to take so that each beam may write its next slot: new ones, and copies of shared ones."""
        num_new, holders = 0, dict[int, int]()
        for beam in group.live:
            if beam.num_planned == beam.capacity:
                num_new += 1
            else:
                block = beam.own_table.blocks[beam.num_planned // self.block_size]
                holders[block] = holders.get(block, 0) + 1
        # The last holder of a block writes it where it is.
        return num_new + sum(n if self.pool.refs(block) > n else n - 1 for block, n in holders.items())

    def _plan_chunks(self, draft: _Draft, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if draft.budget and sequence.state is State.RUNNING:
                self._plan_chunk(draft, sequence)

    def _plan_chunk(self, draft: _Draft, sequence: Sequence) -> None:
        """As much of the known tokens as the budget allows. Their blocks are there since admission."""
        planned = sequence.num_planned
        count = min(len(sequence.tokens), sequence.plan_end) - planned
        count = min(count, draft.budget)
        self._admit_fresh(draft, sequence)
        draft.chunks.append(sequence)
        draft.chunk_counts.append(count)
        sequence.num_planned = planned + count
        draft.budget -= count

    def _make_room(
        self, draft: _Draft, sequence: Sequence, place: int, was_granted: bool, effects: list[Effect]
    ) -> bool:
        """A writable slot for the next position: a new block, or a copy of a shared one. May preempt."""
        table, planned = sequence.own_table, sequence.num_planned
        is_full = planned == sequence.capacity
        at = planned // self.block_size
        if not is_full and self.pool.is_writable(table.blocks[at]):
            return True
        needs_block = is_full or self.pool.refs(table.blocks[at]) > 1
        if needs_block and not self._make_available(draft, 1, sequence.group, place, was_granted, effects):
            return False
        if is_full:
            taken = self.memory.grow(table, 1, draft.moves)
            sequence.capacity += self.block_size
            if not sequence.is_fresh:  # an Admit carries the whole table
                draft.grown_at.append(len(draft.decodes))
                draft.grown_blocks.extend(taken)
        else:
            copy = table.make_writable(at, draft.step)
            if copy is not None:
                draft.moves.copies.append(copy)
                self.counters.block_copies += 1
                if not sequence.is_fresh:
                    raise LawBroken(f"the table of {sequence} changes under its row")
        return True

    def _make_available(
        self, draft: _Draft, num_blocks: int, asking: Group, place: int, was_granted: bool, effects: list[Effect]
    ) -> bool:
        """So many blocks can be taken now, if need be by preempting others. False: not in this plan."""
        while self.pool.num_available < num_blocks:
            if self.pool.num_available + len(draft.moves.device_reads) >= num_blocks:
                return False  # blocks of a group that is being swapped out are free for the next plan
            loser = victim(self.line.running, place, was_granted)
            if loser is None:
                return False
            if loser is asking and len(self.line.running) == 1:
                self.line.fail(loser, "the block pool is too small for this request; raise --kv-memory", effects)
                return False
            self._preempt(draft, loser, effects)
            if loser is asking:
                return False
        return True

    def _preempt(self, draft: _Draft, loser: Group, effects: list[Effect]) -> None:
        draft.has_preempted = True
        pinned = [block for pin in self.line.pinned for block in pin.live[0].own_table.blocks]
        if self._swaps(loser, pinned, draft.moves):
            self.line.swap_out(loser, draft.moves, effects)
        else:
            self.line.recompute(loser, effects)

    def _swaps(self, loser: Group, pinned: list[int], moves: Moves) -> bool:
        """Whether a victim leaves by swap: where it may, and where that is predicted to cost less."""
        has_computed = any(sequence.num_computed for sequence in loser.live)
        if self.preemption is Preemption.RECOMPUTE or loser.has_followers or not has_computed:
            return False
        if not self.memory.can_swap_out(loser, pinned, moves):
            return False
        if self.preemption is Preemption.SWAP:
            return True
        num_out = self.memory.new_host_blocks(loser, pinned, moves)
        num_in = blocks_for(max(s.num_computed for s in loser.live), self.block_size)
        num_in += sum(blocks_for(s.num_generated, self.block_size) for s in loser.live[1:])
        num_tokens = loser.live[0].num_computed + sum(s.num_generated for s in loser.live[1:])
        return self.costs.swap_s(num_out, num_in) < self.costs.recompute_s(num_tokens)

    def _admit_fresh(self, draft: _Draft, sequence: Sequence) -> None:
        """Begin a new life on the row where one is due."""
        if not sequence.is_fresh:
            return
        if sequence.num_planned != sequence.num_computed:
            raise LawBroken(f"{sequence} admitted anew with work in flight")
        start, sampling = sequence.num_computed, sequence.sampling
        draft.admits.append(
            Admit(
                row=sequence.row,
                start=start,
                num_prompt=sequence.num_prompt,
                tokens=tuple(sequence.tokens[start:]),
                history=tuple(sequence.tokens[:start]) if sampling.needs_history else (),
                blocks=tuple(sequence.own_table.blocks),
                sampling=sampling,
            )
        )
        sequence.epoch += 1
        sequence.is_fresh = False

    # --- admission and preemption

    def _plan_admissions(self, draft: _Draft, effects: list[Effect]) -> None:
        """From the head of the line only: whoever does not fit holds up those behind, and so is never overtaken."""
        while draft.budget and self.line.waiting:
            group = self.line.waiting[0]
            now_so = (group.request_id, self.pool.num_available, bool(self.line.running))
            if group.width > len(self.line.free_rows) or self._stuck == now_so:
                return
            if self._come_back(draft, group) if group.is_swapped else self._start(draft, group, effects):
                self._stuck = None
                continue
            self._stuck = now_so
            if self.line.running or draft.moves:
                return
            self.line.fail(group, "the block pool is too small for this request; raise --kv-memory", effects)

    def _has_spare(self, num_blocks: int) -> bool:
        return self.pool.num_available - num_blocks >= (self._watermark if self.line.running else 0)

    def _start(self, draft: _Draft, group: Group, effects: list[Effect]) -> bool:
        """Admit a group that has nothing but its tokens. False where it does not fit now."""
        need = Need(group, [self.memory.hits(sequence) for sequence in group.live], self.block_size)
        if not self._has_spare(need.num_blocks(self.pool)):
            return False
        self._admit(draft, group, need, effects)
        return True

    def _come_back(self, draft: _Draft, group: Group) -> bool:
        """Admit a group that was swapped out. False where it does not fit now."""
        restores = self.memory.restores(group)
        if restores is None:
            self.line.forget_swap(group)
            return self._start(draft, group, [])
        grown = [max(blocks_for(min(len(s.tokens), s.limit), self.block_size) - len(s.host), 0) for s in group.live]
        if not self._has_spare(self.memory.num_restored(restores, sum(grown))):
            return False
        tables = self.memory.swap_in(group, restores, grown, draft.moves)
        computed = [sequence.num_computed for sequence in group.live]
        self.line.start(group, tables, computed, [group.plan_end_of(sequence) for sequence in group.live])
        self.line.num_swapped_in += 1
        self._plan_first(draft, group, [])
        return True

    def _admit(self, draft: _Draft, group: Group, need: Need, effects: list[Effect]) -> None:
        """Rows, tables and first chunks for the sequences of a group."""
        tables = [BlockTable(self.pool) for _ in group.live]
        for i, table in enumerate(tables):  # all hits before any take, so that none is evicted by one
            self.memory.adopt(need.hits[i], table, draft.moves)
        for i, table in enumerate(tables):
            self.memory.bring_back(need.hits[i], table, draft.moves)
        computed = [len(table.blocks) * self.block_size for table in tables]
        ends = [group.plan_end_of(sequence) for sequence in group.live]
        for i, table in enumerate(tables):
            self.memory.grow(table, need.taken[i] - len(need.hits[i].host), draft.moves)
            if need.follows(i):
                ends[i] = 0  # until the first one has computed what they share
        computed[0] = self._copy_pinned(draft, group, tables[0], computed[0])
        self.line.start(group, tables, computed, ends)
        group.live[0].followers = [sequence for i, sequence in enumerate(group.live) if need.follows(i)]
        self._count_admission(group, computed, effects)
        self._plan_first(draft, group, effects)

    def _copy_pinned(self, draft: _Draft, group: Group, table: BlockTable, num_computed: int) -> int:
        """What the prompt has in common with the last, partial block of a named prefix is copied, not computed."""
        pin, run = longest_pin(group.live[0].prompt, group.salt.value, self.line.pinned)
        run = min(run, len(group.live[0].tokens) - 1)
        if pin is None or not num_computed < run <= num_computed + self.block_size:
            return num_computed
        at = num_computed // self.block_size
        draft.moves.copies.append((pin.live[0].own_table.blocks[at], table.blocks[at]))
        self.counters.block_copies += 1
        return run

    def _plan_first(self, draft: _Draft, group: Group, effects: list[Effect]) -> None:
        for sequence in list(group.live):
            if sequence.num_computed >= sequence.limit:
                self.line.end(sequence, FinishReason.LENGTH, effects)
            elif draft.budget and sequence.plan_end > sequence.num_planned:
                self._plan_chunk(draft, sequence)

    def _count_admission(self, group: Group, computed: list[int], effects: list[Effect]) -> None:
        if not group.has_started:
            group.has_started = True
            self.counters.prompt_tokens += group.live[0].num_prompt
            if not isinstance(group, PinGroup):
                effects.append(Started(group.request_id, computed[0]))
        self.counters.prefix_query_tokens += sum(len(sequence.tokens) for sequence in group.live)
        self.counters.prefix_hit_tokens += sum(computed)

    def evacuate(self) -> list[Group]:
        """The lease ended: nothing is under way any more, and everybody leaves."""
        self.flights.clear()
        return self.line.evacuate()

    # --- commit

    def commit(self, result: StepResult, now: float, effects: list[Effect]) -> None:
        """The oldest flight has landed. Raises Disagreement."""
        flight = self.flights.popleft()
        if len(result.num_tokens) != len(flight.sequences):
            raise Disagreement(f"{len(result.num_tokens)} outcomes for {len(flight.sequences)} advances")
        if result.tokens and not 0 <= min(result.tokens) <= max(result.tokens) < self.vocab_size:
            raise Disagreement("a token beyond the vocabulary")
        self.last_commit_at, self.last_step = now, flight.step
        self._learn(flight, result)
        self._lose(result.lost, effects)
        logprobs = {entry.index: entry for entry in result.logprobs}
        unwell = {*result.failed, *(lost.index for lost in result.lost)}
        tokens, at = result.tokens, 0
        for i, sequence in enumerate(flight.sequences):
            end = at + result.num_tokens[i]
            drawn, at = tokens[at:end], end
            if i in result.failed:
                for digest in sequence.chain:
                    block = self.pool.find(digest)
                    if block is not None:
                        self.pool.withdraw(block)
            if sequence.epoch != flight.epochs[i]:
                continue  # of a life that is over
            if i in unwell:
                self._unwell(sequence, result.failed.get(i), effects)
                continue
            self._advance(sequence, flight.counts[i], drawn, logprobs.get(i), effects)

    def _advance(
        self, sequence: Sequence, count: int, drawn: list[int], logprobs: RowLogprobs | None, effects: list[Effect]
    ) -> None:
        before = sequence.num_computed
        computed = sequence.num_computed = before + count
        size, group = self.block_size, sequence.group
        if computed // size > before // size:
            full = sequence.own_table.blocks[: computed // size]
            self.memory.index.publish(sequence.chain, sequence.tokens, full, before // size, group.salt)
        expected = 0 if computed < len(sequence.tokens) else group.num_draws
        if len(drawn) != expected:
            raise Disagreement(f"{len(drawn)} tokens for {sequence}, expected {expected}")
        if sequence.followers:
            self._lead(sequence)
        if isinstance(group, PinGroup) and computed >= sequence.limit:
            self.line.pin(group)  # its draw is of no use to anybody
            effects.append(Pinned(group.request_id, self.name, len(sequence.own_table.blocks)))
            return
        if expected and isinstance(group, BeamGroup):
            self._step_beams(group, sequence, _candidates(logprobs), effects)
        elif expected == 1:
            self._append(sequence, drawn[0], _entries(logprobs, 0), effects)
        elif expected:
            for i, child in enumerate(group.fork()):
                self._append(child, drawn[i], _entries(logprobs, i), effects)
        elif computed >= sequence.limit:
            self.line.end(sequence, FinishReason.LENGTH, effects)

    def _append(
        self, sequence: Sequence, token: int, logprobs: tuple[tuple[int, float], ...], effects: list[Effect]
    ) -> None:
        sequence.tokens.append(token)
        self.counters.generated_tokens += 1
        effects.append(Emit(sequence.group.request_id, sequence.index, token, logprobs))
        if token in sequence.stop_ids:
            self.line.end(sequence, FinishReason.STOP, effects)
        elif sequence.num_computed >= sequence.limit:
            self.line.end(sequence, FinishReason.LENGTH, effects)

    def _step_beams(
        self, group: BeamGroup, beam: Sequence, candidates: list[tuple[int, float]], effects: list[Effect]
    ) -> None:
        """One beam's candidates are in; with the last of them the search goes on, or ends with its results."""
        if not group.heard(beam, candidates):
            return
        continuations = group.step()
        if continuations:
            group.go_on(continuations)
            self.counters.generated_tokens += 1
            return
        self.line.cancel(group)
        for i, kept in enumerate(group.search.kept[: group.n]):
            outcome = Beam(group.request_id, i, kept.tokens, kept.cumulative, kept.score, kept.reason)
            effects.append(outcome)

    def _lead(self, leader: Sequence) -> None:
        """The blocks that a recomputed group has in common are computed: its other sequences share them and go on."""
        num_common = leader.num_prompt // self.block_size
        if leader.num_computed < num_common * self.block_size:
            return
        for sequence in leader.followers:
            sequence.own_table.adopt_front(leader.own_table.blocks[:num_common])
            sequence.capacity += num_common * self.block_size
            sequence.num_computed = sequence.num_planned = num_common * self.block_size
            sequence.plan_end = sequence.group.plan_end_of(sequence)
        leader.followers = []

    def _unwell(self, sequence: Sequence, reason: str | None, effects: list[Effect]) -> None:
        """A row failed, or found KV that it could not read."""
        group = sequence.group
        if reason is None:
            self.line.recompute(group, effects)
            return
        for member in group.live:
            for block in member.own_table.blocks:
                self.pool.withdraw(block)
        self.line.fail(group, f"the worker could not compute this request: {reason}", effects)

    def _lose(self, lost: tuple[KvLost, ...], effects: list[Effect]) -> None:
        """Blocks whose content proved unreadable lose their names, and every table that holds them is recomputed."""
        for entry in lost:
            pool = self.pool if entry.tier is Tier.DEVICE else self.memory.host
            if entry.block >= pool.num_blocks:
                raise Disagreement(f"a loss in block {entry.block} of the {entry.tier.name.lower()} tier")
            if entry.tier is Tier.HOST:
                self._lose_on_host(entry)
                continue
            if self.pool.held_since(entry.block) > entry.step:
                continue  # taken again since it was read
            self.pool.withdraw(entry.block)
            for group in self.line.holding(entry.block):
                self.line.recompute(group, effects)
            for pin in self.line.pins_holding(entry.block):
                self.line.unsettle(pin)

    def _lose_on_host(self, entry: KvLost) -> None:
        """A host copy proved unreadable: no name, and no group comes back by it."""
        if self.memory.host.held_since(entry.block) > entry.step:
            return
        self.memory.host.withdraw(entry.block)
        for group in self.line.waiting:
            if any(entry.block in sequence.host for sequence in group.live):
                self.line.forget_swap(group)

    def _learn(self, flight: Flight, result: StepResult) -> None:
        """What the step cost, for the operators and for the next choice between swap and recompute."""
        counters, timings = self.counters, result.timings
        self.costs.moved(flight.num_moved, timings.moves_s)
        if max(flight.counts, default=0) > 1:
            self.costs.computed(sum(flight.counts), timings.forward_s)
        counters.worker_idle_s += timings.idle_s
        counters.worker_apply_s += timings.apply_s
        counters.worker_forward_s += timings.forward_s
        counters.worker_sample_s += timings.sample_s

    # --- laws

    def validate(self) -> None:
        """Every law, counted anew. Raises LawBroken."""
        under_way = [
            f for flight in self.flights for f in zip(flight.sequences, flight.epochs, flight.counts, strict=True)
        ]
        laws.validate(self.line, under_way, self.block_size)


def _entries(logprobs: RowLogprobs | None, draw: int) -> tuple[tuple[int, float], ...]:
    """The entries of one draw: the token itself, then the likeliest."""
    if logprobs is None:
        return ()
    start, end = draw * logprobs.width, (draw + 1) * logprobs.width
    return tuple(zip(logprobs.ids[start:end], logprobs.logprobs[start:end], strict=True))


def _candidates(logprobs: RowLogprobs | None) -> list[tuple[int, float]]:
    """What a beam's row returned, best first."""
    if logprobs is None or logprobs.width != 1:
        raise Disagreement("candidates without their log probabilities")
    return list(zip(logprobs.ids, logprobs.logprobs, strict=True))
