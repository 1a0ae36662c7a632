"""Measures tilings of the attention kernel on this machine's GPU, and prints rows for `kernels/triton/tilings.py`.

`python bench/tune_triton.py [--head-dims 64,128,256]`. For each head dimension and width of value: decodes of 16 and 64
sequences over 4,096 positions, and one prompt of 4,096 tokens; the candidate with the least product of times wins.
Candidates that do not fit (shared memory) or that spill are passed over. Commit the rows with the date and the device.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from typing import Any

import gpu_check


def candidates(is_decode: bool) -> list[Any]:
    from kilburn.kernels.triton.tilings import Tiling

    rows = (16, 32) if is_decode else (32, 64, 128)
    shapes = itertools.product(rows, (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4))
    return [Tiling(*shape) for shape in shapes]


def best(place: Any, head_dim: int, dtype: Any, is_decode: bool) -> tuple[Any, float]:
    """The tiling of the least geometric mean, and that mean in microseconds."""
    import gpu_kernels as kernels
    import torch
    from triton.runtime.errors import OutOfResources

    from kilburn.kernels.triton import paged_attention

    if is_decode:
        shapes = [kernels.Shape(seqs, 4096, head_dim=head_dim, dtype=dtype) for seqs in (16, 64)]
    else:
        shapes = [kernels.Shape(1, 4096, queries=4096, head_dim=head_dim, dtype=dtype)]
    table, found = paged_attention.tiling, []
    tried = candidates(is_decode)
    for number, cut in enumerate(tried, 1):
        paged_attention.tiling = lambda *_, cut=cut, **__: cut
        with contextlib.suppress(OutOfResources):
            mean = math.exp(sum(math.log(kernels.attention_seconds(place, shape)) for shape in shapes) / len(shapes))
            found.append((mean * 1e6, cut))
        print(
            f"\r{number}/{len(tried)} best {min(found, default=(0, None), key=lambda x: x[0])}   ",
            end="",
            file=sys.stderr,
        )
        torch.cuda.empty_cache()
    paged_attention.tiling = table
    mean, cut = min(found, key=lambda entry: entry[0])
    return cut, mean


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--head-dims", default="64,128,256")
    words = parser.parse_args()
    gpu_check.make_importable()
    import torch

    place = gpu_check.place_of(is_dry=False)
    print(f"# {torch.cuda.get_device_name(0)}, {place.device.architecture}")
    for head_dim in map(int, words.head_dims.split(",")):
        for dtype in (torch.bfloat16, torch.float32):
            pair = [best(place, head_dim, dtype, is_decode) for is_decode in (True, False)]
            cuts = ", ".join(f"Tiling({c.rows}, {c.positions}, {c.warps}, {c.stages})" for c, _ in pair)
            print(
                f"    ({dtype.itemsize}, {head_dim}): ({cuts}),  # {pair[0][1]:.0f} us, {pair[1][1]:.0f} us", flush=True
            )


if __name__ == "__main__":
    main()
