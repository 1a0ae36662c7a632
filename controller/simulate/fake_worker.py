"""The worker's contract, executable: as if each plan ran alone, in order.

A plan runs as swaps out, copies, swaps in, admits, and then all of its advances as one batch: every advance reads
what was there before the batch, and then all write. Whatever the contract forbids raises ContractBroken: a step out
of order, a table too short, an advance past the last known token, a block written by two rows or read by one and
written by another, a cell of somebody else's prefix.

    row    tokens  a b c d e          known: from the Admit, or drawn by the row itself
           chains  . . . .            of the positions computed; len(chains) == num_computed
           table   [7, 3]

The caller may ask for damage: rows that go bad (what they write from then on is not a number, and the row fails when
it next samples) and blocks that are lost (who reads one reports it, and the row is dead until its next Admit).

A grammar is its digest: rows may be admitted with those that were prepared and not forgotten since. One whose source
is UNPREPARABLE cannot be had.

What it does not know: which request a row serves, which blocks the controller calls free, and time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from kilburn.controller.simulate.cells import CellPool
from kilburn.controller.simulate.oracle import ROOT, candidates, mix, next_token
from kilburn.controller.simulate.plan_rules import ContractBroken, Limits, check_plan, demand
from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import (
    Admit,
    Forget,
    KvLost,
    Prepare,
    Prepared,
    PromptLogprobs,
    RowLogprobs,
    StepPlan,
    StepResult,
    Unpreparable,
)
from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.shared.types import Tier


@dataclass(slots=True)
class Row:
    """One life of a row."""

    tokens: list[int]  # known tokens, from position 0 on
    chains: list[int]  # of the positions that are computed
    num_prompt: int
    table: list[int]
    sampling: Sampling
    scored_from: int = 0  # of its prompt, where that is to be scored
    scores: list[list[tuple[int, float]]] = field(default_factory=list)  # of this step
    is_bad: bool = False  # what it writes is not a number
    awaits_admit: bool = False  # the core, not the row, chooses its next token
    failure: str = ""  # dead: the same outcome until the next Admit
    lost: list[tuple[Tier, int, int]] = field(default_factory=list)  # dead: (tier, block, step) of what was unreadable

    @property
    def num_computed(self) -> int:
        return len(self.chains)

    @property
    def is_dead(self) -> bool:
        return bool(self.failure or self.lost)

    def scored(self, start: int, end: int) -> range:
        """The prompt's positions whose scores come of computing [start, end): each with the position before it."""
        if self.sampling.prompt_logprobs < 0:
            return range(0)
        return range(max(start + 1, self.scored_from), min(end + 1, self.num_prompt))

    @property
    def chain(self) -> int:
        """Of all its tokens; meaningful where every one is computed."""
        return self.chains[-1]


UNPREPARABLE = b"nobody can follow this"

Chooser = Callable[[Row, int], int]  # (row, stream) -> the token after row.tokens


def by_oracle(vocab_size: int) -> Chooser:
    """Chooses as `oracle.finish` says."""

    def choose(row: Row, stream: int) -> int:
        return next_token(row.chain, row.sampling, stream, len(row.tokens), row.num_prompt, vocab_size)

    return choose


