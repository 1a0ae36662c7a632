"""Sequences and the groups in which they live.

Progress of a sequence is two numbers:

    tokens        p p p p p p p p g g g          p: prompt, g: generated
    num_computed  ----------->|                  positions whose KV is known to exist (results in)
    num_planned   ------------------>|           positions whose KV will exist once all plans in flight have run
    limit         ------------------------->|    num_prompt + max_tokens - 1: the last draw needs no KV of its own

so prefill, chunk, prefix hit, decode and pipelined decode are one sentence: plan the next
max(len(tokens) - num_planned, 1) positions, never past the limit. `plan_end` is how far planning may go before
something is committed: the limit, or the end of the prompt while a group of several waits for its fork, or nowhere
while a follower waits for its leader.

Every life of a sequence on a row has a number, `epoch`. A result that carries another number is dropped.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from kilburn.controller.core.block_table import BlockTable
from kilburn.controller.core.departure import Departure
from kilburn.controller.core.prefix_index import UNSALTED, Salt
from kilburn.shared.grammar import Grammar
from kilburn.shared.sampling import Draws, Sampling
from kilburn.shared.types import LawBroken


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PINNED = "pinned"
    FINISHED = "finished"


MOVES: dict[State, dict[State, str]] = {
    State.WAITING: {State.RUNNING: "admitted", State.FINISHED: "cancelled, refused, or nothing to compute"},
    State.RUNNING: {
        State.WAITING: "preempted by recompute, or the lease ended",
        State.SWAPPED: "preempted by swap",
        State.PINNED: "a named prefix is complete",
        State.FINISHED: "stopped, at its limit, cancelled, or failed",
    },
    State.SWAPPED: {
        State.RUNNING: "swapped in",
        State.WAITING: "the lease ended, or a block that it left behind is gone",
        State.FINISHED: "cancelled",
    },
    State.PINNED: {State.WAITING: "the lease ended, or blocks were lost", State.FINISHED: "the name was deleted"},
    State.FINISHED: {},
}
if MOVES.keys() != set(State):
    raise LawBroken("a state without a row in the table of moves")


@lru_cache(maxsize=256)
def _set_of(stop_ids: tuple[int, ...]) -> frozenset[int]:
    """One set for all who stop at the same: it is asked at every token, and so had better be in a cache."""
    return frozenset(stop_ids)


class Sequence:
    """One list of token ids, one block table. Owned by its group."""

    __slots__ = (
        "capacity",
        "chain",
        "epoch",
        "followers",
        "group",
        "host",
        "index",
        "is_fresh",
        "is_steady",
        "limit",
        "num_computed",
        "num_planned",
        "num_prompt",
        "plan_end",
        "request_id",
        "row",
        "sampling",
        "state",
        "stop_ids",
        "table",
        "tokens",
    )

    def __init__(self, group: "Group", index: int, tokens: list[int], num_prompt: int, limit: int, sampling: Sampling):
        self.group, self.request_id, self.index = group, group.request_id, index
        self.tokens, self.num_prompt, self.limit = tokens, num_prompt, limit
        self.sampling = sampling
        self.stop_ids = _set_of(sampling.stop_ids)
        self.chain: list[bytes] = []  # digests of the leading full blocks, a pure function of tokens and salt
        self.num_computed = self.num_planned = self.plan_end = 0
        self.epoch = 0
        self.state = State.WAITING
        self.row = -1
        self.table: BlockTable | None = None
        self.capacity = 0  # slots of the table
        self.is_fresh = False  # its next Advance needs an Admit first
        self.is_steady = False  # nothing more can come of an Advance in this life but one token: see commit.py
        self.host: list[int | None] = []  # SWAPPED: the host copy of each block, None where a pin keeps it
        self.followers: list[Sequence] = []  # wait for this one to compute the blocks that they will share

    @property
    def prompt(self) -> list[int]:
        is_all = len(self.tokens) == self.num_prompt  # until it drew something: no need for a copy to look at
        return self.tokens if is_all else self.tokens[: self.num_prompt]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def own_table(self) -> BlockTable:
        """The table of a sequence that must have one."""
        if self.table is None:
            raise LawBroken(f"{self} has no table")
        return self.table

    def move(self, to: State) -> None:
        """The one door between states. A move out of RUNNING voids whatever is in flight."""
        if to not in MOVES[self.state]:
            raise LawBroken(f"no move from {self.state.value} to {to.value} for {self}")
        if self.state is State.RUNNING:
            self.epoch += 1
        self.state = to

    def start(self, row: int, table: BlockTable, num_computed: int, capacity: int, plan_end: int) -> None:
        """A life on a row begins; the next plan that advances it admits it."""
        self.move(State.RUNNING)
        self.row, self.table, self.capacity, self.host = row, table, capacity, []
        self.num_computed = self.num_planned = num_computed
        self.plan_end = plan_end
        self.is_fresh, self.is_steady = True, False

    def fork(self, index: int, row: int) -> "Sequence":
        """Another sequence of the group, with the same past and a table over the same blocks."""
        child = Sequence(self.group, index, list(self.tokens), self.num_prompt, self.limit, self.sampling)
        child.chain = list(self.chain)
        child.start(row, self.own_table.fork(), self.num_computed, self.capacity, self.plan_end)
        return child

    def pin(self) -> int:
        """The row is given up, the table kept. Returns the row."""
        self.move(State.PINNED)
        row, self.row = self.row, -1
        return row

    def swap_out(self, host: list[int | None]) -> int:
        """The blocks went to the host; what was computed stays so, what was only planned does not. Returns the row."""
        self.move(State.SWAPPED)
        row, self.row, self.table, self.capacity, self.host = self.row, -1, None, 0, host
        self.num_planned, self.plan_end = self.num_computed, 0
        self.is_fresh = False
        return row

    def leave(self, to: State) -> int:
        """A life on a row ends: no blocks, no progress. Returns the row."""
        self.move(to)
        if self.table is not None:
            self.table.free()
        row, self.row, self.table, self.capacity = self.row, -1, None, 0
        self.num_computed = self.num_planned = self.plan_end = 0
        self.is_fresh = False
        self.followers = []
        return row

    def __repr__(self) -> str:
        return (
            f"<sequence {self.group.request_id}.{self.index} {self.state.value} epoch {self.epoch} row {self.row}: "
            f"{len(self.tokens)} tokens, {self.num_computed} computed, {self.num_planned} planned, limit {self.limit}>"
        )


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a group stands among those who run: priority first, then arrival. It keeps its place for life."""

    priority: int
    arrival: int


