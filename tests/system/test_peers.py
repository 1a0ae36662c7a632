"""What a comparison of engines rests on: prompts nobody has seen, memory of whole trees, floors below every wall."""

import os
import socket
import subprocess
import sys

import pytest

from bench.machine_limits import Limits, Shapes
from bench.peers import WORKLOADS, common_share, floor_s
from bench.process_memory import peak_mb, tree_that_listens, tree_under
from bench.serve import prompt_of
from kilburn.controller.simulate.traces import MOONCAKE_BLOCK

SHAPES = Shapes(vocabulary=100, num_layers=2, matrices=((8, 4), (4, 8)), head=(100, 4))


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_alike_for_all_sides_of_a_round_and_new_in_the_next(name: str) -> None:
    workload = WORKLOADS[name]
    rounds = []
    for seed in (1, 1, 2):
        asked = workload.drawn(seed)
        rounds.append([tuple(prompt_of(one, i, seed, 30_000)) for i, one in enumerate(asked)])
        assert [len(prompt) for prompt in rounds[-1]] == [one.num_prompt for one in asked]
        assert len(set(rounds[-1])) == workload.num_requests
        commons = {prompt[: workload.num_common] for prompt in rounds[-1]}
        assert len(commons) == 1
        assert workload.num_common in (0, MOONCAKE_BLOCK)
    same, again, new = rounds
    assert same == again
    assert not {prompt[:16] for prompt in same} & {prompt[:16] for prompt in new}


def test_a_floor_counts_every_matrix_once_for_each_position_and_shared_prefixes_once() -> None:
    assert (SHAPES.flops_of_body, SHAPES.flops_of_head) == (2 * 2 * 64, 2 * 400)
    assert SHAPES.bytes_of_weights == 4 * (2 * 64 + 400)
    workload = WORKLOADS["W4"]
    asked = workload.drawn(1)
    fast_read, fast_products = Limits(1e30, 1.0), Limits(1.0, 1e30)
    positions = 512 + 24 * 32 + 24 * 31
    assert floor_s(asked, workload, SHAPES, fast_read) == positions * 256 + 24 * 32 * 800
    assert floor_s(asked, workload, SHAPES, fast_products) == 32 * SHAPES.bytes_of_weights


@pytest.mark.parametrize(
    ("texts", "others", "share"),
    [(["abcd"], ["abcd"], 1.0), (["abcd"], ["abx"], 0.5), (["ab", "cd"], ["ab", "x"], 0.5)],
)
def test_agreement_ends_at_the_first_difference(texts: list[str], others: list[str], share: float) -> None:
    assert common_share(texts, others) == share


def test_memory_is_that_of_the_whole_tree_of_whoever_listens() -> None:
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(200 << 20); print(len(x), flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with socket.create_server(("127.0.0.1", 0)) as server:
            tree = tree_that_listens(server.getsockname()[1])
        assert tree[0] == os.getpid()
        assert child.pid in tree
        assert peak_mb(tree_under(child.pid)) > 200
        assert peak_mb(tree) > peak_mb(tree_under(child.pid))
    finally:
        child.communicate(b"\n", timeout=30)
    with pytest.raises(SystemExit, match="listens on port 1"):
        tree_that_listens(1)
