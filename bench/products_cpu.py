"""Products of a step's rows with all weights of a model, on the CPU: by panels of float32, 16 and 8 bits, and by torch.

    python bench/products_cpu.py                        SmolLM2-135M's shapes: 538 MB, more than any cache
    python bench/products_cpu.py --rows 1,8,64 --rounds 15

The ways take turns in each round, beside a plain read of as many bytes by as many threads. Printed are the medians: ms
of wall time and of CPU time, and how many times the read's time each took.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the worker has it

import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels.dispatch import int8_product_over, product_over

LAYERS, SHAPES, HEAD = 30, ((960, 576), (576, 576), (3072, 576), (576, 1536)), (49152, 576)


def timed(way: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    way()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128", help="rows of x, by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    weights = [torch.randn(shape) * 0.05 for shape in SHAPES * LAYERS + (HEAD,)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
    forms = {
        "float32": [product_over(weight) for weight in weights],
        "bfloat16": [product_over(weight.bfloat16()) for weight in weights],
        "float16": [product_over(weight.half()) for weight in weights],
        "int8": [int8_product_over(weight) for weight in weights],
    }
    num_values = sum(weight.numel() for weight in weights)
    read = torch.ones(num_values)
    print(f"{4 * num_values / 1e6:.0f} MB of weights, {args.threads} threads, medians of {args.rounds} rounds\n")
    print("rows   way       ms wall   ms CPU   times the read   GFLOP/s")
    for num_rows in map(int, args.rows.split(",")):
        xs = {width: torch.randn(num_rows, width) for width in {weight.shape[1] for weight in weights}}

        def panels(name: str, xs: dict[int, Tensor] = xs) -> None:
            for weight, product in zip(weights, forms[name], strict=True):
                if product is not None:
                    product(xs[weight.shape[1]], None)

        def onednn(xs: dict[int, Tensor] = xs) -> None:
            for weight, form in zip(weights, packed, strict=True):
                torch.ops.mkldnn._linear_pointwise(xs[weight.shape[1]], form, None, "none", [], "")

        def plain(xs: dict[int, Tensor] = xs) -> None:
            for weight in weights:
                F.linear(xs[weight.shape[1]], weight)

        ways: dict[str, Callable[[], None]] = {"read": lambda: read.sum(), "oneDNN": onednn, "plain": plain}
        ways |= {name: partial(panels, name) for name, products in forms.items() if None not in products}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                taken[name].append(timed(way))
        medians = {name: [statistics.median(column) for column in zip(*of, strict=True)] for name, of in taken.items()}
        for name, (wall, cpu) in medians.items():
            rate = "" if name == "read" else f"{2 * num_rows * num_values / wall / 1e6:9.1f}"
            print(
                f"{num_rows:4}   {name:8} {wall:8.1f} {cpu:8.1f} {wall / medians['read'][0]:12.2f}     {rate}",
                flush=True,
            )


if __name__ == "__main__":
    main()
