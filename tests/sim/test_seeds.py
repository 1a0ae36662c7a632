"""Two thousand worlds, the seeds that once failed, and proof that the worlds are as full of faults as they claim."""

from dataclasses import replace

import pytest

from kilburn.controller.simulate.scenario import draw_scenario
from kilburn.controller.simulate.virtual import World
from kilburn.controller.simulate.world import judge_world, run_seed, run_seeds

NUM_SEEDS = 2_000

# One line for each fault that a world found. A seed means the same world only as long as scenarios are drawn alike; the
# faults themselves are among the mutants, so that they stay found whatever becomes of the seeds.
REGRESSIONS = {
    42: "a swapped sequence came back whose digests were not known yet",
    109: "a request that was wholly cached had blocks copied for it",
    686: "blocks copied for a request that ended at once were copied into again for the next",
    1232: "who had computed a prefix before it was pinned ran out of blocks, though it was accepted to share them",
    1657: "a lost block of a prefix was copied again and again, and nobody told",
    1692: "blocks of a failed row were named again by somebody who shared them",
    1815: "followers waited for a leader that had found everything",
}

# What must have come up in the 2,000 worlds, and how often at least: a world without it would prove nothing about it.
HAPPENINGS = {
    "token": 40_000,
    "plan": 40_000,
    "admit": 10_000,
    "cached token": 5_000,
    "copy": 500,
    "preempted": 500,
    "finished length": 4_000,
    "finished stop": 1_000,
    "finished error": 100,
    "refused too long": 100,
    "refused too wide": 100,
    "refused queue full": 50,
    "refused no worker": 100,
    "refused shutting down": 50,
    "lease ended": 2_000,
    "lost message": 100,
    "death": 1_000,
    "cancel": 500,
    "stop": 300,
    "row failed": 100,
    "block lost": 100,
    "step failed": 50,
    "step confirmed": 2_000,
    "rank waits": 200,
    "stale result": 20,
    "beam": 1_000,
    "prompt token scored": 2_000,
    "pinned": 800,
    "partial block shared": 300,
    "not pinned": 50,
    "refused pins full": 30,
    "swap out": 2_000,
    "swap in": 250,
    "preempted by swap": 80,
    "passed over": 20,
    "finished timeout": 100,
    "refused queue timeout": 100,
    "refused request timeout": 50,
    "plan of moves alone": 30,
    "admit with grammar": 100,
    "waited for grammar": 50,
    "refused grammar": 10,
    "returned": 200,
    "host hit": 100,
    "host block lost": 10,
    "beams swapped": 20,
    "death while swapped": 3,
    "retired": 200,
    "left": 200,
    "cut off": 300,
    "death by poison": 200,
    "poison": 50,
    "name taken": 30,
}


@pytest.fixture(scope="module")
def many():
    return run_seeds(range(NUM_SEEDS), jobs=2, show=False)


def test_every_world_is_well(many):
    failures, _ = many
    assert not failures, "\n\n".join(verdict.report() for verdict in failures)


@pytest.mark.parametrize("happening", HAPPENINGS)
def test_worlds_are_eventful(many, happening):
    _, seen = many
    assert seen[happening] >= HAPPENINGS[happening]


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_seeds_that_once_failed(seed):
    verdict = run_seed(seed)
    assert not verdict.failure, verdict.report()


@pytest.mark.parametrize("seed", [3, 17, 130])
def test_a_seed_tells_the_same_story_twice(seed):
    first, second = run_seed(seed), run_seed(seed)
    assert first.story.tell(most=10**6) == second.story.tell(most=10**6)
    assert len(first.story.entries) > 20


def test_another_seed_tells_another():
    assert run_seed(3).story.tell() != run_seed(4).story.tell()


def test_a_failure_names_its_seed_its_law_and_its_story():
    """A world whose clients are lied to: the oracle has another vocabulary than the workers."""
    scenario = draw_scenario(17)
    world = World(scenario)
    world.judge.clients.scenario = replace(
        scenario, hellos=tuple([replace(h, vocab_size=1_000) for h in scenario.hellos])
    )
    verdict = judge_world(world)
    assert "token" in verdict.failure
    assert len(verdict.requests) == 1
    [request] = verdict.requests
    report = verdict.report()
    assert report.startswith("seed 17: ")
    assert f"submit {request}:" in report
    assert "--seed 17" in report
    assert not any(
        f"submit {other.submit.request_id}:" in report
        for other in scenario.errands
        if other.submit.request_id != request
    )
