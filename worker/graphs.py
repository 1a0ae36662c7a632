"""Decode as one recorded graph: hundreds of launches that the host asks for with one call, on a GPU.

    a decode of n rows          n = 5                           the graph recorded for the next size, 8
    ids, positions              t t t t t                       t t t t t 0 0 0
    slots                       s s s s s                       s s s s s -1 -1 -1      padding writes nothing ...
    context_len                 c c c c c                       c c c c c 0 0 0         ... and reads nothing
    query_start                 0 1 2 3 4 5                     0 1 2 3 4 5 6 7 8
    tables                      [5, blocks of the longest]      [8, max_blocks], always at the same place

A graph replays addresses, not arguments: the inputs are the runner's persistent buffers, and the tables are copied into
one of full width. What the host knows and a graph cannot (max_query, max_context) is recorded at its largest. Hidden
states are the graph's own and hold until its next replay, which is the next step's.

Sizes are recorded at the start, the largest first, so that the smaller ones live in the memory that it needed. What
cannot be recorded (a model's operation that waits for the device, memory that is not there) costs speed and nothing
else: the first size that fails is told in one line of the log, and decodes are asked for launch by launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from kilburn.kernels.dispatch import Batch
from kilburn.worker.rows import Work

if TYPE_CHECKING:
    from kilburn.worker.model_runner import Inputs

log = logging.getLogger("kilburn.worker")

Forward = Callable[[Tensor, Batch], Tensor]
Replay = Callable[[], Tensor]


class Record(Protocol):
    """Runs `run` once and returns what does the same again, reading the same memory, and returns the same tensor."""

    def __call__(self, run: Replay) -> Replay: ...


def recorder_for(device: torch.device) -> Record:
    """Records with the graphs of the CUDA runtime, all in one pool of memory."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(run: Replay) -> Replay:
        with torch.cuda.stream(stream):  # compiles and loads what a recording may not
            stream.wait_stream(torch.cuda.default_stream(device))
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return record


def padded(work: Work, size: int) -> Work:
    """The decode with rows of no sequence behind it, `size` in all. Its tables stay as they are."""
    more = size - work.num_seqs

    def longer(values: np.ndarray, by: int) -> np.ndarray:
        return np.concatenate([values, np.full(more, by, values.dtype)])

    return replace(
        work,
        query_start=np.arange(size + 1),
        context_len=longer(work.context_len, 0),
        ids=longer(work.ids, 0),
        positions=longer(work.positions, 0),
        slots=longer(work.slots, -1),
    )


@dataclass(slots=True)
class Graphs:
    """The recorded sizes of one runner."""

    inputs: Inputs
    tables: Tensor  # int32 [largest size, max_blocks]
    sizes: list[int]
    replays: dict[int, Replay]

    def takes(self, work: Work) -> bool:
        return work.max_query == 1 and 0 < work.num_seqs <= self.sizes[-1]

    def size_of(self, work: Work) -> int:
        return next(size for size in self.sizes if size >= work.num_seqs)

    def prepare(self, work: Work, max_context: int) -> tuple[Tensor, Batch]:
        """The padded inputs. The rows of the tables that belong to padding are not read, and keep what they held."""
        inputs, size = self.inputs, self.size_of(work)
        whole = padded(work, size)
        rows, width = work.tables.shape
        if rows:
            self.tables[:rows, :width].copy_(inputs.tables.fill(work.tables))
        batch = Batch(
            query_start=inputs.query_start.fill(whole.query_start),
            context_len=inputs.context_len.fill(whole.context_len),
            tables=self.tables[:size],
            positions=inputs.positions.fill(whole.positions),
            slots=inputs.slots.fill(whole.slots),
            max_query=1,
            max_context=max_context,
        )
        return inputs.ids.fill(whole.ids), batch

    def run(self, work: Work) -> Tensor:
        """Hidden states [num_seqs, hidden] of what was prepared."""
        return self.replays[self.size_of(work)]()[: work.num_seqs]


def recorded(
    inputs: Inputs, sizes: list[int], max_blocks: int, max_len: int, forward: Forward, record: Record
) -> Graphs | None:
    """Every size, recorded with nothing but padding; None where one cannot be, and the log says why.

    `forward` must do the same work whatever the inputs hold.
    """
    tables = torch.zeros((sizes[-1], max_blocks), dtype=torch.int32, device=inputs.ids.device)
    graphs = Graphs(inputs, tables, sizes, {})
    for size in reversed(sizes):
        ids, batch = graphs.prepare(_nothing(size), max_len)

        def run(ids: Tensor = ids, batch: Batch = batch) -> Tensor:
            return forward(ids, batch)

        try:
            graphs.replays[size] = record(run)
        except (RuntimeError, MemoryError) as error:  # of the first kind are torch's own errors, CUDA's too
            reason = str(error).partition("\n")[0]
            log.warning("decodes of %d rows cannot be recorded as a graph, and so none are: %s", size, reason)
            return None
    return graphs


def _nothing(size: int) -> Work:
    """`size` rows of padding, as a decode."""
    none = np.zeros(size, np.int64)
    return Work(
        index=none,
        rows=none,
        query_start=np.arange(size + 1),
        context_len=none,
        samples=np.zeros(size, np.bool_),
        ids=np.zeros(size, np.int32),
        positions=none,
        slots=none - 1,
        tables=np.zeros((0, 0), np.int32),
        max_query=1,
        max_context=0,
    )
