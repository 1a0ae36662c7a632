"""Writes the table of tilings, `kernels/triton/tuned.py`, for the attention kernel.

`python bench/tune_triton.py` measures on this machine's GPU, and replaces the rows of its architecture. For each head
dimension and width of value: decodes of 16 and 64 sequences over 4,096 positions, and one prompt of 4,096 tokens; the
candidate with the least product of times wins. Candidates that do not fit (shared memory) are passed over.

`python bench/tune_triton.py --by-occupancy sm_80,sm_90` needs no GPU: tilings are compiled, and one is sound that
spills nothing and, by registers, shared memory and threads, lets a multiprocessor hold ENOUGH warps. A row of the table
that is sound stays, unless `--anew` is given; else candidates are tried in the order of what they promise (more rows:
fewer reads of the context; more positions and stages: more of it under way), and the first sound one wins. That says
nothing of speed. The file says of each architecture which of the two it was.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import Any

import gpu_check

HEAD_DIMS = (64, 128, 256)
WIDTHS = (2, 4)  # bytes of a value of q
ENOUGH = 8  # warps of a multiprocessor: two for each of its four schedulers
TUNED = gpu_check.ROOT / "kernels/triton/tuned.py"

# (rows, positions, warps, stages), the most promising first
_DECODE = ((64, 4, 4), (64, 4, 3), (64, 4, 2), (32, 4, 3), (32, 4, 2), (32, 8, 2), (16, 4, 2), (16, 4, 1))
PROMISING = {
    (2, True): tuple((16, *rest) for rest in _DECODE),
    (2, False): (
        *((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), (64, 32, 8, 2), (64, 32, 4, 2)),
        *((64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)),
    ),
    # Products of float32 are sums in registers: small tiles.
    (4, True): tuple((16, *rest) for rest in _DECODE[4:]),
    (4, False): ((32, 32, 8, 2), (32, 32, 4, 2), *((16, *rest) for rest in _DECODE[4:])),
}

Key = tuple[str, int, int]  # architecture, width, padded head dimension
Pair = tuple[Any, Any]  # tilings of decode and of all else


# --- by occupancy


def launch_of(architecture: str, width: int, head_dim: int, is_decode: bool, cut: Any) -> Any:
    """The attention of 32 heads on 8 over blocks of 16, without memory."""
    import torch

    from kilburn.kernels.contract import Batch
    from kilburn.kernels.triton.paged_attention import Device, Options, paged_attention

    def nowhere(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype, queries = (torch.bfloat16 if width == 2 else torch.float32), (1 if is_decode else 32)
    starts, lens, tables = (nowhere(*shape, dtype=torch.int32) for shape in ((9,), (8,), (8, 512)))
    tokens = nowhere(8 * queries, dtype=torch.int64)
    q, kv = nowhere(8 * queries, 32, head_dim, dtype=dtype), nowhere(64, 2, 8, 16, head_dim, dtype=dtype)
    batch = Batch(starts, lens, tables, tokens, tokens, queries, 8192)
    device = Device(architecture, 132 if is_decode else 1, cut)
    return paged_attention(device, torch.empty_like(q), q, kv, batch, 0.1, Options())[0]


def sound(architecture: str, width: int, head_dim: int, is_decode: bool, anew: bool) -> Any:
    """The first of the candidates that is sound; where none is, the first that fits at all."""
    gpu_check.make_importable()
    from kilburn.kernels.triton.ahead import programs_at_once, use_of
    from kilburn.kernels.triton.tuned import TABLE, Tiling

    tried = [Tiling(*candidate) for candidate in PROMISING[width, is_decode]]
    if not anew and (architecture, width, head_dim) in TABLE:
        tried.insert(0, TABLE[architecture, width, head_dim][0 if is_decode else 1])
    fitting = None
    for cut in tried:
        use = use_of(launch_of(architecture, width, head_dim, is_decode, cut), architecture, {})
        programs = 0 if use.spilled_bytes else programs_at_once(use, cut.warps, architecture)
        if programs * cut.warps >= ENOUGH:
            return cut
        if programs and fitting is None:
            fitting = cut
    if fitting is None:
        raise RuntimeError(f"no candidate fits {architecture}, {width} bytes, head_dim {head_dim}: add smaller ones")
    return fitting


def by_occupancy(architectures: list[str], jobs: int, anew: bool) -> dict[Key, Pair]:
    keys = list(itertools.product(architectures, WIDTHS, HEAD_DIMS))
    found: dict[Key, Pair] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        asked = {
            (key, is_decode): pool.submit(sound, *key, is_decode, anew) for key in keys for is_decode in (True, False)
        }
        for key in keys:
            found[key] = (asked[key, True].result(), asked[key, False].result())
            print(*key, *found[key], flush=True)
    return found


# --- by measurement


def candidates(is_decode: bool) -> list[Any]:
    from kilburn.kernels.triton.tuned import Tiling

    rows = (16, 32) if is_decode else (32, 64, 128)
    shapes = itertools.product(rows, (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4))
    return [Tiling(*shape) for shape in shapes]


def fastest(place: Any, head_dim: int, dtype: Any, is_decode: bool) -> tuple[Any, float]:
    """The tiling of the least geometric mean, and that mean in microseconds."""
    import gpu_kernels as kernels
    import torch
    from triton.runtime.errors import OutOfResources

    if is_decode:
        shapes = [kernels.Shape(seqs, 4096, head_dim=head_dim, dtype=dtype) for seqs in (16, 64)]
    else:
        shapes = [kernels.Shape(1, 4096, queries=4096, head_dim=head_dim, dtype=dtype)]
    found: list[tuple[float, int, Any]] = []
    tried = candidates(is_decode)
    for number, cut in enumerate(tried, 1):
        there = place.cut_by(cut)
        with contextlib.suppress(OutOfResources):
            mean = math.exp(sum(math.log(kernels.attention_seconds(there, shape)) for shape in shapes) / len(shapes))
            found.append((mean * 1e6, number, cut))
        print(f"\r{number}/{len(tried)} best {min(found, default=None)}   ", end="", file=sys.stderr)
        torch.cuda.empty_cache()
    mean_us, _, cut = min(found)
    return cut, mean_us


def by_measurement(place: Any) -> dict[Key, Pair]:
    import torch

    from kilburn.kernels.triton.tilings import known

    found: dict[Key, Pair] = {}
    for head_dim, dtype in itertools.product(HEAD_DIMS, (torch.bfloat16, torch.float32)):
        (decode, decode_us), (ragged, ragged_us) = (fastest(place, head_dim, dtype, kind) for kind in (True, False))
        found[known(place.device.architecture), dtype.itemsize, head_dim] = (decode, ragged)
        print(f"{dtype} {head_dim}: {decode} {decode_us:.0f} us, {ragged} {ragged_us:.0f} us", flush=True)
    return found


# --- the file

HEAD = '''"""Written by bench/tune_triton.py; not by hand. What the numbers mean stands in tilings.py."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    positions: int
    warps: int
    stages: int


