"""The CPU kernels against what the machine can do, and against the other ways of writing them.

`python bench/kernels_cpu.py [--threads 2] [--rounds 8] [--head-dim 64 --group 3 --kv-heads 3 --layers 30]`

    decode    attention of 16 sequences of 1,024 tokens in all layers (755 MB of KV in scattered blocks, so that caches
              do not help), as GB/s; beside it, in the same rounds, a plain read of the same memory by the same threads.
              The pool is the worker's own, huge pages included, for both
    prefill   attention of one prompt of 1,024 tokens over scattered blocks; beside it SDPA on contiguous tensors
    calls     what each kernel costs at batch 1, where it is overhead that counts

Rounds alternate between the ways, the best round of each is shown, and with it the median ratio of the rounds: on a
shared machine single numbers mean little.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.dispatch import Batch, Kernels, Rope, Shapes, kernels_for
from kilburn.shared.layout import KVLayout
from kilburn.worker.kv_cache import KVCache

BLOCK_SIZE, CONTEXT, NUM_SEQS = 16, 1024, 16


@dataclass(frozen=True)
class Model:
    layers: int
    kv_heads: int
    group: int
    head_dim: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def batch_of(tables: Tensor, queries: int, context: int) -> Batch:
    seqs = len(tables)
    positions = torch.arange(context - queries, context).repeat(seqs)
    blocks = tables.repeat_interleave(queries, dim=0).long().gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0]
    return Batch(
        query_start=torch.arange(0, seqs * queries + 1, queries, dtype=torch.int32),
        context_len=torch.full((seqs,), context, dtype=torch.int32),
        tables=tables,
        positions=positions,
        slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        max_query=queries,
        max_context=context,
    )


# -- other ways to write attention


def gathered_sdpa(q: Tensor, kv: Tensor, batch: Batch, scale: float) -> Tensor:
    """The whole context copied together, then torch's own attention. Equal lengths only."""
    seqs, queries = len(batch.context_len), batch.max_query
    held = kv[batch.tables.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [2, seqs, Hkv, context, D]
    grouped = q.view(seqs, queries, -1, q.shape[-1]).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(
        grouped, held[0], held[1], is_causal=queries > 1, scale=scale, enable_gqa=True
    )
    return mixed.transpose(1, 2).reshape(q.shape)


def tiles_of_512(q: Tensor, kv: Tensor, batch: Batch, scale: float) -> Tensor:
    """Torch operations on up to 512 positions at a time, with a running softmax. Equal lengths only."""
    seqs, queries, kv_heads = len(batch.context_len), batch.max_query, kv.shape[2]
    rows = q.view(seqs, queries, kv_heads, -1, q.shape[-1]).permute(0, 2, 3, 1, 4).flatten(2, 3).float()
    seen_by = torch.arange(batch.max_context - queries, batch.max_context).repeat(rows.shape[2] // queries)[:, None]
    top = rows.new_full((*rows.shape[:3], 1), -1e30)
    total, sums = torch.zeros_like(top), torch.zeros_like(rows)
    for start in range(0, batch.max_context, 512):
        table = batch.tables[:, start // BLOCK_SIZE : (start + 512) // BLOCK_SIZE].long()
        keys, values = kv[table].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        score = torch.matmul(rows, keys.transpose(2, 3)) * scale
        if queries > 1:
            score.masked_fill_(torch.arange(start, start + keys.shape[2]) > seen_by, -1e30)
        new_top = torch.maximum(top, score.amax(dim=-1, keepdim=True))
        weight, shrink = torch.exp(score - new_top), torch.exp(top - new_top)
        total, top = total * shrink + weight.sum(dim=-1, keepdim=True), new_top
        sums = sums * shrink + torch.matmul(weight, values)
    mixed = (sums / total).view(seqs, kv_heads, -1, queries, q.shape[-1])
    return mixed.permute(0, 3, 1, 2, 4).reshape(q.shape)


# -- measuring


def rounds_of(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, in turn."""
    for way in ways.values():
        way()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - begun)
    return taken


def table(title: str, taken: dict[str, list[float]], yardstick: str, num_bytes: dict[str, int] | None = None) -> None:
    """`num_bytes` is what a way reads; none is given where it is not reading that counts."""
    print(f"\n{title}\n{'':34}{'best ms':>10}{'GB/s' if num_bytes else '':>10}{'times ' + yardstick:>22}")
    for name, seconds in taken.items():
        ratio = median(a / b for a, b in zip(seconds, taken[yardstick], strict=True))
        rate = f"{num_bytes[name] / min(seconds) / 1e9:10.1f}" if num_bytes else f"{'':10}"
        print(f"{name:34}{min(seconds) * 1e3:10.2f}{rate}{ratio:22.2f}")


def decode(kernels: Kernels, model: Model, rounds: int) -> None:
    """Over pools as a worker allocates them. The plain read is of the same memory, and finds it as it lies."""
    num_blocks, device = NUM_SEQS * CONTEXT // BLOCK_SIZE, torch.device("cpu")
    layout = KVLayout(BLOCK_SIZE, model.layers, model.kv_heads, model.head_dim, "float32")
    narrow = replace(layout, dtype="int8")
    static = torch.full((model.layers, 2, model.kv_heads), 1 / 30)
    cache = KVCache(layout, num_blocks, 0, device, kernels)
    by_head = KVCache(narrow, num_blocks, 0, device, kernels, static)
    by_row = KVCache(narrow.with_scale_area(), num_blocks, 0, device, kernels)
    pool = cache.pool.normal_()
    for block in range(num_blocks):
        by_head.pool[block] = by_row.pool[block] = (pool[block] * 30).clamp(-127, 127).to(torch.int8)
    for scales in by_row.scales or ():
        scales.fill_(1 / 30)
    batch = batch_of(torch.randperm(num_blocks).to(torch.int32).view(NUM_SEQS, -1), 1, CONTEXT)
    q, scale = torch.randn(NUM_SEQS, model.heads, model.head_dim), model.head_dim**-0.5

    def layers(attention: Callable[..., object]) -> Callable[[], None]:
        def run() -> None:
            for layer in range(model.layers):
                attention(q, pool[:, layer], batch, scale)

        return run

    def eight_bits(held: KVCache) -> Callable[[], None]:
        def run() -> None:
            for layer in range(model.layers):
                scales = None if held.scales is None else held.scales[layer]
                kernels.paged_attention(q, held.pool[:, layer], batch, scale, scales=scales)

        return run

    ways: dict[str, Callable[[], object]] = {
        "plain read": lambda: pool.view(-1).sum(),
        kernels.name.split(" ")[0] + " kernels": layers(kernels.paged_attention),
        "of int8, static scales": eight_bits(by_head),
        "of int8, scales of rows": eight_bits(by_row),
        "torch, gather + SDPA": layers(gathered_sdpa),
        "torch, tiles of 512": layers(tiles_of_512),
        "reference": layers(reference.paged_attention),
    }
    taken = rounds_of(ways, rounds)
    read = dict.fromkeys(ways, pool.nbytes) | dict.fromkeys(
        [name for name in ways if "int8" in name], by_head.pool.nbytes
    )
    table(f"decode, 16 x 1k tokens, {pool.nbytes / 1e6:.0f} MB of KV in float32", taken, "plain read", read)


def prefill(kernels: Kernels, model: Model, rounds: int) -> None:
    num_blocks = CONTEXT // BLOCK_SIZE
    pool = torch.randn(num_blocks, 1, 2, model.kv_heads, BLOCK_SIZE, model.head_dim)
    batch = batch_of(torch.randperm(num_blocks).to(torch.int32).view(1, -1), CONTEXT, CONTEXT)
    q, scale = torch.randn(CONTEXT, model.heads, model.head_dim), model.head_dim**-0.5
    shape = (1, model.heads, CONTEXT, model.head_dim)
    contiguous = [torch.randn(shape) for _ in range(3)]
    kv = pool[:, 0]
    ways: dict[str, Callable[[], object]] = {
        "SDPA": lambda: F.scaled_dot_product_attention(*contiguous, is_causal=True),
        kernels.name.split(" ")[0] + " kernels": lambda: kernels.paged_attention(q, kv, batch, scale),
        "torch, gather + SDPA": lambda: gathered_sdpa(q, kv, batch, scale),
        "torch, tiles of 512": lambda: tiles_of_512(q, kv, batch, scale),
        "reference": lambda: reference.paged_attention(q, kv, batch, scale),
    }
    table("prefill, 1k tokens, SDPA on contiguous tensors", rounds_of(ways, rounds), "SDPA")


def calls(kernels: Kernels, model: Model, rounds: int) -> None:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    hidden = heads * dim
    pool = torch.randn(16, model.layers, 2, kv_heads, BLOCK_SIZE, dim)
    batch = batch_of(torch.randperm(16).to(torch.int32)[None], 1, 100)
    q, k, v = torch.randn(1, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
    x, residual, weight = torch.randn(1, hidden), torch.randn(1, hidden), torch.randn(hidden)
    gate_up, rope, kv = torch.randn(1, 5 * hidden), Rope(torch.rand(1024, dim)), pool[:, 0]

    def times_100(way: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(100):
                way()

        return run

    with torch.inference_mode():
        taken = rounds_of(
            {
                "add_rms_norm": times_100(lambda: kernels.add_rms_norm(x, residual, weight, 1e-5)),
                "silu_mul": times_100(lambda: kernels.silu_mul(gate_up)),
                "kv_write": times_100(lambda: kernels.kv_write(q, k, v, kv, batch, rope)),
                "paged_attention, 100 tokens": times_100(lambda: kernels.paged_attention(q, kv, batch, 0.125)),
            },
            rounds,
        )
    print(f"\ncalls at batch 1\n{'':34}{'best us':>10}")
    for name, seconds in taken.items():
        print(f"{name:34}{min(seconds) * 1e4:10.1f}")
    layer_us = sum(min(seconds) * 1e4 for seconds in taken.values()) + min(taken["add_rms_norm"]) * 1e4
    print(f"{f'a step of {model.layers} layers, ms':34}{layer_us * model.layers / 1e3:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("threads", 2),
        ("rounds", 8),
        ("layers", 30),
        ("kv-heads", 3),
        ("group", 3),
        ("head-dim", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=["decode", "prefill", "calls"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = Model(given.layers, given.kv_heads, given.group, given.head_dim)
    kernels = kernels_for(torch.device("cpu"))
    print(f"{kernels.name}; {given.threads} threads, {given.rounds} rounds")
    begun = time.perf_counter()
    hidden = model.heads * model.head_dim
    kernels.warm_up(
        Shapes(hidden, 3 * hidden, model.heads, model.kv_heads, model.head_dim, BLOCK_SIZE, torch.float32), print
    )
    print(f"warm-up {time.perf_counter() - begun:.2f} s")
    for part in (calls, prefill, decode):
        if given.only in (None, part.__name__):
            part(kernels, model, given.rounds)


if __name__ == "__main__":
    main()
