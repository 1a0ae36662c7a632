"""Steps on the CPU as one launch each: the host asks once, and threads go from kernel to kernel by themselves.

What a step asks for is recorded when a worker starts, at the largest that a plan may be (kernels/cpu/recording.py), and
serves every step, prompts as well as decodes. Inputs are the runner's persistent buffers; block tables are copied into
one that has full width, so that its rows stay as far apart as they were.

A model whose forward pass has operations of torch's own cannot be recorded. That costs speed and nothing else: a line
in the log says so, and steps are asked for kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kilburn.kernels.dispatch import Batch
from kilburn.worker.rows import Work

if TYPE_CHECKING:
    from kilburn.kernels.cpu.recording import Recorder, Recording
    from kilburn.worker.model_runner import Inputs

log = logging.getLogger("kilburn.worker")

Forward = Callable[[Tensor, Batch], Tensor]


@dataclass(slots=True)
class Replays:
    """The recorded step of one runner."""

    inputs: Inputs
    tables: Tensor  # int32 [most sequences, max_blocks]
    recording: Recording

    def takes(self, work: Work) -> bool:
        return work.num_seqs > 0

    def prepare(self, work: Work, max_context: int) -> tuple[Tensor, Batch]:
        rows, width = work.tables.shape
        ids, batch = self.inputs.ids.fill(work.ids), self.inputs.batch(work)
        self.tables[:rows, :width].copy_(batch.tables)
        return ids, replace(batch, tables=self.tables[:rows], max_context=max_context)

    def run(self, work: Work) -> Tensor:
        """Hidden states [num_tokens, hidden] of what was prepared. They hold until the next step."""
        return self.recording(np.diff(work.query_start), work.context_len)


def recorded_step(
    inputs: Inputs, max_rows: int, max_step_tokens: int, max_blocks: int, forward: Forward, recorder: Recorder
) -> Replays | None:
    """A step of at most so many sequences and tokens; None where it cannot be recorded, and the log says why."""
    tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32)

    def run(num_tokens: int, num_seqs: int) -> Tensor:
        """A step of nothing but padding, which writes nothing."""
        none = np.zeros(num_tokens, np.int64)
        batch = Batch(
            query_start=inputs.query_start.fill(np.arange(num_seqs + 1)),
            context_len=inputs.context_len.fill(np.zeros(num_seqs, np.int64)),
            tables=tables[:num_seqs],
            positions=inputs.positions.fill(none),
            slots=inputs.slots.fill(none - 1),
            max_query=num_tokens,
            max_context=0,
        )
        return forward(inputs.ids.fill(none), batch)

    try:
        run(1, 1)  # what is compiled or laid out at its first use
        recording = recorder(lambda: run(max_step_tokens, max_rows), max_step_tokens, max_rows)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        log.warning("steps cannot be recorded, and so each kernel is asked for by itself: %s", reason)
        return None
    return Replays(inputs, tables, recording)
