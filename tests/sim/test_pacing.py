"""Steps bounded in seconds: on a virtual clock with a cost model, and by the numbers that are learned.

A worker of 2 ms a step, 0.2 ms a row, and 50 us a token of a prompt, more with its length: a prompt of 8,192 tokens
takes about 0.8 s alone.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from kilburn.controller.core.events import Submit
from kilburn.controller.core.pacing import LEAST, UNKNOWN, Pacing
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.simulate.fake_daemon import fake_hello
from kilburn.controller.simulate.metered import Metered, StepCosts
from kilburn.shared.sampling import Sampling

PATIENT = EngineSettings(step_deadline_s=1e9, silence_s=1e9, max_step_tokens=2048)
NUM_LONG, NUM_STREAMS, LONG = 8192, 8, 99
COSTS = StepCosts()


def metered(target_s: float, costs: StepCosts = COSTS, depth: int = 2) -> Metered:
    hello = fake_hello(num_blocks=2000, block_size=16, max_rows=32, max_step_tokens=2048, max_len=20_000)
    return Metered(replace(PATIENT, step_target_s=target_s, depth=depth), hello, costs)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i) % 50 + 1 for i in range(length)]


def streams_and_a_long_prompt(target_s: float, costs: StepCosts = COSTS, depth: int = 2) -> tuple[list[float], float]:
    """Gaps between tokens of the streams while the long prompt runs, and how long that takes to its first token."""
    world = metered(target_s, costs, depth)
    for number in range(NUM_STREAMS):
        sampling = Sampling(temperature=0.0, seed=number)
        world.submit(0.0, Submit(number, prompt(number, 64), 2000, sampling))
    world.submit(1.0, Submit(LONG, prompt(LONG, NUM_LONG), 1, Sampling(temperature=0.0)))
    while world.cases[LONG].ended_s < 0:
        world.run(until_s=world.now + 0.1)
        assert world.now < 60.0
    begun_s, ended_s = 1.0, world.cases[LONG].ended_s
    gaps: list[float] = []
    for number in range(NUM_STREAMS):
        times = [at_s for at_s in world.cases[number].tokens_s if begun_s <= at_s <= ended_s]
        gaps += [b - a for a, b in pairwise(times)]
    return sorted(gaps), ended_s - begun_s


def alone_s(costs: StepCosts = COSTS) -> float:
    world = metered(0.0, costs)
    world.submit(0.0, Submit(LONG, prompt(LONG, NUM_LONG), 1, Sampling(temperature=0.0)))
    world.run()
    return world.cases[LONG].ended_s


def p99(values: list[float]) -> float:
    return values[int(len(values) * 0.99)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("target_s", [0.025, 0.05])
def test_streams_flow_on_while_a_long_prompt_is_computed(target_s: float, depth: int) -> None:
    """p99 between tokens within twice the target, and the prompt within 1.3 times of its time alone."""
    gaps, took_s = streams_and_a_long_prompt(target_s, depth=depth)
    assert len(gaps) > 8 * 10
    assert p99(gaps) <= 2 * target_s
    assert took_s <= 1.3 * alone_s()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("target_s", [0.05, 0.1])
def test_streams_flow_on_where_tokens_get_dearer_with_what_is_before_them(target_s: float, depth: int) -> None:
    """The last tokens of the prompt cost seven times as much as its first."""
    costs = replace(COSTS, pair_s=4e-8)
    gaps, took_s = streams_and_a_long_prompt(target_s, costs, depth)
    assert len(gaps) > 8 * 10
    assert p99(gaps) <= 2 * target_s
    assert took_s <= 1.3 * alone_s(costs)


def test_tokens_alone_do_not_bound_seconds() -> None:
    gaps, _ = streams_and_a_long_prompt(0.0)
    assert p99(gaps) > 2 * 0.05


def test_a_prompt_goes_on_where_decodes_fill_the_target_by_themselves() -> None:
    """Decodes take 40 ms, the target is 20: half of it is added for prompts, and no more."""
    costs = replace(COSTS, fixed_s=0.04)
    gaps, took_s = streams_and_a_long_prompt(0.02, costs)
    assert p99(gaps) <= 0.04 + 8 * 2e-4 + 2 * 0.01
    assert took_s < 6.0


def test_nothing_is_held_back_where_nobody_waits_for_a_token() -> None:
    world = metered(0.01)
    world.submit(0.0, Submit(LONG, prompt(LONG, NUM_LONG), 1, Sampling(temperature=0.0)))
    world.run()
    assert world.cases[LONG].ended_s == alone_s()
    assert [sum(plan.counts) for plan in world.plans[:4]] == [2048] * 4


def test_streams_and_prompts_are_answered_alike_with_and_without_a_target() -> None:
    answers = []
    for target_s in (0.0, 0.005):
        world = metered(target_s)
        for number in range(6):
            world.submit(0.01 * number, Submit(number, prompt(number, 300), 5, Sampling(temperature=0.0, seed=number)))
        world.run()
        answers.append([case.tokens for case in world.cases.values()])
    assert answers[0] == answers[1]
    assert all(len(tokens) == 5 for tokens in answers[0])


# --- what is learned


def test_before_anything_is_known_a_step_tries_a_little() -> None:
    pacing = Pacing(0.1)
    assert pacing.most_prompt_tokens(0) is None
    assert pacing.most_prompt_tokens(3) == UNKNOWN
    assert Pacing(0.0).most_prompt_tokens(3) is None


def test_what_decodes_leave_is_for_prompts() -> None:
    pacing = Pacing(0.1)
    pacing.learn(4, 0, 0.02)
    pacing.learn(4, 100, 0.03)
    assert pacing.token_s == pytest.approx(1e-4)
    assert pacing.most_prompt_tokens(4) == 800
    assert pacing.most_prompt_tokens(2) == 800, "fewer rows may take as long"
    assert pacing.most_prompt_tokens(8) == 600, "more rows take longer"
    assert pacing.most_prompt_tokens(400) == 500, "and half of the target is for prompts always"


def test_a_prompt_always_goes_on() -> None:
    pacing = Pacing(0.001)
    pacing.learn(4, 0, 0.02)
    pacing.learn(4, 100, 10.0)
    assert pacing.most_prompt_tokens(4) == LEAST


def test_estimates_follow_a_worker_that_changes() -> None:
    pacing = Pacing(0.1)
    for _ in range(5):
        pacing.learn(4, 0, 0.01)
        pacing.learn(4, 100, 0.02)
    for _ in range(20):
        pacing.learn(4, 0, 0.02)
        pacing.learn(4, 100, 0.06)
    assert pacing.decode_s == pytest.approx(0.02, rel=0.05)
    assert pacing.token_s == pytest.approx(4e-4, rel=0.05)


def test_dearer_tokens_are_believed_at_once_and_cheaper_ones_by_and_by() -> None:
    pacing = Pacing(0.1)
    pacing.learn(0, 100, 0.01)
    pacing.learn(0, 100, 0.05)
    assert pacing.token_s == pytest.approx(5e-4)
    pacing.learn(0, 100, 0.01)
    assert pacing.token_s == pytest.approx(4e-4)


def test_steps_of_moves_alone_teach_nothing() -> None:
    pacing = Pacing(0.1)
    pacing.learn(4, 0, 0.02)
    pacing.learn(0, 0, 0.9)
    assert (pacing.decode_s, pacing.num_decodes) == (0.02, 4)


def test_steps_without_timings_teach_nothing() -> None:
    pacing = Pacing(0.1)
    pacing.learn(4, 100, 0.0)
    assert pacing.most_prompt_tokens(4) == UNKNOWN
