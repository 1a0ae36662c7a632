"""Swap, recompute and auto under one load and one clock: auto goes with the cheaper, learns, and regrets little."""

from dataclasses import replace

import pytest

from kilburn.controller.core.events import NoteKind
from kilburn.controller.core.policy import Preemption
from kilburn.controller.simulate.pressure import Load, Outcome, Prices, run

LOAD = Load(num_requests=30)
CHEAP_COPY = Prices(move_s=0.0001, token_s=0.0005)
CHEAP_PREFILL = Prices(move_s=0.004, token_s=0.0001)
MOST_REGRET = 1.10
SETTINGS: dict[str, tuple[Load, Prices]] = {
    "cheap copies": (LOAD, CHEAP_COPY),
    "cheap prefill": (LOAD, CHEAP_PREFILL),
    "no difference": (LOAD, Prices(move_s=0.0004, token_s=0.0004)),
    "slow prefill": (LOAD, Prices(move_s=0.0001, token_s=0.002)),
    "large blocks": (replace(LOAD, block_size=16, num_blocks=24, num_host_blocks=24), CHEAP_COPY),
    "a common prefix": (replace(LOAD, common=40, num_blocks=100), Prices(move_s=0.001, token_s=0.0005)),
    "a small host pool": (replace(LOAD, num_host_blocks=25), CHEAP_COPY),
}


def ways(outcome: Outcome) -> list[str]:
    """How each victim left whose way the predictions decided, in order."""
    left = [note.text for note in outcome.notes if note.kind is NoteKind.PREEMPTED]
    return ["swap" if ", by swap" in text else "recompute" for text in left if "cheaper" in text]


def share(outcome: Outcome, way: str) -> float:
    chosen = ways(outcome)
    assert len(chosen) >= 8, "the load presses"
    return chosen.count(way) / len(chosen)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_throttled_bandwidth_turns_swap_into_recompute(seed: int) -> None:
    assert share(run(LOAD, CHEAP_COPY, Preemption.AUTO, seed), "swap") >= 0.8
    throttled = replace(CHEAP_COPY, move_s=100 * CHEAP_COPY.move_s)
    assert share(run(LOAD, throttled, Preemption.AUTO, seed), "recompute") >= 0.8


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_throttled_prefill_turns_recompute_into_swap(seed: int) -> None:
    assert share(run(LOAD, CHEAP_PREFILL, Preemption.AUTO, seed), "recompute") >= 0.8
    throttled = replace(CHEAP_PREFILL, token_s=100 * CHEAP_PREFILL.token_s)
    assert share(run(LOAD, throttled, Preemption.AUTO, seed), "swap") >= 0.8


@pytest.mark.parametrize("seed", [1, 2])
def test_it_follows_a_bandwidth_that_collapses_under_way(seed: int) -> None:
    """Swap at first; some copies prove slow; recompute from then on."""
    collapsed = replace(CHEAP_COPY, move_s=200 * CHEAP_COPY.move_s)
    outcome = run(LOAD, lambda now: CHEAP_COPY if now < 1.5 else collapsed, Preemption.AUTO, seed)
    chosen = ways(outcome)
    assert chosen[0] == "swap"
    assert chosen[-4:] == ["recompute"] * 4


@pytest.mark.parametrize("name", SETTINGS)
def test_auto_regrets_at_most_a_tenth_of_the_better_fixed_mode(name: str) -> None:
    load, prices = SETTINGS[name]
    for seed in (1, 2, 3):
        cost = {way: run(load, prices, way, seed) for way in Preemption}
        best = min(cost[Preemption.SWAP].cost(), cost[Preemption.RECOMPUTE].cost())
        regret = cost[Preemption.AUTO].cost() / best
        assert regret <= MOST_REGRET, f"seed {seed}: {regret:.3f}"
        assert cost[Preemption.AUTO].snapshot.preempted_by_swap + cost[Preemption.AUTO].snapshot.preempted_by_recompute


def test_the_fixed_modes_differ_so_that_a_choice_matters() -> None:
    """A wrong choice would show: always the worse of the two exceeds the allowed regret."""
    for prices in (replace(CHEAP_COPY, move_s=0.01), replace(CHEAP_COPY, token_s=0.004)):
        cost = [run(LOAD, prices, way, seed=1).cost() for way in (Preemption.SWAP, Preemption.RECOMPUTE)]
        assert max(cost) / min(cost) > MOST_REGRET


def test_predictions_and_truth_agree_where_nothing_changes() -> None:
    outcome = run(replace(LOAD, num_requests=40), CHEAP_COPY, Preemption.SWAP, seed=5)
    found = outcome.snapshot
    assert found.returned_by_swap >= 10
    assert 0.7 < found.predicted_swap_s / found.actual_swap_s < 1.4
    assert found.move_s_per_block == pytest.approx(CHEAP_COPY.move_s, rel=0.2)
    assert found.compute_s_per_token == pytest.approx(CHEAP_COPY.token_s, rel=0.5)
