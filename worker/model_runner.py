"""From a step's work to hidden states and tokens: the one place where rows, model, kernels and sampler meet.

    Work (numpy, host) -> Inputs (persistent buffers, device) -> Batch -> model.forward -> hidden [T, hidden]
                                                                             | rows that reached their known end
                                                                             v
                                                                     model.logits -> sampler.choose

Buffers are made once, at the largest size that a plan may have, and filled anew for each step: on the CPU the model
reads the very memory that was filled, a device with memory of its own gets one copy per buffer from pinned memory. A
step is over when its tokens are on the host, so that no buffer is filled while it is still read.

A row whose hidden states are not finite has failed, whether or not it samples. Every row has its own outcome; no row's
numbers touch another's. Of several ranks the first samples, and tells the others what came of it.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilburn.kernels.dispatch import Batch, Kernels, Scales, can_capture, recorder_of
from kilburn.shared.ledger import logits_rows, recorded_sizes
from kilburn.shared.messages import PromptLogprobs
from kilburn.worker.graphs import Graphs, Record, recorded, recorder_for
from kilburn.worker.kv_cache import KVCache, has_own_memory
from kilburn.worker.parallel import Ranks
from kilburn.worker.replays import Replays, recorded_step
from kilburn.worker.rows import Ints, Limits, Rows, Work
from kilburn.worker.sampler import Chosen, choose, heard, score, told

HIDDEN_NOT_FINITE = "the model's hidden states are not finite"


class Model(Protocol):
    """What a model is to the runner."""

    def forward(self, ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels, scales: Scales) -> Tensor:
        """Writes the KV of the batch into the pool. ids int64 [T]; returns hidden states [T, hidden].

        `scales` are those of a pool of 8 bits, one tensor a layer.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden]; returns float32 [R, vocabulary]."""


class Buffer:
    """Memory of a fixed capacity that is filled on the host and read on the device."""

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        is_apart = has_own_memory(device)
        self._host = torch.zeros(capacity, dtype=dtype, pin_memory=is_apart)
        self._values = self._host.numpy()
        self._device = torch.zeros(capacity, dtype=dtype, device=device) if is_apart else self._host

    @property
    def device(self) -> torch.device:
        return self._device.device

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        return self._device.nbytes

    def fill(self, values: NDArray[np.generic]) -> Tensor:
        """The tensor that holds these values until the next fill; contiguous, of their shape."""
        size = values.size
        self._values[:size].reshape(values.shape)[...] = values
        if self._device is not self._host:
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        return self._device[:size].view(values.shape)


class Inputs:
    """The persistent inputs of a step."""

    def __init__(self, limits: Limits, max_blocks: int, device: torch.device) -> None:
        rows, tokens = limits.max_rows, limits.max_step_tokens
        self.ids = Buffer(tokens, torch.int64, device)
        self.positions = Buffer(tokens, torch.int64, device)
        self.slots = Buffer(tokens, torch.int64, device)
        self.query_start = Buffer(rows + 1, torch.int32, device)
        self.context_len = Buffer(rows, torch.int32, device)
        self.tables = Buffer(rows * max_blocks, torch.int32, device)
        self.last = Buffer(rows, torch.int64, device)  # the hidden states that are sampled from

    def batch(self, work: Work) -> Batch:
        return Batch(
            query_start=self.query_start.fill(work.query_start),
            context_len=self.context_len.fill(work.context_len),
            tables=self.tables.fill(work.tables),
            positions=self.positions.fill(work.positions),
            slots=self.slots.fill(work.slots),
            max_query=work.max_query,
            max_context=work.max_context,
        )


@dataclass(slots=True)
class Drawn:
    """What the sampling sequences of a Work chose."""

    seqs: Ints  # places in the Work; the entries of `chosen` follow them
    chosen: Chosen


class ModelRunner:
    """Runs one model over one cache."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        rows: Rows,
        kernels: Kernels,
        device: torch.device,
        ranks: Ranks | None = None,
        is_recorded: bool = True,
    ) -> None:
        self.model, self.cache, self.rows, self.kernels = model, cache, rows, kernels
        self.ranks = ranks or Ranks()
        self.inputs = Inputs(rows.limits, rows.max_blocks, device)
        self.rows_at_once = logits_rows(rows.limits.vocab_size, rows.limits.max_rows)
        self.graphs: Graphs | Replays | None = None
        self.host_graph_bytes = 0  # of the step that the CPU has recorded, with its activations
        if not is_recorded:
            return
        if records(device, self.ranks):
            self.record(recorder_for(device))
        elif not self.ranks.are_several and (recorder := recorder_of(kernels)) is not None:
            with torch.inference_mode():
                sizes = self._most_rows, rows.limits.max_step_tokens, rows.max_blocks
                replays = recorded_step(self.inputs, *sizes, self._forward, recorder)
            if replays is not None:
                self.graphs, self.host_graph_bytes = replays, replays.recording.num_bytes + replays.tables.nbytes

    @property
    def _most_rows(self) -> int:
        """Of a decode."""
        return min(self.rows.limits.max_rows, self.rows.limits.max_step_tokens)

    def _forward(self, ids: Tensor, batch: Batch) -> Tensor:
        return self.model.forward(ids, self.cache.pool, batch, self.kernels, self.cache.scales)

    def record(self, record: Record) -> None:
        """From now on decodes are replayed, of the sizes that are recorded, and below the largest."""
        with torch.inference_mode():
            self.graphs = recorded(
                self.inputs,
                recorded_sizes(self._most_rows),
                self.rows.max_blocks,
                self.rows.limits.max_len,
                self._forward,
                record,
            )

    def prepare(self, work: Work) -> tuple[Tensor, Batch]:
        """The inputs of a step, on the device."""
        if self.graphs is not None and self.graphs.takes(work):
            return self.graphs.prepare(work, self.rows.limits.max_len)
        return self.inputs.ids.fill(work.ids), self.inputs.batch(work)

    def forward(self, ids: Tensor, batch: Batch, work: Work) -> tuple[Tensor, Ints]:
        """Hidden states [T, hidden], and the sequences (places in the Work) whose states are not finite."""
        if self.graphs is not None and self.graphs.takes(work):
            hidden = self.graphs.run(work)
        else:
            hidden = self._forward(ids, batch)
        # A sum is NaN or infinite if a term is: one pass, and one number per token goes to the host.
        is_finite = np.isfinite(hidden.sum(dim=-1, dtype=torch.float32).cpu().numpy())
        if is_finite.all() and not self.ranks.are_several:
            return hidden, np.zeros(0, np.int64)
        is_bad = ~np.logical_and.reduceat(is_finite, work.query_start[:-1])
        return hidden, np.flatnonzero(self.ranks.any(is_bad))

    def score(self, hidden: Tensor, work: Work, bad: Ints) -> tuple[list[PromptLogprobs], Ints]:
        """How likely the tokens of prompts are, and the sequences (places in the Work) that have no such numbers.

        As many rows of logits at once as a draw takes, whatever the length of the prompt.
        """
        scored: list[PromptLogprobs] = []
        failed: list[int] = []
        for span in work.spans:
            if span.seq in bad:
                continue
            num_likeliest = int(self.rows.knobs.columns["prompt_logprobs"][work.rows[span.seq]])
            turns = []
            for first in range(0, len(span.tokens), self.rows_at_once):
                tokens = span.tokens[first : first + self.rows_at_once]
                logits = self.model.logits(hidden[span.start + first : span.start + first + len(tokens)])
                if self.ranks.is_first:
                    turns.append(score(logits, tokens, num_likeliest, self.kernels))
            if not self.ranks.is_first:
                continue
            if not all(turn.is_finite for turn in turns):
                failed.append(span.seq)
                continue
            scored.append(
                PromptLogprobs(
                    int(work.index[span.seq]),
                    span.position,
                    turns[0].width,
                    ids=tuple(chain.from_iterable(turn.ids for turn in turns)),
                    logprobs=tuple(chain.from_iterable(turn.logprobs for turn in turns)),
                    ranks=tuple(chain.from_iterable(turn.ranks for turn in turns)),
                )
            )
        is_failed = np.zeros(work.num_seqs, np.bool_)
        is_failed[failed] = True
        return scored, np.flatnonzero(self.ranks.any(is_failed))

    def sample(self, hidden: Tensor, work: Work, bad: Ints) -> Drawn:
        """Choose for every sequence that reached the end of its known tokens, but those in `bad`."""
        samples = work.samples
        if len(bad):
            samples = samples.copy()
            samples[bad] = False
        seqs = np.flatnonzero(samples)
        last = self.inputs.last.fill(work.query_start[1:][seqs] - 1)
        rows, positions = work.rows[seqs], work.context_len[seqs]
        turns = []
        for start in range(0, len(seqs), self.rows_at_once):
            turn = slice(start, start + self.rows_at_once)
            logits = self.model.logits(hidden[last[turn]])
            if self.ranks.is_first:
                turns.append(choose(logits, self.rows.knobs, rows[turn], positions[turn], self.kernels))
        chosen = _joined(turns, self.rows_at_once)
        if self.ranks.are_several:
            own = told(chosen, self.rows.knobs, rows)
            said = self.ranks.from_first(own)
            chosen = chosen if self.ranks.is_first else heard(said, len(rows))
        return Drawn(seqs, chosen)


def records(device: torch.device, ranks: Ranks) -> bool:
    """Whether a device records decodes. Those of several ranks are not: their collectives are new with each lease."""
    return can_capture(device) and not ranks.are_several


def _joined(turns: list[Chosen], size: int) -> Chosen:
    """The choices of consecutive turns of `size` rows as one."""
    if len(turns) == 1:
        return turns[0]
    none = np.zeros(0, np.int64)
    whole = Chosen(
        np.concatenate([none, *(turn.num_tokens for turn in turns)]),
        np.concatenate([none, *(turn.tokens for turn in turns)]),
    )
    for number, turn in enumerate(turns):
        whole.failed |= {number * size + place: reason for place, reason in turn.failed.items()}
        whole.reports |= {number * size + place: report for place, report in turn.reports.items()}
    return whole
