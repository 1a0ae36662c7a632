"""The rows: where each running sequence stands, kept from step to step.

A row is two numbers and three stretches of memory:

    tokens[row]      t t t t t t t t t t . . .        known tokens; before `start` only where the sampling needs them
                     [computed )[ to do )             num_computed <= num_known
    tables[row]      7 3 12                           blocks; the KV of position p lies in slot
                                                      tables[row, p // block_size] * block_size + p % block_size
    knobs            how the row chooses (knobs.py)

An Advance computes the next `count` positions and never passes num_known. Where it reaches num_known the row draws, the
draw becomes a known token, and the next Advance has something to compute: prefill, chunk and decode are one sentence.
A row that drew more than one token, or candidates, learns nothing from it, so that it has nothing left to advance over
until its next Admit.

A life ends early by a death: what befell this row, and no other. Until the next Admit its Advances compute nothing and
give the same outcome.

All of it is numpy on the host, indexed by row, so that a step's inputs are a few gathers whatever the batch. Nothing
here knows a model, a tensor or a socket. A plan that names what cannot be raises `PlanBroken`; what only one request
got wrong (a token beyond the vocabulary) is that row's death.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import Admit
from kilburn.worker.knobs import Knobs, fault_of
from kilburn.worker.outcomes import Death, Failed, PlanBroken

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What Hello promised."""

    max_rows: int
    max_step_tokens: int
    max_len: int
    block_size: int
    num_blocks: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a batch whose hidden states tell how likely the next ones of their prompt are."""

    seq: int  # place in the Work
    start: int  # the first of them among the batch's tokens
    position: int  # of the first token that is scored: one behind that of the hidden state
    tokens: Ints  # that are scored, one for each state


@dataclass(slots=True)
class Work:
    """One ragged batch on the host: sequence s is the Advance at index[s] and has tokens [query_start[s], ...)."""

    index: Ints  # [num_seqs] place in the plan
    rows: Ints  # [num_seqs]
    query_start: Ints  # [num_seqs + 1]
    context_len: Ints  # [num_seqs] positions with KV once this step is written
    samples: NDArray[np.bool_]  # [num_seqs] whether it reached the end of its known tokens
    ids: NDArray[np.int32]  # [num_tokens]
    positions: Ints  # [num_tokens]
    slots: Ints  # [num_tokens]
    tables: NDArray[np.int32]  # [num_seqs, blocks of the longest]
    max_query: int
    max_context: int
    spans: tuple[Span, ...] = ()  # of prompts that are scored

    @property
    def num_seqs(self) -> int:
        return len(self.rows)


class Rows:
    """Persistent state of up to `limits.max_rows` sequences."""

    def __init__(self, limits: Limits, knobs: Knobs) -> None:
        self.limits, self.knobs = limits, knobs
        rows = limits.max_rows
        self.max_blocks = blocks_for(limits.max_len, limits.block_size)
        # One column more than max_len: what follows a sequence of full length is drawn, and thrown away by the core.
        # Zeroed memory costs no pages until a row reaches it.
        self.tokens = np.zeros((rows, limits.max_len + 1), np.int32)
        self.tables = np.zeros((rows, self.max_blocks), np.int32)
        self.num_computed = np.zeros(rows, np.int64)
        self.num_known = np.zeros(rows, np.int64)
        self.num_prompt = np.zeros(rows, np.int64)
        self.num_blocks = np.zeros(rows, np.int64)
        self.is_admitted = np.zeros(rows, np.bool_)
        self.deaths: dict[int, Death] = {}
        self.scored_from: dict[int, int] = {}  # rows whose prompts are scored: from which position on

    def clear(self) -> None:
        """The lease is over: no row is admitted any more."""
        self.is_admitted[:] = False
        self.deaths.clear()
        self.scored_from.clear()
        self.knobs.clear()

    # --- deltas

    def admit(self, admit: Admit) -> None:
        """A row begins a life. Raises PlanBroken."""
        row, start, num_known = admit.row, admit.start, admit.start + len(admit.tokens)
        _check_admit(admit, self.limits, self.max_blocks)
        self.is_admitted[row] = True
        self.deaths.pop(row, None)
        self.scored_from.pop(row, None)
        if admit.sampling.prompt_logprobs >= 0 and admit.scored_from < admit.num_prompt:
            self.scored_from[row] = max(admit.scored_from, 1)  # nothing tells how likely a first token is
        self.num_computed[row], self.num_known[row], self.num_prompt[row] = start, num_known, admit.num_prompt
        self.num_blocks[row] = len(admit.blocks)
        self.tables[row, : len(admit.blocks)] = admit.blocks
        self.tokens[row, start:num_known] = admit.tokens
        needs_history = admit.sampling.needs_history
        if needs_history:
            self.tokens[row, :start] = admit.history
        known = self.tokens[row, (0 if needs_history else start) : num_known]
        fault = fault_of(admit.sampling, self.limits.vocab_size)
        if fault is None and int(known.max()) >= self.limits.vocab_size:
            fault = f"token {int(known.max())} is beyond the vocabulary of {self.limits.vocab_size}"
        if fault is not None:
            self.kill(row, Failed(fault))
            return
        self.knobs.set(row, admit.sampling, known, admit.num_prompt)

    def kill(self, row: int, death: Death) -> None:
        """From now on the row's Advances compute nothing. A first death stands."""
        self.deaths.setdefault(row, death)

    def advance(self, rows: list[int], counts: list[int], grown_at: list[int], grown_blocks: list[int]) -> Work:
        """Grow the tables, move every living row on by its count, and say what to compute. Raises PlanBroken."""
        row, count = np.array(rows, np.int64), np.array(counts, np.int64)
        self._check_rows(row)
        dead = self.deaths
        for at, block in zip(grown_at, grown_blocks, strict=True):
            if rows[at] not in dead:
                self._grow(rows[at], block)
        if dead:
            index = np.array([i for i, r in enumerate(rows) if r not in dead], np.int64)
            row, count = row[index], count[index]
        else:
            index = np.arange(len(row))
        start = self.num_computed[row]
        end = start + count
        self._check_reach(row, start, end)
        self.num_computed[row] = end
        return self._work(index, row, start, end)

    def learn(self, rows: Ints, tokens: Ints) -> None:
        """Rows that feed their own draw drew these tokens."""
        position = self.num_known[rows]
        self.tokens[rows, position] = tokens
        self.num_known[rows] = position + 1
        self.knobs.count(rows, tokens)

    # --- what a plan may say

    def _check_rows(self, row: Ints) -> None:
        if not len(row):
            return
        limits = self.limits
        if int(row.max()) >= limits.max_rows or int(row.min()) < 0:
            raise PlanBroken(f"an Advance of row {int(row.max())}: there are {limits.max_rows}")
        if not self.is_admitted[row].all():
            raise PlanBroken(f"an Advance of row {int(row[~self.is_admitted[row]][0])}, which was never admitted")
        if np.bincount(row).max() > 1:
            raise PlanBroken(f"two Advances of row {int(np.bincount(row).argmax())} in one plan")

    def _grow(self, row: int, block: int) -> None:
        if not 0 <= block < self.limits.num_blocks:
            raise PlanBroken(f"row {row} grows by block {block}: the pool has {self.limits.num_blocks}")
        place = int(self.num_blocks[row])
        if place >= self.max_blocks:
            raise PlanBroken(f"the table of row {row} grows beyond {self.max_blocks} blocks")
        self.tables[row, place] = block
        self.num_blocks[row] = place + 1

    def _check_reach(self, row: Ints, start: Ints, end: Ints) -> None:
        if not len(row):
            return
        total = int((end - start).sum())
        if total > self.limits.max_step_tokens:
            raise PlanBroken(f"a plan of {total} positions: max_step_tokens is {self.limits.max_step_tokens}")
        if int((end - start).min()) < 1:
            raise PlanBroken(f"row {int(row[(end - start).argmin()])} advances by nothing")
        if int(end.max()) > self.limits.max_len:
            raise PlanBroken(
                f"row {int(row[end.argmax()])} advances to {int(end.max())}: max_len is {self.limits.max_len}"
            )
        beyond = end > self.num_known[row]
        if beyond.any():
            raise PlanBroken(self._beyond_known(int(row[beyond][0]), int(end[beyond][0])))
        homeless = end > self.num_blocks[row] * self.limits.block_size
        if homeless.any():
            which = int(row[homeless][0])
            raise PlanBroken(
                f"row {which} advances to {int(end[homeless][0])}: its {int(self.num_blocks[which])} blocks end before"
            )

    def _beyond_known(self, row: int, end: int) -> str:
        known = int(self.num_known[row])
        if self.num_computed[row] == known and not self.knobs.feeds_itself[row]:
            return f"an Advance of row {row}, which returned its draws and awaits an Admit"
        return f"row {row} advances to {end}, beyond its {known} known tokens"

    # --- the batch

    def _work(self, index: Ints, row: Ints, start: Ints, end: Ints) -> Work:
        """Positions, slots and tokens of the advances [start, end), by a few gathers."""
        count = end - start
        query_start = np.zeros(len(row) + 1, np.int64)
        np.cumsum(count, out=query_start[1:])
        max_query = int(count.max(initial=0))
        if max_query <= 1:
            token_row, positions = row, start
        else:
            token_row = np.repeat(row, count)
            positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - start, count)
        block_size = self.limits.block_size
        if block_size & (block_size - 1) == 0:  # a mask and a shift cost a tenth of a division
            place, offset = positions >> (block_size.bit_length() - 1), positions & (block_size - 1)
        else:
            place, offset = np.divmod(positions, block_size)
        max_context = int(end.max(initial=0))
        spans = self._spans(row.tolist(), start.tolist(), end.tolist(), query_start) if self.scored_from else ()
        return Work(
            index=index,
            rows=row,
            query_start=query_start,
            context_len=end,
            samples=end == self.num_known[row],
            ids=self.tokens[token_row, positions],
            positions=positions,
            slots=self.tables[token_row, place].astype(np.int64) * block_size + offset,
            tables=self.tables[row, : blocks_for(max_context, block_size)],
            max_query=max_query,
            max_context=max_context,
            spans=spans,
        )

    def _spans(self, rows: list[int], starts: list[int], ends: list[int], query_start: Ints) -> tuple[Span, ...]:
        """What the advances [start, end) tell of prompts: of each position, how likely the one behind it is."""
        spans: list[Span] = []
        for seq, (row, start, end) in enumerate(zip(rows, starts, ends, strict=True)):
            num_prompt = int(self.num_prompt[row])
            first = max(start + 1, self.scored_from.get(row, num_prompt))
            last = min(end + 1, num_prompt)
            if first < last:
                tokens = self.tokens[row, first:last].astype(np.int64)
                spans.append(Span(seq, int(query_start[seq]) + first - 1 - start, first, tokens))
        return tuple(spans)


def _check_admit(admit: Admit, limits: Limits, max_blocks: int) -> None:
    def broken(what: str) -> PlanBroken:
        return PlanBroken(f"Admit of row {admit.row}: {what}")

    if not 0 <= admit.row < limits.max_rows:
        raise broken(f"there are {limits.max_rows} rows")
    if not admit.tokens:
        raise broken("no tokens")
    num_known = admit.start + len(admit.tokens)
    if num_known > limits.max_len:
        raise broken(f"{num_known} tokens, max_len is {limits.max_len}")
    if len(admit.blocks) > max_blocks:
        raise broken(f"a table of {len(admit.blocks)} blocks, max_len fills {max_blocks}")
    if admit.blocks and not 0 <= min(admit.blocks) <= max(admit.blocks) < limits.num_blocks:
        raise broken(f"block {max(admit.blocks)}, the pool has {limits.num_blocks}")
    if admit.start > len(admit.blocks) * limits.block_size:
        raise broken(f"{admit.start} positions are computed, its {len(admit.blocks)} blocks do not hold them")
    if admit.sampling.needs_history and len(admit.history) != admit.start:
        raise broken(f"its penalties need {admit.start} tokens of history, {len(admit.history)} came")
