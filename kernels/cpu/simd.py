"""The vocabulary that the compiled CPU kernels are written in: raw addresses and vectors of eight.

numba compiles our loops; what it cannot promise is how they become vector instructions. So the few innermost pieces are
written out here, as LLVM instructions that Python loops unroll when a kernel is compiled:

    dot_four    three rows of queries with four rows of keys, wherever these are in memory: twelve sums in registers
    add_rows    three rows of sums += weights x rows of values, likewise
    add_panel   1 to 3 rows of sums += rows of x . a chunk of a packed weight, likewise
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
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kilburn.kernels.cpu.arguments import PANEL

F32, BF16, F16, INT8 = 0, 1, 2, 3  # INT8: of a cache only
KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
LANES = 8  # float32 values of a vector: one AVX2 register, two NEON ones

# Sums may be reordered and products fused; NaN and infinities stay what they are, since they tell a broken row.
FAST = {"nsz", "arcp", "contract", "afn", "reassoc"}

I8, I32, I64, FLOAT, HALF, I16 = (
    ir.IntType(8),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
    ir.HalfType(),
    ir.IntType(16),
)
INT64S = types.CPointer(types.int64)
FLOATS = types.CPointer(types.float32)
NONE = types.void


def _pointer_to(numba_type: Any) -> Any:
    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
            return build.inttoptr(args[0], target.get_value_type(numba_type))

        return numba_type(types.int64), code

    return at


int64s = _pointer_to(INT64S)
int32s = _pointer_to(types.CPointer(types.int32))
floats = _pointer_to(FLOATS)


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
        _prefetch(build, args[0])
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


def _prefetch(build: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    ask = build.module.declare_intrinsic("llvm.prefetch", (I8.as_pointer(),), kind)
    build.call(ask, [build.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1)])


# -- elements and vectors of any kind ----------------------------------------------------------------------------------

ELEMENT = {F32: FLOAT, BF16: I16, F16: HALF, INT8: I8}
ELEMENT_BYTES = {F32: 4, BF16: 2, F16: 2, INT8: 1}


def _vector(element: Any, width: int) -> Any:
    return element if width == 1 else ir.VectorType(element, width)


def _constant(element: Any, width: int, value: Any) -> Any:
    return ir.Constant(element, value) if width == 1 else ir.Constant(ir.VectorType(element, width), [value] * width)


def _pointer(build: Any, address: Any, element: Any, width: int) -> Any:
    return build.inttoptr(address, _vector(element, width).as_pointer())


def _load(build: Any, address: Any, kind: int, width: int) -> Any:
    """`width` neighbours of a kind, as float32."""
    held = build.load(_pointer(build, address, ELEMENT[kind], width), align=ELEMENT_BYTES[kind])
    match kind:
        case 0:
            return held
        case 1:
            bits = build.shl(build.zext(held, _vector(I32, width)), _constant(I32, width, 16))
            return build.bitcast(bits, _vector(FLOAT, width))
        case 2:
            return build.fpext(held, _vector(FLOAT, width))
        case _:
            return build.sitofp(build.sext(held, _vector(I32, width)), _vector(FLOAT, width))


Load = Callable[[Any, Any, int, int], Any]


def _load_some(build: Any, address: Any, kind: int, mask: Any) -> Any:
    """As _load, of the eight that a mask names; zeros for the others, which are not read."""
    held = ir.VectorType({F32: FLOAT, BF16: I16, F16: I16, INT8: I8}[kind], LANES)
    name = {F32: "f32", BF16: "i16", F16: "i16", INT8: "i8"}[kind]
    args = [build.inttoptr(address, held.as_pointer()), I32(ELEMENT_BYTES[kind]), mask, ir.Constant(held, None)]
    function = build.module.declare_intrinsic(
        f"llvm.masked.load.v8{name}.p0", (), ir.FunctionType(held, [a.type for a in args])
    )
    some = build.call(function, args)
    match kind:
        case 0:
            return some
        case 1:
            bits = build.shl(build.zext(some, ir.VectorType(I32, LANES)), _constant(I32, LANES, 16))
            return build.bitcast(bits, ir.VectorType(FLOAT, LANES))
        case 3:
            return build.sitofp(build.sext(some, ir.VectorType(I32, LANES)), ir.VectorType(FLOAT, LANES))
        case _:
            return build.fpext(build.bitcast(some, ir.VectorType(HALF, LANES)), ir.VectorType(FLOAT, LANES))


def _store(build: Any, value: Any, address: Any, kind: int, width: int) -> None:
    match kind:
        case 0:
            narrow = value
        case 1:  # to the nearest, ties to even, as torch rounds; a NaN must not carry into the exponent
            bits = build.bitcast(value, _vector(I32, width))
            odd = build.and_(build.lshr(bits, _constant(I32, width, 16)), _constant(I32, width, 1))
            rounded = build.add(build.add(bits, _constant(I32, width, 0x7FFF)), odd)
            is_nan = build.fcmp_unordered("uno", value, value)
            rounded = build.select(is_nan, _constant(I32, width, 0x7FC00000), rounded)
            narrow = build.trunc(build.lshr(rounded, _constant(I32, width, 16)), _vector(I16, width))
        case 2:
            narrow = build.fptrunc(value, _vector(HALF, width))
        case _:  # what is no number is 0, what is beyond the range its end; comparisons with NaN are false
            value = build.select(build.fcmp_ordered("ord", value, value), value, _constant(FLOAT, width, 0.0))
            for sign, end in (("<", -127.0), (">", 127.0)):
                limit = _constant(FLOAT, width, end)
                value = build.select(build.fcmp_ordered(sign, value, limit), limit, value)
            narrow = build.fptosi(_call(build, "llvm.rint", [value]), _vector(I8, width))
    build.store(narrow, _pointer(build, address, ELEMENT[kind], width), align=ELEMENT_BYTES[kind])


def _call(build: Any, name: str, args: list[Any]) -> Any:
    """Calls one of LLVM's own functions on floats or vectors of them."""
    kind = args[0].type
    name += ".f32" if kind == FLOAT else f".v{kind.count}f32"
    function = build.module.globals.get(name) or ir.Function(
        build.module, ir.FunctionType(kind, [kind] * len(args)), name=name
    )
    return build.call(function, args)


