"""Compiled kernels as object files in a folder: compiled once on a machine, loaded in milliseconds from then on.

A file's name holds a digest of everything that went into it (these sources, the compilers' versions, the processor),
so that a stale one is never found; its first 32 bytes are the digest of the rest, so that a damaged one is never run.
Files are written beside and renamed. Where the folder cannot be written, kernels are compiled at each start, which is
said.
"""

import contextlib
import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm
import torch

KIND_NAMES = ("float32", "bfloat16", "float16")
SOURCES = (
    "arguments",
    "attention",
    "compiling",
    "int8_panels",
    "panels",
    "rows",
    "sequence",
    "simd",
    "vectors",
    "writing",
)  # what machine code depends on


def host_has(feature: str) -> bool:
    """Whether an x86 processor has these instructions; others have what they stand for."""
    return platform.machine() not in ("x86_64", "AMD64") or bool(llvm.get_host_cpu_features().get(feature))


# As vectors.py numbers them. Without F16C a half becomes a float in a function that nothing here would link.
KINDS = {getattr(torch, name): kind for kind, name in enumerate(KIND_NAMES) if name != "float16" or host_has("f16c")}


def default_folder() -> Path:
    """KILBURN_CACHE, or kilburn in the user's cache folder."""
    root = os.environ.get("KILBURN_CACHE")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kilburn")
    return Path(root) / "kernels"


class Objects:
    """Finds, compiles and loads kernels; hands out the addresses of their functions."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.cpu, self._features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        self._digest = self._sources_digest()
        self._engines: list[llvm.ExecutionEngine] = []  # own the machine code

    def _sources_digest(self) -> str:
        digest = hashlib.sha256(f"{version('numba')} {version('llvmlite')} {self.cpu} {self._features}".encode())
        for source in SOURCES:
            digest.update((Path(__file__).parent / f"{source}.py").read_bytes())
        return digest.hexdigest()[:16]

    def _machine(self) -> llvm.TargetMachine:
        return llvm.Target.from_default_triple().create_target_machine(
            cpu=self.cpu, features=self._features, opt=3, jit=True
        )

    def address(self, name: str, kind: int, say: Callable[[str], None] | None = None) -> int:
        """Where the function of a kernel begins. Compiles it if need be."""
        path = self.folder / f"{name}-{KIND_NAMES[kind]}-{self._digest}.o"
        code = _read(path)
        if code is None:
            if say is not None:
                say(f"compiling the CPU kernel {name} for {KIND_NAMES[kind]}")
            from kilburn.kernels.cpu.compiling import object_code  # numba takes seconds to import

            code = object_code(name, kind, self._machine())
            if not _write(path, code) and say is not None:
                say(f"{self.folder} cannot be written, so that kernels are compiled at each start; set KILBURN_CACHE")
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self._machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._engines.append(engine)
        return int(engine.get_function_address("kernel"))


def _read(path: Path) -> bytes | None:
    """The object file, if it is whole and nobody else could have put it there."""
    try:
        owner = path.stat().st_uid
        if owner not in (os.getuid(), 0):
            return None
        data = path.read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _write(path: Path, code: bytes) -> bool:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError:
        with contextlib.suppress(OSError, NameError):
            os.unlink(file.name)
        return False
    return True
