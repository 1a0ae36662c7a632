"""Every Triton kernel compiled for devices that this machine lacks, and its binaries read.

    python tests/kernels/aot.py            one row of each kind for each architecture
    python tests/kernels/aot.py --tuned    each kernel, each row of the table of tilings
    python tests/kernels/aot.py --all      and each option
    python tests/kernels/aot.py --spill    one kernel that cannot fit its registers, to see that this is noticed

A launcher is asked for a Launch with tensors that have no memory, and what it would have run is compiled for the
target (`kernels/triton/ahead.py`). A kernel that spills, or wants more shared memory than the device has, is a fault;
the exit status says whether there was one. What two rows have in common (the kernel that joins parts, mostly) is
compiled once.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import triton
from torch import Tensor

from kilburn.kernels.contract import Batch, Odds, Rope
from kilburn.kernels.triton.ahead import UNITS, source, use_of
from kilburn.kernels.triton.copy_blocks import copy_blocks
from kilburn.kernels.triton.kv_write import kv_write
from kilburn.kernels.triton.launch import Launch
from kilburn.kernels.triton.paged_attention import Device, Options, paged_attention
from kilburn.kernels.triton.rms_norm import add_rms_norm, rms_norm
from kilburn.kernels.triton.sample import likeliest, sample
from kilburn.kernels.triton.silu_mul import silu_mul
from kilburn.kernels.triton.tilings import ARCHITECTURES

MORE = {"spill": {"sm_90": {"maxnreg": 32}}}  # options of the compiler, beside a launch's own
ONE_OF_EACH = ("sm_90", "gfx942")  # options, which are code in common, are compiled for one architecture of each maker
EIGHT_BITS = {"sm_90": torch.float8_e4m3fn, "sm_100": torch.float8_e4m3fn, "sm_80": torch.int8, "gfx942": torch.int8}


# --- what is compiled


def nowhere(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def batch_of(num_seqs: int, queries: int, context: int, block_size: int) -> Batch:
    def whole(*shape: int) -> Tensor:
        return nowhere(*shape, dtype=torch.int32)

    tokens = nowhere(num_seqs * queries, dtype=torch.int64)
    tables = whole(num_seqs, context // block_size)
    return Batch(whole(num_seqs + 1), whole(num_seqs), tables, tokens, tokens, queries, context)


def attention(
    architecture: str,
    head_dim: int,
    queries: int,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    options: Options | None = None,
    kv_dtype: torch.dtype | None = None,
) -> list[Launch]:
    """With one query a sequence the context is split, so that the kernel that joins the parts is compiled too."""
    q = nowhere(8 * queries, 32, head_dim, dtype=dtype)
    pool = nowhere(64, 4, 2, 8, block_size, head_dim, dtype=kv_dtype or dtype)
    device = Device(architecture, 132 if queries == 1 else 1)
    batch = batch_of(8, queries, 8192, block_size)
    return paged_attention(device, nowhere(*q.shape, dtype=dtype), q, pool[:, 1], batch, 0.1, options or Options())


def small() -> list[tuple[str, Launch]]:
    """The other kernels, which are cut alike for every architecture."""
    x, head = nowhere(64, 4096), nowhere(64, 48, 128)
    q, k, v = head.split([32, 8, 8], dim=1)
    kv, batch = nowhere(64, 4, 2, 8, 16, 128)[:, 1], batch_of(8, 8, 4096, 16)
    halves, pairs = (Rope(nowhere(4096, 64, dtype=torch.float32), interleaved) for interleaved in (False, True))
    pool = nowhere(64, 4, 2, 8, 16, 128)
    moves = nowhere(3, 2, dtype=torch.int64)
    return [
        ("rms_norm", rms_norm(x, x.unsqueeze(1), x[0], 1e-6)),
        ("rms_norm of heads", rms_norm(q, q, nowhere(128), 1e-6)),
        ("add_rms_norm", add_rms_norm(x, x, x, x[0], 1e-6)),
        ("silu_mul", silu_mul(nowhere(64, 14336), nowhere(64, 28672))),
        ("kv_write", kv_write(q, k, v, kv, batch, halves)),
        ("kv_write, pairs", kv_write(q, k, v, kv, batch, pairs)),
        ("kv_write, no rope", kv_write(q, k, v, kv, batch, None)),
        ("copy_blocks", copy_blocks(pool, pool, moves)),
        *sampling(),
    ]


def sampling() -> Iterator[tuple[str, Launch]]:
    logits = nowhere(64, 128256, dtype=torch.float32)
    odds = Odds(nowhere(64, 4, dtype=torch.float64), nowhere(64, 4, dtype=torch.int64))
    _, drawn = sample(logits, odds)
    _, best = likeliest(logits, 20)
    names = ("chunks", "odds", "draws", "chunks with sums", "likeliest")
    yield from zip((f"sample: {name}" for name in names), (*drawn, *best), strict=True)


def some(architecture: str) -> Iterator[tuple[str, Launch]]:
    for queries, head_dim in ((1, 128), (32, 128)):
        yield from named(f"attention {head_dim} x{queries}", attention(architecture, head_dim, queries))
    yield from small()


def tuned(architecture: str) -> Iterator[tuple[str, Launch]]:
    yield from small()
    for queries in (1, 32):
        for head_dim in (64, 128, 256):
            yield from named(f"attention {head_dim} x{queries}", attention(architecture, head_dim, queries))
            wide = attention(architecture, head_dim, queries, torch.float32)
            yield from named(f"attention {head_dim} x{queries} float32", wide)


def everything(architecture: str) -> Iterator[tuple[str, Launch]]:
    yield from tuned(architecture)
    if architecture not in ONE_OF_EACH:
        return
    yield from eight_bits(architecture, EIGHT_BITS[architecture])
    sinks = nowhere(32, dtype=torch.float32)
    half = attention(architecture, 128, 1, torch.float16, block_size=128)
    yield from named("attention 128 x1 float16, blocks of 128", half)
    # A head that fills no tile; 80 stands for 96.
    yield from named("attention 80 x32", attention(architecture, 80, 32))
    capped = attention(architecture, 80, 1, block_size=8, options=Options(None, 30.0, sinks))
    yield from named("attention 80 x1 cap, sinks, blocks of 8", capped)
    windowed = attention(architecture, 128, 32, block_size=8, options=Options(1000, 30.0, sinks))
    yield from named("attention 128 x32 window, cap, sinks, blocks of 8", windowed)


def eight_bits(architecture: str, kv_dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    q, k, v = nowhere(64, 48, 128).split([32, 8, 8], dim=1)
    kv, batch = nowhere(64, 4, 2, 8, 16, 128, dtype=kv_dtype)[:, 1], batch_of(8, 8, 4096, 16)
    rope = Rope(nowhere(4096, 64, dtype=torch.float32))
    for form, shape in (("scales of heads", (2, 8)), ("scales of rows", (64, 2, 8, 16))):
        scales = nowhere(*shape, dtype=torch.float32)
        yield f"kv_write {kv_dtype}, {form}", kv_write(q, k, v, kv, batch, rope, scales)
        for queries in (1, 32) if len(shape) == 4 else (1,):  # the larger form in both of its cuts
            read = attention(architecture, 128, queries, options=Options(scales=scales), kv_dtype=kv_dtype)
            yield from named(f"attention 128 x{queries} {kv_dtype}, {form}", read)


def named(name: str, launches: list[Launch]) -> list[tuple[str, Launch]]:
    return [(name, launches[0]), *((f"{name}, joined", launch) for launch in launches[1:])]


def spilling(architecture: str) -> Iterator[tuple[str, Launch]]:
    """A kernel whose threads hold more numbers until all have been summed than they may have registers."""
    match architecture:
        case "sm_90":  # 64 a thread, and MORE allows half as many
            width, warps = 16384, 8
        case "gfx942":  # 128 a thread, in a program of so many threads that they have no more
            width, warps = 131072, 16
        case _:
            return
    x = nowhere(4, width)
    yield "made to spill", dataclasses.replace(rms_norm(x, x.unsqueeze(1), x[0], 1e-6), num_warps=warps)


SETS = {"some": some, "tuned": tuned, "all": everything, "spill": spilling}

# --- how


def rows(which: str) -> Iterator[tuple[str, int]]:
    """(architecture, place in its set) of all that differ."""
    known = set()
    for architecture in ARCHITECTURES:
        for place, (_, launch) in enumerate(SETS[which](architecture)):
            key = architecture, source(launch).hash(), str(sorted(launch.options.items()))
            if key not in known:
                known.add(key)
                yield architecture, place


def compile_one(which: str, architecture: str, place: int) -> str:
    """A line of the table, in a process of its own, which makes the Launch anew: kernels do not travel."""
    name, launch = list(SETS[which](architecture))[place]
    begun = time.monotonic()
    try:
        use = use_of(launch, architecture, MORE.get(which, {}).get(architecture, {}))
    except (triton.CompilationError, RuntimeError) as error:
        return f"{architecture:<7} {name:<52} FAULT: {error}"
    fault = "FAULT: spills" if use.spilled_bytes else ""
    if use.shared_bytes > UNITS[architecture].shared_bytes:
        fault = f"FAULT: more shared memory than {UNITS[architecture].shared_bytes}"
    numbers = f"{use.registers:>9} {use.spilled_bytes:>8} {use.shared_bytes:>8} {time.monotonic() - begun:>7.1f}"
    return f"{architecture:<7} {name:<52} {numbers} {fault}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", dest="which", action="store_const", const="all", default="some")
    parser.add_argument("--tuned", dest="which", action="store_const", const="tuned")
    parser.add_argument("--spill", dest="which", action="store_const", const="spill")
    parser.add_argument("--jobs", type=int, default=2)
    words = parser.parse_args()
    faults = 0
    print(f"triton {triton.__version__}: {'':<45} registers  spilled   shared       s")
    with ProcessPoolExecutor(words.jobs, mp_context=get_context("spawn")) as pool:
        asked = [pool.submit(compile_one, words.which, *row) for row in rows(words.which)]
        for answer in asked:
            line = answer.result()
            faults += "FAULT" in line
            print(line, flush=True)
    print(f"{len(asked)} kernels, {faults} faults", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
