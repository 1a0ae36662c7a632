"""From the line onto the rows: who is admitted, and with what of it already there.

    waiting   --> hits on the device (named prefixes first), hits on the host, new blocks for the rest --> running
    swapped   --> what is still on the device is adopted, the rest comes back from the host            --> running

Only the head of the line (turns.py) is ever tried: whoever does not fit holds up those behind, and so is never
overtaken; save for a bounded number of steps while somebody computes what it begins with, so that requests that arrive
together compute their common prefix once. One who had his turn by waiting is still the first to be preempted by the
more urgent, and may be more than once. But he is then at the head again and nobody new comes before him; nor does
anybody get what is left of a step's budget before he has computed all his tokens. So he goes on by a token at least
each time, and comes to his end.
Admission takes the blocks of all tokens known by then, so that only decoding can run out of them.
"""

from enum import Enum

from kilburn.controller.core.blame import is_suspect
from kilburn.controller.core.block_table import BlockTable
from kilburn.controller.core.events import Effect, Started, Turn, Turned
from kilburn.controller.core.forming import Forming
from kilburn.controller.core.lineup import Lineup
from kilburn.controller.core.memory import Moves
from kilburn.controller.core.policy import Need
from kilburn.controller.core.prefixes import PinGroup, longest_pin
from kilburn.controller.core.sequence import Group
from kilburn.controller.core.step import Counters, Draft
from kilburn.shared.layout import blocks_for
from kilburn.shared.types import FinishReason

MOST_AT_ONCE = 64  # are passed over in one step, since all that they may have in common is hashed first
TOO_SMALL = "the block pool is too small for this request; raise --kv-memory"


class Hold(Enum):
    """What the head of the line waits for."""

    BLOCKS = "blocks"
    ROWS = "rows"
    BUDGET = "budget"  # of the next step


