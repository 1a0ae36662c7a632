"""The parts that every decoder of ours is made of: linear layers, and the embedding of tokens.

**Linear** has two forms. On the CPU in float32, oneDNN's own packed order of the weights is far faster than plain
`F.linear` from 8 rows on (GFLOP/s on 2 Zen 3 cores, plain -> packed: 960x576 at 1, 8, 32, 128 rows 21 -> 17, 52 -> 96,
104 -> 146, 138 -> 151; the head, 49152x576: 5 -> 7, 15 -> 43, 46 -> 105, 80 -> 133), so it is taken wherever it exists.
The packed copy replaces the plain one: nothing of the plain weight stays resident. For up to `FEW_ROWS` rows, when the
read of the weights is what takes the time, the same packed weights go through `kernels/cpu/panels.py`, which reads them
in order (`bench/products_cpu.py`). With weights of 8 bits (`--quantization int8`, on the CPU) a layer goes through
`kernels/cpu/int8_panels.py`, whatever the number of rows; biases, norms and embeddings stay as they are.

**Embedding** keeps the checkpoint's own table and dtype: on the CPU that is a view of the memory-mapped file, of which
only the rows that are looked up become resident. So a tied head can be packed without holding the table twice. Of
several ranks each has the rows of its share of the vocabulary; a token that another has is zero here, and the sum over
all ranks is its embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels.dispatch import few_rows_product, int8_product_over
from kilburn.worker.models.checkpoint import Checkpoint
from kilburn.worker.parallel import Ranks

FEW_ROWS = 64  # up to here products over panels are faster than oneDNN's


@dataclass(frozen=True, slots=True)
class Form:
    """What a model's tensors are made of, and where."""

    device: torch.device
    dtype: torch.dtype  # that is computed in
    has_int8_weights: bool = False  # of linear layers: CPU, float32


class Linear(Protocol):
    """x [rows, in] -> [rows, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """torch's own product."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """A product over weights in oneDNN's own packed order. CPU, float32."""

    __slots__ = ("_bias", "_few_rows", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias
        self._few_rows = few_rows_product(self._packed, weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self._few_rows is not None and x.shape[0] <= FEW_ROWS:
            return self._few_rows(x, self._bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


class Int8Linear:
    """A product over weights of 8 bits. CPU, float32."""

    __slots__ = ("_bias", "_product")

    def __init__(self, product: Callable[[Tensor, Tensor | None], Tensor], bias: Tensor | None) -> None:
        self._product, self._bias = product, bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._bias)


def packs(form: Form) -> bool:
    """Whether linear layers should be packed."""
    return (
        form.device.type == "cpu"
        and form.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def linear(weight: Tensor, bias: Tensor | None, form: Form) -> Linear:
    """The fastest that there is. weight [out, in] and bias [out] may lie in a mapped file, in any float dtype."""
    bias = None if bias is None else owned(bias, form)
    if form.has_int8_weights and (product := int8_product_over(weight)) is not None:
        return Int8Linear(product, bias)
    if packs(form):
        return PackedLinear(weight.to(form.dtype).contiguous(), bias)
    return PlainLinear(owned(weight, form), bias)


def merged(weights: list[Tensor], biases: list[Tensor | None], form: Form) -> Linear:
    """One linear layer whose outputs are those of several, side by side. Biases: of all, or of none."""
    given = [bias for bias in biases if bias is not None]
    return linear(torch.cat(weights), torch.cat(given) if given else None, form)


def owned(weight: Tensor, form: Form) -> Tensor:
    """A copy that depends on no file."""
    return weight.to(device=form.device, dtype=form.dtype, copy=True).contiguous()


class Embedding:
    """ids [T] -> [T, width] in `dtype`. The table keeps the dtype of its file."""

    __slots__ = ("_dtype", "_table")

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        self._table, self._dtype = table, dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._table).to(self._dtype)


class SplitEmbedding:
    """As Embedding, of a table whose rows lie with several ranks: here those from `first` on."""

    __slots__ = ("_dtype", "_first", "_ranks", "_table")

    def __init__(self, table: Tensor, first: int, dtype: torch.dtype, ranks: Ranks) -> None:
        self._table, self._first, self._dtype, self._ranks = table, first, dtype, ranks

    def __call__(self, ids: Tensor) -> Tensor:
        places = ids - self._first
        is_elsewhere = (places < 0) | (places >= len(self._table))
        found = F.embedding(places.masked_fill(is_elsewhere, 0), self._table).to(self._dtype)
        return self._ranks.sum(found.masked_fill(is_elsewhere[:, None], 0))


Lookup = Embedding | SplitEmbedding


def embedding(weights: Checkpoint, name: str, shape: tuple[int, int], form: Form, ranks: Ranks) -> Lookup:
    """The embedding whose table is called `name`."""
    rows = ranks.part.share(shape[0])
    table = weights.take(name, *shape)[rows]
    table = weights.apart(name)[rows] if form.device.type == "cpu" else owned(table, form)
    return _lookup(table, form.dtype, ranks, rows)


def tied_embedding(
    weights: Checkpoint, name: str, shape: tuple[int, int], form: Form, ranks: Ranks
) -> tuple[Lookup, Linear]:
    """The embedding whose table is called `name`, and the head that is the same table."""
    rows, whole = ranks.part.share(shape[0]), weights.take(name, *shape)
    weights.take_tied("lm_head.weight", whole)
    if packs(form) or form.has_int8_weights:
        return _lookup(weights.apart(name)[rows], form.dtype, ranks, rows), linear(whole[rows], None, form)
    shared = owned(whole[rows], form)
    return _lookup(shared, form.dtype, ranks, rows), PlainLinear(shared, None)


def _lookup(table: Tensor, dtype: torch.dtype, ranks: Ranks, rows: slice) -> Lookup:
    return SplitEmbedding(table, rows.start, dtype, ranks) if ranks.are_several else Embedding(table, dtype)


def split_linear(weight: Tensor, bias: Tensor | None, inputs: slice, form: Form, ranks: Ranks) -> Linear:
    """The part of a layer that takes these of its inputs; the sum of all ranks' results is the layer's.

    The bias comes from rank 0 alone, since it is to be added once.
    """
    return linear(weight[:, inputs], bias if ranks.is_first else None, form)
