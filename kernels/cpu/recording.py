"""What a step asks of the CPU's kernels, recorded once, and asked for again as one launch (sequence.py), for any step.

A recording is a table: of every launch the words that it was asked for with. It can be replayed because nothing else
happens: between the launches stand views and new tensors without contents, and any other operation of torch ends the
recording with a RuntimeError that names it. Tensors that are made meanwhile get memory that stays (rooms.py), since its
addresses are in the words; what the step reads (inputs, weights, the pool) must stay where it is.

    recorded, for 512 tokens and 128 sequences            replayed, for 40 tokens of 3 sequences

    rms_norm   x, weight, out   512 rows   ...            rms_norm   x, weight, out    40 rows   ...
    panels     x, panels, out   512 rows   ...            panels     x, panels, out    40 rows   ...
    attention  q, kv, out       128 seqs   ...            attention  q, kv, out         3 seqs   ...

Rows lie one behind another whatever their number. So one recording, of the largest step, is that of every smaller one:
in each launch stands where its rows are counted. Nothing runs while it is made.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kilburn.kernels.cpu.arguments import (
    ARRIVALS,
    CUT,
    FAULT,
    GROUP,
    HEAD_DIM,
    MAX_ROWS,
    NUM_KV_HEADS,
    PIECES,
    S_FUNCTION,
    S_IN,
    S_OUT,
    WINDOW,
    Words,
    piece_bytes,
)
from kilburn.kernels.cpu.objects import Objects
from kilburn.kernels.cpu.rooms import Loans, Rooms, Scratch
from kilburn.kernels.cpu.team import TAPE, Fork, Tape, Team
from kilburn.kernels.observing import Observer

Counts = NDArray[np.int64]


class _Watch(Observer):
    """Lends memory to every tensor that is made, and refuses what a replay would not do."""

    def __init__(self, loans: Loans) -> None:
        super().__init__()
        self._loans = loans

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        is_view = bool(made) and all(leaf.untyped_storage().data_ptr() in given for leaf in made)
        if func._schema.name == "aten::empty":
            return self._loans.like(out)
        if func._schema.is_mutable or not is_view:
            raise RuntimeError(f"{func._schema.name} is no kernel of the CPU's set")
        return out


class Recorder:
    """Makes recordings that run on the threads of `fork`."""

    def __init__(self, fork: Fork, objects: Objects) -> None:
        self._team, self._sequence = Team(fork), objects.address("sequence", 0)

    def __call__(self, run: Callable[[], Tensor], num_tokens: int, num_seqs: int) -> "Recording":
        """What `run` asks for, for a step of so many tokens and sequences, which has run before at any size: nothing
        is compiled meanwhile. Raises RuntimeError."""
        tape, loans = Tape(torch.get_num_threads(), Scratch(is_recorded=True)), Loans()
        before = TAPE.set(tape)
        try:
            with _Watch(loans):
                out = run()
        finally:
            TAPE.reset(before)
        return Recording(tape, loans, out, (num_tokens, num_seqs), self._sequence, self._team)


class Recording:
    """A step that can be done again, with as many tokens and sequences or fewer."""

    def __init__(
        self, tape: Tape, loans: Loans, out: Tensor, sizes: tuple[int, int], sequence: int, team: Team
    ) -> None:
        self._tape, self._loans, self._out, self._sequence, self._team = tape, loans, out, sequence, team
        self._table = np.zeros((len(tape.launches), S_OUT + 1), np.int64)
        for row, launch in zip(self._table, tape.launches, strict=True):
            row[: len(launch.words) // 8] = np.frombuffer(launch.words, np.int64)
            row[S_FUNCTION] = launch.function
        self._rows_at = np.array([launch.rows_at for launch in tape.launches])
        self._attends = np.flatnonzero([launch.seqs_at for launch in tape.launches])
        self._seqs_at = np.array([tape.launches[i].seqs_at for i in self._attends], np.int64)
        recorded, self._launches = self._counted(), np.arange(len(tape.launches))
        self._per_token = recorded // sizes[0]
        if (recorded != self._per_token * sizes[0]).any() or not self._per_token.all():
            raise RuntimeError("a kernel's rows are not those of the step's tokens")
        self._rooms, self._words = Rooms(), Words(3, 0)
        self._addresses = self._table.ctypes.data, self._table.strides[0], len(self._table)

    def _counted(self) -> Counts:
        """The rows of each launch."""
        counted: Counts = self._table[np.arange(len(self._table)), self._rows_at]
        return counted

    @property
    def num_bytes(self) -> int:
        """Of the table, of what threads work in, and of the tensors that the step makes; what cut units leave is not
        among it, for contexts decide that."""
        return int(self._table.nbytes) + self._tape.scratch.num_bytes + self._loans.num_bytes

    def __call__(self, queries: Counts, contexts: Counts) -> Tensor:
        """The step of sequences with so many tokens and such contexts. Returns what it gives, a row a token."""
        num_tokens, table = int(queries.sum()), self._table
        table[:, : FAULT + 1] = table[:, S_IN:] = 0
        table[self._launches, self._rows_at] = self._per_token * num_tokens
        table[self._attends, self._seqs_at] = len(queries)
        self._place_cuts(queries, contexts)
        self._words.begin(*self._addresses)
        self._team.run(self._sequence, self._words, self._tape.num_threads)
        (fault,) = self._words.read(FAULT, FAULT + 1)
        if fault:
            raise ValueError(
                f"batch: a token, position, slot or block is out of bounds, by kernel {fault - 1} of a step; "
                "none of those after it ran"
            )
        return self._out[:num_tokens]

    def _place_cuts(self, queries: Counts, contexts: Counts) -> None:
        """Gives attention room for what the pieces of its units leave, by the layer that cuts most (`survey`)."""
        if not len(self._attends):
            return
        words = self._table[self._attends]
        kv_heads, group = words[:, NUM_KV_HEADS].max(), words[:, GROUP]
        first_cut = np.maximum(contexts - queries - words[:, WINDOW].max() + 1, 0) // CUT
        num_cuts = -(-contexts // CUT) - first_cut
        is_cut = (num_cuts > 1) & (queries <= max(MAX_ROWS // int(group.min()), 1))
        num_rows = int((queries * num_cuts)[is_cut].sum() * kv_heads * group.max())
        pieces = self._rooms.pieces.address(num_rows * piece_bytes(int(words[:, HEAD_DIM].max())))
        self._table[self._attends, PIECES] = pieces
        self._table[self._attends, ARRIVALS] = self._rooms.arrivals.address(8 * len(queries) * int(kv_heads))
