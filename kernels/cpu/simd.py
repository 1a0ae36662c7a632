"""The vocabulary that the compiled CPU kernels are written in: raw addresses and vectors of eight.

numba compiles our loops; what it cannot promise is how they become vector instructions. So the few innermost pieces are
written out here, as LLVM instructions that Python loops unroll when a kernel is compiled:

    dot_four    three rows of queries with four rows of keys, wherever these are in memory: twelve sums in registers
    add_rows    three rows of sums += weights x rows of values, likewise
    row_max     the largest of a row, NaN passed over (it comes back through the exponentials)
    is_above    whether one of a row is above a limit
    exp2_row    2^(x - top) of a row in place, and their sums by lane

An address is an int64, as is a step between addresses, both in bytes: no 32-bit product can wrap. Element types are
small literals (`F32`, `BF16`, `F16`, `INT8`) and all arithmetic is float32. Nothing here checks anything: the launchers
do.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kilburn.kernels.cpu.vectors import (
    ELEMENT,
    ELEMENT_BYTES,
    F32,
    FLOAT,
    FLOATS,
    I8,
    I32,
    I64,
    INT64S,
    LANES,
    NONE,
    Load,
    after,
    call_llvm,
    constant,
    counted,
    fma,
    load_some,
    load_vector,
    pointer,
    pointer_to,
    prefetch_line,
    rows_from,
    shuffle,
    splat,
    store_vector,
    vector_type,
)

int64s = pointer_to(INT64S)
int32s = pointer_to(types.CPointer(types.int32))
floats = pointer_to(FLOATS)


@intrinsic
def fetch_add(context: Any, words: Any, index: Any, amount: Any) -> Any:
    """Adds to words[index], to which other threads add as well; returns what it was."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        return build.atomic_rmw("add", build.gep(args[0], [args[1]]), args[2], "seq_cst")

    return types.int64(INT64S, types.int64, types.int64), code


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Asks for the cache line of an address that will be read soon; any address will do."""

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        prefetch_line(build, args[0])
        return target.get_dummy_value()

    return NONE(types.int64), code


@intrinsic
def number(context: Any, words: Any, index: Any) -> Any:
    """The float64 that words[index] holds."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        at = build.gep(args[0], [args[1]])
        return build.load(build.bitcast(at, ir.DoubleType().as_pointer()))

    return types.float64(INT64S, types.int64), code


@intrinsic
def copy_bytes(context: Any, to: Any, source: Any, count: Any) -> Any:
    """Copies bytes between addresses that do not overlap, or are equal."""

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        pointer = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, I64, ir.IntType(1)])
        copy = build.module.declare_intrinsic("llvm.memmove", (pointer, pointer, I64), kind)
        build.call(
            copy, [build.inttoptr(args[0], pointer), build.inttoptr(args[1], pointer), args[2], ir.IntType(1)(0)]
        )
        return target.get_dummy_value()

    return NONE(types.int64, types.int64, types.int64), code


# -- elements and vectors of any kind ----------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def load_one(context: Any, base: Any, index: Any, kind: Any) -> Any:
    """The element at `index` of a row that begins at the address `base`."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        # An index, not a sum of addresses: only so does LLVM see a loop that it can turn into vectors.
        at = build.gep(pointer(build, args[0], ELEMENT[kind.literal_value], 1), [args[1]])
        return load_vector(build, build.ptrtoint(at, I64), kind.literal_value, 1)

    return types.float32(types.int64, types.int64, kind), code


@intrinsic(prefer_literal=True)
def store_one(context: Any, base: Any, index: Any, value: Any, kind: Any) -> Any:
    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        at = build.gep(pointer(build, args[0], ELEMENT[kind.literal_value], 1), [args[1]])
        store_vector(build, args[2], build.ptrtoint(at, I64), kind.literal_value, 1)
        return target.get_dummy_value()

    return NONE(types.int64, types.int64, types.float32, kind), code


# -- pieces of attention -----------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def dot_four(
    context: Any, out: Any, out_step: Any, q: Any, q_step: Any, rows: Any, offset: Any, dim: Any, num_q: Any, kind: Any
) -> Any:
    """out[i][j] = q[i] . rows[j] for i < num_q <= 3 and j < 4.

    out and q are float32 at addresses, with their steps, q filled up with zeros to a multiple of 8; rows are four
    addresses, to which `offset` is added, and are not read beyond `dim`.
    """

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        out, out_step, q, q_step, rows, offset, dim = args[:7]
        keys = [build.add(build.load(build.gep(rows, [I64(j)])), offset) for j in range(4)]
        queries = rows_from(build, q, q_step, num_q.literal_value)
        key_bytes = I64(LANES * ELEMENT_BYTES[kind.literal_value])

        def step(index: Any, sums: list[Any], load: Load = load_vector) -> list[Any]:
            at_q, at_key = build.mul(index, I64(4 * LANES)), build.mul(index, key_bytes)
            query = [load_vector(build, build.add(at, at_q), F32, LANES) for at in queries]
            new = list(sums)
            for j, at in enumerate(keys):  # 12 sums, 3 queries and a key: all 16 registers
                key = load(build, build.add(at, at_key), kind.literal_value, LANES)
                for i in range(len(queries)):
                    new[4 * i + j] = fma(build, query[i], key, sums[4 * i + j])
            return new

        sums = _whole_and_rest(build, dim, [constant(FLOAT, LANES, 0.0)] * (4 * len(queries)), step)
        for i, at in enumerate(rows_from(build, out, out_step, len(queries))):
            store_vector(build, _four_sums(build, sums[4 * i : 4 * i + 4]), at, F32, 4)
        return target.get_dummy_value()

    return NONE(*[types.int64] * 4, INT64S, types.int64, types.int64, num_q, kind), code


def _whole_and_rest(build: Any, dim: Any, values: list[Any], step: Callable[..., list[Any]]) -> list[Any]:
    """values = step(index, values) for the vectors of a row of `dim`; the last one's load stops at the end."""
    whole, rest = build.lshr(dim, I64(3)), build.and_(dim, I64(LANES - 1))
    values = counted(build, whole, values, step)
    lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    limit = splat(build, build.trunc(rest, I32), LANES)
    mask = build.icmp_unsigned("<", lanes, limit)

    def load(build: Any, address: Any, kind: int, width: int) -> Any:
        return load_some(build, address, kind, mask)

    def last(_index: Any, values: list[Any]) -> list[Any]:
        return step(whole, values, load)

    return counted(build, build.zext(build.icmp_unsigned("!=", rest, I64(0)), I64), values, last)


