"""Twins: a cluster that takes many steps at once is, at any moment, in the state of one that takes each."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Cancel
from kilburn.controller.simulate.cluster import Cluster, Worker
from kilburn.controller.simulate.demand import Decoding, poisson, submits
from kilburn.controller.simulate.devices import DEVICES, Reach
from kilburn.controller.simulate.record import Record
from kilburn.controller.simulate.roofline import Linear, Roofline, known_shape
from kilburn.controller.simulate.sizing import Setup
from kilburn.controller.simulate.traces import Asked
from kilburn.shared.layout import KVLayout

PRICES = Linear(fixed_s=2e-3, row_s=5e-5, cell_s=1e-7, token_s=5e-5, pair_s=1e-8, move_s=1e-5)
PLAIN = Setup(
    KVLayout(4, 1, 1, 8, "float32"), PRICES, 200, max_rows=16, max_step_tokens=64, max_len=160, step_target_s=0.004
)
SHAPE = known_shape("opt-13b", "float16", 1)
assert SHAPE is not None
SLOW = replace(DEVICES["a10-24gb"], flops=8e12)  # bound by products as well as by memory
SETUPS = {
    "plain": PLAIN,
    "one plan at a time": replace(PLAIN, depth=1),
    "three at a time": replace(PLAIN, depth=3),
    "a tight pool": replace(PLAIN, num_blocks=70, num_host_blocks=30),
    "a tight pool without a host": replace(PLAIN, num_blocks=70),
    "a device of the table": replace(
        PLAIN, machine=Roofline(SLOW, Reach(), SHAPE, PLAIN.layout, "float16", 1), num_groups=2
    ),
    "few rows": replace(PLAIN, max_rows=3, max_step_tokens=8),
    "blocks of one": replace(PLAIN, layout=replace(PLAIN.layout, block_size=1), num_blocks=800),
    "large blocks": replace(PLAIN, layout=replace(PLAIN.layout, block_size=32), num_blocks=30),
    "several groups": replace(PLAIN, num_groups=3),
    "samples": replace(PLAIN, decoding=Decoding(n=3)),
    "beams": replace(PLAIN, decoding=Decoding(n=2, beams=True)),
    "equal beginnings": replace(PLAIN, decoding=Decoding(num_common=20)),
    "shares": replace(PLAIN, is_fair=True, decoding=Decoding(heavy_percent=50)),
    "batches": replace(PLAIN, policy="batch"),
    "reserved": replace(PLAIN, policy="orca-pow2"),
}


def cluster_of(setup: Setup, steps_each: bool) -> Cluster:
    workers = [Worker(f"group-{n}".encode(), setup.hello(n), setup.machine, n) for n in range(setup.num_groups)]
    return Cluster(setup.engine_settings(), workers, setup.gate(), Record(), sample_s=0.05, steps_each=steps_each)


def state_of(engine: Engine, peers: list[bytes]) -> list[Any]:
    """All of the engine that decides anything, and all that it tells onlookers."""
    found: list[Any] = []
    for peer in peers:
        home = engine.home(peer)
        assert home is not None
        scheduler = home.scheduler
        found.append([
            (g.request_id, [
                (s.tokens, s.num_computed, s.num_planned, s.capacity, s.epoch, s.row, s.own_table.blocks, len(s.chain))
                for s in g.live
            ])
            for g in scheduler.line.running
        ])  # fmt: skip
        found.append([
            (f.step, f.sent_at, [(s.group.request_id, s.index) for s in f.sequences], f.epochs, f.counts, f.num_moved)
            for f in scheduler.flights
        ])  # fmt: skip
        found.append([g.request_id for g in scheduler.line.waiting])
        pool = scheduler.pool
        found.append([pool.refs(block) for block in range(pool.num_blocks)])
        found.append([pool.held_since(block) for block in range(pool.num_blocks)])
        found.append([pool.next_evicted(pool.num_available), pool.lifetimes_s.spread(), pool.idle_s.spread()])
        found.append([scheduler.counters, scheduler.sizes.rows.spread(), scheduler.sizes.positions.spread()])
        found.append([scheduler.sizes.budget_use.spread(), scheduler.sizes.flight_s.spread(), scheduler.last_step])
        found.append([scheduler.pacing.decode_s, scheduler.pacing.num_decodes, scheduler.pacing.token_s])
        found.append([scheduler.costs.move_s_per_block, scheduler.costs.compute_s_per_token, scheduler.last_commit_at])
        found.append(scheduler.costs.chunk_s(1, 1.0))
    return found


def names_of(cluster: Cluster, peers: list[bytes]) -> list[bytes | None]:
    """What every block of every pool is known by, on both tiers."""
    homes = [home for peer in peers if (home := cluster.engine.home(peer)) is not None]
    pools = [pool for home in homes for pool in (home.scheduler.memory.device, home.scheduler.memory.host)]
    found = [pool.name_of(block) for pool in pools for block in range(pool.num_blocks)]
    return [None if name is None else name.digest for name in found]


@pytest.mark.parametrize("name", SETUPS)
def test_stretches_make_no_difference(name: str) -> None:
    setup, rng = SETUPS[name], Random(name)
    lengths = [Asked(None, rng.randint(1, 40), rng.choice((1, 2, 20, 60, 90))) for _ in range(40)]
    asked = poisson(lengths, rate=25.0, seconds=1.6, seed=rng.randrange(99))
    quick, slow = cluster_of(setup, False), cluster_of(setup, True)
    turns = [0, 0]
    for i, cluster in enumerate((quick, slow)):
        handle = cluster.engine.handle

        def counted(*arguments: Any, i: int = i, handle: Any = handle) -> Any:
            turns[i] += 1
            return handle(*arguments)

        cluster.engine.handle = counted  # type: ignore[method-assign]
    peers = [f"group-{n}".encode() for n in range(setup.num_groups)]
    # Each is stopped at the same moments, most of them in the middle of something.
    requests = [submits(asked, setup.decoding) for _ in range(2)]
    stops = [0.2, 0.5, 0.55, 1.0, 1.3]
    names: set[tuple[bytes | None, bytes | None]] = set()
    for until_s in (*stops, 1e9):
        for cluster, coming in zip((quick, slow), requests, strict=True):
            cluster.run(coming, until_s)
            cluster.engine.validate()
        assert state_of(quick.engine, peers) == state_of(slow.engine, peers), until_s
        # Names are others where they are quickly made: each stands for one real one, and that for no other.
        names |= set(zip(names_of(quick, peers), names_of(slow, peers), strict=True))
        assert len(names) == len({quickly for quickly, _ in names}) == len({really for _, really in names})
        assert (quick.num_steps, quick.num_sequence_steps) == (slow.num_steps, slow.num_sequence_steps)
        assert quick.record.seen == slow.record.seen
        assert quick.record.gaps == slow.record.gaps
        assert quick.record.samples == slow.record.samples
        assert (quick.record.busy_s, quick.record.row_seconds, quick.record.last_end_s) == pytest.approx(
            (slow.record.busy_s, slow.record.row_seconds, slow.record.last_end_s)
        )
        if setup.policy == "paged":  # somebody leaves, in the middle of something or in line
            present = sorted(request_id for request_id, seen in quick.record.seen.items() if seen.num_left)
            for cluster in (quick, slow) if present else ():
                cluster.happens([Cancel(present[len(present) // 2])], until_s)
    assert len(quick.record.seen) == len(asked) > 25
    if name not in ("beams", "shares"):  # which wait for every token, or have turns that depend on each
        assert turns[0] < 0.95 * turns[1], turns
