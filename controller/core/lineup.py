"""Who runs, who waits, and on which rows: the groups of one worker group between their arrival and their end.

    waiting  --(admitted: rows, blocks)-->  running  --(ended)-->  gone
             <--(preempted, evacuated)---

Those who run are in order of place, those who wait in order of their turns (turns.py). A group's rows are its own from
admission on, those of sequences still to be forked included. The one thing that this file does to memory is to let
go of it.
"""

from bisect import insort
from collections import Counter
from itertools import takewhile

from kilburn.controller.core.beam import BeamGroup
from kilburn.controller.core.block_table import BlockTable
from kilburn.controller.core.departure import Departure, Way, Why
from kilburn.controller.core.events import (
    Effect,
    Finished,
    Note,
    NoteKind,
    NotPinned,
    Refusal,
    Refused,
    Turn,
    Turned,
)
from kilburn.controller.core.fairness import Fairness
from kilburn.controller.core.grammars import Grammars
from kilburn.controller.core.memory import Memory, Moves
from kilburn.controller.core.prefixes import PinGroup
from kilburn.controller.core.sequence import Group, Sequence, State
from kilburn.controller.core.turns import Turns
from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import Prepared, Unpreparable
from kilburn.shared.types import FinishReason


class Lineup:
    """See the file's head. `ended` collects groups with nothing left to do, for the engine to forget."""

    def __init__(
        self, memory: Memory, max_rows: int, name: str, grammars: Grammars, fairness: Fairness | None = None
    ) -> None:
        self.memory, self.max_rows, self.name, self.grammars = memory, max_rows, name, grammars
        self.running: list[Group] = []
        self._sequences: list[Sequence] | None = []  # see `sequences`
        self.waiting = Turns(fairness)
        self.pinned: list[PinGroup] = []  # held, not running
        self.ended: list[Group] = []
        self.num_begun = self.tokens_begun = 0  # requests that began since somebody last looked, and their prompts
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self.returning: list[tuple[Group, Departure]] = []  # on rows, with less than they had when they left
        self.num_recomputed = self.num_swapped_out = self.num_swapped_in = 0  # groups
        self.preempted: Counter[tuple[Way, Why]] = Counter()  # the same by what decided it

    # --- questions

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that named prefixes hold, or will once they are computed. Counted apart where they share."""
        return sum(blocks_for(len(pin.prefix.tokens), self.memory.block_size) for pin in self.all_pins)

    @property
    def all_pins(self) -> list[PinGroup]:
        running = takewhile(lambda group: isinstance(group, PinGroup), self.running)  # their place is before all others
        return [group for group in (*self.pinned, *running, *self.waiting.pins) if isinstance(group, PinGroup)]

    @property
    def requests(self) -> list[Group]:
        """All that are here, named prefixes apart."""
        return [group for group in (*self.running, *self.waiting) if not isinstance(group, PinGroup)]

    @property
    def pinned_blocks(self) -> list[int]:
        """What complete prefixes hold."""
        return [block for pin in self.pinned for block in pin.live[0].own_table.blocks]

    @property
    def sequences(self) -> list[Sequence]:
        """Of all groups that run, in order. Kept until somebody comes, leaves or forks: for many steps, as a rule."""
        if self._sequences is None:
            self._sequences = [sequence for group in self.running for sequence in group.live]
        return self._sequences

    def regrouped(self) -> None:
        """Others run than did before."""
        self._sequences = None

    def holding(self, block: int) -> list[Group]:
        """The running groups that hold a block."""
        return [group for group in self.running if any(block in s.own_table.blocks for s in group.live)]

    def pins_holding(self, block: int) -> list[PinGroup]:
        return [pin for pin in self.pinned if any(block in s.own_table.blocks for s in pin.live)]

    # --- on to the rows

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self.waiting.num_requests

    def enqueue(self, group: Group) -> None:
        group.is_preparing = not self.grammars.join(group)
        self.waiting.add(group)

    def grammar_answered(self, answer: Prepared | Unpreparable, effects: list[Effect]) -> None:
        """A grammar is ready, and whoever waits for it stands in line; or nobody gets it."""
        match answer:
            case Prepared(number=number):
                digest = self.grammars.answered(number, is_prepared=True)
                for group in self._preparing(digest):
                    self.waiting.prepared(group)
                    effects.append(Turned(group.request_id, Turn.PREPARED))
            case Unpreparable(number=number, reason=reason):
                digest = self.grammars.answered(number, is_prepared=False)
                self._deny(digest, Refusal.GRAMMAR, f"the worker cannot follow this grammar: {reason}", effects)

    def give_up_grammars(self, now: float, effects: list[Effect]) -> None:
        for digest in self.grammars.overdue(now):
            self._deny(digest, Refusal.NO_WORKER, "no worker compiled the grammar in time; try again", effects)

    def _deny(self, digest: bytes | None, refusal: Refusal, reason: str, effects: list[Effect]) -> None:
        for group in self._preparing(digest):
            if group.has_started:
                self.fail(group, reason, effects)
            else:
                effects.append(Refused(group.request_id, refusal, reason))
                self.cancel(group)

    def _preparing(self, digest: bytes | None) -> list[Group]:
        waiting = self.waiting.preparing
        return [group for group in waiting if group.grammar is not None and group.grammar.digest == digest]

    @property
    def load(self) -> int:
        """Sequences here, for placement."""
        return self.max_rows - len(self.free_rows) + sum(group.width for group in self.waiting)

    @property
    def num_ahead(self) -> int:
        """Known tokens that are still to be computed here."""
        running = sum([len(s.tokens) - s.num_computed for s in self.sequences])
        return running + sum([len(group.live[0].tokens) for group in self.waiting])

    def start(self, group: Group, tables: list[BlockTable], computed: list[int], plan_ends: list[int]) -> None:
        """A waiting group begins to run: a row for each of its sequences, and for those still to be forked.

        For each live sequence its table, the positions in it that are computed, and how far it may be planned.
        """
        self.waiting.remove(group)
        insort(self.running, group, key=lambda g: g.place)
        self.regrouped()
        for sequence, table, num_computed, plan_end in zip(group.live, tables, computed, plan_ends, strict=True):
            capacity = len(table.blocks) * self.memory.block_size
            sequence.start(self.free_rows.pop(), table, num_computed, capacity, plan_end)
        group.reserved_rows = [self.free_rows.pop() for _ in range(group.width - len(group.live))]
        if group.departure is not None:
            self.returning.append((group, group.departure))

    def lead(self, leader: Sequence) -> None:
        """Once the blocks that a recomputed group has in common are there, its other sequences share them and go on."""
        size = self.memory.block_size
        num_common = leader.num_prompt // size
        if leader.num_computed < num_common * size:
            return
        for sequence in leader.followers:
            sequence.own_table.adopt_front(leader.own_table.blocks[:num_common])
            sequence.capacity += num_common * size
            sequence.num_computed = sequence.num_planned = num_common * size
            sequence.plan_end = sequence.group.plan_end_of(sequence)
        leader.followers = []

    # --- off the rows

    def recompute(self, group: Group, effects: list[Effect], departure: Departure | None = None) -> None:
        """The group goes back to its place in the line with its tokens and nothing else.

        `departure`: the choice that led to it; None where there was none, since blocks that it needs are lost.
        """
        self.take_off(group, State.WAITING)
        self.enqueue(group)
        self.num_recomputed += 1
        group.num_preempted += 1
        self._depart(group, departure, effects)

    def _depart(self, group: Group, departure: Departure | None, effects: list[Effect]) -> None:
        group.departure = departure
        self.preempted[(Way.RECOMPUTE, Why.LOST) if departure is None else (departure.way, departure.why)] += 1
        text = f"by recompute: {Why.LOST.value}" if departure is None else departure.text
        effects.append(Note(NoteKind.PREEMPTED, f"request {group.request_id}, {text}"))
        effects.append(Turned(group.request_id, Turn.PREEMPTED, text))

    def swap_out(self, group: Group, departure: Departure, moves: Moves, effects: list[Effect]) -> None:
        """The group goes back to its place in the line, and what it computed to the host."""
        num_before = len(moves.swaps_out)
        hosts = self.memory.swap_out(group, self.pinned_blocks, moves)
        moves.shares.append((departure, len(moves.swaps_out) - num_before))
        self.running.remove(group)
        self.regrouped()
        for sequence, host in zip(group.live, hosts, strict=True):
            self.free_rows.append(sequence.swap_out(host))
        self._give_back_reserved(group)
        group.interrupted()
        self.enqueue(group)
        self.num_swapped_out += 1
        group.num_preempted += 1
        self._depart(group, departure, effects)

    def forget_swap(self, group: Group) -> None:
        """A swapped group cannot come back as it was: it waits to be recomputed."""
        for sequence in group.live:
            self.memory.forget(sequence)
            sequence.leave(State.WAITING)
        group.departure = None
        self.num_recomputed += 1
        self.preempted[Way.RECOMPUTE, Why.LOST] += 1

    def _give_back_reserved(self, group: Group) -> None:
        self.free_rows.extend(group.reserved_rows)
        group.reserved_rows = []

    def take_off(self, group: Group, to: State) -> None:
        """The whole group leaves its rows and blocks."""
        self.running.remove(group)
        self.regrouped()
        for sequence in group.live:
            self.free_rows.append(sequence.leave(to))
        self._give_back_reserved(group)
        group.interrupted()

    def pin(self, group: PinGroup) -> None:
        """A named prefix is complete: it keeps its blocks and leaves its row."""
        (sequence,) = group.live
        self.running.remove(group)
        self.regrouped()
        self.free_rows.append(sequence.pin())
        self.pinned.append(group)

    def unsettle(self, group: PinGroup) -> None:
        """Blocks of a pinned prefix were lost: it is computed again."""
        self._let_go(group, State.WAITING)
        self.enqueue(group)

    def _let_go(self, group: Group, to: State) -> None:
        self.pinned = [other for other in self.pinned if other is not group]
        for sequence in group.live:
            sequence.leave(to)

    def evacuate(self) -> list[Group]:
        """The lease ended: everybody leaves, with tokens and places, and no blocks or digests."""
        for pin in list(self.pinned):
            self._let_go(pin, State.WAITING)
        groups = self.requests
        for group in list(self.running):
            self.waiting.served(group)  # whoever ends before he has a home again was served all the same
            self.take_off(group, State.WAITING)
        for group in groups:
            if group.is_swapped:
                self.forget_swap(group)
            group.departure = None
            for sequence in group.live:
                sequence.chain = []  # the next worker may have blocks of another size
        self.waiting.clear()
        for group in groups:
            self.grammars.leave(group)
        return groups

    # --- ends

    def stop(self, group: Group, index: int, effects: list[Effect]) -> None:
        """The text layer found a stop string in one sequence. Beams have no text before the search is over."""
        if isinstance(group, BeamGroup):
            return
        for sequence in group.live:
            if sequence.index == index and group.has_forked:
                if sequence.state is not State.RUNNING:
                    self._leave_line(sequence, effects)
                else:
                    self.end(sequence, FinishReason.STOP, effects)
                return

    def cancel(self, group: Group) -> None:
        """The client left: the whole group ends, silently."""
        self.waiting.served(group)
        if group in self.running:
            self.take_off(group, State.FINISHED)
        elif group in self.pinned:
            self._let_go(group, State.FINISHED)
        else:
            self.waiting.remove(group)
            for sequence in group.live:
                self.memory.forget(sequence)
                sequence.leave(State.FINISHED)
        group.live = []
        self.ended.append(group)

    def _leave_line(self, sequence: Sequence, effects: list[Effect]) -> None:
        """A sequence of a waiting group ends by itself."""
        group = sequence.group
        self.memory.forget(sequence)
        sequence.leave(State.FINISHED)
        group.part_with(sequence)
        effects.append(Finished(group.request_id, sequence.index, FinishReason.STOP))
        if not group.live:
            self.waiting.remove(group)
            self.ended.append(group)

    def end(self, sequence: Sequence, reason: FinishReason, effects: list[Effect]) -> None:
        """A running sequence is finished; the last of a group takes it off the list."""
        group = sequence.group
        orphans = sequence.followers
        indices = [sequence.index] if group.has_forked else group.indices()
        self.free_rows.append(sequence.leave(State.FINISHED))
        group.part_with(sequence)
        self.regrouped()
        for leader in group.live:
            if sequence in leader.followers:
                leader.followers.remove(sequence)
        effects.extend(Finished(group.request_id, index, reason) for index in indices)
        if not group.live:
            self.waiting.served(group)
            self.ended.append(group)
            self.running.remove(group)
            self._give_back_reserved(group)
        elif orphans:
            # Nobody computes what they were to share: the group starts over with another leader.
            self.recompute(group, effects)

    def fail(self, group: Group, message: str, effects: list[Effect]) -> None:
        indices = group.indices()
        self.cancel(group)
        if isinstance(group, PinGroup):
            effects.append(NotPinned(group.request_id, self.name, message))
            return
        effects.extend(Finished(group.request_id, index, FinishReason.ERROR, message) for index in indices)
