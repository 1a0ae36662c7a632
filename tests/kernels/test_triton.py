"""The Triton set, interpreted, against the reference in float64: boundary rows of the table, poison, canaries.

The interpreter runs one program after another in numpy, and so the worlds are small. `triton_twins.py`, by hand, runs
the whole table.
"""

import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import Batch, Rope, Shapes
from tests.kernels.eight_bits import FORMS, check_attention, check_odd_rows, check_written
from tests.kernels.interpreted import paged_attention, swap_blocks, triton_kernels
from tests.kernels.shapes import (
    CASES,
    Case,
    assert_near,
    attention_world,
    covering,
    grid,
    rope_table,
    write_world,
)

KERNELS = triton_kernels()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_RESERVE = 0x4000  # MAP_NORESERVE, which `mmap` has no name for before 3.13
SHORT = ((1, 33), (17, 17), (1, 1), (5, 48), (1, 16))
BOUNDARIES = (
    "decode",
    "prefill",
    "chunks",
    "no sequence",
    "empty sequences",
    "more queries than context",
    "rows of no sequence",
    "only rows of no sequence",
    "one KV head for 128",
    "block size 1",
    "block size 4",
    "block size 256",
    "window 1",
    "window 3",
    "window 17",
    "window, block size 4",
    "sinks, rows that see nothing",
    "shared blocks",
    "long, few queries",
    "long, window, sinks, cap",
)
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_the_boundary_rows_of_the_table(name: str) -> None:
    world = attention_world(replace(BY_NAME[name], kv_heads=1))
    world.check(world.run(KERNELS))


@pytest.mark.parametrize("case", list(covering()), ids=str)
def test_head_dimensions_groups_and_blocks_in_all_pairs(case: Case) -> None:
    world = attention_world(replace(case, kv_heads=1))
    world.check(world.run(KERNELS))


def test_the_pairs_are_all_pairs() -> None:
    rows = [(case.head_dim, case.group, case.block_size) for case in covering()]
    every = [(case.head_dim, case.group, case.block_size) for case in grid()]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert {(row[first], row[second]) for row in rows} == {(row[first], row[second]) for row in every}


@pytest.mark.parametrize("size", [2, 8, 32, 64, 128])
def test_other_block_sizes(size: int) -> None:
    world = attention_world(Case(f"blocks of {size}", SHORT, kv_heads=1, block_size=size, shared=True, window=40))
    world.check(world.run(KERNELS))


def test_numbers_of_query_positions_that_end_anywhere_in_a_tile() -> None:
    seqs = tuple((queries, queries + 7 * queries % 34) for queries in range(1, 41, 3))
    world = attention_world(Case("1 to 40", seqs, kv_heads=1, group=3, head_dim=32))
    world.check(world.run(KERNELS))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_floats(dtype: torch.dtype) -> None:
    world = attention_world(Case("halves", (*SHORT, (2, 600)), kv_heads=1, group=3, soft_cap=8.0, sinks=True), dtype)
    world.check(world.run(KERNELS))


def test_every_row_of_out_is_written_and_nothing_beside_it() -> None:
    """What was in the memory before is of another request (S28)."""
    for case in (Case("one", SHORT, kv_heads=1, rows_before=2, rows_after=3), Case("split", ((1, 900), (1, 0)))):
        world = attention_world(case)
        wide = torch.full((len(world.q), case.heads + 2, case.head_dim), torch.nan)
        world.check(world.run(KERNELS, out=wide[:, 1:-1]))
        assert wide[:, 0].isnan().all()
        assert wide[:, -1].isnan().all()


@pytest.mark.parametrize("num_units", [1, 4, 16, 132])
def test_however_many_splits_the_answer_is_one(num_units: int) -> None:
    case = Case("splits", ((1, 1400), (1, 257), (1, 3)), kv_heads=1, group=3, sinks=True)
    world = attention_world(case)
    world.check(world.run(triton_kernels(num_units)))


def test_splits_follow_host_numbers_alone() -> None:
    def splits(context: int, window: int | None, programs: int) -> int:
        return paged_attention.splits_for(context, window, 256, programs, num_units=132)

    assert [splits(context, None, 8) for context in (0, 255, 512, 1024, 8192, 1 << 20)] == [1, 1, 2, 4, 32, 32]
    assert [splits(8192, None, programs) for programs in (0, 1, 64, 132, 133, 4096)] == [32, 32, 4, 2, 1, 1]
    assert splits(1 << 20, 300, 1) == 2


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_103", "gfx942", "gfx950"])
def test_other_architectures_are_cut_otherwise_and_mean_the_same(architecture: str) -> None:
    world = attention_world(Case("cut", SHORT, kv_heads=1, group=3))
    world.check(world.run(triton_kernels(architecture=architecture)))