def _four_sums(build: Any, four: list[Any]) -> Any:
    """The sum of each of four vectors, as a vector of four."""

    def folded(a: Any, b: Any, low: list[int], high: list[int]) -> Any:
        return build.fadd(shuffle(build, a, b, low), shuffle(build, a, b, high))

    pairs = [folded(a, b, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]) for a, b in (four[:2], four[2:])]
    halves = folded(*pairs, [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15])
    return folded(halves, halves, [0, 1, 2, 3], [4, 5, 6, 7])


@intrinsic(prefer_literal=True)
def add_rows(
    context: Any,
    sums: Any,
    sums_step: Any,
    weights: Any,
    weights_step: Any,
    rows: Any,
    offset: Any,
    count: Any,
    dim: Any,
    num_sums: Any,
    kind: Any,
) -> Any:
    """sums[i] += weights[i][j] * rows[j] for i < num_sums <= 3 and j < count.

    sums and weights are float32 at addresses, with their steps, sums with room up to a multiple of 8; rows are
    addresses, to which `offset` is added, and are not read beyond `dim`.
    """

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        sums, sums_step, weights, weights_step, rows, offset, count, dim = args[:8]
        sum_rows = rows_from(build, sums, sums_step, num_sums.literal_value)
        weight_rows = rows_from(build, weights, weights_step, num_sums.literal_value)

        def columns(first: Any, num_vectors: int, load: Load = load_vector) -> None:
            """The sums of num_vectors * 8 columns, the first vector of them at an index."""
            at_row = build.mul(first, I64(LANES * ELEMENT_BYTES[kind.literal_value]))
            ats = [build.add(row, build.mul(first, I64(4 * LANES))) for row in sum_rows]
            cells = [after(build, at, 4 * LANES * j) for at in ats for j in range(num_vectors)]

            def step(index: Any, held: list[Any]) -> list[Any]:
                row = build.add(build.add(build.load(build.gep(rows, [index])), offset), at_row)
                at = build.shl(index, I64(2))
                weight = [splat(build, load_vector(build, build.add(w, at), F32, 1), LANES) for w in weight_rows]
                new = list(held)
                for j in range(num_vectors):  # 12 sums, 3 weights and a value: all 16 registers
                    value_at = after(build, row, j * LANES * ELEMENT_BYTES[kind.literal_value])
                    value = load(build, value_at, kind.literal_value, LANES)
                    for i in range(len(weight)):
                        new[i * num_vectors + j] = fma(build, weight[i], value, held[i * num_vectors + j])
                return new

            new = counted(build, count, [load_vector(build, at, F32, LANES) for at in cells], step)
            for at, value in zip(cells, new, strict=True):
                store_vector(build, value, at, F32, LANES)

        def four(index: Any, _values: list[Any]) -> list[Any]:
            columns(build.shl(index, I64(2)), 4)
            return []

        counted(build, build.lshr(dim, I64(5)), [], four)
        first = build.shl(build.lshr(dim, I64(5)), I64(2))

        def one(index: Any, _values: list[Any], load: Load = load_vector) -> list[Any]:
            columns(build.add(first, index), 1, load)
            return []

        _whole_and_rest(build, build.and_(dim, I64(31)), [], one)
        return target.get_dummy_value()

    return NONE(*[types.int64] * 4, INT64S, *[types.int64] * 3, num_sums, kind), code


