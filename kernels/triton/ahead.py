"""A Launch compiled for a device that is not here, and its binary read.

`launcher(tensors on "meta") -> Launch -> use_of(launch, "sm_90") -> Use`. NVIDIA's binaries are read by cuobjdump,
which comes with Triton (registers; the stack, where what is spilled lies; shared memory); AMD's assembly states its own
numbers. What is compiled is what the runtime would compile: `source` specialises as it does.

`programs_at_once` is the arithmetic of occupancy: how many programs of a kernel a multiprocessor holds, by registers,
shared memory and threads. It knows nothing of speed.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kilburn.kernels.triton.launch import Launch

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """What a multiprocessor (a compute unit, for AMD) has to share out."""

    shared_bytes: int  # of all programs together; one may have all of it
    registers: int  # of 32 bits, in all
    threads: int
    lanes: int  # of a warp


UNITS = {
    "sm_80": Unit(163 << 10, 65536, 2048, 32),
    "sm_90": Unit(227 << 10, 65536, 2048, 32),
    "sm_100": Unit(227 << 10, 65536, 2048, 32),
    "gfx942": Unit(64 << 10, 4 * 512 * 64, 2048, 64),
}


@dataclass(frozen=True, slots=True)
class Use:
    """What a binary takes."""

    registers: int  # a thread
    spilled_bytes: int
    shared_bytes: int


def programs_at_once(use: Use, num_warps: int, architecture: str) -> int:
    """0: not even one fits."""
    unit = UNITS[architecture]
    threads = num_warps * unit.lanes
    registers = -(-max(use.registers, 1) // 8) * 8 * threads
    shared = unit.shared_bytes // use.shared_bytes if use.shared_bytes else unit.threads
    return min(shared, unit.registers // registers, unit.threads // threads)


def source(launch: Launch) -> ASTSource:
    """As the runtime specialises it: a 1 is a constant, what 16 divides is known; neither, if a kernel says so."""
    names, params = launch.kernel.arg_names, launch.kernel.params
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    facts: dict[tuple[int, ...], list[list[object]]] = {}
    for place, argument in enumerate(launch.arguments):
        name = names[place]
        match argument:
            case Tensor():
                signature[name], facts[place,] = TYPES[argument.dtype], [["tt.divisibility", 16]]
            case float():
                signature[name] = "fp32"
            case int() if params[place].do_not_specialize:
                signature[name] = "i32"
            case 1:
                signature[name], constants[place,] = "constexpr", 1
            case int():
                signature[name] = "i32" if -(2**31) <= argument < 2**31 else "i64"
                if argument % 16 == 0:
                    facts[place,] = [["tt.divisibility", 16]]
    for name, value in launch.constants.items():
        signature[name], constants[names.index(name),] = "constexpr", value
    return ASTSource(launch.kernel, signature, constants, facts)


def target(architecture: str) -> GPUTarget:
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def use_of(launch: Launch, architecture: str, more: dict[str, int]) -> Use:
    built = triton.compile(source(launch), target=target(architecture), options=launch.options | more)
    if "amdgcn" in built.asm:
        return _amd(built.asm["amdgcn"], built.metadata.shared)
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return _nvidia(told, built.metadata.shared)


def _nvidia(told: str, shared_bytes: int) -> Use:
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", told)
    if found is None:
        raise ValueError(f"cuobjdump says nothing about registers:\n{told}")
    registers, stack, shared, local = map(int, found.groups())
    return Use(registers, stack + local, shared_bytes + shared)


def _amd(assembly: str, shared_bytes: int) -> Use:
    def number(word: str) -> int:
        found = re.search(rf"\.{word}:\s+(\d+)", assembly)
        if found is None:
            raise ValueError(f"the assembly does not state its .{word}")
        return int(found.group(1))

    spilled = max(number("private_segment_fixed_size"), 4 * number("vgpr_spill_count"))
    return Use(number("vgpr_count"), spilled, max(shared_bytes, number("group_segment_fixed_size")))
