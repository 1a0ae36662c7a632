"""The pools: moves in their order, and sizes that fit or say what would."""

from pathlib import Path

import pytest
import torch

from kilburn.kernels import reference
from kilburn.shared.config import SettingsError
from kilburn.shared.layout import KVLayout
from kilburn.shared.pool_size import sized
from kilburn.worker.kv_cache import KVCache, spare_host_bytes, total_host_bytes
from tests.worker.toy import CPU, layout

BLOCK = KVLayout(16, 4, 2, 8, "float32")  # 8 KiB a block
MIB = 1 << 20


def numbered(num_blocks: int, num_host_blocks: int) -> KVCache:
    """Pools whose block b holds b everywhere, the host's 100 + b."""
    cache = KVCache(layout(4), num_blocks, num_host_blocks, CPU, reference)
    for block in range(num_blocks):
        cache.pool[block] = block
    for block in range(num_host_blocks):
        cache.host_pool[block] = 100 + block
    return cache


def held(pool: torch.Tensor) -> list[int]:
    assert (pool.flatten(1) == pool.flatten(1)[:, :1]).all(), "a block was moved in part"
    return [int(value) for value in pool.flatten(1)[:, 0]]


def test_pools_begin_zeroed_and_block_major() -> None:
    cache = KVCache(KVLayout(16, 3, 2, 8, "bfloat16"), 5, 2, CPU, reference)
    assert cache.pool.shape == (5, 3, 2, 2, 16, 8)
    assert cache.host_pool.shape == (2, 3, 2, 2, 16, 8)
    assert cache.pool.is_contiguous()
    assert cache.pool.dtype == torch.bfloat16
    assert cache.pool[0].numel() * 2 == cache.layout.bytes_per_block
    assert not cache.pool.any()
    assert not cache.host_pool.any()


@pytest.mark.parametrize(
    ("swaps_out", "copies", "swaps_in", "device", "host"),
    [
        ([], [(1, 2), (1, 3)], [], [0, 1, 1, 1], [100, 101]),
        ([(3, 0), (0, 1)], [], [], [0, 1, 2, 3], [3, 0]),
        ([], [], [(1, 0), (0, 3)], [101, 1, 2, 100], [100, 101]),
        ([(1, 0)], [(2, 1)], [], [0, 2, 2, 3], [1, 101]),  # a block is out before it is written
        ([(1, 0)], [], [(0, 3)], [0, 1, 2, 1], [1, 101]),  # and back in the same plan
        ([], [(2, 1)], [(1, 2)], [0, 2, 101, 3], [100, 101]),  # copied before what it held is replaced
    ],
)
def test_moves_run_in_the_plans_order(swaps_out: list, copies: list, swaps_in: list, device: list, host: list) -> None:
    cache = numbered(4, 2)
    cache.move(swaps_out, copies, swaps_in)
    assert (held(cache.pool), held(cache.host_pool)) == (device, host)


def asked(**changes: int) -> int:
    settings = {
        "num_blocks": 0,
        "kv_memory": 0,
        "spare": 100 * MIB,
        "share": 0.25,
        "workspace": 10 * MIB,
        "wanted": 10**9,
    }
    return sized(BLOCK, **{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "num_blocks"),
    [
        ({"num_blocks": 77}, 77),
        ({"kv_memory": 1 * MIB}, 128),
        ({"kv_memory": 1 * MIB + 8191}, 128),
        ({}, 90 * 128 // 4),
        ({"wanted": 33}, 33),
        ({"wanted": 33, "share": 0.9}, 33),
    ],
)
def test_a_pool_is_sized_by_count_by_memory_or_by_what_is_left(changes: dict, num_blocks: int) -> None:
    assert asked(**changes) == num_blocks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 10**6}, ["--num-blocks", "10880 or less"]),
        ({"kv_memory": 99 * MIB}, ["--kv-memory", "85MiB or less"]),
        ({"kv_memory": 8000}, ["--kv-memory", "one takes 8192 bytes"]),
        ({"spare": 9 * MIB}, ["--max-step-tokens", "--max-rows"]),
    ],
)
def test_a_pool_that_does_not_fit_names_the_setting_and_a_value_that_works(changes: dict, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        asked(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_value_that_it_names_works() -> None:
    assert asked(num_blocks=10880) == 10880
    assert asked(kv_memory=85 * MIB) == 85 * 128


@pytest.mark.parametrize(
    ("limit", "current", "inactive", "expected"),
    [
        ("max", 0, 0, 4000 << 10),
        ("1048576", 1000000, 500000, 548576),
        ("99999999999", 0, 0, 4000 << 10),
        ("5", 90, 0, 0),
    ],
)
def test_spare_memory_is_the_machines_or_the_containers(
    tmp_path: Path, limit: str, current: int, inactive: int, expected: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(f"{current}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")
    assert spare_host_bytes(tmp_path, tmp_path) == expected
    machine_bytes = 9000 << 10
    assert total_host_bytes(tmp_path, tmp_path) == (machine_bytes if limit == "max" else min(machine_bytes, int(limit)))
    (tmp_path / "memory.max").unlink()
    assert total_host_bytes(tmp_path, tmp_path) == machine_bytes
    assert spare_host_bytes(tmp_path, tmp_path) == 4000 << 10