class Admission:
    """See the file's head."""

    def __init__(self, line: Lineup, counters: Counters, prefix_wait_steps: int) -> None:
        self._forming, self._prefix_wait_steps = Forming(line.memory.block_size), prefix_wait_steps
        self._line, self._memory, self._counters = line, line.memory, counters
        self._pool, self._block_size = line.memory.device, line.memory.block_size
        self._stuck: tuple[int, int, bool] | None = None  # what was so when the head of the line last did not fit
        self.hold = Hold.BUDGET  # what the head of the line waited for when it was last looked at
        # A margin kept when others run, so that a newcomer is not preempted by their next few blocks.
        self._watermark = self._pool.num_blocks // 100

    def admit(self, draft: Draft, probe: Group | None, effects: list[Effect]) -> None:
        """Whoever fits, from the head of the line. `probe`: only this one, which is to be alone (blame.py)."""
        line = self._line
        if line.waiting.aside:
            line.waiting.release(draft.step)
        if line.free_rows:  # otherwise nobody is admitted, whoever's turn it is
            line.waiting.settle(line.running)
        most_aside = len(line.waiting.aside) + MOST_AT_ONCE
        while draft.room and len(line.waiting.aside) < most_aside:
            group = line.waiting.head()
            if group is None or (group is not probe and (probe is not None or is_suspect(group))):
                return
            if self.lacks_rows(group):
                self.hold = Hold.ROWS
                return
            now_so = (group.request_id, self._pool.num_available, bool(line.running))
            if self._stuck == now_so:
                self.hold = Hold.BLOCKS
                return
            if self._come_back(draft, group, effects) if group.is_swapped else self._start(draft, group, effects):
                self._stuck = None
                continue
            self._stuck, self.hold = now_so, Hold.BLOCKS
            if line.running or draft.moves:
                return
            line.fail(group, TOO_SMALL, effects)
        self.hold = Hold.BUDGET

    def _has_spare(self, num_blocks: int) -> bool:
        return self._pool.num_available - num_blocks >= (self._watermark if self._line.running else 0)

    def lacks_rows(self, group: Group) -> bool:
        """Whether a waiting group would need more rows than are free, whatever blocks there are."""
        return group.width > len(self._line.free_rows)

    def lacks_blocks(self, group: Group) -> bool:
        """Whether a waiting group was tried and did not fit. One that was not tried waits for the next step."""
        return self._stuck is not None and self._stuck[0] == group.request_id

    def _pinned_run(self, group: Group) -> tuple[list[int], int]:
        """The blocks of the named prefix that shares most with the group's prompt, and how many tokens it shares."""
        pin, run = longest_pin(group.live[0].prompt, group.salt.value, self._line.pinned)
        return ([], 0) if pin is None else (pin.live[0].own_table.blocks, run)

    def would_hold_less(self, group: Group) -> bool:
        """Whether a running group, admitted again, would share more of a named prefix than it does.

        It may have begun before the prefix was complete, though it was accepted because it shares it.
        """
        if self._line.waiting.pins:
            return True
        first = group.live[0]
        pinned, run = self._pinned_run(group)
        shared = pinned[: min(run, group.most_hit(first.num_prompt)) // self._block_size]
        return first.own_table.blocks[: len(shared)] != shared

    # --- those who were swapped out

    def _come_back(self, draft: Draft, group: Group, effects: list[Effect]) -> bool:
        """False where it does not fit now."""
        pinned, run = self._pinned_run(group)
        restores = self._memory.restores(group, pinned[: run // self._block_size])
        if restores is None:
            self._line.forget_swap(group)
            return self._start(draft, group, effects)
        grown = [max(blocks_for(min(len(s.tokens), s.limit), self._block_size) - len(s.host), 0) for s in group.live]
        if not self._has_spare(self._memory.num_restored(restores, sum(grown))):
            return False
        num_before = len(draft.moves.swaps_in)
        tables = self._memory.swap_in(group, restores, grown, draft.moves)
        found = {block for restore in restores for block in restore.found if block is not None}
        self._returns(group, draft.moves, num_before, len(found))
        computed = [sequence.num_computed for sequence in group.live]
        self._line.start(group, tables, computed, [group.plan_end_of(sequence) for sequence in group.live])
        self._line.num_swapped_in += 1
        self._fills(group)
        effects.append(Turned(group.request_id, Turn.RESUMED, "from the host"))
        self._plan_first(draft, group)
        return True

    def _returns(self, group: Group, moves: Moves, num_before: int, num_found: int) -> None:
        """A group that was preempted comes back: what of it is still here, and which of the moves are its own."""
        departure = group.departure
        if departure is not None:
            departure.back_step = moves.step
            departure.num_found = max(num_found - departure.num_kept, 0)
            departure.num_brought = len(moves.swaps_in) - num_before
            moves.shares.append((departure, departure.num_brought))

    # --- those who have nothing but their tokens

    def _start(self, draft: Draft, group: Group, effects: list[Effect]) -> bool:
        """False where it does not fit now; true where it runs, has ended, or was set aside."""
        pinned, run = self._pinned_run(group)
        shared = pinned[: run // self._block_size]
        need = Need(group, [self._memory.hits(sequence, shared) for sequence in group.live], self._block_size)
        if self._forming and self._is_set_aside(group, need.hits[0].num_blocks, draft.step):
            return True
        if not self._has_spare(need.num_blocks(self._pool)):
            return False
        first = group.live[0]
        if self._after_copy(group, need.hits[0].num_blocks * self._block_size, run) >= first.limit:
            self._line.start(group, [BlockTable(self._pool)], [first.limit], [first.limit])
            self._count(group, [first.limit], effects)
            self._line.end(first, FinishReason.LENGTH, effects)  # nothing to draw, and nothing to compute
            return True
        tables = [BlockTable(self._pool) for _ in group.live]
        for i, table in enumerate(tables):  # all hits before any take, so that none is evicted by one
            self._memory.adopt(need.hits[i], table, draft.moves)
        num_before = len(draft.moves.swaps_in)
        for i, table in enumerate(tables):
            self._memory.bring_back(need.hits[i], table, draft.moves)
        self._counters.prefix_host_hit_tokens += len(need.hits[0].host) * self._block_size
        self._returns(group, draft.moves, num_before, len({block for hits in need.hits for block in hits.device}))
        computed = [len(table.blocks) * self._block_size for table in tables]
        ends = [group.plan_end_of(sequence) for sequence in group.live]
        after_copy = self._after_copy(group, computed[0], run)
        if after_copy > computed[0]:
            source = pinned[computed[0] // self._block_size]
            self._memory.copy_at_end(source, tables[0], draft.moves)
            self._counters.block_copies += 1
            computed[0] = after_copy
        for i, table in enumerate(tables):
            total = need.taken[i] + len(need.hits[i].device)
            self._memory.grow(table, total - len(table.blocks), draft.moves)
            if need.follows(i):
                ends[i] = 0  # until the first one has computed what they share
        self._line.start(group, tables, computed, ends)
        group.live[0].followers = [sequence for i, sequence in enumerate(group.live) if need.follows(i)]
        self._line.lead(group.live[0])  # what it found may be all that they wait for
        self._count(group, computed, effects)
        self._fills(group)
        self._plan_first(draft, group)
        return True

    def _is_set_aside(self, group: Group, num_hit: int, step: int) -> bool:
        """Pass over a group whose next blocks somebody is computing, so that they are computed once."""
        if not self._line.waiting.may_set_aside(group, step):
            return False
        first, size = group.live[0], self._block_size
        filler, num_found = None, num_hit
        while num_found < group.most_hit(len(first.tokens)) // size:
            self._memory.index.extend(first.chain, first.tokens, num_found + 1, group.salt)
            found = self._forming.filler_of(first.chain[num_found])
            if found is None or (filler is not None and found is not filler):
                break
            filler, num_found = found, num_found + 1
        if filler is None:
            return False
        self._line.waiting.set_aside(group, filler, num_found * size, step + self._prefix_wait_steps)
        return True

    def _fills(self, group: Group) -> None:
        """Let it be known which blocks a group that has just begun to run will fill first."""
        first = group.live[0]
        num_full = min(len(first.tokens), first.limit) // self._block_size
        if self._prefix_wait_steps and first.num_computed < num_full * self._block_size:
            self._memory.index.extend(first.chain, first.tokens, num_full, group.salt)
            self._forming.begins(first, first.num_computed // self._block_size, num_full)

    def _after_copy(self, group: Group, num_computed: int, run: int) -> int:
        """How far the first sequence has come once what it shares of a prefix's next block is copied.

        That block would be written at once, so it is copied, not shared: mostly it is the prefix's last, partial one.
        """
        run = min(run, group.most_hit(len(group.live[0].tokens)))
        return run if num_computed < run <= num_computed + self._block_size else num_computed

    def _plan_first(self, draft: Draft, group: Group) -> None:
        for sequence in group.live:
            if draft.room and sequence.plan_end > sequence.num_planned:
                draft.add_chunk(sequence)

    def _count(self, group: Group, computed: list[int], effects: list[Effect]) -> None:
        if not group.has_started:
            group.has_started, group.cached_tokens = True, computed[0]
            self._counters.prompt_tokens += group.live[0].num_prompt
            if not isinstance(group, PinGroup):
                self._line.waiting.served(group, group.num_prompt - computed[0])
                self._line.num_begun += 1
                self._line.tokens_begun += group.num_prompt
                effects.append(Started(group.request_id, computed[0]))
        else:
            effects.append(Turned(group.request_id, Turn.RESUMED, f"with {sum(computed)} positions found"))
        self._counters.prefix_query_tokens += sum(len(sequence.tokens) for sequence in group.live)
        self._counters.prefix_hit_tokens += sum(computed)