@dataclass(slots=True)
class Blasts:
    """How often workers were lost with work of a group under way while it did not go on by a token: see blame.py."""

    num: int = 0
    mark: tuple[int, int] = (0, 0)  # how far it was then


class Group:
    """The sequences of one request: admitted, preempted, resumed, cancelled whole.

    Until its fork a group of n is one sequence whose first draw will be n draws; `live` holds those not finished.
    """

    __slots__ = (
        "awaits",
        "blasts",
        "cached_tokens",
        "departure",
        "grammar",
        "has_forked",
        "has_started",
        "is_preparing",
        "live",
        "n",
        "num_charged",
        "num_drawn_by_ended",
        "num_draws",
        "num_preempted",
        "num_prompt",
        "num_scored",
        "place",
        "request_id",
        "reserved_rows",
        "salt",
        "tenant",
        "turn",
        "until_step",
        "weight",
    )

    def __init__(
        self,
        request_id: int,
        place: Place,
        prompt: Tokens[int],
        max_tokens: int,
        sampling: Sampling,
        n: int = 1,
        salt: Salt = UNSALTED,
        grammar: Grammar | None = None,
    ) -> None:
        self.request_id, self.place, self.n, self.salt = request_id, place, n, salt
        self.grammar, self.is_preparing = grammar, False  # whether it waits for its grammar: see grammars.py
        self.turn: tuple[float, int] = (place.priority, place.arrival)  # when it is admitted: see turns.py
        self.awaits: tuple[Sequence, int] | None = None  # passed over until this one has computed so far, and
        self.until_step: int | None = None  # until this step at most: see turns.py
        self.tenant, self.weight = b"", 1.0  # whose request it is, and the tenant's share: see fairness.py
        self.num_charged = self.num_drawn_by_ended = 0  # tokens drawn: those counted, those of sequences that ended
        self.blasts = Blasts()
        self.num_prompt = len(prompt)
        # Positions of the prompt whose log probabilities nobody waits for any more; that of the first are no numbers.
        self.num_scored = 1 if sampling.prompt_logprobs >= 0 else len(prompt)
        self.has_started = False
        self.cached_tokens = 0  # of its prompt, when it first began
        self.num_preempted = 0
        # With max_tokens 0 nothing is drawn, so there is nothing to fork at: the choices are one result n times.
        self.has_forked = n == 1
        self.num_draws = n  # tokens that a sequence returns when it reaches the end of what it knows
        if sampling.choose != (draws := Draws(0, n)):
            sampling = replace(sampling, choose=draws)
        limit = len(prompt) + max_tokens - 1
        self.live = [Sequence(self, 0, list(prompt), len(prompt), limit, sampling)]
        self.reserved_rows: list[int] = []  # for the sequences that the fork will make
        self.departure: Departure | None = None  # preempted, and not yet all there again

    @property
    def most_wide(self) -> int:
        """Sequences that may run together at any time of the group's life."""
        return self.n

    @property
    def width(self) -> int:
        """Rows that the group needs."""
        return len(self.live) if self.has_forked else self.n

    def part_with(self, sequence: "Sequence") -> None:
        """One of its sequences is finished. What it drew was served all the same: see fairness.py."""
        self.num_drawn_by_ended += sequence.num_generated
        self.live.remove(sequence)

    def most_hit(self, num_tokens: int) -> int:
        """Of so many tokens, those that need not be computed if they are found: neither what is to be scored, since
        the scores of a token are computed with the one before it, nor the newest."""
        end = num_tokens if self.num_scored >= self.num_prompt else self.num_scored
        return end - 1

    @property
    def is_swapped(self) -> bool:
        return bool(self.live) and self.live[0].state is State.SWAPPED

    @property
    def has_followers(self) -> bool:
        return any(sequence.followers for sequence in self.live)

    def plan_end_of(self, sequence: Sequence) -> int:
        """How far planning may go before something is committed."""
        return sequence.limit if self.has_forked else min(sequence.limit, sequence.num_prompt)

    def indices(self) -> list[int]:
        """The choices that have not ended."""
        return [sequence.index for sequence in self.live] if self.has_forked else list(range(self.n))

    def interrupted(self) -> None:
        """The group left its rows in the middle of something. What was half heard is void."""

    def fork(self) -> list[Sequence]:
        """The one sequence becomes n, which share every block; each will append a draw of its own."""
        (parent,) = self.live
        if parent.num_planned != parent.num_computed:
            raise LawBroken(f"fork of {parent} with work in flight")
        sampling = parent.sampling
        self.has_forked, self.num_draws = True, 1
        for index in range(1, self.n):
            self.live.append(parent.fork(index, self.reserved_rows.pop()))
        parent.is_fresh = True
        for sequence in self.live:
            sequence.sampling = replace(sampling, choose=Draws(sequence.index, 1))
            sequence.plan_end = self.plan_end_of(sequence)
        return list(self.live)
