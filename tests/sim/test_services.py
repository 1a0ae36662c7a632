"""Services of several controllers and gateways, by seed: all laws hold, and they are as eventful as they claim."""

import pytest

from kilburn.controller.simulate.circumstances import draw_circumstances
from kilburn.controller.simulate.service import Service, run_service
from kilburn.controller.simulate.witness import WorldBroken
from kilburn.controller.simulate.world import run_seeds

NUM_SEEDS = 100

# One line for each fault that a service found.
REGRESSIONS = {
    4: "a stream waited for ever for a machine that was back before its probes were missed",
    3233: "streams of a controller that had just begun ended with the silence of the one before",
}
# What must have come up among all of them, and how often at least.
HAPPENINGS = {
    "plan": 5_000,
    "token": 3_000,
    "life of a controller": 350,
    "controller died": 90,
    "client answered": 1_000,
    "client broken off": 5,
    "client refused": 30,
    "client left": 80,
    "client unanswered": 50,
    "client the gateway ended": 3,
    "retried": 150,
    "refused, and asked elsewhere": 50,
    "routed by prefix": 80,
    "hints lost": 50,
    "lease ended": 300,
    "left": 20,
    "cut off": 50,
    "step confirmed": 300,
}


@pytest.fixture(scope="module")
def many():
    return run_seeds(range(NUM_SEEDS), jobs=2, show=False, run=run_service)


def test_every_service_is_well(many):
    failures, _ = many
    assert not failures, "\n\n".join(verdict.report() for verdict in failures)


@pytest.mark.parametrize("happening", HAPPENINGS)
def test_services_are_eventful(many, happening):
    _, seen = many
    assert seen[happening] >= HAPPENINGS[happening]


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_seeds_that_once_failed(seed):
    verdict = run_service(seed)
    assert not verdict.failure, verdict.report()


def test_a_seed_tells_the_same_story_twice():
    def story() -> str:
        service = Service(draw_circumstances(5))
        service.run()
        return service.story.tell(most=10**6)

    first = story()
    assert first == story()
    assert "site0.0 " in first


def test_a_failure_is_found_and_told():
    """A client is told something that no controller said."""
    service = Service(draw_circumstances(5))
    told = service.customers.told
    service.customers.told = lambda record, data: told(record, data.replace(b" ", b"-"))  # type: ignore[method-assign]
    with pytest.raises(WorldBroken, match="is told, where"):
        service.run()


def test_steps_are_counted_over_seeds():
    failures, seen = run_seeds(range(10**9), show=False, run=run_service, num_steps=60)
    assert not failures
    assert 60 <= seen["plan"] < 2_000
