"""What a worker really holds, and what a step needs at its height: the ledger's figures, by measurement.

    held        every tensor that can be reached from the model, each storage once; an embedding that is looked up in
                its file is told apart, for only the rows that are used become resident
    at height   the largest sum of all tensors alive that were made since the measuring began

A device with memory of its own has an allocator that knows its height, and is asked. Elsewhere a meter watches the
operations, and sees each tensor's making and its end, but nothing inside an operation. There a step is measured at a
small size and multiplied, for all that a step makes is so much for each token, or for each row of logits.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kilburn.kernels.observing import Observer
from kilburn.shared.layout import blocks_for
from kilburn.shared.ledger import Ledger
from kilburn.shared.messages import Admit
from kilburn.shared.sampling import Sampling
from kilburn.worker.kv_cache import has_own_memory
from kilburn.worker.model_runner import ModelRunner
from kilburn.worker.rows import Work

SMALL_TOKENS = 64
SMALL_ROWS = 4
# Every copy of the logits that sampling can make.
WORST = Sampling(top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=1)


# --- what is held


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a model's tensors."""

    own_bytes: int
    mapped_bytes: int  # lie in their files


def held(model: object) -> Held:
    """Everything that can be reached from `model`."""
    own, mapped = dict[int, int](), dict[int, int]()
    seen, todo = {id(model)}, [model]
    while todo:
        thing = todo.pop()
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            # safetensors maps a file and makes tensors of stretches of it: such memory cannot be resized.
            place = own if storage.resizable() else mapped
            place[storage.data_ptr()] = storage.nbytes()
        for child in gc.get_referents(thing):
            if id(child) not in seen and not isinstance(child, type | FunctionType | ModuleType):
                seen.add(id(child))
                todo.append(child)
    return Held(sum(own.values()), sum(mapped.values()))


# --- what a step needs


@dataclass(frozen=True, slots=True)
class Heights:
    """What steps hold when that is most, in bytes."""

    activation_bytes: int
    logits_bytes: int


class Meter(Observer):
    """While it is on, `now` is the sum of the tensors that were made since and are alive; `peak` its largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if _is_plain(leaf) and id(leaf.untyped_storage()) not in given:
                self._made(leaf.untyped_storage())
        return out

    def _made(self, storage: Any) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= num_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided


def height_of(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that `run` holds at its height, beside what was there before. Measured the second time that it runs."""
    run()
    if has_own_memory(device):
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        run()
        return torch.accelerator.max_memory_allocated(device) - before
    meter = Meter()
    with meter:
        run()
    return meter.peak


def heights(runner: ModelRunner, device: torch.device) -> Heights:
    """Of a runner that nobody uses yet. Its blocks are written to, and its rows are cleared again."""
    limits = runner.rows.limits
    room = min(limits.max_rows, limits.num_blocks)
    small_tokens, small_rows = (limits.max_step_tokens, room) if has_own_memory(device) else (SMALL_TOKENS, SMALL_ROWS)
    num_rows = min(runner.rows_at_once, room, small_rows, limits.max_step_tokens)
    chunk = _begun(runner, min(small_tokens, limits.max_step_tokens))
    num_tokens = len(chunk.ids)
    forward = height_of(lambda: _forward(runner, chunk), device)
    rows = _begun(runner, num_rows, each=1)
    hidden = _forward(runner, rows).clone()
    logits = height_of(lambda: runner.sample(hidden, rows, np.zeros(0, np.int64)), device)
    runner.rows.clear()
    return Heights(forward * limits.max_step_tokens // num_tokens, logits * runner.rows_at_once // rows.num_seqs)


def _forward(runner: ModelRunner, work: Work) -> Tensor:
    """Hidden states, by the model itself: a recorded step holds nothing anew."""
    ids, batch, cache = runner.inputs.ids.fill(work.ids), runner.inputs.batch(work), runner.cache
    return runner.model.forward(ids, cache.pool, batch, runner.kernels, cache.scales)


def _begun(runner: ModelRunner, num_tokens: int, each: int = 0) -> Work:
    """New prompts of `num_tokens` in all, `each` long or as long as they can be; fewer where the pool is smaller."""
    rows, limits = runner.rows, runner.rows.limits
    rows.clear()
    each, counts, block = each or limits.max_len, list[int](), 0
    while num_tokens and len(counts) < limits.max_rows and block < limits.num_blocks:
        count = min(each, num_tokens, (limits.num_blocks - block) * limits.block_size)
        end = block + blocks_for(count, limits.block_size)
        table = tuple(range(block, end))
        rows.admit(Admit(len(counts), 0, count, (0,) * count, (), table, WORST))
        counts.append(count)
        num_tokens, block = num_tokens - count, end
    return rows.advance(list(range(len(counts))), counts, [], [])


def measured(planned: Ledger, weight_bytes: int, runner: ModelRunner, graph_bytes: int, device: torch.device) -> Ledger:
    """The bill of a worker that is ready, in the words of the plan."""
    steps, inputs = heights(runner, device), runner.inputs
    buffers = (inputs.ids, inputs.positions, inputs.slots, inputs.query_start, inputs.context_len, inputs.tables)
    return replace(
        planned,
        weight_bytes=weight_bytes,
        activation_bytes=steps.activation_bytes,
        logits_bytes=steps.logits_bytes,
        buffer_bytes=sum(buffer.num_bytes for buffer in (*buffers, inputs.last)),
        graph_bytes=graph_bytes,
        kv_bytes=runner.cache.pool.untyped_storage().nbytes(),
        host_bytes=runner.cache.host_pool.untyped_storage().nbytes(),
    )


def weights_held(model: object, is_looked_up: bool) -> int:
    """Bytes of the weights. `is_looked_up`: what lies in files is tables of which some rows are read."""
    found = held(model)
    return found.own_bytes + (0 if is_looked_up else found.mapped_bytes)


def reserved_bytes(device: torch.device) -> int:
    """What the allocator of a device of its own has taken from it."""
    return torch.accelerator.memory_reserved(device) if has_own_memory(device) else 0
