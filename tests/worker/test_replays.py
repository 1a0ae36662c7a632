"""Steps that the CPU has recorded: the same numbers as launch by launch, from the same memory, or none at all."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kilburn.kernels.cpu.arguments import S_IN
from kilburn.kernels.cpu.kernels import CpuKernels
from kilburn.kernels.cpu.recording import Counts
from kilburn.kernels.cpu.team import torch_openmp
from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import Admit, StepPlan
from kilburn.shared.sampling import Sampling
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.models.weights import load
from kilburn.worker.replays import Replays
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


def executor_of(folder: Path, quantization: str, kv: str = "float32") -> Executor:
    """`kv`: "block" and "static" are int8, by where its scales are."""
    loaded = load(folder, torch.float32, CPU, quantization=quantization)
    c, kernels = loaded.config, CpuKernels(torch_openmp())
    layout = KVLayout(16, c.num_layers, c.num_kv_heads, c.head_dim, "float32" if kv == "float32" else "int8")
    layout = layout.with_scale_area() if kv == "block" else layout
    scales = torch.linspace(0.01, 0.04, c.num_layers * 2 * c.num_kv_heads).view(c.num_layers, 2, c.num_kv_heads)
    cache = KVCache(layout, NUM_ROWS * BLOCKS, 0, CPU, kernels, scales if kv == "static" else None)
    limits = Limits(NUM_ROWS, 1024, min(c.max_len, 16 * BLOCKS), 16, NUM_ROWS * BLOCKS, c.vocab_size)
    return executor_for(loaded, cache, limits, kernels, CPU)


def plan_of(todo: dict[int, int], born: dict[int, int] | None = None) -> StepPlan:
    """Rows that go on by so many positions, in this order, after some began with prompts of these lengths."""
    admits = [
        Admit(row, 0, n, tuple(7 + (31 * i + row + n) % 90 for i in range(n)), (),
              tuple(range(row * BLOCKS, (row + 1) * BLOCKS)), Sampling(temperature=0.0, logprobs=2))
        for row, n in (born or {}).items()
    ]  # fmt: skip
    return StepPlan(0, 1, [*todo], [*todo.values()], admits=admits)


def prompts_and_decodes(prompts: list[int], num_steps: int) -> list[StepPlan]:
    born = dict(enumerate(prompts))
    return [plan_of(born, born), *[plan_of(dict.fromkeys(born, 1))] * (num_steps - 2)]


# Chunks beside decodes; rows leave, and others take their places.
MIXED = [
    plan_of({0: 250, 1: 7}, {0: 300, 1: 7}),
    plan_of({1: 1, 0: 20, 2: 97}, {2: 340}),
    plan_of({2: 170, 0: 30, 1: 1}),
    plan_of({2: 30, 0: 1}),
    plan_of({1: 20, 2: 43, 0: 1}, {1: 20}),
    plan_of({1: 1, 2: 1}),
    plan_of({0: 259, 1: 1, 2: 1}, {0: 262}),
    plan_of({2: 1, 0: 3, 1: 1}),
    plan_of({1: 5, 0: 1, 2: 1}, {1: 5}),
    plan_of({0: 1, 1: 1, 2: 1}),
]


def written(executor: Executor, plans: list[StepPlan]) -> list[object]:
    """What rows draw, step by step, and how likely it was to the last bit."""
    executor.clear()
    results = [executor.run(plan) for plan in plans]
    assert not any(result.failed for result in results)
    return [(result.num_tokens, result.tokens, result.logprobs) for result in results]


def counts(queries: int, context: int) -> tuple[Counts, Counts]:
    """Of a step of one sequence."""
    return np.array([queries]), np.array([context])


# With several KV heads; and with a window in all layers, or in the second alone.
HEADS = SIZES | {"num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": 100}
LATE = HEADS | {"use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("kind", "overrides", "quantization", "kv"),
    [
        ("smollm", SIZES, "none", "float32"),
        ("smollm", SIZES, "int8", "float32"),
        ("qwen3", SIZES, "none", "float32"),
        ("mistral", HEADS, "none", "float32"),
        ("mistral", HEADS, "none", "block"),
        ("qwen2", LATE, "none", "static"),
    ],
)
def test_a_replay_says_what_the_launches_say(
    tmp_path: Path, two_threads: None, kind: str, overrides: dict[str, object], quantization: str, kv: str
) -> None:
    """Of prompts, of decodes and of both, by one recording; also where contexts grow beyond a cut of attention."""
    folder = make_tiny(tmp_path, kind, with_tokenizer=False, overrides=overrides)
    executor = executor_of(folder, quantization, kv)
    recorded = executor.runner.graphs
    assert recorded is not None, "every launch of the family is a kernel's"
    alike = [prompts_and_decodes(prompts, 12) for prompts in ([250], [40, 5], [3, 255, 17], [1, 1, 1], [360, 20])]
    for plans in (*alike, MIXED):
        got = written(executor, plans)
        executor.runner.graphs = None
        assert written(executor, plans) == got
        executor.runner.graphs = recorded


def test_what_is_out_of_bounds_is_told_by_a_replay(tmp_path: Path) -> None:
    executor = executor_of(make_tiny(tmp_path, "smollm", with_tokenizer=False, overrides=SIZES), "none")
    replays = executor.runner.graphs
    assert isinstance(replays, Replays)
    executor.runner.inputs.slots.fill(torch.full((1,), 10**6).numpy())
    with pytest.raises(ValueError, match="out of bounds, by kernel 3 of"):
        replays.recording(*counts(1, 0))


def test_a_replay_ends_with_the_first_kernel_that_finds_a_fault(tmp_path: Path) -> None:
    """Attention relies on what the survey before it checked; where that is broken, nothing behind it runs."""
    executor = executor_of(make_tiny(tmp_path, "smollm", with_tokenizer=False, overrides=SIZES), "none")
    replays, inputs = executor.runner.graphs, executor.runner.inputs
    assert isinstance(replays, Replays)
    replay = replays.recording
    inputs.context_len.fill(torch.full((1,), 1 << 30, dtype=torch.int32).numpy())
    with pytest.raises(ValueError, match="out of bounds, by kernel 4 of"):
        replay(*counts(1, 0))
    came = replay._table[:, S_IN] > 0
    assert came[:5].all()
    assert not came[5:].any()
    inputs.context_len.fill(torch.zeros(1, dtype=torch.int32).numpy())
    assert bool(replay(*counts(1, 0)).isfinite().all())
    assert (replay._table[:, S_IN] > 0).all()


def test_what_a_recording_holds_is_that_of_one_layer(tmp_path: Path) -> None:
    """Layers work in the same memory; only the words of launches are their own."""
    taken = []
    for num_layers in (2, 6):
        folder = make_tiny(
            tmp_path / str(num_layers),
            "smollm",
            with_tokenizer=False,
            overrides=SIZES | {"num_hidden_layers": num_layers},
        )
        runner = executor_of(folder, "none").runner
        taken.append(runner.host_graph_bytes)
    num_launches = 4 * 10  # at most, in four layers
    assert 0 < taken[1] - taken[0] <= num_launches * 46 * 8


@pytest.mark.parametrize("ask", [lambda x: x[0].item(), lambda x: torch.equal(x, x), lambda x: x + 1])
def test_what_a_replay_would_not_do_is_refused(ask: Callable[[Tensor], object]) -> None:
    """Also what gives no tensor at all: its answer would be that of the recording for ever."""
    record, x = CpuKernels(torch_openmp()).recorder(), torch.ones(3)
    assert record is not None

    def run() -> Tensor:
        ask(x)
        return x

    with pytest.raises(RuntimeError, match=r"aten::\w+ is no kernel"):
        record(run, 3, 1)


def test_a_kernel_over_other_rows_than_the_steps_is_refused() -> None:
    """Of a smaller step it would be asked for a share of them."""
    kernels, x, weight = CpuKernels(torch_openmp()), torch.ones(4, 8), torch.ones(8)
    record = kernels.recorder()
    assert record is not None
    with pytest.raises(RuntimeError, match="not those of the step's tokens"):
        record(lambda: kernels.rms_norm(x, weight, 1e-5), 3, 1)


def test_a_model_that_computes_by_itself_is_not_recorded(tmp_path: Path) -> None:
    executor = executor_of(make_tiny(tmp_path, "opt", with_tokenizer=False), "none")
    assert executor.runner.graphs is None
    assert len(written(executor, prompts_and_decodes([5], 4))) == 3
