"""The CPU set's attention against the reference in float64: over the table, the grid, and what hypothesis draws.

Beyond that its result depends on nothing but what the sequence holds: not on where its blocks lie, on its neighbours in
the batch, on how many threads came, nor on whose threads they are. Each of these is asked for to the bit.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import Kernels
from kilburn.kernels.cpu.kernels import CpuKernels
from kilburn.kernels.dispatch import kernels_for
from tests.kernels.shapes import CASES, MIXED, Case, assert_near, attention_world, grid

KERNELS: Kernels = kernels_for(torch.device("cpu"))
NARROW = (torch.bfloat16, torch.float16)
SPLIT = tuple(case for case in CASES if case.name.startswith("long"))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_this_machine_gets_the_compiled_set() -> None:
    assert isinstance(KERNELS, CpuKernels)
    assert KERNELS.name.startswith("cpu (compiled for ")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_table(case: Case) -> None:
    world = attention_world(case)
    world.check(world.run(KERNELS))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_table_in_half_the_bytes(case: Case, dtype: torch.dtype) -> None:
    world = attention_world(case, dtype)
    world.check(world.run(KERNELS))


@pytest.mark.parametrize("case", tuple(grid()), ids=str)
def test_the_grid(case: Case) -> None:
    world = attention_world(case)
    world.check(world.run(KERNELS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_types_without_a_compiled_form_go_to_the_reference(dtype: torch.dtype) -> None:
    world = attention_world(Case("as it is", MIXED), dtype)
    world.pool = world.pool.nan_to_num().double()
    world.check(world.run(KERNELS))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    contexts = draw(st.lists(st.integers(0, 90), max_size=5))
    if draw(st.booleans()):
        contexts.append(draw(st.integers(250, 800)))
    seqs = tuple((draw(st.integers(0, min(context + 2, 40))), context) for context in contexts)
    return Case(
        f"drawn {draw(st.integers(0, 1000))}",
        seqs,
        kv_heads=draw(st.integers(1, 4)),
        group=draw(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 9, 33))),
        head_dim=draw(st.sampled_from((1, 4, 7, 8, 16, 20, 31, 32, 33, 64, 72, 100))),
        block_size=draw(st.sampled_from((1, 2, 3, 4, 5, 8, 16, 24, 64))),
        window=draw(st.none() | st.integers(1, 100)),
        soft_cap=draw(st.none() | st.sampled_from((0.5, 5.0, 50.0))),
        sinks=draw(st.booleans()),
        shared=draw(st.booleans()),
        rows_before=draw(st.integers(0, 2)),
        rows_after=draw(st.integers(0, 2)),
    )


@settings(max_examples=80, deadline=None)
@given(case=cases(), dtype=st.sampled_from((torch.float32, *NARROW)))
def test_drawn_shapes(case: Case, dtype: torch.dtype) -> None:
    world = attention_world(case, dtype)
    world.check(world.run(KERNELS))


# -- what is written, and what is read


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_of_out_is_written_and_nothing_else(case: Case) -> None:
    world = attention_world(case)
    held = torch.full((len(world.q), case.heads + 1, case.head_dim + 3), torch.nan)
    out = held[:, : case.heads, : case.head_dim]
    assert world.run(KERNELS, out=out) is out
    world.check(out)
    assert held[:, case.heads :].isnan().all()
    assert held[:, :, case.head_dim :].isnan().all()


def test_a_batch_of_nothing_but_padding_gives_zeros_not_what_lay_in_memory() -> None:
    world = attention_world(Case("only padding", (), rows_after=64, kv_heads=8))
    torch.full((64, 16, 64), 3.0)  # likely the very memory that the next one gets
    assert not world.run(KERNELS).any()


def test_a_broken_slot_breaks_the_rows_that_see_it_and_no_other() -> None:
    world = attention_world(Case("one NaN", ((6, 40), (6, 40), (1, 36), (1, 37)), shared=True))
    block, offset = int(world.batch.tables[0, 20 // 16]), 20 % 16
    assert block == world.batch.tables[3, 1]  # shared by all
    for part in (0, 1):  # a key, a value
        world.kv[block, part, 0, offset] = torch.nan
    got = world.run(KERNELS).isnan()
    assert got[:, :2].all()
    assert not got[:, 2:].any()  # the heads of the other KV head
    assert not KERNELS.paged_attention(world.q, world.kv, world.batch, 0.125, window=10).isnan().any()


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_large_and_small_scores(scale: float) -> None:
    """Softmax of scores in the thousands is a choice; it neither overflows nor falls to zero over zero."""
    world = attention_world(Case(f"scores times {scale}", MIXED))
    got = KERNELS.paged_attention(world.q, world.kv, world.batch, scale)
    kv = world.kv.double().nan_to_num()
    # A score of 3,000 is known to within 0.0002 in float32, and as much of it comes back as a weight.
    slack = 100 if scale > 1 else 1
    assert_near(got, reference.paged_attention(world.q.double(), kv, world.batch, scale), torch.float32, slack)


# -- what the result does not depend on


@pytest.mark.parametrize("case", [*SPLIT, Case("placed", MIXED), Case("placed, shared", MIXED, shared=True)], ids=str)
def test_where_blocks_lie_does_not_matter(case: Case) -> None:
    here, there = attention_world(case), attention_world(case, placement=1)
    assert not torch.equal(here.batch.tables, there.batch.tables)
    assert torch.equal(here.run(KERNELS), there.run(KERNELS))


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_neighbours_do_not_matter(case: Case) -> None:
    world = attention_world(case)
    together, start = world.run(KERNELS), 0
    for seq, (queries, context) in enumerate(case.seqs):
        batch = replace(
            world.batch,
            query_start=torch.tensor([0, queries], dtype=torch.int32),
            context_len=world.batch.context_len[seq : seq + 1],
            tables=world.batch.tables[seq : seq + 1],
            max_query=queries,
            max_context=context,
        )
        q = world.q[start : start + queries]
        assert torch.equal(KERNELS.paged_attention(q, world.kv, batch, **world.options), together[start:][:queries])
        start += queries


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_the_number_of_threads_does_not_matter(case: Case) -> None:
    world = attention_world(case)
    results = []
    for count in (1, 2, 4):
        with threads(count):
            results.extend(world.run(KERNELS) for _ in range(3))
    assert all(torch.equal(results[0], other) for other in results)


def test_threads_of_python_do_the_same() -> None:
    plain = CpuKernels(None)
    assert "Python threads" in plain.name
    with threads(2):
        for case in SPLIT:
            world = attention_world(case)
            assert torch.equal(world.run(plain), world.run(KERNELS))
        x, weight = torch.randn(200, 576), torch.randn(576)
        assert torch.equal(plain.rms_norm(x, weight, 1e-5), KERNELS.rms_norm(x, weight, 1e-5))


def test_two_callers_at_once_wait_for_each_other() -> None:
    worlds = [attention_world(case) for case in SPLIT]
    alone = [world.run(KERNELS) for world in worlds]
    wrong: list[str] = []

    def call(mine: int) -> None:
        for _ in range(20):
            if not torch.equal(worlds[mine].run(KERNELS), alone[mine]):
                wrong.append(worlds[mine].case.name)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


# -- what is refused


def refused(name: str, **changes: object) -> None:
    """The call with these arguments changed ends in an error that names one of them."""
    world = attention_world(Case("good", MIXED))
    arguments = {"q": world.q, "kv": world.kv, "batch": world.batch, "scale": 1.0} | changes
    with pytest.raises(ValueError, match=name):
        KERNELS.paged_attention(**arguments)  # type: ignore[arg-type]


def test_bad_tensors_are_named() -> None:
    world = attention_world(Case("good", MIXED))
    q, kv, tokens = world.q, world.kv, len(world.q)
    refused("q ", q=torch.empty(tokens, 3, 64))  # no multiple of two KV heads
    refused("q ", q=torch.empty(tokens, 64, 4).transpose(1, 2))
    refused("q ", q=q[0])
    refused("out ", out=torch.empty(tokens, 4, 32))
    refused("out ", out=torch.empty(tokens, 4, 64, dtype=torch.bfloat16))
    refused("out ", out=torch.empty(tokens, 64, 4).transpose(1, 2))
    refused("kv ", kv=kv[:, :1])
    refused("kv ", kv=kv[..., :32])
    refused("kv ", kv=kv.transpose(3, 4).contiguous().transpose(3, 4))
    refused("kv ", kv=kv[:0])
    refused("kv ", kv=kv[:, :, :0])
    refused("sinks ", sinks=torch.zeros(3))
    refused("window 0", window=0)
    refused("soft_cap 0", soft_cap=0.0)
    refused("soft_cap nan", soft_cap=float("nan"))


def test_bad_batches_are_named() -> None:
    batch = attention_world(Case("good", MIXED)).batch

    def changed(name: str, value: Tensor) -> None:
        refused("batch", batch=replace(batch, **{name: value}))

    changed("query_start", batch.query_start.long())
    changed("query_start", batch.query_start[:-1])
    changed("query_start", batch.query_start + 1)  # the last sequence ends behind q
    changed("query_start", batch.query_start.flip(0))
    changed("query_start", batch.query_start - 1)
    changed("context_len", batch.context_len.long())
    changed("context_len", -batch.context_len)
    changed("context_len", batch.context_len + 100_000)
    changed("tables", batch.tables.long())
    changed("tables", batch.tables[:-1])
    changed("tables", batch.tables[0])
    changed("tables", batch.tables.T.contiguous().T)
    for outside in (-1, 10_000):
        tables = batch.tables.clone()
        tables[3, 2] = outside
        changed("tables", tables)


def test_after_a_refusal_the_next_call_is_right() -> None:
    world = attention_world(SPLIT[0])
    good, bad = world.batch.tables, world.batch.tables.clone()
    bad[0, 100] = 1_000_000
    for _ in range(3):
        world.batch.tables = bad
        with pytest.raises(ValueError, match="sequence 0"):
            world.run(KERNELS)
        world.batch.tables = good
        world.check(world.run(KERNELS))