def test_contiguous_addressing_is_the_same_kernel() -> None:
    """The switch that measures what paging costs: sequence s in block s, of which the tables say nothing."""
    case = Case("in one piece", ((1, 33), (5, 60), (40, 64)), kv_heads=2, group=3, block_size=64)
    world = attention_world(case)
    order = world.batch.tables[:, 0].long()
    batch = replace(world.batch, tables=torch.full_like(world.batch.tables, 2**31 - 1))
    out, device = torch.empty_like(world.q, memory_format=torch.contiguous_format), paged_attention.Device("sm_90", 4)
    for launch in paged_attention.paged_attention(
        device, out, world.q, world.kv[order], batch, world.options["scale"], paged_attention.Options(), paged=False
    ):
        launch.run()
    world.check(out)


@st.composite
def ragged(draw: st.DrawFn) -> Case:
    seqs = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), max_size=4))
    return Case(
        f"drawn {draw(st.integers(0, 1000))}",
        tuple(seqs),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 5)),
        head_dim=draw(st.sampled_from((8, 20, 32, 72))),
        block_size=draw(st.sampled_from((1, 3, 8, 16, 24))),
        window=draw(st.sampled_from((None, None, 1, 5, 30))),
        soft_cap=draw(st.sampled_from((None, None, 4.0))),
        sinks=draw(st.booleans()),
        rows_before=draw(st.integers(0, 2)),
        rows_after=draw(st.integers(0, 2)),
    )


@settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(ragged())
def test_drawn_shapes(case: Case) -> None:
    world = attention_world(case)
    world.check(world.run(KERNELS))


# -- writes


ROPES = (
    None,
    Rope(rope_table(64)),
    Rope(rope_table(64), interleaved=True),
    Rope(rope_table(30)),
    Rope(rope_table(2), True),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "none" if rope is None else str(rope.cos_sin.shape[1]))
def test_rope_and_writes(rope: Rope | None, dtype: torch.dtype) -> None:
    world = write_world(Case("w", ((3, 20), (1, 17), (4, 4)), kv_heads=3, group=3), dtype, rope=rope)
    world.write(KERNELS)
    world.check()


@pytest.mark.parametrize(
    "case",
    [
        Case("heads in parts", ((2, 9),), kv_heads=9, group=1, head_dim=80),
        Case("wide", ((3, 5),), kv_heads=1, group=7, head_dim=256, block_size=1),
        Case("no token", ()),
        Case("of no sequence", ((2, 3),), rows_before=2, rows_after=1),
    ],
    ids=str,
)
def test_writes_of_other_shapes(case: Case) -> None:
    for padding in (0, 1, 2):
        world = write_world(case, rope=Rope(rope_table(case.head_dim)), padding=padding)
        world.write(KERNELS)
        world.check()


# -- KV of 8 bits


EIGHT_BITS = pytest.mark.parametrize(
    ("stored", "form"), [(stored, form) for stored in (torch.int8, torch.float8_e4m3fn) for form in FORMS], ids=str
)
OF_EIGHT_BITS = (
    Case("mixed, of 8 bits", ((1, 33), (17, 17), (3, 40), (1, 200)), kv_heads=2, group=3),
    Case("narrow blocks, of 8 bits", ((1, 33), (5, 20)), kv_heads=2, block_size=4, window=9, soft_cap=3.0, sinks=True),
    Case("wide blocks, of 8 bits", ((1, 600), (2, 130)), kv_heads=1, group=7, head_dim=80, block_size=128),
)


@EIGHT_BITS
@pytest.mark.parametrize("case", OF_EIGHT_BITS, ids=str)
def test_eight_bits_are_read(case: Case, stored: torch.dtype, form: str) -> None:
    check_attention(KERNELS, case, form, torch.float32, stored)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_eight_bits_are_read_by_half_floats(dtype: torch.dtype) -> None:
    check_attention(KERNELS, OF_EIGHT_BITS[0], "block", dtype)


