"""What a step asks of the CPU's kernels, recorded once, and asked for again as one launch (sequence.py).

A recording is a table: of every launch the words that it was made with. It can be replayed because nothing else
happened: between the launches stand views and new tensors without contents, and any other operation of torch ends the
recording with a RuntimeError that names it. Tensors that were made meanwhile are kept, since their addresses are in the
words; what the step reads (inputs, weights, the pool) must stay where it is.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kilburn.kernels.cpu.arguments import FAULT, S_FUNCTION, S_IN, S_OUT, Words
from kilburn.kernels.cpu.objects import Objects
from kilburn.kernels.cpu.team import TAPE, Fork, Tape, Team

Run = Callable[[], Tensor]


class _Watch(TorchDispatchMode):
    """Keeps every tensor that is made, and refuses what a replay would not do."""

    def __init__(self, held: list[object]) -> None:
        super().__init__()
        self._held = held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        is_view = all(leaf.untyped_storage().data_ptr() in given for leaf in made)
        if func._schema.is_mutable or not (is_view or func._schema.name == "aten::empty"):
            raise RuntimeError(f"{func._schema.name} is no kernel of the CPU's set")
        self._held.extend(made)
        return out


class Recorder:
    """Makes recordings that run on the threads of `fork`."""

    def __init__(self, fork: Fork, objects: Objects) -> None:
        self._fork, self._objects = fork, objects

    def __call__(self, run: Run) -> Run:
        """Runs `run`; returns what does the same again, and returns the same tensor. Raises RuntimeError."""
        run()  # what is compiled or laid out at its first use
        tape = Tape()
        before = TAPE.set(tape)
        try:
            with _Watch(tape.held):
                out = run()
        finally:
            TAPE.reset(before)
        return Recording(tape, out, self._objects.address("sequence", 0), self._fork)


class Recording:
    """A step that can be done again."""

    def __init__(self, tape: Tape, out: Tensor, sequence: int, fork: Fork) -> None:
        self._tape, self._out, self._sequence, self._team = tape, out, sequence, Team(fork)
        self._table = np.zeros((len(tape.launches), S_OUT + 1), np.int64)
        for row, (function, words) in zip(self._table, tape.launches, strict=True):
            row[: len(words) // 8] = np.frombuffer(words, np.int64)
            row[S_FUNCTION] = function
        self._words = Words(3, 0)
        self._addresses = self._table.ctypes.data, self._table.strides[0], len(self._table)

    def __call__(self) -> Tensor:
        self._table[:, : FAULT + 1] = self._table[:, S_IN:] = 0
        self._words.begin(*self._addresses)
        self._team.run(self._sequence, self._words, torch.get_num_threads())
        (fault,) = self._words.read(FAULT, FAULT + 1)
        if fault:
            raise ValueError(
                f"batch: a token, position, slot or block is out of bounds, by kernel {fault - 1} of a step"
            )
        return self._out