def _fma(build: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(build, "llvm.fma", [a, b, c])


def _splat(build: Any, value: Any, width: int) -> Any:
    vector = build.insert_element(ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, I32(0))
    return build.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, width), [0] * width))


def _shuffle(build: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return build.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _after(build: Any, address: Any, num_bytes: int) -> Any:
    return build.add(address, I64(num_bytes)) if num_bytes else address


@intrinsic(prefer_literal=True)
def load_one(context: Any, base: Any, index: Any, kind: Any) -> Any:
    """The element at `index` of a row that begins at the address `base`."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        # An index, not a sum of addresses: only so does LLVM see a loop that it can turn into vectors.
        at = build.gep(_pointer(build, args[0], ELEMENT[kind.literal_value], 1), [args[1]])
        return _load(build, build.ptrtoint(at, I64), kind.literal_value, 1)

    return types.float32(types.int64, types.int64, kind), code


@intrinsic(prefer_literal=True)
def store_one(context: Any, base: Any, index: Any, value: Any, kind: Any) -> Any:
    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        at = build.gep(_pointer(build, args[0], ELEMENT[kind.literal_value], 1), [args[1]])
        _store(build, args[2], build.ptrtoint(at, I64), kind.literal_value, 1)
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
        queries = _rows_from(build, q, q_step, num_q.literal_value)
        key_bytes = I64(LANES * ELEMENT_BYTES[kind.literal_value])

        def step(index: Any, sums: list[Any], load: Load = _load) -> list[Any]:
            at_q, at_key = build.mul(index, I64(4 * LANES)), build.mul(index, key_bytes)
            query = [_load(build, build.add(at, at_q), F32, LANES) for at in queries]
            new = list(sums)
            for j, at in enumerate(keys):  # 12 sums, 3 queries and a key: all 16 registers
                key = load(build, build.add(at, at_key), kind.literal_value, LANES)
                for i in range(len(queries)):
                    new[4 * i + j] = _fma(build, query[i], key, sums[4 * i + j])
            return new

        sums = _whole_and_rest(build, dim, [_constant(FLOAT, LANES, 0.0)] * (4 * len(queries)), step)
        for i, at in enumerate(_rows_from(build, out, out_step, len(queries))):
            _store(build, _four_sums(build, sums[4 * i : 4 * i + 4]), at, F32, 4)
        return target.get_dummy_value()

    return NONE(*[types.int64] * 4, INT64S, types.int64, types.int64, num_q, kind), code


def _whole_and_rest(build: Any, dim: Any, values: list[Any], step: Callable[..., list[Any]]) -> list[Any]:
    """values = step(index, values) for the vectors of a row of `dim`; the last one's load stops at the end."""
    whole, rest = build.lshr(dim, I64(3)), build.and_(dim, I64(LANES - 1))
    values = _counted(build, whole, values, step)
    lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    limit = _splat(build, build.trunc(rest, I32), LANES)
    mask = build.icmp_unsigned("<", lanes, limit)

    def load(build: Any, address: Any, kind: int, width: int) -> Any:
        return _load_some(build, address, kind, mask)

    def last(_index: Any, values: list[Any]) -> list[Any]:
        return step(whole, values, load)

    return _counted(build, build.zext(build.icmp_unsigned("!=", rest, I64(0)), I64), values, last)


def _rows_from(build: Any, first: Any, step: Any, count: int) -> list[Any]:
    rows = [first]
    while len(rows) < count:
        rows.append(build.add(rows[-1], step))
    return rows


def _four_sums(build: Any, four: list[Any]) -> Any:
    """The sum of each of four vectors, as a vector of four."""

    def folded(a: Any, b: Any, low: list[int], high: list[int]) -> Any:
        return build.fadd(_shuffle(build, a, b, low), _shuffle(build, a, b, high))

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
        sum_rows = _rows_from(build, sums, sums_step, num_sums.literal_value)
        weight_rows = _rows_from(build, weights, weights_step, num_sums.literal_value)

        def columns(first: Any, num_vectors: int, load: Load = _load) -> None:
            """The sums of num_vectors * 8 columns, the first vector of them at an index."""
            at_row = build.mul(first, I64(LANES * ELEMENT_BYTES[kind.literal_value]))
            ats = [build.add(row, build.mul(first, I64(4 * LANES))) for row in sum_rows]
            cells = [_after(build, at, 4 * LANES * j) for at in ats for j in range(num_vectors)]

            def step(index: Any, held: list[Any]) -> list[Any]:
                row = build.add(build.add(build.load(build.gep(rows, [index])), offset), at_row)
                at = build.shl(index, I64(2))
                weight = [_splat(build, _load(build, build.add(w, at), F32, 1), LANES) for w in weight_rows]
                new = list(held)
                for j in range(num_vectors):  # 12 sums, 3 weights and a value: all 16 registers
                    value_at = _after(build, row, j * LANES * ELEMENT_BYTES[kind.literal_value])
                    value = load(build, value_at, kind.literal_value, LANES)
                    for i in range(len(weight)):
                        new[i * num_vectors + j] = _fma(build, weight[i], value, held[i * num_vectors + j])
                return new

            new = _counted(build, count, [_load(build, at, F32, LANES) for at in cells], step)
            for at, value in zip(cells, new, strict=True):
                _store(build, value, at, F32, LANES)

        def four(index: Any, _values: list[Any]) -> list[Any]:
            columns(build.shl(index, I64(2)), 4)
            return []

        _counted(build, build.lshr(dim, I64(5)), [], four)
        first = build.shl(build.lshr(dim, I64(5)), I64(2))

        def one(index: Any, _values: list[Any], load: Load = _load) -> list[Any]:
            columns(build.add(first, index), 1, load)
            return []

        _whole_and_rest(build, build.and_(dim, I64(31)), [], one)
        return target.get_dummy_value()

    return NONE(*[types.int64] * 4, INT64S, *[types.int64] * 3, num_sums, kind), code


@intrinsic(prefer_literal=True)
def add_panel(
    context: Any,
    sums: Any,
    sums_step: Any,
    x: Any,
    x_step: Any,
    weights: Any,
    depth: Any,
    is_fresh: Any,
    num_rows: Any,
    num_vectors: Any,
) -> Any:
    """sums[i] [8 * num_vectors] += x[i] [depth] . weights [depth, 64], of which the first columns count.

    All float32 at addresses, with their steps. Where `is_fresh` is not 0, sums begin at 0 and what they held does not
    matter. Products are added in order of depth, one after another.
    """

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        sums, sums_step, x, x_step, weights, depth, is_fresh = args[:7]
        vectors = range(num_vectors.literal_value)
        xs = _rows_from(build, x, x_step, num_rows.literal_value)
        rows = _rows_from(build, sums, sums_step, num_rows.literal_value)
        cells = [_after(build, row, 4 * LANES * j) for row in rows for j in vectors]

        def step(index: Any, held: list[Any]) -> list[Any]:
            column, at = build.add(weights, build.mul(index, I64(4 * PANEL))), build.shl(index, I64(2))
            values = [_splat(build, _load(build, build.add(row, at), F32, 1), LANES) for row in xs]
            new = list(held)
            for j in vectors:
                weight = _load(build, _after(build, column, 4 * LANES * j), F32, LANES)
                for i, value in enumerate(values):
                    new[i * len(vectors) + j] = _fma(build, value, weight, held[i * len(vectors) + j])
            return new

        begins = build.icmp_signed("!=", is_fresh, I64(0))
        zero = _constant(FLOAT, LANES, 0.0)
        start = [build.select(begins, zero, _load(build, at, F32, LANES)) for at in cells]
        for at, value in zip(cells, _counted(build, depth, start, step), strict=True):
            _store(build, value, at, F32, LANES)
        return target.get_dummy_value()

    return NONE(*[types.int64] * 7, num_rows, num_vectors), code


def _counted(build: Any, count: Any, start: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """values = step(index, values) for index in [0, count)."""
    before = build.block
    loop, after = build.append_basic_block("loop"), build.append_basic_block("done")
    build.cbranch(build.icmp_signed(">", count, I64(0)), loop, after)
    build.position_at_end(loop)
    index, values = build.phi(I64), [build.phi(value.type) for value in start]
    new = step(index, values)
    end = build.block  # not `loop` where the step has a loop of its own
    following = build.add(index, I64(1))
    for phi, first, last in [(index, I64(0), following), *zip(values, start, new, strict=True)]:
        phi.add_incoming(first, before)
        phi.add_incoming(last, end)
    build.cbranch(build.icmp_signed("<", following, count), loop, after)
    build.position_at_end(after)
    results = [build.phi(value.type) for value in start]
    for phi, first, last in zip(results, start, new, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, end)
    return results


@intrinsic
def row_max(context: Any, row: Any, count: Any, start: Any) -> Any:
    """The largest of `start` and `count` float32 (a multiple of 8, above 0) at an address."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return build.select(build.fcmp_ordered(">", a, b), a, b)

        def step(address: Any, top: Any) -> Any:
            return larger(_load(build, address, F32, LANES), top)

        top = _over_row(build, args[0], args[1], _splat(build, args[2], LANES), step)
        for half in (4, 2, 1):
            top = larger(_shuffle(build, top, top, [(i + half) % LANES for i in range(LANES)]), top)
        return build.extract_element(top, I32(0))

    return types.float32(types.int64, types.int64, types.float32), code


@intrinsic
def is_above(context: Any, row: Any, count: Any, limit: Any) -> Any:
    """Whether one of `count` float32 (a multiple of 8) at an address is above a limit. NaN is not."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        limit = _splat(build, args[2], LANES)

        def step(address: Any, found: Any) -> Any:
            return build.or_(found, build.fcmp_ordered(">", _load(build, address, F32, LANES), limit))

        found = _over_row(build, args[0], args[1], ir.Constant(ir.VectorType(ir.IntType(1), LANES), None), step)
        return build.icmp_unsigned("!=", build.bitcast(found, I8), I8(0))

    return types.boolean(types.int64, types.int64, types.float32), code


@intrinsic
def exp2_row(context: Any, row: Any, count: Any, top: Any, totals: Any) -> Any:
    """row = 2^(row - top) in place, for `count` float32 (a multiple of 8); adds them to the 8 at `totals`, by lane."""

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        top = _splat(build, args[2], LANES)

        def step(address: Any, total: Any) -> Any:
            value = _exp2(build, build.fsub(_load(build, address, F32, LANES), top), LANES)
            _store(build, value, address, F32, LANES)
            return build.fadd(total, value)

        total = _over_row(build, args[0], args[1], _load(build, args[3], F32, LANES), step)
        _store(build, total, args[3], F32, LANES)
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
            near = _fma(build, near, square, FLOAT(_float32(term)))
        power = _exp2(build, build.fmul(x, FLOAT(_float32(2 * math.log2(math.e)))), 1)
        far = build.fsub(one, build.fdiv(two, build.fadd(one, power)))
        # Near zero the difference would lose digits.
        return build.select(build.fcmp_ordered("<", square, FLOAT(_float32(0.3))), build.fmul(near, x), far)

    return types.float32(types.float32), code


def _over_row(build: Any, row: Any, count: Any, start: Any, step: Callable[[Any, Any], Any]) -> Any:
    """value = step(address, value) for the vectors of a row."""

    def at(index: Any, values: list[Any]) -> list[Any]:
        return [step(build.add(row, build.shl(index, I64(5))), values[0])]

    return _counted(build, build.lshr(count, I64(3)), [start], at)[0]


# 2^f for f in [-0.5, 0.5], fitted at Chebyshev nodes.
EXP2_TERMS = (1, 0.693147207, 0.240226512, 0.0555032721, 0.0096180256, 0.00134004322, 0.00015469732)


# tanh(x) / x by powers of x^2, for x^2 below 0.3025, fitted likewise.
TANH_TERMS = (1.0, -0.33333311, 0.13332468, -0.05384337, 0.02104217, -0.00623885)


def _float32(value: float) -> float:
    """As LLVM wants to have a float written."""
    return float(np.float32(value))


def _exp2(build: Any, x: Any, width: int) -> Any:
    def constant(value: float) -> Any:
        return _constant(FLOAT, width, _float32(value))

    # Comparisons with NaN are false, and so NaN passes both limits.
    x = build.select(build.fcmp_ordered("<", x, constant(-126.0)), constant(-126.0), x)
    x = build.select(build.fcmp_ordered(">", x, constant(127.0)), constant(127.0), x)
    whole = _call(build, "llvm.rint", [x])
    fraction = build.fsub(x, whole)
    value = constant(EXP2_TERMS[-1])
    for term in reversed(EXP2_TERMS[:-1]):
        value = _fma(build, value, fraction, constant(term))
    # Adding 1.5 * 2^23 leaves the whole number in the lowest bits, and has no undefined case where it is NaN.
    shifted = build.fadd(whole, constant(1.5 * 2**23))
    bits = build.shl(build.bitcast(shifted, _vector(I32, width)), _constant(I32, width, 23))
    power = build.bitcast(build.add(bits, _constant(I32, width, 0x3F800000)), _vector(FLOAT, width))
    return build.fmul(value, power)
