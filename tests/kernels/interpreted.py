"""The Triton set in Triton's interpreter: its kernels run on the CPU, one program after another, in numpy.

The interpreter is chosen when a decorator runs, Triton's own functions included, and so the variable is set around the
imports alone, and a Triton that another test's libraries have imported for compiling is left to them.
"""

import contextlib
import os
import sys
from typing import Any

import numpy as np
import torch

_before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
for _name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
    if not _name.startswith("triton._C"):  # its compiled part, which cannot be loaded twice and knows no modes
        del sys.modules[_name]
try:
    import triton.experimental.gluon  # noqa: F401, imported at the first launch otherwise, when the variable is gone
    import triton.language as tl
    from triton.runtime import interpreter

    from kilburn.kernels.triton import (  # noqa: F401
        copy_blocks,
        kernels,
        kv_write,
        paged_attention,
        rms_norm,
        sample,
        silu_mul,
        swap_blocks,
    )
finally:
    if _before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = _before

# Three things that every device does and the interpreter does not: it cuts off what a narrow float cannot hold, where
# devices round to the nearest, multiplies the bits of bfloat16 as if they were integers, and takes integers for such
# bits.

_ROUNDED = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}
_cut_off, _dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot


def _rounded(x: Any, from_dtype: Any, to_dtype: Any, mode: Any) -> Any:
    if from_dtype != tl.float32 or to_dtype not in _ROUNDED:
        return _cut_off(x, from_dtype, to_dtype, mode)
    dtype, bits = _ROUNDED[to_dtype]
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(dtype).view(bits).numpy().reshape(x.shape)


def _dot_of_bfloat16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    wide = [
        interpreter.TensorHandle(_cut_off(x.data, x.dtype.scalar, tl.float32, None).view(np.float32), tl.float32)
        if x.dtype.scalar == tl.bfloat16
        else x
        for x in (a, b)
    ]
    return _dot(self, *wide, *rest)


def _to_float(self: Any, source: Any, to_type: Any) -> Any:
    if to_type.scalar == tl.bfloat16:
        source = self.cast_impl(source, tl.float32)
    return self.cast_impl(source, to_type)


interpreter._convert_float = _rounded
interpreter.InterpreterBuilder.create_si_to_fp = _to_float
interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16


def triton_kernels(num_units: int = 4, architecture: str = "sm_90") -> "kernels.TritonKernels":
    """With few multiprocessors, so that small worlds are cut into splits too."""
    device = paged_attention.Device(architecture, num_units)
    return kernels.TritonKernels(torch.device("cpu"), device, contextlib.nullcontext)
