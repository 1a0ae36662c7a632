"""The CPU set's writes: RoPE and new KV, and the moves of whole blocks. Every slot that is nobody's stays as it was."""

import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import Batch, Rope
from kilburn.kernels.dispatch import kernels_for
from tests.kernels.shapes import CASES, LAYER, MIXED, Case, assert_near, rope_table, write_world

KERNELS = kernels_for(torch.device("cpu"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_RESERVE = 0x4000  # MAP_NORESERVE, which `mmap` has no name for before 3.13
WRITTEN = tuple(case for case in CASES if case.name.startswith(("group", "prefill", "chunks", "block size", "long")))
SHORT = ((5, 9), (1, 17), (2, 20))
ROPES = (None, *(Rope(rope_table(dim), interleaved) for dim in (2, 30, 32, 64) for interleaved in (False, True)))


def rope_name(rope: Rope | None) -> str:
    return "no rope" if rope is None else f"{rope.cos_sin.shape[1]} {'pairs' if rope.interleaved else 'halves'}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_table(case: Case) -> None:
    world = write_world(case, rope=Rope(rope_table(case.head_dim)))
    world.write(KERNELS)
    world.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", ROPES, ids=rope_name)
@pytest.mark.parametrize("padding", [0, 1, 2, 7])
def test_every_rope_with_some_tokens_padding(padding: int, rope: Rope | None, dtype: torch.dtype) -> None:
    world = write_world(Case("ropes", MIXED, kv_heads=3, group=3), dtype, rope=rope, padding=padding)
    world.write(KERNELS)
    world.check()


def test_calls_of_many_kinds_in_turn_do_not_disturb_each_other() -> None:
    """What a set keeps from call to call must follow what it is given."""
    for _ in range(2):
        for rope in (*ROPES, Rope(rope_table(64)), Rope(-rope_table(64))):
            for case in (Case("a", SHORT), Case("a", SHORT, block_size=8), Case("a", SHORT[:2])):
                world = write_world(case, rope=rope)
                world.write(KERNELS)
                world.check()


@st.composite
def writes(draw: st.DrawFn) -> tuple[Case, Rope | None]:
    contexts = draw(st.lists(st.integers(0, 70), max_size=5))
    head_dim = draw(st.sampled_from((1, 2, 7, 8, 20, 31, 64, 72, 100)))
    case = Case(
        f"drawn {draw(st.integers(0, 1000))}",
        tuple((draw(st.integers(0, min(context, 40))), context) for context in contexts),
        kv_heads=draw(st.integers(1, 4)),
        group=draw(st.sampled_from((1, 2, 3, 5, 8))),
        head_dim=head_dim,
        block_size=draw(st.sampled_from((1, 2, 3, 4, 8, 16, 24, 64))),
        shared=draw(st.booleans()),
        rows_after=draw(st.integers(0, 3)),
    )
    half = draw(st.integers(0, head_dim // 2))
    return case, Rope(rope_table(2 * half), draw(st.booleans())) if half else None


@settings(max_examples=80, deadline=None)
@given(drawn=writes(), dtype=st.sampled_from(DTYPES), padding=st.sampled_from((0, 1, 2, 5)))
def test_drawn_writes(drawn: tuple[Case, Rope | None], dtype: torch.dtype, padding: int) -> None:
    case, rope = drawn
    world = write_world(case, dtype, rope=rope, padding=padding)
    world.write(KERNELS)
    world.check()


@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_what_is_written_is_what_attention_reads(case: Case) -> None:
    """A prompt written step by step gives the rows that it gives when written at once."""
    world, twin = (write_world(case, rope=Rope(rope_table(case.head_dim)), padding=0) for _ in range(2))
    world.write(KERNELS)
    reference.kv_write(*twin.qkv, twin.pool[:, LAYER], twin.batch, twin.rope)
    got = KERNELS.paged_attention(world.qkv[0], world.pool[:, LAYER], world.batch, 0.125)
    kv = twin.pool[:, LAYER].double()
    assert_near(got, reference.paged_attention(twin.qkv[0].double(), kv, twin.batch, 0.125), torch.float32, slack=4)


def test_a_cache_of_another_type_is_served_by_the_reference() -> None:
    world = write_world(Case("as it is", MIXED), rope=Rope(rope_table(64)))
    pool = world.pool.to(torch.bfloat16)
    KERNELS.kv_write(*world.qkv, pool[:, LAYER], world.batch, world.rope)
    twin = write_world(Case("as it is", MIXED), rope=Rope(rope_table(64)))
    twin.write(KERNELS)
    assert torch.equal(pool, twin.pool.to(torch.bfloat16))


# -- blocks far into a pool


def test_offsets_beyond_32_bits() -> None:
    """8 KiB blocks up to number 1,100,000: bytes pass 2^31, 2^32 and 2^33, elements 2^31; few pages are touched."""
    num_blocks, shape = 1_100_000, (2, 1, 16, 64)
    room = mmap.mmap(-1, num_blocks * 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    pool = torch.frombuffer(room, dtype=torch.float32).view(num_blocks, *shape)
    near = torch.zeros(8, *shape)
    far = [262_144, 262_145, 524_288, 524_291, 1_048_576, 1_048_583, 1_099_999]  # [2^31, 2^32, 2^33 bytes) + a few
    rope, q, k, v = Rope(rope_table(64)), *torch.randn(3, 100, 1, 64)
    results = []
    for kv, table in ((near, list(range(1, 8))), (pool, far)):
        positions = torch.arange(100)
        batch = Batch(
            query_start=torch.tensor([0, 100], dtype=torch.int32),
            context_len=torch.tensor([100], dtype=torch.int32),
            tables=torch.tensor([table], dtype=torch.int32),
            positions=positions,
            slots=torch.tensor(table)[positions // 16] * 16 + positions % 16,
            max_query=100,
            max_context=100,
        )
        turned = q.clone()
        KERNELS.kv_write(turned, k.clone(), v, kv, batch, rope)
        results.append(KERNELS.paged_attention(turned, kv, batch, 0.125))
    assert torch.equal(*results)
    assert torch.equal(pool[far], near[1:])
    assert not pool[:8].any()  # where a number that wrapped would lead

    KERNELS.copy_blocks(pool, torch.tensor([[far[5], 700_000], [far[0], far[6] - 1]]))
    assert torch.equal(pool[[700_000, far[6] - 1]], near[[6, 1]])
    host = torch.zeros(8, *shape)
    KERNELS.swap_blocks(pool, host, torch.tensor([[block, i + 1] for i, block in enumerate(far)]))
    assert torch.equal(host, near)
    KERNELS.swap_blocks(near, pool, torch.tensor([[3, 1_050_000]]))
    assert torch.equal(pool[1_050_000], near[3])
    assert not pool[:8].any()


# -- whole blocks


def pairs_of(num_blocks: int, count: int, seed: int = 0) -> Tensor:
    """Distinct blocks, the sources before the destinations."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    return torch.stack((order[:count], order[count : 2 * count]), dim=1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("block", [(1,), (2, 2, 3, 5, 7), (3, 2, 2, 16, 64), (30, 2, 3, 16, 64)], ids=str)
def test_copies_move_bytes_and_touch_no_other_block(block: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = torch.randint(0, 256, (11, *block, torch.empty(0, dtype=dtype).element_size()), dtype=torch.uint8)
    pool = pool.view(dtype)[..., 0]
    before, pairs = pool.clone(), pairs_of(11, 4)
    KERNELS.copy_blocks(pool, pairs)
    before[pairs[:, 1]] = before[pairs[:, 0]]
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8))


def test_one_source_may_go_to_many_places() -> None:
    pool = torch.randn(6, 2, 2, 1, 4, 8)
    before = pool.clone()
    KERNELS.copy_blocks(pool, torch.tensor([[2, 0], [2, 5], [2, 3]]))
    assert torch.equal(pool, before[[2, 1, 2, 2, 4, 2]])


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), st.integers(2, 30), st.integers(0, 12), st.integers(0, 5))
def test_swaps_go_there_and_back(here: int, there: int, wanted: int, seed: int) -> None:
    count = min(here, there, wanted)
    device_pool, host_pool = torch.randn(here, 2, 2, 3, 4, 8), torch.randn(there, 2, 2, 3, 4, 8)
    before = device_pool.clone(), host_pool.clone()
    generator = torch.Generator().manual_seed(seed)
    out = [torch.randperm(n, generator=generator)[:count] for n in (here, there)]
    KERNELS.swap_blocks(device_pool, host_pool, torch.stack(out, dim=1))
    moved = before[1].clone()
    moved[out[1]] = before[0][out[0]]
    assert torch.equal(host_pool, moved)
    assert torch.equal(device_pool, before[0])
    device_pool[out[0]] = 0.0
    KERNELS.swap_blocks(host_pool, device_pool, torch.stack(out[::-1], dim=1))
    assert torch.equal(device_pool, before[0])


def test_pairs_may_be_a_view_and_may_be_none() -> None:
    pool = torch.randn(6, 8)
    before = pool.clone()
    KERNELS.copy_blocks(pool, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(pool, before)
    KERNELS.copy_blocks(pool, torch.tensor([[0, 9, 9], [4, 9, 9]]).T[:1])
    assert torch.equal(pool, before[[0, 1, 2, 3, 0, 5]])


def test_a_pool_that_is_a_part_of_a_larger_one() -> None:
    whole = torch.randn(12, 8)
    before = whole.clone()
    KERNELS.copy_blocks(whole[::2], torch.tensor([[1, 4]]))
    before[8] = before[2]
    assert torch.equal(whole, before)


# -- what is refused


def test_moves_out_of_bounds_move_nothing() -> None:
    pool, host = torch.randn(6, 8), torch.randn(3, 8)
    before, host_before = pool.clone(), host.clone()
    for wrong in ([[0, 6]], [[6, 0]], [[-1, 0]], [[0, 1], [0, -1]]):
        with pytest.raises(ValueError, match=r"^pairs"):
            KERNELS.copy_blocks(pool, torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"^pairs"):
        KERNELS.swap_blocks(pool, host, torch.tensor([[0, 3]]))
    with pytest.raises(ValueError, match=r"^pairs"):
        KERNELS.copy_blocks(pool, torch.tensor([[0, 1]], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^pairs"):
        KERNELS.copy_blocks(pool, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"^source pool"):
        KERNELS.swap_blocks(torch.randn(8, 6).T, host, torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match=r"^destination pool"):
        KERNELS.swap_blocks(pool, torch.randn(3, 9), torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match=r"^destination pool"):
        KERNELS.swap_blocks(pool, host.double(), torch.tensor([[0, 1]]))
    assert torch.equal(pool, before)
    assert torch.equal(host, host_before)


def test_bad_writes_are_named() -> None:
    world = write_world(Case("good", MIXED), padding=0)
    (q, k, v), kv, batch, rope = world.qkv, world.pool[:, LAYER], world.batch, Rope(rope_table(64))
    tokens = len(q)
    last = torch.tensor([tokens - 1])
    far, negative = (batch.positions.index_fill(0, last, position) for position in (2048, -1))
    outside = batch.slots.index_fill(0, last, kv.shape[0] * kv.shape[3])
    for match, arguments in (
        ("q ", (q[:, :3], k, v, kv, batch, rope)),
        ("q ", (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, kv, batch, rope)),
        ("k ", (q, k[:, :1], v, kv, batch, rope)),
        ("k ", (q, k[:-1], v, kv, batch, rope)),
        ("v ", (q, k, v[..., :32], kv, batch, rope)),
        ("kv ", (q, k, v, kv[..., :32], batch, rope)),
        ("kv ", (q, k, v, kv[0], batch, rope)),
        ("kv ", (q, k, v, kv[:, :1], batch, rope)),
        ("batch.positions ", (q, k, v, kv, replace(batch, positions=batch.positions.int()), rope)),
        ("batch.slots ", (q, k, v, kv, replace(batch, slots=batch.slots[:-1]), rope)),
        ("batch.slots ", (q, k, v, kv, replace(batch, slots=batch.slots.repeat_interleave(2)[::2]), rope)),
        ("rope.cos_sin ", (q, k, v, kv, batch, Rope(rope_table(64).half()))),
        ("rope.cos_sin ", (q, k, v, kv, batch, Rope(rope_table(66)))),
        ("rope.cos_sin ", (q, k, v, kv, batch, Rope(rope_table(64)[:, :31].contiguous()))),
        ("rope.cos_sin ", (q, k, v, kv, batch, Rope(rope_table(64)[:, :32]))),
        (f"batch: token {tokens - 1} ", (q, k, v, kv, replace(batch, positions=far), rope)),
        (f"batch: token {tokens - 1} ", (q, k, v, kv, replace(batch, positions=negative), rope)),
        (f"batch: token {tokens - 1} ", (q, k, v, kv, replace(batch, slots=outside), None)),
    ):
        with pytest.raises(ValueError, match=f"^{match}"):
            KERNELS.kv_write(*arguments)
