"""A worker small enough to be believed.

It keeps, in each KV cell, the tokens up to and including that position. So the next token can be a function of the
whole text before it, and whoever reads a cell that is not his own, or not yet written, is found out at once. Plans run
when their results are asked for, one after the other, which is what the contract says a worker looks like.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kilburn.controller.simulate.oracle import candidates, chain_of
from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import Admit, Hello, KvLost, RowLogprobs, StepPlan, StepResult, Timings
from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.shared.types import Tier

VOCAB_SIZE = 1000
MODEL = b"m" * 32
Choose = Callable[[tuple[int, ...], int], int]
Likely = Callable[[tuple[int, ...], int], list[tuple[int, float]]]


def draw(text: tuple[int, ...], stream: int) -> int:
    """The next token: some function of everything before it and of the stream."""
    total = 97 * stream + 13 * len(text)
    for token in text:
        total = (31 * total + token) % 1_000_003
    return total % VOCAB_SIZE


def likeliest(text: tuple[int, ...], count: int) -> list[tuple[int, float]]:
    """The likeliest next tokens, with log probabilities."""
    return list(candidates(chain_of(text), count, VOCAB_SIZE))


def hello(
    name: str = "w",
    num_blocks: int = 64,
    block_size: int = 4,
    max_rows: int = 8,
    max_step_tokens: int = 64,
    max_len: int = 256,
    model: bytes = MODEL,
    num_host_blocks: int = 0,
) -> Hello:
    layout = KVLayout(block_size, num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32")
    return Hello(name, model, layout, num_blocks, num_host_blocks, max_rows, max_step_tokens, max_len, VOCAB_SIZE)


Cells = dict[tuple[int, int], tuple[int, ...]]  # (block, slot) -> the text up to there


@dataclass
class Row:
    tokens: list[int]
    num_computed: int
    num_prompt: int
    table: list[int]
    sampling: Sampling
    failure: str = ""


class Worker:
    """Runs plans, one at a time, when asked to."""

    def __init__(self, peer: bytes, hello: Hello, lease: int, choose: Choose) -> None:
        self.peer, self.hello, self.lease, self.choose = peer, hello, lease, choose
        self.plans: deque[StepPlan] = deque()  # sent, and not run
        self.seen: list[StepPlan] = []  # every plan of the lease
        self.rows: dict[int, Row] = {}
        self.cells: Cells = {}
        self.bad_blocks: set[int] = set()  # unreadable from now on, until written anew from their first slot
        self.bad_rows: set[int] = set()
        self.host_cells: Cells = {}
        self.bad_host_blocks: set[int] = set()
        self.likely: Likely = likeliest
        self.move_s = self.token_s = 0.0  # what a block moved and a position computed are said to take

    def filled(self, block: int) -> int:
        return sum((block, slot) in self.cells for slot in range(self.hello.layout.block_size))

    def receive(self, plan: StepPlan) -> None:
        assert plan.lease == self.lease
        assert plan.step == len(self.seen) + 1, "steps count from 1, without gaps"
        assert len(plan.rows) == len(plan.counts)
        assert plan.rows or plan.swaps_out or plan.swaps_in
        assert sum(plan.counts) <= self.hello.max_step_tokens
        assert len(set(plan.rows)) == len(plan.rows), "a row advances once in a plan"
        destinations = [destination for _, destination in (*plan.copies, *plan.swaps_in)]
        assert len(set(destinations)) == len(destinations), "no block is the destination of two moves"
        assert not set(destinations) & {source for source, _ in (*plan.copies, *plan.swaps_out)}
        assert not {host for _, host in plan.swaps_out} & {host for host, _ in plan.swaps_in}
        self.seen.append(plan)
        self.plans.append(plan)

    def run_next(self) -> StepResult:
        """The oldest plan, as if it ran alone."""
        plan = self.plans.popleft()
        for source, destination in plan.swaps_out:
            self._move(self.cells, source, self.host_cells, destination)
        for source, destination in plan.copies:
            self._move(self.cells, source, self.cells, destination)
        for source, destination in plan.swaps_in:
            self._move(self.host_cells, source, self.cells, destination)
            if source in self.bad_host_blocks:
                self.bad_blocks.add(destination)
        for admit in plan.admits:
            self._admit(admit)
        for at, block in zip(plan.grown_at, plan.grown_blocks, strict=True):
            self.rows[plan.rows[at]].table.append(block)
        result = StepResult(plan.lease, plan.step, [], [])
        for index, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            drawn = self._advance(index, self.rows[row], row, count, result)
            result.num_tokens.append(len(drawn))
            result.tokens.extend(drawn)
        num_moved = len(plan.swaps_out) + len(plan.swaps_in)
        result.timings = Timings(forward_s=self.token_s * sum(plan.counts), moves_s=self.move_s * num_moved)
        return result

    def _move(self, of: Cells, source: int, to: Cells, destination: int) -> None:
        for slot in range(self.hello.layout.block_size):
            to.pop((destination, slot), None)
            if (source, slot) in of:
                to[destination, slot] = of[source, slot]

    def _admit(self, admit: Admit) -> None:
        size = self.hello.layout.block_size
        before: tuple[int, ...] = ()
        if admit.start:
            last = admit.start - 1
            before = self.cells[admit.blocks[last // size], last % size]
            assert len(before) == admit.start
        assert admit.tokens, "a life begins with something to compute"
        assert admit.history == (before if admit.sampling.needs_history else ())
        assert len(set(admit.blocks)) == len(admit.blocks)
        self.rows[admit.row] = Row(
            [*before, *admit.tokens], admit.start, admit.num_prompt, list(admit.blocks), admit.sampling
        )

    def _advance(self, index: int, row: Row, number: int, count: int, result: StepResult) -> list[int]:
        size = self.hello.layout.block_size
        lost = [block for block in row.table[: -(-row.num_computed // size)] if block in self.bad_blocks]
        if lost:
            entries = [KvLost(index, Tier.DEVICE, block, result.step) for block in lost]
            result.lost = (*result.lost, *entries)
            return []
        if number in self.bad_rows or row.failure:
            row.failure = row.failure or "not finite"
            self.bad_rows.discard(number)
            result.failed[index] = row.failure
            return []
        start, end = row.num_computed, row.num_computed + count
        assert end <= len(row.tokens), "a plan names a token that nobody knows yet"
        assert end <= len(row.table) * size, "a plan writes beyond its row's table"
        for position in range(start):
            cell = self.cells.get((row.table[position // size], position % size))
            assert cell == tuple(row.tokens[: position + 1]), f"a foreign or stale cell at position {position}"
        for position in range(start, end):
            block, slot = row.table[position // size], position % size
            if slot == 0:  # a block that begins anew
                self.bad_blocks.discard(block)
                for old in range(size):
                    self.cells.pop((block, old), None)
            self.cells[block, slot] = tuple(row.tokens[: position + 1])
        row.num_computed = end
        if end < len(row.tokens):
            return []
        if isinstance(row.sampling.choose, Candidates):
            likely = self.likely(tuple(row.tokens), row.sampling.choose.count)
            found, logprobs = tuple(token for token, _ in likely), tuple(logprob for _, logprob in likely)
            result.logprobs = (*result.logprobs, RowLogprobs(index, 1, found, logprobs))
            return list(found)
        assert isinstance(row.sampling.choose, Draws)
        first, num_draws = row.sampling.choose.first_stream, row.sampling.choose.count
        drawn = [self.choose(tuple(row.tokens), stream) for stream in range(first, first + num_draws)]
        if num_draws == 1:
            row.tokens.append(drawn[0])
        return drawn
