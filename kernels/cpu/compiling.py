"""From a kernel's Python source to an object file. Needs numba, which whoever loads a finished object does not.

numba makes LLVM code of the function; an entry `void kernel(int64 *arguments)` is laid on top, and LLVM compiles both
for the processor at hand. What is left refers to nothing but the C library.
"""

from typing import Any

import llvmlite.binding as llvm
from numba import njit

from kilburn.kernels.cpu import attention, int8_panels, panels, rows, sequence, vectors, writing

KERNELS = {
    "survey": lambda _kind: attention.survey.py_func,
    "attention": lambda kind: attention.kernel(kind, kind),
    "attention_int8": lambda kind: attention.kernel(kind, vectors.INT8),
    "kv_write": lambda kind: writing.kv_write_kernel(kind, kind),
    "kv_write_int8": lambda kind: writing.kv_write_kernel(kind, vectors.INT8),
    "rms_norm": rows.rms_norm_kernel,
    "silu_mul": rows.silu_mul_kernel,
    "look_up": rows.look_up_kernel,
    "sequence": sequence.sequence_kernel,
    "int8_panels": int8_panels.panels_kernel,
    "panels": panels.panels_kernel,
    "quantize_rows": int8_panels.quantize_rows_kernel,
    "move_blocks": writing.move_blocks_kernel,
}


def object_code(name: str, kind: int, machine: llvm.TargetMachine) -> bytes:
    """The object file of a kernel, whose function is called `kernel`."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
    function = njit(fastmath=vectors.FAST, **options)(KERNELS[name](kind))
    signature = (vectors.INT64S,)
    function.compile(signature)
    inner = function.overloads[signature].fndesc.llvm_func_name
    entry = f"""
        define void @kernel(ptr %arguments) {{
            %result = alloca ptr
            %raised = alloca ptr
            %status = call i32 @{inner}(ptr %result, ptr %raised, ptr %arguments)
            ret void
        }}"""
    module = llvm.parse_assembly(function.inspect_llvm(signature) + entry)
    module.verify()
    return machine.emit_object(module)
