"""What a step asks of the CPU's kernels, recorded once, and asked for again as one launch (sequence.py).

A recording is a table: of every launch the words that it was made with. It can be replayed because nothing else
happened: between the launches stand views and new tensors without contents, and any other operation of torch ends the
recording with a RuntimeError that names it. Tensors that are made meanwhile get memory that stays (rooms.py), since its
addresses are in the words; what the step reads (inputs, weights, the pool) must stay where it is.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kilburn.kernels.cpu.arguments import FAULT, S_FUNCTION, S_IN, S_OUT, Words
from kilburn.kernels.cpu.objects import Objects
from kilburn.kernels.cpu.rooms import Loans, Rooms
from kilburn.kernels.cpu.team import TAPE, Fork, Tape, Team
from kilburn.kernels.observing import Observer

Run = Callable[[], Tensor]


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
    """Makes recordings that run on the threads of `fork`, one at a time, and share memory."""

    def __init__(self, fork: Fork, objects: Objects) -> None:
        self._team, self._sequence = Team(fork), objects.address("sequence", 0)
        self._rooms, self._loans, self._table_bytes = Rooms(is_recorded=True), Loans(), 0

    @property
    def num_bytes(self) -> int:
        """Of everything that recordings hold."""
        return self._rooms.num_bytes + self._loans.num_bytes + self._table_bytes

    def __call__(self, run: Run) -> Run:
        """Runs `run`; returns what does the same again, and returns the same tensor. Raises RuntimeError."""
        run()  # what is compiled or laid out at its first use
        tape = Tape(torch.get_num_threads(), self._rooms)
        before = TAPE.set(tape)
        try:
            with _Watch(self._loans):
                out = run()
        finally:
            TAPE.reset(before)
        recording = Recording(tape, self._loans, out, self._sequence, self._team)
        self._table_bytes += recording.table_bytes
        return recording


class Recording:
    """A step that can be done again."""

    def __init__(self, tape: Tape, loans: Loans, out: Tensor, sequence: int, team: Team) -> None:
        self._held = tape.rooms, loans
        self._num_threads, self._out, self._sequence, self._team = tape.num_threads, out, sequence, team
        self._table = np.zeros((len(tape.launches), S_OUT + 1), np.int64)
        for row, (function, words) in zip(self._table, tape.launches, strict=True):
            row[: len(words) // 8] = np.frombuffer(words, np.int64)
            row[S_FUNCTION] = function
        self._words = Words(3, 0)
        self._addresses = self._table.ctypes.data, self._table.strides[0], len(self._table)

    @property
    def table_bytes(self) -> int:
        return int(self._table.nbytes)

    def __call__(self) -> Tensor:
        self._table[:, : FAULT + 1] = self._table[:, S_IN:] = 0
        self._words.begin(*self._addresses)
        self._team.run(self._sequence, self._words, self._num_threads)
        (fault,) = self._words.read(FAULT, FAULT + 1)
        if fault:
            raise ValueError(
                f"batch: a token, position, slot or block is out of bounds, by kernel {fault - 1} of a step; "
                "none of those after it ran"
            )
        return self._out