@EIGHT_BITS
def test_eight_bits_are_written(stored: torch.dtype, form: str) -> None:
    heads = Case("heads in parts, of 8 bits", ((2, 9), (3, 3)), kv_heads=9, group=1, head_dim=80, block_size=4)
    for dtype in (torch.float32, torch.bfloat16):
        for rope in (None, Rope(rope_table(80)), Rope(rope_table(20), interleaved=True)):
            check_written(KERNELS, write_world(heads, dtype, rope=rope), form, stored)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_row_of_zeros_is_read_as_zeros_and_a_broken_row_as_broken(stored: torch.dtype) -> None:
    check_odd_rows(KERNELS, stored)


# -- rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 576, 1100])
def test_norms_and_activation(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x, residual = torch.randn(2, 5, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(width, generator=generator, dtype=torch.float64).to(dtype)
    assert_near(KERNELS.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5), dtype)
    summed = (residual.float() + x.float()).to(dtype)
    wide = torch.full((5, width + 3), torch.nan, dtype=dtype)
    view = wide[:, 1 : 1 + width]
    view.copy_(residual)
    got = KERNELS.add_rms_norm(x, view, weight, 1e-5)
    assert_near(got, reference.rms_norm(summed.double(), weight.double(), 1e-5), dtype)
    assert torch.equal(view, summed)
    assert wide[:, [0, -2, -1]].isnan().all()
    gate_up = torch.randn(3, 2 * width, generator=generator, dtype=torch.float64).to(dtype)
    assert_near(KERNELS.silu_mul(gate_up), reference.silu_mul(gate_up.double()), dtype)


def test_the_norm_of_heads_where_they_lie() -> None:
    fused, weight = torch.randn(7, 8, 80), torch.randn(80)
    for heads in fused.split([3, 3, 2], dim=1):
        assert_near(
            KERNELS.rms_norm(heads, weight, 1e-5),
            reference.rms_norm(heads.double(), weight.double(), 1e-5),
            heads.dtype,
        )


def test_no_rows() -> None:
    empty = torch.empty(0, 64)
    assert KERNELS.rms_norm(empty, torch.ones(64), 1e-5).shape == (0, 64)
    assert KERNELS.silu_mul(empty).shape == (0, 32)


# -- moves of blocks


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
def test_copies_and_swaps(dtype: torch.dtype) -> None:
    for dims in ((2, 2, 3, 4, 6), (1, 2, 1, 1, 5), (3, 2, 4, 16, 64)):
        pool = torch.randint(0, 100, (9, *dims)).to(dtype)
        host = torch.randint(0, 100, (4, *dims)).to(dtype)
        wanted, pairs = pool.clone(), torch.tensor([[1, 2], [8, 0], [5, 3]])
        reference.copy_blocks(wanted, pairs)
        KERNELS.copy_blocks(pool, pairs)
        assert torch.equal(pool, wanted)
        out, wanted = torch.tensor([[8, 1], [0, 3]]), host.clone()
        reference.swap_blocks(pool, wanted, out)
        KERNELS.swap_blocks(pool, host, out)
        assert torch.equal(host, wanted)
        KERNELS.copy_blocks(pool, torch.empty(0, 2, dtype=torch.int64))
        KERNELS.swap_blocks(host, pool, torch.empty(0, 2, dtype=torch.int64))


def test_large_blocks_move_by_runs_of_neighbours() -> None:
    assert list(swap_blocks.runs([])) == []
    pairs = [[3, 7], [4, 8], [5, 9], [6, 2], [7, 3], [9, 4]]
    assert list(swap_blocks.runs(pairs)) == [(3, 7, 3), (6, 2, 2), (9, 4, 1)]
    pool, host = torch.randn(10, 2, 1 << 17), torch.zeros(12, 2, 1 << 17)
    wanted = host.clone()
    reference.swap_blocks(pool, wanted, torch.tensor(pairs))
    KERNELS.swap_blocks(pool, host, torch.tensor(pairs))
    assert torch.equal(host, wanted)


def test_offsets_beyond_32_bits() -> None:
    """Blocks so far into a pool that elements pass 2^31 and 2^32; few pages of it are touched."""
    num_blocks, shape = 1_100_000, (2, 1, 16, 64)
    room = mmap.mmap(-1, num_blocks * 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    pool = torch.frombuffer(room, dtype=torch.float32).view(num_blocks, *shape)
    near, far = torch.zeros(4, *shape), [262_144, 1_048_576, 1_099_999]
    q, k, v = torch.randn(3, 40, 1, 64)
    results = []
    for kv, table in ((near, [1, 2, 3]), (pool, far)):
        positions = torch.arange(40)
        slots = torch.tensor(table)[positions // 16] * 16 + positions % 16
        starts, context = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
        batch = Batch(starts, context, torch.tensor([table], dtype=torch.int32), positions, slots, 40, 40)
        KERNELS.kv_write(q.clone(), k, v, kv, batch, Rope(rope_table(64)))
        results.append(KERNELS.paged_attention(q, kv, batch, 0.125))
    assert torch.equal(*results)
    assert torch.equal(pool[far], near[1:])
    assert not pool[:8].any()  # where a number that wrapped would lead

    KERNELS.copy_blocks(pool, torch.tensor([[far[2], 700_000], [far[0], 1_099_998]]))
    assert torch.equal(pool[[700_000, 1_099_998]], near[[3, 1]])

    host = torch.zeros(3, *shape)
    KERNELS.swap_blocks(pool, host, torch.tensor([[far[2], 0], [far[1], 2]]))
    assert torch.equal(host[[0, 2]], near[[3, 2]])
    KERNELS.swap_blocks(host, pool, torch.tensor([[0, 800_000], [2, far[0]]]))
    assert torch.equal(pool[[800_000, far[0]]], near[[3, 2]])
    assert not pool[:8].any()


# -- what a launcher refuses


def small_batch() -> tuple[Tensor, Tensor, Batch]:
    world = attention_world(Case("refused", ((2, 5),), kv_heads=2, group=2, head_dim=16))
    return world.q, world.kv, world.batch


def test_refusals_name_the_argument() -> None:
    q, kv, batch = small_batch()
    attend = KERNELS.paged_attention
    k = torch.zeros(2, 2, 16)
    refused = [
        ("q", lambda: attend(q.double(), kv.double(), batch, 1.0)),
        ("kv", lambda: attend(q, kv.half(), batch, 1.0)),
        ("kv", lambda: attend(q, kv[..., ::2], batch, 1.0)),
        ("scales", lambda: attend(q, kv.to(torch.int8), batch, 1.0)),
        ("scales", lambda: attend(q, kv.to(torch.int8), batch, 1.0, scales=torch.ones(2, 3))),
        ("scales", lambda: attend(q, kv.to(torch.int8), batch, 1.0, scales=torch.ones(len(kv), 2, 2, 15))),
        ("batch.tables", lambda: attend(q, kv, replace(batch, tables=batch.tables.long()), 1.0)),
        ("batch.query_start", lambda: attend(q, kv, replace(batch, query_start=batch.query_start[:-1]), 1.0)),
        ("window", lambda: attend(q, kv, batch, 1.0, window=0)),
        ("soft_cap", lambda: attend(q, kv, batch, 1.0, soft_cap=-1.0)),
        ("sinks", lambda: attend(q, kv, batch, 1.0, sinks=torch.ones(3))),
        ("out", lambda: attend(q, kv, batch, 1.0, out=torch.empty(2, 4, 8))),
        ("k", lambda: KERNELS.kv_write(q, k[:1], k, kv, batch, None)),
        ("v", lambda: KERNELS.kv_write(q, k, k.half(), kv, batch, None)),
        ("batch.slots", lambda: KERNELS.kv_write(q, k, k, kv, replace(batch, slots=batch.slots.int()), None)),
        ("rope.cos_sin", lambda: KERNELS.kv_write(q, k, k, kv, batch, Rope(rope_table(32)))),
        ("weight", lambda: KERNELS.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)),
        ("residual", lambda: KERNELS.add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), 1e-5)),
        ("gate_up", lambda: KERNELS.silu_mul(torch.ones(2, 7))),
        ("pairs", lambda: KERNELS.copy_blocks(torch.ones(4, 8), torch.tensor([0, 1]))),
        ("pairs", lambda: KERNELS.swap_blocks(torch.ones(4, 8), torch.ones(4, 8), torch.tensor([[0, 4]]))),
        ("destination pool", lambda: KERNELS.swap_blocks(torch.ones(4, 8), torch.ones(4, 6), torch.tensor([[0, 1]]))),
    ]
    for name, call in refused:
        with pytest.raises(ValueError, match=name):
            call()


def test_warm_up_runs_on_any_shape() -> None:
    for shapes in (
        Shapes(96, 160, 9, 3, 16, 8, torch.float32),
        Shapes(64, 64, 2, 1, 5, 1, torch.bfloat16, vocab=1000),
    ):
        KERNELS.warm_up(shapes)
