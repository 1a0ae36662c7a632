"""Decodes that the CPU has recorded: the same numbers as launch by launch, from the same memory, or none at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kilburn.kernels.cpu.kernels import CpuKernels
from kilburn.kernels.cpu.team import torch_openmp
from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import Admit, StepPlan
from kilburn.shared.sampling import Sampling
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.model_runner import FEW_ROWS
from kilburn.worker.models.weights import load
from kilburn.worker.rows import Limits
from kilburn.worker.start import executor_for
from kilburn.worker.step import Executor
from tests.worker.paged_harness import CPU
from tests.worker.tiny_models import make_tiny

NUM_ROWS, BLOCKS = 3, 24
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def executor_of(folder: Path, quantization: str) -> Executor:
    loaded = load(folder, torch.float32, CPU, quantization=quantization)
    c, kernels = loaded.config, CpuKernels(torch_openmp())
    layout = KVLayout(16, c.num_layers, c.num_kv_heads, c.head_dim, "float32")
    cache = KVCache(layout, NUM_ROWS * BLOCKS, 0, CPU, kernels)
    limits = Limits(NUM_ROWS, 1024, min(c.max_len, 16 * BLOCKS), 16, NUM_ROWS * BLOCKS, c.vocab_size)
    return executor_for(loaded, cache, limits, kernels, CPU)


def written(executor: Executor, prompts: list[int], num_steps: int) -> list[list[int]]:
    """What rows with prompts of these lengths draw, step by step."""
    rows = list(range(len(prompts)))
    greedy = Sampling(temperature=0.0)
    admits = [
        Admit(row, 0, n, tuple(7 + (31 * i + row) % 90 for i in range(n)), (),
              tuple(range(row * BLOCKS, (row + 1) * BLOCKS)), greedy)
        for row, n in zip(rows, prompts, strict=True)
    ]  # fmt: skip
    drawn = [executor.run(StepPlan(0, 1, rows, prompts, admits=admits)).tokens]
    return drawn + [executor.run(StepPlan(0, step, rows, [1] * len(rows))).tokens for step in range(2, num_steps)]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_replay_says_what_the_launches_say(tmp_path: Path, two_threads: None, quantization: str) -> None:
    """Also where contexts grow beyond a cut of attention, and where rows are filled up with padding."""
    folder = make_tiny(tmp_path, "smollm", with_tokenizer=False, overrides=SIZES)
    executor = executor_of(folder, quantization)
    recorded = executor.runner.graphs
    assert recorded is not None, "every launch of the family is a kernel's"
    assert recorded.sizes == [1, 2, NUM_ROWS]
    assert recorded.sizes[-1] <= FEW_ROWS
    for prompts in ([250], [40, 5], [3, 255, 17]):
        executor.clear()
        got = written(executor, prompts, 12)
        executor.clear()
        executor.runner.graphs = None
        assert written(executor, prompts, 12) == got
        executor.runner.graphs = recorded


def test_what_is_out_of_bounds_is_told_by_a_replay(tmp_path: Path) -> None:
    executor = executor_of(make_tiny(tmp_path, "smollm", with_tokenizer=False, overrides=SIZES), "none")
    recorded = executor.runner.graphs
    assert recorded is not None
    executor.runner.inputs.slots.fill(torch.full((1,), 10**6).numpy())
    with pytest.raises(ValueError, match="out of bounds"):
        recorded.replays[1]()


def test_a_model_that_computes_by_itself_is_not_recorded(tmp_path: Path) -> None:
    executor = executor_of(make_tiny(tmp_path, "opt", with_tokenizer=False), "none")
    assert executor.runner.graphs is None
    assert len(written(executor, [5], 4)[-1]) == 1
