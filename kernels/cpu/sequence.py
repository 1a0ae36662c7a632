"""A recorded step: all its kernels one after another, in one region of the threads.

    thread 0    | kernel 0: pieces | kernel 1: pieces             | kernel 2 ...
    thread 1    | kernel 0: pieces   | kernel 1: pieces | . . . . | kernel 2 ...
                                                          waits: what kernel 2 reads is not all there

Asking for a kernel from Python takes about as long as a small one runs, and so does waking a thread; a layer has nine.
Here the words of each, function and all, are rows of a table. Who comes to a kernel counts itself in, and out again
when no piece is left to take; as long as somebody is in, a piece may be unfinished. So nobody waits for a thread that
does nothing, which on a busy machine may be one that is not running. Who does wait looks for a while and then lets
whoever wants the core have it.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kilburn.kernels.cpu.arguments import FAULT, S_COUNT, S_FUNCTION, S_IN, S_OUT, S_STEP, S_TABLE
from kilburn.kernels.cpu.simd import fetch_add, int64s
from kilburn.kernels.cpu.vectors import FAST, I32, I64, INT64S, NONE

LOOKS = 4000  # before one lets others run: some 50 us


@intrinsic
def enter(context: Any, function: Any, words: Any) -> Any:
    """Calls the kernel at an address."""

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer()])
        build.call(build.inttoptr(args[0], kind.as_pointer()), [build.inttoptr(args[1], I64.as_pointer())])
        return target.get_dummy_value()

    return NONE(types.int64, types.int64), code


@intrinsic
def newest(context: Any, words: Any, index: Any) -> Any:
    """words[index], to which other threads add."""

    def code(_target: Any, build: Any, _signature: Any, args: Any) -> Any:
        return build.load_atomic(build.gep(args[0], [args[1]]), "acquire", 8)

    return types.int64(INT64S, types.int64), code


@intrinsic
def look_again(context: Any, lets_others: Any) -> Any:
    """A pause, or, where the argument is not 0, whoever else wants the core."""

    def code(target: Any, build: Any, _signature: Any, args: Any) -> Any:
        with build.if_else(build.icmp_signed("!=", args[0], I64(0))) as (lets, looks):
            with lets:
                kind = ir.FunctionType(I32, [])
                found = build.module.globals.get("sched_yield")
                build.call(found or ir.Function(build.module, kind, "sched_yield"), [])
            with looks:
                if llvm.get_host_cpu_features().get("sse2"):
                    kind = ir.FunctionType(ir.VoidType(), [])
                    build.call(build.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])
        return target.get_dummy_value()

    return NONE(types.int64), code


def sequence_kernel(_kind: int) -> Any:
    """The kernels of a table, row by row."""

    @njit(fastmath=FAST)
    def wait_for_others(words):
        looks = 0
        while newest(words, S_OUT) < newest(words, S_IN):
            looks += 1
            look_again(looks // LOOKS)

    def sequence(a):
        for index in range(a[S_COUNT]):
            at = a[S_TABLE] + index * a[S_STEP]
            words = int64s(at)
            fetch_add(words, S_IN, 1)
            enter(words[S_FUNCTION], at)
            fetch_add(words, S_OUT, 1)
            wait_for_others(words)
            if words[FAULT] != 0:
                a[FAULT] = 1 + index
                return  # as do all, who wait for each other: what comes next relies on it

    return sequence
