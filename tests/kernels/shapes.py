"""Ragged worlds for any set of kernels, on any device and dtype: what goes in, what must come out, what may be touched.

    world = attention_world(case, torch.bfloat16, device)         one layer of a pool, a batch, q
    got = world.run(kernels)                                      kernels.paged_attention with the case's options
    world.check(got)                                              against the reference, in float64

    for case in CASES: ...                                        the hand-made table (ids: case.name)
    for case in grid(): ...                                       head_dim x group x block size, each with many lengths
    for case in covering(): ...                                   as many of them as it takes for every pair

What must not be read is NaN: the rest of a sequence's last block, blocks that nobody holds, the other layers. What a
window has left behind is written, and so it is not NaN but loud (300). Entries of a table beyond a sequence's blocks
are the largest int32, which is no block. Block ids are scattered, and where a case says `shared` the sequences have
their leading blocks in common.

    world = write_world(case, torch.float16, device, rope)        new k and v as views of one fused output
    world.write(kernels); world.check()                           q, k, v where they belong, every other slot as it was

Every number is drawn on the CPU from the case's name and rounded to the dtype before anything is computed from it, and
so a device changes nothing but the kernels.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import Batch, Kernels, Rope

CPU = torch.device("cpu")
LAYER, NUM_LAYERS = 1, 3  # a view with something before it and something behind it
SPARE_BLOCKS = 3
LOUD = 300.0
NO_BLOCK = 2**31 - 1

# (absolute, relative): of float64, float32 by accumulation, the others by the rounding of what is stored
TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (4e-6, 1e-5),
    torch.bfloat16: (8e-3, 1.2e-2),
    torch.float16: (1e-3, 2e-3),
}


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    assert got.dtype == dtype
    absolute, relative = TOLERANCES[dtype]
    torch.testing.assert_close(
        got.detach().cpu().double(), wanted.cpu().double(), atol=slack * absolute, rtol=slack * relative
    )


@dataclass(frozen=True)
class Case:
    name: str
    seqs: tuple[tuple[int, int], ...]  # (query positions, context with them), one a sequence
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    shared: bool = False
    rows_before: int = 0  # rows of q of no sequence, before the first ...
    rows_after: int = 0  # ... and after the last

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def __str__(self) -> str:
        return self.name


DECODE = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 32), (1, 33))
PREFILL = ((1, 1), (15, 15), (16, 16), (17, 17), (33, 33), (40, 40))
CHUNKS = ((5, 16), (16, 32), (3, 33), (40, 47), (7, 100), (2, 17))
MIXED = ((1, 33), (17, 17), (1, 1), (5, 48), (1, 200), (40, 64))

CASES = (
    Case("decode", DECODE),
    Case("prefill", PREFILL),
    Case("chunks", CHUNKS),
    Case("mixed", MIXED),
    Case("one token of all", ((1, 1),)),
    Case("no sequence", ()),
    Case("empty sequences", ((0, 0), (1, 5), (0, 20), (0, 0), (2, 3), (0, 0))),
    Case("more queries than context", ((3, 1), (5, 5), (4, 0), (20, 3))),
    Case("rows of no sequence", MIXED, rows_before=2, rows_after=5),
    Case("only rows of no sequence", (), rows_after=4),
    *(Case(f"group {group}", MIXED, kv_heads=2, group=group) for group in (1, 2, 3, 4, 6, 7, 8)),
    Case("one KV head, group 3", MIXED, kv_heads=1, group=3),
    Case("one KV head for 128", ((1, 20), (3, 9)), kv_heads=1, group=128),
    Case("16 KV heads", MIXED, kv_heads=16, group=1, head_dim=32),
    Case("3 KV heads, group 3", MIXED, kv_heads=3, group=3),
    *(Case(f"block size {size}", MIXED, block_size=size, shared=True) for size in (1, 2, 4, 8, 32, 64, 128, 256)),
    *(Case(f"window {window}", (*MIXED, *CHUNKS), window=window) for window in (1, 3, 15, 16, 17, 40, 1000)),
    Case("window, block size 4", MIXED, window=6, block_size=4),
    Case("soft cap", MIXED, soft_cap=5.0),
    Case("sinks", MIXED, sinks=True),
    Case("window, soft cap, sinks", (*MIXED, *CHUNKS), group=3, window=9, soft_cap=3.0, sinks=True),
    Case("sinks, rows that see nothing", ((5, 2), (2, 40)), sinks=True),
    Case("shared blocks", ((1, 70), (1, 90), (4, 68), (1, 65)), shared=True),
    Case("long, decode", ((1, 2000), (1, 255), (1, 256), (1, 257), (1, 513)), group=3),
    Case("long, few queries", ((4, 2000), (2, 1025)), group=3),
    Case("long, chunk", ((40, 2000),), group=3, shared=True),
    Case("long, window", ((1, 2000), (3, 1999), (40, 1500)), window=300),
    Case("long, window, sinks, cap", ((1, 2000), (5, 700)), window=513, sinks=True, soft_cap=20.0),
    Case("long, all of it new", ((300, 300), (257, 258))),
)


HEAD_DIMS, GROUPS, BLOCK_SIZES = (64, 80, 96, 128, 256), (1, 2, 3, 4, 6, 7, 8), (8, 16, 32)


def grid() -> Iterator[Case]:
    """Head dimensions that are no power of two, groups that are none."""
    for head_dim in HEAD_DIMS:
        for group in GROUPS:
            for block_size in BLOCK_SIZES:
                yield _of_grid(head_dim, group, block_size)


def covering() -> Iterator[Case]:
    """A third of the grid in which every pair of a head dimension, a group and a block size occurs."""
    for i, head_dim in enumerate(HEAD_DIMS):
        for j, group in enumerate(GROUPS):
            yield _of_grid(head_dim, group, BLOCK_SIZES[(i + j) % len(BLOCK_SIZES)])


def _of_grid(head_dim: int, group: int, block_size: int) -> Case:
    seqs = ((1, 1), (15, 15), (1, 16), (2, 17), (1, 33))
    name = f"dim {head_dim}, group {group}, blocks of {block_size}"
    return Case(name, seqs, group=group, head_dim=head_dim, block_size=block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def drawn(generator: torch.Generator, dtype: torch.dtype, *shape: int, spread: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


def tables_of(case: Case, generator: torch.Generator) -> tuple[list[list[int]], int]:
    """(the blocks of each sequence, scattered; blocks of the pool)."""
    size, counts = case.block_size, [blocks_for(context, case.block_size) for _, context in case.seqs]
    # What is shared is full and written by no one in this step.
    settled = [max(context - queries, 0) // size for queries, context in case.seqs]
    num_shared = min(settled) if case.shared and settled else 0
    own = [count - num_shared for count in counts]
    num_blocks = num_shared + sum(own) + SPARE_BLOCKS
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    shared, ids = ids[:num_shared], ids[num_shared:]
    tables = []
    for count in own:
        tables.append(shared + ids[:count])
        ids = ids[count:]
    return tables, num_blocks


def batch_of(case: Case, tables: list[list[int]], device: torch.device = CPU) -> Batch:
    width = max((len(table) for table in tables), default=0) + 2
    lens = [queries for queries, _ in case.seqs]
    starts = [case.rows_before + sum(lens[:i]) for i in range(len(lens) + 1)]
    positions, slots = [0] * case.rows_before, [-1] * case.rows_before
    for (queries, context), table in zip(case.seqs, tables, strict=True):
        for position in range(context - queries, context):
            positions.append(max(position, 0))
            offset = position % case.block_size
            slots.append(table[position // case.block_size] * case.block_size + offset if position >= 0 else -1)
    padded = [table + [NO_BLOCK] * (width - len(table)) for table in tables]
    return Batch(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_len=torch.tensor([context for _, context in case.seqs], dtype=torch.int32, device=device),
        tables=torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(tables), width),
        positions=torch.tensor(positions + [0] * case.rows_after, dtype=torch.int64, device=device),
        slots=torch.tensor(slots + [-1] * case.rows_after, dtype=torch.int64, device=device),
        max_query=max(lens, default=0),
        max_context=max((context for _, context in case.seqs), default=0),
    )


def empty_pool(case: Case, num_blocks: int, dtype: torch.dtype) -> Tensor:
    """[num_blocks, layers, 2, Hkv, bs, D], all of it NaN."""
    shape = (num_blocks, NUM_LAYERS, 2, case.kv_heads, case.block_size, case.head_dim)
    return torch.full(shape, math.nan, dtype=dtype)


# -- attention


@dataclass
class AttentionWorld:
    case: Case
    q: Tensor  # [T, Hq, D], a view of a wider tensor whose other columns are NaN
    pool: Tensor  # what must not be read is NaN
    batch: Batch
    sinks: Tensor | None

    @property
    def kv(self) -> Tensor:
        return self.pool[:, LAYER]

    @property
    def options(self) -> dict[str, Any]:
        case = self.case
        return {
            "scale": case.head_dim**-0.5,
            "window": case.window,
            "soft_cap": case.soft_cap,
            "sinks": self.sinks,
        }

    def check(self, got: Tensor) -> None:
        """`got` is what must come out; scores of wide heads are sums of more terms."""
        assert_near(got, self.expected(), self.q.dtype, slack=max(self.case.head_dim / 128, 1.0))

    def run(self, kernels: Kernels, out: Tensor | None = None) -> Tensor:
        return kernels.paged_attention(self.q, self.kv, self.batch, out=out, **self.options)

    def expected(self) -> Tensor:
        """By the reference, in float64 on the CPU; the poison, which it may not meet, is zero there."""
        b = self.batch
        host = replace(b, query_start=b.query_start.cpu(), context_len=b.context_len.cpu(), tables=b.tables.cpu())
        options = self.options | {"sinks": None if self.sinks is None else self.sinks.cpu().double()}
        return reference.paged_attention(self.q.cpu().double(), self.kv.cpu().double().nan_to_num(), host, **options)


def attention_world(
    case: Case, dtype: torch.dtype = torch.float32, device: torch.device = CPU, placement: int = 0
) -> AttentionWorld:
    """`placement` moves the blocks about; nothing else depends on it."""
    tables, num_blocks = tables_of(case, torch.Generator().manual_seed(case.seed + placement))
    generator = torch.Generator().manual_seed(case.seed)
    pool, size = empty_pool(case, num_blocks, dtype), case.block_size
    written: set[int] = set()
    # Drawn by logical place, so that a placement does not change what a sequence holds.
    for (queries, context), table in zip(case.seqs, tables, strict=True):
        first_seen = 0 if case.window is None else max(context - queries - case.window + 1, 0)
        for index, block in enumerate(table):
            filled = min(context - index * size, size)
            held = drawn(generator, dtype, 2, case.kv_heads, filled, case.head_dim)
            if block in written:
                continue
            written.add(block)
            if not case.shared:
                held[:, :, : max(min(first_seen - index * size, filled), 0)] = LOUD
            pool[block, LAYER, :, :, :filled] = held
    num_rows = case.rows_before + sum(queries for queries, _ in case.seqs) + case.rows_after
    fused = torch.full((num_rows, case.heads + 2, case.head_dim), math.nan, dtype=dtype)
    fused[:, : case.heads] = drawn(generator, dtype, num_rows, case.heads, case.head_dim, spread=2.0)
    sinks = drawn(generator, torch.float32, case.heads, spread=2.0).to(device) if case.sinks else None
    q = fused.to(device)[:, : case.heads]
    return AttentionWorld(case, q, pool.to(device), batch_of(case, tables, device), sinks)


# -- KV write


@dataclass
class WriteWorld:
    case: Case
    fused: Tensor  # [T, Hq + 2 Hkv, D]
    pool: Tensor
    batch: Batch
    rope: Rope | None
    before: tuple[Tensor, Tensor]  # fused and pool as they were, on the CPU

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.fused.split([self.case.heads, self.case.kv_heads, self.case.kv_heads], dim=1)
        return q, k, v

    def write(self, kernels: Kernels) -> None:
        kernels.kv_write(*self.qkv, self.pool[:, LAYER], self.batch, self.rope)

    def check(self) -> None:
        dtype, (fused, pool) = self.fused.dtype, self.before
        heads, kv_heads, size = self.case.heads, self.case.kv_heads, self.case.block_size
        q, k, _ = fused.double().split([heads, kv_heads, kv_heads], dim=1)
        if self.rope is not None:
            rope = replace(self.rope, cos_sin=self.rope.cos_sin.cpu())
            q, k = (reference.rotated(x, self.batch.positions.cpu(), rope) for x in (q, k))
        assert_near(self.qkv[0], q, dtype)
        assert torch.equal(self.qkv[2].cpu(), fused[:, heads + kv_heads :]), "v was changed"
        after, untouched, slots = self.pool.cpu(), pool.clone(), self.batch.slots.cpu()
        tokens = (slots >= 0).nonzero()[:, 0]
        blocks, offsets = slots[tokens] // size, slots[tokens] % size
        keys, values = after[blocks, LAYER, :, :, offsets].unbind(1)
        assert_near(keys, k[tokens], dtype)
        assert torch.equal(values, fused[tokens, heads + kv_heads :]), "v was not copied to its slots"
        untouched[blocks, LAYER, :, :, offsets] = after[blocks, LAYER, :, :, offsets]
        assert torch.equal(after, untouched), "a slot was written that is no token's"


def rope_table(rotary_dim: int, max_positions: int = 2048) -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def write_world(
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    rope: Rope | None = None,
    padding: int = 3,
) -> WriteWorld:
    """Every `padding`-th token is padding (its slot is -1)."""
    generator = torch.Generator().manual_seed(case.seed)
    tables, num_blocks = tables_of(case, generator)
    batch = batch_of(case, tables)
    if padding:
        batch.slots[::padding] = -1
    num_rows = len(batch.slots)
    fused = drawn(generator, dtype, num_rows, case.heads + 2 * case.kv_heads, case.head_dim)
    pool = drawn(generator, dtype, *empty_pool(case, num_blocks, dtype).shape)
    on_device = {name: getattr(batch, name).to(device) for name in ("query_start", "context_len", "tables")}
    batch = replace(batch, positions=batch.positions.to(device), slots=batch.slots.to(device), **on_device)
    rope = None if rope is None else replace(rope, cos_sin=rope.cos_sin.to(device))
    before = (fused.clone(), pool.clone())
    return WriteWorld(case, fused.to(device), pool.to(device, copy=True), batch, rope, before)