@intrinsic
def row_max(context: Any, row: Any, count: Any, start: Any) -> Any:
    """The largest of `start` and `count` float32 (a multiple of 8, above 0) at an address."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return build.select(build.fcmp_ordered(">", a, b), a, b)

        def step(address: Any, top: Any) -> Any:
            return larger(load_vector(build, address, F32, LANES), top)

        top = _over_row(build, args[0], args[1], splat(build, args[2], LANES), step)
        for half in (4, 2, 1):
            top = larger(shuffle(build, top, top, [(i + half) % LANES for i in range(LANES)]), top)
        return build.extract_element(top, I32(0))

    return types.float32(types.int64, types.int64, types.float32), code


@intrinsic
def is_above(context: Any, row: Any, count: Any, limit: Any) -> Any:
    """Whether one of `count` float32 (a multiple of 8) at an address is above a limit. NaN is not."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        limit = splat(build, args[2], LANES)

        def step(address: Any, found: Any) -> Any:
            return build.or_(found, build.fcmp_ordered(">", load_vector(build, address, F32, LANES), limit))

        found = _over_row(build, args[0], args[1], ir.Constant(ir.VectorType(ir.IntType(1), LANES), None), step)
        return build.icmp_unsigned("!=", build.bitcast(found, I8), I8(0))

    return types.boolean(types.int64, types.int64, types.float32), code


@intrinsic
def exp2_row(context: Any, row: Any, count: Any, top: Any, totals: Any) -> Any:
    """row = 2^(row - top) in place, for `count` float32 (a multiple of 8); adds them to the 8 at `totals`, by lane."""

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        top = splat(build, args[2], LANES)

        def step(address: Any, total: Any) -> Any:
            value = _exp2(build, build.fsub(load_vector(build, address, F32, LANES), top), LANES)
            store_vector(build, value, address, F32, LANES)
            return build.fadd(total, value)

        total = _over_row(build, args[0], args[1], load_vector(build, args[3], F32, LANES), step)
        store_vector(build, total, args[3], F32, LANES)
        return target.get_dummy_value()

    return NONE(types.int64, types.int64, types.float32, types.int64), code


@intrinsic
def exp2(context: Any, x: Any) -> Any:
    """2^x, x within [-126, 127] or brought there; NaN stays NaN; relative error below 3e-7."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        return _exp2(build, args[0], 1)

    return types.float32(types.float32), code


@intrinsic
def tanh(context: Any, x: Any) -> Any:
    """Relative error below 4e-7; NaN stays NaN."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        one, two, x = FLOAT(1.0), FLOAT(2.0), args[0]
        square = build.fmul(x, x)
        near = FLOAT(_float32(TANH_TERMS[-1]))
        for term in reversed(TANH_TERMS[:-1]):
            near = fma(build, near, square, FLOAT(_float32(term)))
        power = _exp2(build, build.fmul(x, FLOAT(_float32(2 * math.log2(math.e)))), 1)
        far = build.fsub(one, build.fdiv(two, build.fadd(one, power)))
        # Near zero the difference would lose digits.
        return build.select(build.fcmp_ordered("<", square, FLOAT(_float32(0.3))), build.fmul(near, x), far)

    return types.float32(types.float32), code


def _over_row(build: Any, row: Any, count: Any, start: Any, step: Callable[[Any, Any], Any]) -> Any:
    """value = step(address, value) for the vectors of a row."""

    def at(index: Any, values: list[Any]) -> list[Any]:
        return [step(build.add(row, build.shl(index, I64(5))), values[0])]

    return counted(build, build.lshr(count, I64(3)), [start], at)[0]


# 2^f for f in [-0.5, 0.5], fitted at Chebyshev nodes.
EXP2_TERMS = (1, 0.693147207, 0.240226512, 0.0555032721, 0.0096180256, 0.00134004322, 0.00015469732)


# tanh(x) / x by powers of x^2, for x^2 below 0.3025, fitted likewise.
TANH_TERMS = (1.0, -0.33333311, 0.13332468, -0.05384337, 0.02104217, -0.00623885)


def _float32(value: float) -> float:
    """As LLVM wants to have a float written."""
    return float(np.float32(value))


def _exp2(build: Any, x: Any, width: int) -> Any:
    def same(value: float) -> Any:
        return constant(FLOAT, width, _float32(value))

    # Comparisons with NaN are false, and so NaN passes both limits.
    x = build.select(build.fcmp_ordered("<", x, same(-126.0)), same(-126.0), x)
    x = build.select(build.fcmp_ordered(">", x, same(127.0)), same(127.0), x)
    whole = call_llvm(build, "llvm.rint", [x])
    fraction = build.fsub(x, whole)
    value = same(EXP2_TERMS[-1])
    for term in reversed(EXP2_TERMS[:-1]):
        value = fma(build, value, fraction, same(term))
    # Adding 1.5 * 2^23 leaves the whole number in the lowest bits, and has no undefined case where it is NaN.
    shifted = build.fadd(whole, same(1.5 * 2**23))
    bits = build.shl(build.bitcast(shifted, vector_type(I32, width)), constant(I32, width, 23))
    power = build.bitcast(build.add(bits, constant(I32, width, 0x3F800000)), vector_type(FLOAT, width))
    return build.fmul(value, power)
