"""Replayed decodes: the world of the runner again, with its decodes recorded.

On the CPU a recording is kept as the call that it was, and a replay makes it again: it sees nothing but the memory that
it saw when it was recorded.
"""

from collections.abc import Callable

import numpy as np
import pytest
from torch import Tensor

from kilburn.kernels.dispatch import Batch, Kernels, Scales
from kilburn.shared.ledger import MOST_RECORDED_ROWS, recorded_sizes
from kilburn.shared.sampling import Sampling
from kilburn.worker.graphs import padded
from kilburn.worker.rows import Work
from tests.worker.test_runner_world import World
from tests.worker.toy import Hand, ToyModel, admit, oracle, toy_executor


class Tape:
    """Records calls, and counts what is replayed."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        out = run()
        self.num_recorded += 1

        def replay() -> Tensor:
            self.num_replayed += 1
            return out.copy_(run())

        return replay


@pytest.mark.parametrize("seed", range(8))
def test_the_world_is_the_same_when_decodes_are_replayed(seed: int) -> None:
    world, tape = World(seed), Tape()
    world.executor.runner.record(tape)
    assert tape.num_recorded == 3
    world.play()
    assert tape.num_replayed > 0
    for number, seq in enumerate(world.sequences):
        expected = oracle(world.model, seq.prompt, seq.sampling, seq.num_output)
        assert seq.tokens[len(seq.prompt) :] == expected, f"seed {seed}, sequence {number}: {seq}"


def test_recording_and_padding_write_nothing() -> None:
    executor, tape = toy_executor(ToyModel(), max_rows=8), Tape()
    executor.runner.record(tape)
    pool = executor.runner.cache.pool
    assert pool.isnan().all()
    hand, greedy = Hand(executor), Sampling(temperature=0.0)
    hand.run(dict.fromkeys(range(5), 3), tuple(admit(row, [1, 2, 3], [9 * row], greedy) for row in range(5)))
    before = pool.clone()
    hand.run(dict.fromkeys(range(5), 1))
    assert tape.num_replayed == 1
    changed = (pool != before) & ~(pool.isnan() & before.isnan())
    assert changed.flatten(1).any(dim=1).nonzero()[:, 0].tolist() == [9 * row for row in range(5)]
    assert changed.flatten(0, 3).any(dim=2).any(dim=0).tolist() == [False, False, False, True]


def test_sizes_hold_every_batch_with_little_padding() -> None:
    assert recorded_sizes(1) == [1]
    assert recorded_sizes(3) == [1, 2, 3]
    assert recorded_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]
    assert recorded_sizes(10**6)[-1] == MOST_RECORDED_ROWS
    sizes = np.array(recorded_sizes(MOST_RECORDED_ROWS))
    rows = np.arange(1, MOST_RECORDED_ROWS + 1)
    padding = sizes[np.searchsorted(sizes, rows)] - rows
    assert (padding[16:] <= rows[16:] / 2).all()
    assert padding.max() < 32


def test_padding_is_rows_of_no_sequence() -> None:
    work = Work(
        index=np.arange(2),
        rows=np.array([4, 1]),
        query_start=np.array([0, 1, 2]),
        context_len=np.array([9, 3]),
        samples=np.array([True, True]),
        ids=np.array([7, 8], np.int32),
        positions=np.array([8, 2]),
        slots=np.array([40, 22]),
        tables=np.zeros((2, 3), np.int32),
        max_query=1,
        max_context=9,
    )
    whole = padded(work, 4)
    assert whole.query_start.tolist() == [0, 1, 2, 3, 4]
    assert whole.context_len.tolist() == [9, 3, 0, 0]
    assert whole.slots.tolist() == [40, 22, -1, -1]
    assert whole.ids.tolist() == [7, 8, 0, 0]
    assert whole.positions.tolist() == [8, 2, 0, 0]
    assert whole.num_seqs == 2


def test_prompts_and_larger_batches_are_not_taken() -> None:
    executor, tape = toy_executor(ToyModel(), max_rows=2), Tape()
    executor.runner.record(tape)
    hand, greedy = Hand(executor), Sampling(temperature=0.0)
    hand.run({0: 2}, (admit(0, [1, 2], [3, 4], greedy),))
    hand.run({0: 1, 1: 4}, (admit(1, [1, 2, 3, 4], [5, 6], greedy),))
    assert tape.num_replayed == 0
    hand.run({0: 1, 1: 1})
    assert tape.num_replayed == 1


@pytest.mark.parametrize("works", [0, 1, 2])
def test_a_recording_that_fails_costs_no_request(works: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever size it is: decodes run as if nobody had asked, and the log has one line that says why."""
    world, tape = World(3), Tape()

    def fails_after(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if tape.num_recorded == works:
            raise RuntimeError("operation not permitted when stream is capturing\nand a page of advice")
        return tape(run)

    world.executor.runner.record(fails_after)
    assert world.executor.runner.graphs is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("and so none are: operation not permitted when stream is capturing")
    world.play()
    assert tape.num_replayed == 0
    for seq in world.sequences:
        assert seq.tokens[len(seq.prompt) :] == oracle(world.model, seq.prompt, seq.sampling, seq.num_output)


def test_replays_read_what_was_filled_and_nothing_else() -> None:
    """Every input of a recorded size lies where it lay: addresses are all that a graph knows."""
    executor, tape = toy_executor(ToyModel(), max_rows=4), Tape()
    seen: list[tuple[int, ...]] = []
    forward = executor.runner.model.forward

    def watched(ids: Tensor, pool: Tensor, batch: Batch, kernels: Kernels, scales: Scales) -> Tensor:
        tensors = (ids, batch.query_start, batch.context_len, batch.tables, batch.positions, batch.slots)
        seen.append((len(ids), batch.max_query, batch.max_context, *(tensor.data_ptr() for tensor in tensors)))
        return forward(ids, pool, batch, kernels, scales)

    executor.runner.model.forward = watched  # type: ignore[method-assign]
    executor.runner.record(tape)
    recorded = set(seen)
    assert len(recorded) == 3
    hand, greedy = Hand(executor), Sampling(temperature=0.0)
    for row in range(4):
        hand.run({row: 3}, (admit(row, [1, 2, 3], [9 * row, 9 * row + 1], greedy),))
    seen.clear()
    for rows in (1, 2, 3, 4, 3):
        hand.run(dict.fromkeys(range(rows), 1))
    assert tape.num_replayed == 5
    assert set(seen) <= recorded
