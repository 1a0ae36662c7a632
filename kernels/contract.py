"""What a set of kernels is: the shapes that go in and the names that every set answers to.

Three sets share these signatures: `reference.py` says what each kernel means, `cpu/` and `triton/` say it fast. The
model knows this page only.

One ragged batch is one forward pass. Its T tokens lie one after another, sequence by sequence; a prefill, a chunk, a
prefix hit and a decode step differ only in how many query rows a sequence brings:

    query_start   [0,        3,  4,                 9]         three sequences: 3 + 1 + 5 tokens
    context_len   [3,        18, 40]                           positions with KV once this step is written
    positions     [0, 1, 2,  17, 35, 36, 37, 38, 39]           the last ones before context_len
    slots         [block * block_size + offset, ...]           where the KV of each token goes; -1: nowhere (padding)
    tables        [[7, ., .], [3, 9, .], [4, 1, 8]]            block_size 16; a dot is never read

T = tokens, Hq = query heads, Hkv = KV heads (Hq is a multiple of it), D = head_dim, bs = block_size.
`kv` is one layer of a pool, `pool[:, layer]`: [num_blocks, 2, Hkv, bs, D], strided, since the next block's piece of
this layer is a whole block away.

A pool of 8 bits comes with scales: value = stored * scale. They are float32 and of either form:

    static    [2, Hkv]                     one for a head's keys and one for its values, found before
    block     [num_blocks, 2, Hkv, bs]     one for each row, written with it: a view of the blocks' own scale areas
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # of the types of 8 bits: what a scale brings values below
Scales = Sequence[Tensor] | None  # of a whole pool: one tensor a layer, or None for a pool that is not of 8 bits


@dataclass(slots=True)
class Batch:
    """One ragged batch, as the kernels read it. All tensors are contiguous and on the device of the model."""

    query_start: Tensor  # int32 [num_seqs + 1]: sequence s has the query rows [query_start[s], query_start[s + 1])
    context_len: Tensor  # int32 [num_seqs]: positions with KV once this step is written, this step's included
    tables: Tensor  # int32 [num_seqs, max_blocks]: entries beyond a sequence's blocks are arbitrary and never read
    positions: Tensor  # int64 [num_tokens]
    slots: Tensor  # int64 [num_tokens]: block * block_size + offset; -1 is padding and never written
    max_query: int  # host numbers, for grids and scratch: the most query rows of a sequence ...
    max_context: int  # ... and the longest context


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the first `rotary_dim` values of a head are rotated, the others pass through."""

    cos_sin: Tensor  # float32 [max_positions, rotary_dim]: first half cosines, second half sines
    interleaved: bool = False  # False: i turns with i + rotary_dim / 2 (Llama, NeoX); True: with i + 1 (GPT-J)


@dataclass(frozen=True)
class Shapes:
    """What a model will ask of the kernels: enough to compile and load them before the first request."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    vocab: int = 0  # 0: nothing is sampled
    kv_dtype: torch.dtype | None = None  # None: as dtype


@dataclass(slots=True)
class Odds:
    """How rows of logits are drawn from. Both tensors are contiguous and on the device of the logits.

    rows   float64 [R, 4]   temperature    above 0: what the logits are divided by; else nothing is drawn from this row
                            top_k          0 or less, or the vocabulary and more: no cut
                            top_p          1 or more: no cut; 0 or less: what equals the likeliest
                            least          log of min_p: the least logit under the highest, over temperature, that
                                           stands; -inf: no cut
    draws  int64 [D, 4]     row            whose logits
                            seed           the 64 bits of it
                            stream, position
    """

    rows: Tensor
    draws: Tensor


@dataclass(slots=True)
class Sampled:
    """What a set found in R rows of logits, and D draws from them."""

    top: Tensor  # float32 [R]: the highest logit; NaN if any is
    best: Tensor  # int64 [R]: the first token that has it; arbitrary where top is not finite
    tokens: Tensor  # int64 [D]; arbitrary for a row whose top is not finite or whose temperature is 0


@dataclass(slots=True)
class Likeliest:
    """The likeliest tokens of R rows, best first, of equals the lower id."""

    log_total: Tensor  # float32 [R]: log of the sum of the exponentials of a row's logits
    ids: Tensor  # int64 [R, n]
    log_probs: Tensor  # float32 [R, n]


class Stopwatch(Protocol):
    """Times work that is asked for and not waited for."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float:
        """Waits for what was asked for between the last start and stop. 0.0: it was done when it was asked for."""


class IdleWatch:
    """Of a device that does what it is asked before it answers: there is nothing to wait for."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float:
        return 0.0


class Kernels(Protocol):
    """Everything that a model needs besides matrix products."""

    @property
    def name(self) -> str:
        """Which set this is, for the log: what it is made of and why it was chosen."""

    def warm_up(self, shapes: Shapes, on_progress: Callable[[str], None] | None = None) -> None:
        """Compiles and loads all that `shapes` needs, so that no request waits for it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., H], weight [H]."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns the rms_norm of that sum. x, residual [T, H]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up. gate_up [T, 2 * I], the gate first; returns [T, I]."""

    def kv_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        batch: Batch,
        rope: Rope | None,
        scales: Tensor | None = None,
    ) -> None:
        """Rotates q in place and writes the rotated k, and v, to `batch.slots` of kv.

        q [T, Hq, D], k and v [T, Hkv, D] may be strided views of one fused output (last dimension contiguous). Whether
        k is rotated in place too is left open: nobody may read it afterwards. For a kv of 8 bits what is stored is
        value / scale, limited to LARGEST and rounded to the nearest; a row's own scale is its largest size / LARGEST.
        """

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        batch: Batch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of each sequence's query rows over its own blocks. q, out [T, Hq, D], sinks [Hq].

        The position i sees (i - window, i]. Scores are scaled, then capped (cap * tanh(score / cap)), then a sink
        takes its share of the softmax. A row that sees nothing, and a row of no sequence, is zero.
        """

    def copy_blocks(self, pool: Tensor, pairs: Tensor) -> None:
        """pool[destination] = pool[source] for each row (source, destination) of pairs, int64 [n, 2].

        No block is a destination twice, nor source and destination at once.
        """

    def swap_blocks(self, source_pool: Tensor, destination_pool: Tensor, pairs: Tensor) -> None:
        """destination_pool[destination] = source_pool[source] for each row of pairs, int64 [n, 2]."""

    def sample(self, logits: Tensor, odds: Odds | None = None) -> Sampled:
        """The likeliest token of each row, and the draws that `odds` asks for. logits float32 [R, V], rows contiguous.

            scaled = (logit - highest) / temperature    in float32
            top_k   stands if scaled is that of the k-th likeliest token or above
            top_p   stands if scaled is at or above the highest value at which the mass e^scaled of what is at or above
                    it reaches top_p of the mass that top_k left
            min_p   stands if scaled >= least

        Every cut is a floor: equals stand or fall together. A draw is the first token, in the order of ids, at which
        the cumulative mass of what stands exceeds u times their total, u = philox.uniform(seed, stream, position).
        """

    def likeliest(self, logits: Tensor, count: int) -> Likeliest:
        """The `count` likeliest tokens of each row and their log probabilities. logits as for `sample`, all finite or
        -inf; 0 <= count <= V."""
