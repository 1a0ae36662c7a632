"""How LLVM is told of vectors: what simd.py, panels.py and int8_panels.py write their innermost loops with.

Each function here adds instructions to a function that is being compiled, and returns the value that they make. Types
are small literals (`F32`, `BF16`, `F16`, `INT8`), vectors have eight lanes, all arithmetic is float32, an address is an
int64 in bytes.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F32, BF16, F16, INT8 = 0, 1, 2, 3  # INT8: of a cache only
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

ELEMENT = {F32: FLOAT, BF16: I16, F16: HALF, INT8: I8}
ELEMENT_BYTES = {F32: 4, BF16: 2, F16: 2, INT8: 1}
Load = Callable[[Any, Any, int, int], Any]


def prefetch_line(build: Any, address: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    ask = build.module.declare_intrinsic("llvm.prefetch", (I8.as_pointer(),), kind)
    build.call(ask, [build.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1)])


def vector_type(element: Any, width: int) -> Any:
    return element if width == 1 else ir.VectorType(element, width)


def constant(element: Any, width: int, value: Any) -> Any:
    return ir.Constant(element, value) if width == 1 else ir.Constant(ir.VectorType(element, width), [value] * width)


def pointer(build: Any, address: Any, element: Any, width: int) -> Any:
    return build.inttoptr(address, vector_type(element, width).as_pointer())


def load_vector(build: Any, address: Any, kind: int, width: int) -> Any:
    """`width` neighbours of a kind, as float32."""
    held = build.load(pointer(build, address, ELEMENT[kind], width), align=ELEMENT_BYTES[kind])
    match kind:
        case 0:
            return held
        case 1:
            bits = build.shl(build.zext(held, vector_type(I32, width)), constant(I32, width, 16))
            return build.bitcast(bits, vector_type(FLOAT, width))
        case 2:
            return build.fpext(held, vector_type(FLOAT, width))
        case _:
            return build.sitofp(build.sext(held, vector_type(I32, width)), vector_type(FLOAT, width))


def load_some(build: Any, address: Any, kind: int, mask: Any) -> Any:
    """As load_vector, of the eight that a mask names; zeros for the others, which are not read."""
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
            bits = build.shl(build.zext(some, ir.VectorType(I32, LANES)), constant(I32, LANES, 16))
            return build.bitcast(bits, ir.VectorType(FLOAT, LANES))
        case 3:
            return build.sitofp(build.sext(some, ir.VectorType(I32, LANES)), ir.VectorType(FLOAT, LANES))
        case _:
            return build.fpext(build.bitcast(some, ir.VectorType(HALF, LANES)), ir.VectorType(FLOAT, LANES))


def store_vector(build: Any, value: Any, address: Any, kind: int, width: int) -> None:
    match kind:
        case 0:
            narrow = value
        case 1:  # to the nearest, ties to even, as torch rounds; a NaN must not carry into the exponent
            bits = build.bitcast(value, vector_type(I32, width))
            odd = build.and_(build.lshr(bits, constant(I32, width, 16)), constant(I32, width, 1))
            rounded = build.add(build.add(bits, constant(I32, width, 0x7FFF)), odd)
            is_nan = build.fcmp_unordered("uno", value, value)
            rounded = build.select(is_nan, constant(I32, width, 0x7FC00000), rounded)
            narrow = build.trunc(build.lshr(rounded, constant(I32, width, 16)), vector_type(I16, width))
        case 2:
            narrow = build.fptrunc(value, vector_type(HALF, width))
        case _:  # what is no number is 0, what is beyond the range its end; comparisons with NaN are false
            value = build.select(build.fcmp_ordered("ord", value, value), value, constant(FLOAT, width, 0.0))
            for sign, end in (("<", -127.0), (">", 127.0)):
                limit = constant(FLOAT, width, end)
                value = build.select(build.fcmp_ordered(sign, value, limit), limit, value)
            narrow = build.fptosi(call_llvm(build, "llvm.rint", [value]), vector_type(I8, width))
    build.store(narrow, pointer(build, address, ELEMENT[kind], width), align=ELEMENT_BYTES[kind])


def call_llvm(build: Any, name: str, args: list[Any]) -> Any:
    """Calls one of LLVM's own functions on floats or vectors of them."""
    kind = args[0].type
    name += ".f32" if kind == FLOAT else f".v{kind.count}f32"
    function = build.module.globals.get(name) or ir.Function(
        build.module, ir.FunctionType(kind, [kind] * len(args)), name=name
    )
    return build.call(function, args)


def fma(build: Any, a: Any, b: Any, c: Any) -> Any:
    return call_llvm(build, "llvm.fma", [a, b, c])


def splat(build: Any, value: Any, width: int) -> Any:
    vector = build.insert_element(ir.Constant(ir.VectorType(value.type, width), ir.Undefined), value, I32(0))
    return build.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, width), [0] * width))


def shuffle(build: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return build.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def after(build: Any, address: Any, num_bytes: int) -> Any:
    return build.add(address, I64(num_bytes)) if num_bytes else address


def rows_from(build: Any, first: Any, step: Any, count: int) -> list[Any]:
    rows = [first]
    while len(rows) < count:
        rows.append(build.add(rows[-1], step))
    return rows


def counted(build: Any, count: Any, start: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
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


def pointer_to(numba_type: Any) -> Any:
    """A function of numba's that takes an address for a pointer to such values."""

    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
            return build.inttoptr(args[0], target.get_value_type(numba_type))

        return numba_type(types.int64), code

    return at