# How the rows of an architecture were chosen.
CHOSEN = {'''


def text_of(table: dict[Key, Pair], chosen: dict[str, str]) -> str:
    """tuned.py, as it is committed."""
    lines = [HEAD, *(f'    "{architecture}": "{how}",' for architecture, how in chosen.items()), "}", ""]
    lines += ["# (architecture, bytes of a value of q, padded head dimension) -> (decode, ragged)", "TABLE = {"]
    order = list(chosen)
    for key in sorted(table, key=lambda key: (order.index(key[0]), *key[1:])):
        cuts = ", ".join(f"Tiling({cut.rows}, {cut.positions}, {cut.warps}, {cut.stages})" for cut in table[key])
        lines.append(f'    ("{key[0]}", {key[1]}, {key[2]}): ({cuts}),')
    return "\n".join([*lines, "}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--by-occupancy", metavar="ARCHITECTURES", default="", help="such as sm_80,gfx942; no GPU")
    parser.add_argument("--anew", action="store_true", help="with --by-occupancy: whatever the table has now")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at once")
    words = parser.parse_args()
    gpu_check.make_importable()
    from kilburn.kernels.triton.tuned import CHOSEN, TABLE

    today = datetime.now(UTC).strftime("%Y-%m-%d")
    if words.by_occupancy:
        architectures = words.by_occupancy.split(",")
        found = by_occupancy(architectures, words.jobs, words.anew)
        how = f"by compile-time occupancy, {today}; to measure on a device: python bench/tune_triton.py"
    else:
        import torch

        found = by_measurement(gpu_check.place_of(is_dry=False))
        architectures = sorted({architecture for architecture, *_ in found})
        how = f"by measurement on {torch.cuda.get_device_name(0)}, {today}"
    TUNED.write_text(text_of(TABLE | found, CHOSEN | dict.fromkeys(architectures, how)))
    print(f"{TUNED}: {how}")


if __name__ == "__main__":
    main()
