"""The threads that kernels run on: those of torch's own matrix products.

A kernel is a C function of one argument, the address of its words, of which the first counts what was taken so far.
Each thread that enters takes the next piece of work until none is left, so that it does not matter how many threads
come nor which of them is slow. They come from the OpenMP library that torch has loaded: a second pool of threads would
fight with the first for the cores. Where torch came without that library, plain Python threads do the same.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch  # first: its OpenMP library must be the one in the process

from kilburn.kernels.cpu.arguments import Words
from kilburn.kernels.cpu.rooms import Scratch

ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Fork = Callable[[int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class Launch:
    """A function, and a copy of its words; which of these grow with tokens and sequences, as in `Words`."""

    function: int
    words: bytes
    rows_at: int
    seqs_at: int


@dataclass(slots=True)
class Tape:
    """The launches that were asked for while it was set, to be made on as many threads, with what these work in."""

    num_threads: int
    scratch: Scratch
    launches: list[Launch] = field(default_factory=list)


TAPE: ContextVar[Tape | None] = ContextVar("TAPE", default=None)


class Team:
    """Runs kernels' functions on one thread or on all of torch's."""

    def __init__(self, fork: Fork | None) -> None:
        self._fork = fork
        self._threads: ThreadPoolExecutor | None = None
        self._entries: dict[int, Callable[[int], None]] = {}

    @property
    def name(self) -> str:
        return "Python threads" if self._fork is None else "torch's OpenMP threads"

    def run(self, function: int, words: Words, num_threads: int) -> None:
        """Enters the function at an address, on at most `num_threads` threads; returns when all have left. What is
        recorded is not run: it gives no answers, and finds no fault."""
        arguments = words.address
        if (tape := TAPE.get()) is not None:
            tape.launches.append(Launch(function, words.copied(), words.rows_at, words.seqs_at))
            return
        if num_threads > 1 and self._fork is not None:
            self._fork(function, arguments, num_threads, 0)
            return
        entry = self._entries.get(function)
        if entry is None:
            entry = self._entries[function] = ENTRY(function)
        if num_threads <= 1:
            entry(arguments)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(thread_name_prefix="kernel")
        for done in [self._threads.submit(entry, arguments) for _ in range(num_threads)]:
            done.result()


def torch_openmp() -> Fork | None:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP library in this process, if there is one."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split()[-1] for line in maps.splitlines() if "omp" in line.rpartition("/")[2]}
    for path in sorted(paths, key=lambda path: (str(Path(torch.__file__).parent) not in path, path)):
        try:
            fork = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        fork.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        fork.restype = None
        return fork  # type: ignore[no-any-return]
    return None