class FakeWorker:
    """One lease's worth of worker: pools, rows and the number of the next step."""

    def __init__(self, lease: int, limits: Limits, vocab_size: int, choose: Chooser | None = None) -> None:
        self.lease, self.limits, self.vocab_size = lease, limits, vocab_size
        self.choose = choose or by_oracle(vocab_size)
        self.next_step = 1
        self.rows: dict[int, Row] = {}
        self.pools = {
            Tier.DEVICE: CellPool(limits.num_blocks, limits.block_size),
            Tier.HOST: CellPool(limits.num_host_blocks, limits.block_size),
        }
        self.grammars: set[bytes] = set()
        self.came_up: dict[int, int] = {}  # in this plan: device block -> the host block that filled it

    def run(
        self,
        plan: StepPlan,
        bad_rows: Iterable[int] = (),
        lost_blocks: Iterable[int] = (),
        lost_host_blocks: Iterable[int] = (),
    ) -> StepResult:
        """Execute the next plan.

        `bad_rows` go bad in it; `lost_blocks` (device) become unreadable before its work, `lost_host_blocks` before
        its moves. Who reads what an unreadable host block filled in this plan reports the host block.
        """
        demand(plan.lease == self.lease, f"a plan of lease {plan.lease}, here is {self.lease}")
        demand(plan.step == self.next_step, f"step {plan.step}, expected {self.next_step}")
        check_plan(plan, self.limits)
        self.next_step += 1
        self.pools[Tier.HOST].lost.update(lost_host_blocks)
        self._move(plan)
        for admit in plan.admits:
            self.rows[admit.row] = self._admitted(admit)
        self._grow(plan)
        self.pools[Tier.DEVICE].lost.update(lost_blocks)
        batch = [self._row(row) for row in plan.rows]
        for number in bad_rows:
            self.rows[number].is_bad = True
        self._check_batch(batch, plan.counts)
        for row, count in zip(batch, plan.counts, strict=True):
            self._read(row, count, plan.step)
        for row, count in zip(batch, plan.counts, strict=True):
            self._write(row, count)
        return self._result(plan.step, batch, plan.counts)

    def prepare(self, asked: Prepare) -> Prepared | Unpreparable:
        """A grammar is compiled, between two plans."""
        verdict = self.verdict(asked)
        if isinstance(verdict, Prepared):
            self.grammars.add(asked.digest)
        return verdict

    def verdict(self, asked: Prepare) -> Prepared | Unpreparable:
        """What compiling it will show."""
        demand(asked.digest == sha256(asked.source).digest(), "a grammar has the digest of its source")
        if asked.source == UNPREPARABLE:
            return Unpreparable(asked.lease, asked.number, "it says nothing")
        return Prepared(asked.lease, asked.number)

    def forget(self, forgotten: Forget) -> None:
        self.grammars.discard(forgotten.digest)

    # --- before the batch

    def _move(self, plan: StepPlan) -> None:
        device, host = self.pools[Tier.DEVICE], self.pools[Tier.HOST]
        for source, destination in plan.swaps_out:
            host.copy_from(device, source, destination)
        for source, destination in plan.copies:
            device.copy_from(device, source, destination)
        self.came_up = {destination: source for source, destination in plan.swaps_in}
        for source, destination in plan.swaps_in:
            device.copy_from(host, source, destination)

    def _admitted(self, admit: Admit) -> Row:
        limits, num_known = self.limits, admit.start + len(admit.tokens)
        demand(admit.start >= 0, "a row starts at 0 or later")
        demand(len(admit.tokens) >= 1, "a row is admitted with at least one token to compute")
        demand(num_known <= limits.max_len, f"{num_known} tokens in a row of at most {limits.max_len}")
        demand(1 <= admit.num_prompt <= num_known, "all of the prompt is known when a row is admitted")
        demand(all(0 <= t < self.vocab_size for t in admit.tokens), "tokens are of the vocabulary")
        table = list(admit.blocks)
        demand(len(set(table)) == len(table), "no block is twice in a table")
        demand(len(table) >= blocks_for(admit.start, limits.block_size), "the table covers what is computed")
        demand(len(table) <= blocks_for(limits.max_len, limits.block_size), "no table is longer than a sequence can be")
        tokens, chains = self.pools[Tier.DEVICE].prefix(table, admit.start)
        grammar = admit.sampling.grammar
        demand(not grammar or grammar in self.grammars, "a row's grammar is prepared before the row is admitted")
        history = tokens if admit.sampling.needs_history else []
        demand(list(admit.history) == history, "history is the tokens before start, where the sampling needs it")
        row = Row(tokens + list(admit.tokens), chains, admit.num_prompt, table, admit.sampling, admit.scored_from)
        wanted = row.scored(0, num_known)
        demand(not wanted or admit.start < wanted.start, "what is to be scored is computed here")
        return row

    def _grow(self, plan: StepPlan) -> None:
        for at, block in zip(plan.grown_at, plan.grown_blocks, strict=True):
            row = self._row(plan.rows[at])
            demand(block not in row.table, f"block {block} is in the table of row {plan.rows[at]} already")
            row.table.append(block)

    def _row(self, number: int) -> Row:
        row = self.rows.get(number)
        if row is None:
            raise ContractBroken(f"row {number} advances before it was admitted")
        return row

    def _check_batch(self, batch: list[Row], counts: list[int]) -> None:
        """Each advance is possible, and no two touch one block if either writes it."""
        size = self.limits.block_size
        written: set[int] = set()
        read: list[set[int]] = []
        for row, count in zip(batch, counts, strict=True):
            start, end = row.num_computed, row.num_computed + count
            demand(not row.awaits_admit, "after several draws a row is admitted anew before it advances")
            if row.is_dead:
                continue
            demand(end <= len(row.tokens), f"an advance to {end} of {len(row.tokens)} known tokens")
            demand(end <= self.limits.max_len, f"an advance to {end} in a row of at most {self.limits.max_len}")
            demand(len(row.table) >= blocks_for(end, size), f"a table of {len(row.table)} blocks for {end} positions")
            writes = set(row.table[start // size : blocks_for(end, size)])
            demand(written.isdisjoint(writes), f"blocks {sorted(written & writes)} are written by two rows")
            written |= writes
            read.append(set(row.table[: blocks_for(start, size)]) - writes)
        for blocks in read:
            demand(written.isdisjoint(blocks), f"blocks {sorted(written & blocks)} are written while another row reads")

    # --- the batch

    def _read(self, row: Row, count: int, step: int) -> None:
        if row.is_dead:
            return
        pool = self.pools[Tier.DEVICE]
        lost = [b for b in row.table[: blocks_for(row.num_computed, pool.block_size)] if b in pool.lost]
        if lost:
            row.lost = [self._loss(block, step) for block in lost]
        elif not pool.read(row.table, row.chains, row.num_computed):
            row.is_bad = True
        end = row.num_computed + count
        if row.is_bad and not lost and (end == len(row.tokens) or row.scored(row.num_computed, end)):
            row.failure = "the logits are not numbers"

    def _loss(self, block: int, step: int) -> tuple[Tier, int, int]:
        source = self.came_up.get(block)
        if source is not None and source in self.pools[Tier.HOST].lost:
            return Tier.HOST, source, step
        return Tier.DEVICE, block, step

    def _write(self, row: Row, count: int) -> None:
        if row.is_dead:
            return
        pool, size = self.pools[Tier.DEVICE], self.limits.block_size
        chain = row.chains[-1] if row.chains else ROOT
        wanted, num_likely = row.scored(row.num_computed, row.num_computed + count), row.sampling.prompt_logprobs
        row.scores = []
        for position in range(row.num_computed, row.num_computed + count):
            token = row.tokens[position]
            chain = mix(chain, token)
            pool.write(row.table[position // size], position % size, chain, token, not row.is_bad)
            row.chains.append(chain)
            if position + 1 in wanted:
                row.scores.append(logprobs_of(chain, row.tokens[position + 1], num_likely, self.vocab_size))

    def _result(self, step: int, batch: list[Row], counts: list[int]) -> StepResult:
        result = StepResult(self.lease, step, [], [])
        lost: list[KvLost] = []
        logprobs: list[RowLogprobs] = []
        scored: list[PromptLogprobs] = []
        for index, (row, count) in enumerate(zip(batch, counts, strict=True)):
            if row.failure:
                result.failed[index] = row.failure
            lost.extend([KvLost(index, *entry) for entry in row.lost])
            if row.scores and not row.is_dead:
                scored.append(self._scored(row, index, count))
            samples = not row.is_dead and row.num_computed == len(row.tokens)
            tokens = self._draw(row, index, logprobs) if samples else []
            result.num_tokens.append(len(tokens))
            result.tokens.extend(tokens)
        result.lost, result.logprobs, result.prompt_logprobs = tuple(lost), tuple(logprobs), tuple(scored)
        return result

    def _scored(self, row: Row, index: int, count: int) -> PromptLogprobs:
        wanted = row.scored(row.num_computed - count, row.num_computed)
        entries = [entry for scores in row.scores for entry in scores]
        ranks = [rank_of(row.chains[position - 1], row.tokens[position], self.vocab_size) for position in wanted]
        columns = tuple([t for t, _ in entries]), tuple([w for _, w in entries]), tuple(ranks)
        return PromptLogprobs(index, wanted.start, 1 + row.sampling.prompt_logprobs, *columns)

    def _draw(self, row: Row, index: int, logprobs: list[RowLogprobs]) -> list[int]:
        match row.sampling.choose:
            case Candidates(count):
                row.awaits_admit = True
                likely = candidates(row.chain, count, self.vocab_size)
                ids, weights = tuple([t for t, _ in likely]), tuple([w for _, w in likely])
                logprobs.append(RowLogprobs(index, 1, ids, weights))
                return list(ids)
            case Draws(first, count):
                tokens = [self.choose(row, first + i) for i in range(count)]
        if row.sampling.logprobs >= 0:
            logprobs.append(self._likely(row, index, tokens))
        if len(tokens) == 1:
            row.tokens.append(tokens[0])
        else:
            row.awaits_admit = True
        return tokens

    def _likely(self, row: Row, index: int, tokens: list[int]) -> RowLogprobs:
        width = 1 + row.sampling.logprobs
        entries = [entry for token in tokens for entry in logprobs_of(row.chain, token, width - 1, self.vocab_size)]
        return RowLogprobs(index, width, tuple([t for t, _ in entries]), tuple([w for _, w in entries]))


def logprobs_of(chain: int, token: int, num_likely: int, vocab_size: int) -> list[tuple[int, float]]:
    """The drawn token and then the likeliest after the prefix with this chain; padded by the last if they run out."""
    likely = list(candidates(chain, num_likely, vocab_size))
    return [(token, -0.25), *likely, *likely[-1:] * (num_likely - len(likely))]


def rank_of(chain: int, token: int, vocab_size: int) -> int:
    """How many tokens are said to be as likely as this one after the prefix with this chain, or likelier."""
    return 1 + mix(chain, token) % vocab_size
