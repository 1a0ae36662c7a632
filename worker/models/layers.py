"""The parts that every decoder of ours is made of: linear layers, and the embedding of tokens.

**Linear** goes through panels wherever the CPU computes in float32 (`kernels/cpu/panels.py`): a copy of the weight in
the order in which it is read, which replaces the plain one. A weight that its file has in bfloat16 or float16 keeps its
16 bits there, for half of the memory and of the reads, and becomes float32 in registers: the results are to the last
bit those of float32 weights. `--quantization float16` rounds float32 weights so; `int8` keeps 8 bits and a scale for
each output (`kernels/cpu/int8_panels.py`). Biases, norms and embeddings stay as they are.

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

from kilburn.kernels.dispatch import has_products, int8_product_over, product_over, row_lookup
from kilburn.shared.model_files import ModelRefused
from kilburn.worker.models.checkpoint import Checkpoint
from kilburn.worker.parallel import Ranks


@dataclass(frozen=True, slots=True)
class Form:
    """What a model's tensors are made of, and where."""

    device: torch.device
    dtype: torch.dtype  # that is computed in
    quantization: str = "none"  # of the weights of linear layers, as in the settings; others: CPU, float32


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
    """A product over panels. CPU, float32."""

    __slots__ = ("_bias", "_product")

    def __init__(self, product: Callable[[Tensor, Tensor | None], Tensor], bias: Tensor | None) -> None:
        self._product, self._bias = product, bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._bias)


def packs(form: Form) -> bool:
    """Whether linear layers have copies of their own."""
    return form.device.type == "cpu" and form.dtype == torch.float32 and has_products()


def linear(weight: Tensor, bias: Tensor | None, form: Form) -> Linear:
    """The fastest that there is. weight [out, in] and bias [out] may lie in a mapped file, in any float dtype."""
    bias = None if bias is None else owned(bias, form)
    if form.quantization == "int8" and (product := int8_product_over(weight)) is not None:
        return PackedLinear(product, bias)
    if packs(form) and (product := product_over(_kept(weight, form))) is not None:
        return PackedLinear(product, bias)
    return PlainLinear(owned(weight, form), bias)


def _kept(weight: Tensor, form: Form) -> Tensor:
    """The weight in the type that its panels have. Raises ModelRefused."""
    if form.quantization == "float16":
        kept = weight.to(torch.float16)
        if bool((kept.isinf() & weight.isfinite()).any()):
            raise ModelRefused("--quantization: the model has weights beyond what float16 can hold; give none")
        return kept
    return weight if weight.dtype in (torch.bfloat16, torch.float16) else weight.float()


def merged(weights: list[Tensor], biases: list[Tensor | None], form: Form) -> Linear:
    """One linear layer whose outputs are those of several, side by side. Biases: of all, or of none."""
    given = [bias for bias in biases if bias is not None]
    return linear(torch.cat(weights), torch.cat(given) if given else None, form)


def owned(weight: Tensor, form: Form) -> Tensor:
    """A copy that depends on no file."""
    return weight.to(device=form.device, dtype=form.dtype, copy=True).contiguous()


class Embedding:
    """ids [T] -> [T, width] in `dtype`. The table keeps the dtype of its file."""

    __slots__ = ("_dtype", "_lookup", "_table")

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        self._table, self._dtype = table, dtype
        self._lookup = row_lookup() if packs(Form(table.device, dtype)) else None

    def __call__(self, ids: Tensor) -> Tensor:
        if self._lookup is not None and self._lookup.takes(self._table):
            return self._lookup(self._table, ids)
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
    if packs(form):
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
