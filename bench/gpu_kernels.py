"""What `gpu_check.py` measures of the kernels themselves: is it right, how fast, and beside what.

sampling     a step's choice of tokens, beside torch's argmax
twins        each kernel against the reference in float64, poison in what must not be read
bandwidth    device-to-device copy: the yardstick of everything that only moves memory
decode       KV bytes read a second, of the yardstick; the same with contiguous addressing, and layer-major storage
prefill      TFLOP/s beside torch's flash attention over contiguous tensors
moves        copy_blocks, and a worker's swaps, by copies and by a kernel, beside plain memcpy
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import LARGEST, Batch, Odds, Rope
from kilburn.kernels.triton.kernels import TritonKernels
from kilburn.kernels.triton.paged_attention import Device, Options, paged_attention
from kilburn.kernels.triton.swap_blocks import by_copies, by_kernel
from kilburn.kernels.triton.tuned import Tiling
from kilburn.shared.layout import KVLayout
from kilburn.worker.kv_cache import KVCache

Row = dict[str, Any]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Where it runs: a real device, or the interpreter on tiny sizes."""

    torch_device: torch.device
    device: Device
    kernels: TritonKernels
    is_dry: bool

    def cut_by(self, cut: Tiling) -> Place:
        """The same place, where attention is cut otherwise than by the table."""
        return replace(self, device=replace(self.device, cut=cut))

    def seconds(self, call: Callable[[], object], calls: int = 10, rounds: int = 5) -> float:
        """The median time of one call, the host's share left out: `calls` of them are recorded and replayed."""
        if self.is_dry:
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        times = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / calls)
        return sorted(times)[rounds // 2]

    def host_seconds(self, call: Callable[[], object], calls: int = 5) -> float:
        """The median time of one call and its end on the device, the host's share included."""
        if self.is_dry:
            return self.seconds(call)
        call()
        times = []
        for _ in range(calls):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        return sorted(times)[calls // 2]


@dataclass(frozen=True)
class Shape:
    """One batch of like sequences."""

    seqs: int
    context: int
    queries: int = 1
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def blocks_each(self) -> int:
        return -(-self.context // self.block_size)

    @property
    def kv_bytes(self) -> int:
        return self.seqs * self.context * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


def batch_of(shape: Shape, device: torch.device, scattered: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(1)
    number = shape.seqs * shape.blocks_each
    ids = torch.randperm(number, generator=generator) if scattered else torch.arange(number)
    tables = ids.view(shape.seqs, -1).to(torch.int32)
    positions = torch.arange(shape.context - shape.queries, shape.context).repeat(shape.seqs)
    owner = torch.arange(shape.seqs).repeat_interleave(shape.queries)
    slots = tables[owner, positions // shape.block_size].long() * shape.block_size + positions % shape.block_size
    starts = torch.arange(shape.seqs + 1, dtype=torch.int32) * shape.queries
    lens = torch.full((shape.seqs,), shape.context, dtype=torch.int32)
    tensors = [x.to(device) for x in (starts, lens, tables, positions, slots)]
    return Batch(*tensors, max_query=shape.queries, max_context=shape.context)


def drawn(device: torch.device, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.float32 if device.type == "cpu" else dtype).to(dtype)


# --- right


def twins(place: Place) -> Iterator[Row]:
    """Ragged batches of every kind, each option, each dtype; the judge is the reference in float64 on the CPU."""
    kinds = [torch.float16, torch.float32] if place.is_dry else [torch.bfloat16, torch.float16, torch.float32]
    worlds: list[tuple[str, Row, tuple[int, int, int]]] = [
        ("plain", {}, (2, 3, 64)),
        ("window, cap, sinks", {"window": 19, "soft_cap": 8.0, "sinks": True}, (2, 4, 128)),
        ("head_dim 80", {}, (1, 7, 80)),
        ("head_dim 256", {"window": 40}, (2, 2, 256)),
    ]
    for stored, form in itertools.product((torch.int8, torch.float8_e4m3fn), ("static", "block")):
        yield _eight_bits(place, stored, form)
    yield from _moves_twin(place)
    yield _sampling_twin(place)
    for dtype in kinds:
        for number, (name, options, (kv_heads, group, head_dim)) in enumerate(worlds[: 2 if place.is_dry else None]):
            # Every size is compiled anew, so that only one world of one dtype sees them all.
            sizes = (1, 8, 16, 24, 64, 256) if number == 0 and dtype == torch.bfloat16 else (16,)
            for size, seqs in itertools.product(sizes, SEQS_DRY if place.is_dry else SEQS):
                worst = _twin(place, dtype, options, seqs, kv_heads, group, head_dim, size)
                yield {"what": name, "dtype": str(dtype), "block_size": size, "worst": worst, "ok": worst <= 1}


# (query positions, context with them) of each sequence: a ragged batch, and a decode
Seqs = tuple[tuple[int, int], ...]
SEQS: tuple[Seqs, ...] = (
    ((1, 33), (300, 300), (5, 2048), (1, 1), (1, 9000)),
    ((1, 1), (1, 15), (1, 16), (1, 257), (1, 9000)),
)
SEQS_DRY: tuple[Seqs, ...] = (((1, 33), (17, 17), (5, 20)), ((1, 17), (1, 600)))


def _twin(
    place: Place, dtype: torch.dtype, options: Row, seqs: Seqs, kv_heads: int, group: int, head_dim: int, size: int
) -> float:
    """The largest error in units of what is allowed. kv_write fills the slots of the last positions first."""
    tables, next_block, pool_blocks = [], 0, sum(-(-context // size) for _, context in seqs) + 2
    order = torch.randperm(pool_blocks, generator=torch.Generator().manual_seed(size))
    widest = max(-(-context // size) for _, context in seqs)
    pool = torch.full((pool_blocks, 2, 2, kv_heads, size, head_dim), math.nan)
    positions, slots = [], []
    for queries, context in seqs:
        own = order[next_block : next_block + -(-context // size)]
        next_block += len(own)
        tables.append(torch.cat((own, torch.full((widest - len(own),), 2**31 - 1))))
        at = torch.arange(context)
        known = at[: context - queries]
        pool[own[known // size], 1, :, :, known % size] = torch.randn(len(known), 2, kv_heads, head_dim)
        positions.append(at[context - queries :])
        slots.append(own[positions[-1] // size] * size + positions[-1] % size)
    starts = torch.tensor([0, *torch.tensor([queries for queries, _ in seqs]).cumsum(0)], dtype=torch.int32)
    host = Batch(
        starts,
        torch.tensor([context for _, context in seqs], dtype=torch.int32),
        torch.stack(tables).int(),
        torch.cat(positions),
        torch.cat(slots),
        max_query=max(queries for queries, _ in seqs),
        max_context=max(context for _, context in seqs),
    )
    fused = torch.randn(int(starts[-1]), (group + 2) * kv_heads, head_dim).to(dtype)
    half = (head_dim // 2) & ~1
    angle = torch.arange(9000)[:, None] * 10000.0 ** (-torch.arange(0, half, 2) / half)
    rope = Rope(torch.cat((angle.cos(), angle.sin()), dim=1))
    sinks = torch.randn(kv_heads * group) if options.get("sinks") else None
    pool, where = pool.to(dtype), place.torch_device
    words = {"scale": head_dim**-0.5, "window": options.get("window"), "soft_cap": options.get("soft_cap")}

    q, k, v = fused.double().split([group * kv_heads, kv_heads, kv_heads], dim=1)
    kv = pool[:, 1].double()
    reference.kv_write(q, k, v, kv, host, rope)
    # What the device rounds on its way, the twin rounds too.
    wanted = reference.paged_attention(
        q.to(dtype).double(), kv.to(dtype).double().nan_to_num(), host, sinks=sinks, **words
    )

    q, k, v = fused.to(where).split([group * kv_heads, kv_heads, kv_heads], dim=1)
    placed, batch = pool.to(where), replace(host, **{n: getattr(host, n).to(where) for n in NAMES})
    place.kernels.kv_write(q, k, v, placed[:, 1], batch, Rope(rope.cos_sin.to(where)))
    got = place.kernels.paged_attention(
        q, placed[:, 1], batch, sinks=None if sinks is None else sinks.to(where), **words
    )
    absolute, relative = {torch.float32: (2e-5, 2e-5), torch.float16: (2e-3, 4e-3)}.get(dtype, (1.6e-2, 2e-2))
    error = (got.cpu().double() - wanted).abs() / (absolute + relative * wanted.abs())
    return float(error.nan_to_num(math.inf).max())


NAMES = ("query_start", "context_len", "tables", "positions", "slots")


def _eight_bits(place: Place, stored: torch.dtype, form: str) -> Row:
    """A pool of 8 bits, written and read: beside the reference in float64 over the values that the kernel has stored,
    and these beside what they should be."""
    dtype, where = torch.float16 if place.is_dry else torch.bfloat16, place.torch_device
    context, queries = (20, 3) if place.is_dry else (3000, 3000)
    shape = Shape(2, context, queries=queries, kv_heads=2, group=4, head_dim=64, dtype=dtype)
    blocks, largest = shape.seqs * shape.blocks_each, LARGEST[stored]
    q, k, v = torch.randn(shape.seqs * queries, 12, 64).to(dtype).split([8, 2, 2], dim=1)
    kv = torch.zeros((blocks, 2, 2, 16, 64), device=where).to(stored)
    scales = torch.zeros((blocks, 2, 2, 16), device=where)
    if form == "static":
        scales = torch.full((2, 2), 6.0 / largest, device=where)
    batch = batch_of(shape, where)
    # The interpreter cuts off what e4m3 cannot hold, where devices round.
    writer = reference if place.is_dry and stored == torch.float8_e4m3fn else place.kernels
    writer.kv_write(q.to(where), k.to(where), v.to(where), kv, batch, None, scales)
    by_row = scales.cpu().double()[..., None] if form == "block" else scales.cpu().double()[None, :, :, None, None]
    held = kv.cpu().double() * by_row
    slots = batch.slots.cpu()
    wanted = torch.stack((k, v), dim=1).double()
    # Half a step of int8; of e4m3, whose digits are fewer than 4, a fifteenth.
    near = 6.0 / 127 * 0.51 + wanted.abs() * (1e-2 if stored == torch.int8 else 1 / 15)
    written = float(((held[slots // 16, :, :, slots % 16] - wanted).abs() / near).nan_to_num(math.inf).max())
    decode = batch_of(replace(shape, queries=1), where)
    q = q[queries - 1 :: queries].contiguous()
    got = place.kernels.paged_attention(q.to(where), kv, decode, 0.125, scales=scales)
    wanted = reference.paged_attention(q.double(), held, batch_of(replace(shape, queries=1), CPU), 0.125)
    worst = float(((got.cpu().double() - wanted).abs() / (1.6e-2 + 2e-2 * wanted.abs())).nan_to_num(math.inf).max())
    worst = max(worst, written)
    return {"what": f"8 bits, {form} scales", "dtype": str(stored), "block_size": 16, "worst": worst, "ok": worst <= 1}


def _moves_twin(place: Place) -> list[Row]:
    """Blocks from place to place, to the host and back: bit for bit what left arrives, and nothing else moves."""
    rows, where = [], place.torch_device
    for words in (12, 1 << 10) if place.is_dry else (12, 1 << 12, 1 << 18):
        pool = torch.randint(0, 1 << 30, (12, words), dtype=torch.int32)
        device, host = pool.to(where), torch.zeros((12, words), dtype=torch.int32, pin_memory=not place.is_dry)
        place.kernels.copy_blocks(device, torch.tensor([[3, 9], [4, 0]], device=where))
        wanted = pool.clone()
        reference.copy_blocks(wanted, torch.tensor([[3, 9], [4, 0]]))
        place.kernels.swap_blocks(device, host, torch.tensor([[9, 1], [5, 2], [6, 3]]))
        device[[5, 6]] = -1  # handed out at once
        place.kernels.swap_blocks(host, device, torch.tensor([[2, 7], [1, 11]]))
        wanted[[7, 11]] = wanted[[5, 9]]
        wanted[[5, 6]] = -1
        wrong = int((device.cpu() != wanted).sum())
        rows.append({"what": "copies and swaps", "block_bytes": 4 * words, "worst": wrong, "ok": wrong == 0})
    return rows


SAMPLINGS = (  # temperature, top_k, top_p, log of min_p
    (1.0, 0.0, 1.0, -math.inf),
    (0.7, 50.0, 0.95, -math.inf),
    (1.5, 0.0, 0.9, -math.inf),
    (1.0, 0.0, 1.0, -3.0),
    (1e-8, 0.0, 1.0, -math.inf),
)


def sampling_of(place: Place, num_rows: int, vocab: int, draws_each: int = 1) -> tuple[Tensor, Odds]:
    logits = drawn(place.torch_device, torch.float32, num_rows, vocab) * 3.0
    rows = torch.tensor([SAMPLINGS[row % len(SAMPLINGS)] for row in range(num_rows)], dtype=torch.float64)
    draws = [[row, 7 * row + 1, stream, 1000 + row] for row in range(num_rows) for stream in range(draws_each)]
    return logits, Odds(rows.to(place.torch_device), torch.tensor(draws).to(place.torch_device))


def _sampling_twin(place: Place) -> Row:
    """Draws by every kind of cut, and the likeliest tokens. A draw at an edge (1e-6 of the mass) may fall beside it."""
    vocab, num_rows = (777, 5) if place.is_dry else (128256, 20)
    logits, odds = sampling_of(place, num_rows, vocab, draws_each=8)
    got, best = place.kernels.sample(logits, odds), place.kernels.likeliest(logits, 9)
    wanted = reference.sample(logits.cpu(), Odds(odds.rows.cpu(), odds.draws.cpu()))
    wanted_best = reference.likeliest(logits.cpu(), 9)
    others = int((got.tokens.cpu() != wanted.tokens).sum())
    exact = torch.equal(got.best.cpu(), wanted.best) and torch.equal(best.ids.cpu(), wanted_best.ids)
    worst = float((best.log_probs.cpu() - wanted_best.log_probs).abs().max()) / 1e-4
    ok = exact and worst <= 1 and others <= len(odds.draws) // 50
    return {"what": "sample", "draws": len(odds.draws), "draws_beside": others, "worst": worst, "ok": ok}


# --- fast


def sampling(place: Place) -> Iterator[Row]:
    """Microseconds of a step's choice over the vocabulary of an 8B model: greedy, drawn, cut; 20 log probabilities."""
    vocab = 700 if place.is_dry else 128256
    for batch in (2,) if place.is_dry else (1, 64, 256):
        logits, odds = sampling_of(place, batch, vocab)
        row: Row = {"batch": batch, "greedy_us": place.seconds(lambda: place.kernels.sample(logits)) * 1e6}  # noqa: B023
        for name, kind in (("drawn", SAMPLINGS[0]), ("cut", SAMPLINGS[1])):
            odds.rows.copy_(torch.tensor(kind, dtype=torch.float64))
            row[f"{name}_us"] = place.seconds(lambda: place.kernels.sample(logits, odds)) * 1e6  # noqa: B023
        row["logprobs_us"] = place.seconds(lambda: place.kernels.likeliest(logits, 20)) * 1e6  # noqa: B023
        row["argmax_us"] = place.seconds(lambda: logits.argmax(dim=1)) * 1e6  # noqa: B023
        yield row


def bandwidth(place: Place) -> float:
    """Bytes a second, read and written, of a copy too large for any cache."""
    size = 1 << (16 if place.is_dry else 30)
    source, destination = (torch.zeros(size, dtype=torch.uint8, device=place.torch_device) for _ in range(2))
    return 2 * size / place.seconds(lambda: destination.copy_(source))


def attention_seconds(place: Place, shape: Shape, how: str = "paged") -> float:
    """How: paged; contiguous (a sequence in one piece, no table); layer-major (paged, no other layer between)."""
    where, blocks = place.torch_device, shape.seqs * shape.blocks_each
    layers = 2 if how == "paged" else 1  # block-major: the next block of this layer is a whole block away
    if how == "contiguous":
        kv = drawn(
            where, shape.dtype, shape.seqs, 2, shape.kv_heads, shape.blocks_each * shape.block_size, shape.head_dim
        )
    else:
        kv = drawn(where, shape.dtype, blocks, layers, 2, shape.kv_heads, shape.block_size, shape.head_dim)[:, 0]
    batch = batch_of(shape, where)
    q = drawn(where, shape.dtype, shape.seqs * shape.queries, shape.kv_heads * shape.group, shape.head_dim)
    out, scale = torch.empty_like(q), shape.head_dim**-0.5

    def attend() -> None:
        launches = paged_attention(place.device, out, q, kv, batch, scale, Options(), paged=how != "contiguous")
        for launch in launches:
            launch.run()

    return place.seconds(attend)


def decode(place: Place, yardstick: float) -> Iterator[Row]:
    grid = [(2, 40)] if place.is_dry else [(b, c) for b in (1, 16, 64, 256) for c in (512, 2048, 8192, 32768)]
    for group in (
        (4,) if place.is_dry else (4, 1, 8)
    ):  # in order of worth: what is left out for want of time is the last
        for seqs, context in grid:
            shape = _sized(place, Shape(seqs, context, group=group))
            if shape.kv_bytes > 20 << 30:
                continue
            taken = attention_seconds(place, shape)
            row = {"batch": seqs, "context": context, "group": group, "us": taken * 1e6}
            row["of_copy"] = shape.kv_bytes / taken / yardstick
            if place.is_dry or (group == 4 and seqs in (16, 64) and context >= 2048):
                row["paging_costs"] = taken / attention_seconds(place, shape, "contiguous") - 1
                row["block_major_costs"] = taken / attention_seconds(place, shape, "layer-major") - 1
                row["sdpa_us"] = _sdpa_seconds(place, shape) * 1e6
            yield row


def block_sizes(place: Place, yardstick: float) -> Iterator[Row]:
    for size in (8, 16) if place.is_dry else (8, 16, 32, 64, 128):
        shape = _sized(place, Shape(2 if place.is_dry else 64, 40 if place.is_dry else 4096, block_size=size))
        taken = attention_seconds(place, shape)
        yield {"block_size": size, "us": taken * 1e6, "of_copy": shape.kv_bytes / taken / yardstick}


def prefill(place: Place) -> Iterator[Row]:
    for length in (24,) if place.is_dry else (1024, 4096, 16384):
        shape = _sized(place, Shape(1, length, queries=length))
        pairs = length * (length + 1) / 2
        flops = 4 * pairs * shape.kv_heads * shape.group * shape.head_dim
        taken, sdpa = attention_seconds(place, shape), _sdpa_seconds(place, shape)
        paged_for = taken / attention_seconds(place, shape, "contiguous") - 1
        yield {"tokens": length, "tflops": flops / taken / 1e12, "of_sdpa": sdpa / taken, "paging_costs": paged_for}


def _sized(place: Place, shape: Shape) -> Shape:
    return replace(shape, kv_heads=1, head_dim=16, dtype=torch.float16) if place.is_dry else shape


def _sdpa_seconds(place: Place, shape: Shape) -> float:
    """torch's own attention over contiguous tensors of the same sizes."""
    where, heads = place.torch_device, shape.kv_heads * shape.group
    q = drawn(where, shape.dtype, shape.seqs, heads, shape.queries, shape.head_dim)
    k, v = (drawn(where, shape.dtype, shape.seqs, shape.kv_heads, shape.context, shape.head_dim) for _ in range(2))
    causal = shape.queries == shape.context
    return place.seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True))


def moves(place: Place, yardstick: float) -> Iterator[Row]:
    """Blocks of an 8B-shaped model, by block size: copies beside the yardstick; swaps as a worker asks for them, and
    each of the two ways to do them, beside a plain copy of the same bytes in one piece from or to pinned memory.

    The rates are of that plain copy's. `kernel_wins` says where LARGE_BLOCK_BYTES should lie above a block's size.
    """
    where = place.torch_device
    for size in (4,) if place.is_dry else (16, 8, 64, 128, 4, 1):
        number = 4 if place.is_dry else 1024 // size
        kind = KVLayout(size, 2, 1, 16, "float16") if place.is_dry else KVLayout(size, 32, 8, 128, "float16")
        cache = KVCache(kind, 2 * number, number, where, place.kernels)
        pool, host = cache.pool, cache.host_pool
        moved = number * kind.bytes_per_block
        order = torch.randperm(number, generator=torch.Generator().manual_seed(3))
        pairs = torch.stack((order, torch.arange(number)), dim=1)
        apart = torch.stack((order, torch.arange(number, 2 * number)), dim=1).to(where)
        copy = place.seconds(lambda: place.kernels.copy_blocks(pool, apart))  # noqa: B023, called here
        row: Row = {"block_size": size, "block_bytes": moved // number, "copy_of_copy": 2 * moved / copy / yardstick}
        for name, source, destination, plan in (
            ("out", pool, host, (pairs.tolist(), [], [])),
            ("in", host, pool, ([], [], pairs.tolist())),
        ):
            plain = place.host_seconds(
                lambda: destination[:number].copy_(source[:number], non_blocking=True)  # noqa: B023
            )
            worker = place.host_seconds(lambda: cache.move(*plan))  # noqa: B023
            copies = place.host_seconds(lambda: by_copies(source, destination, pairs))  # noqa: B023
            kernel = place.host_seconds(lambda: by_kernel(source, destination, pairs, where))  # noqa: B023
            row[f"swap_{name}_gb_s"] = moved / worker / 1e9
            row |= {f"swap_{name}": plain / worker, f"copies_{name}": plain / copies, f"kernel_{name}": plain / kernel}
            row[f"kernel_wins_{name}"] = kernel < copies
        yield row
