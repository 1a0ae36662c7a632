"""Preempted requests go on as if nothing had happened, on the real worker, by either way: everything but the time.

Each load runs in a pool that holds all of it, and in one that does not. What the clients are told must be the same:
tokens, log probabilities, reasons, and the scores of beams.
"""

from dataclasses import replace
from functools import cache

import pytest

from kilburn.controller.core.events import BeamSettings, EarlyStopping, NoteKind, Submit
from kilburn.controller.core.policy import Preemption
from kilburn.shared.sampling import Sampling
from tests.worker.served import Answer, Served
from tests.worker.toy import VOCAB, ToyModel, oracle

WAYS = [Preemption.SWAP, Preemption.RECOMPUTE, Preemption.AUTO]
KNOBS = {
    "greedy": Sampling(temperature=0.0),
    "drawn": Sampling(temperature=0.9, seed=7),
    "cut": Sampling(temperature=1.2, top_k=9, top_p=0.8, min_p=0.01, seed=2**63 + 5),
    "penalties": Sampling(temperature=0.7, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.3, seed=3),
    "min_tokens": Sampling(temperature=1.0, min_tokens=9, stop_ids=tuple(range(0, VOCAB, 2)), seed=4),
    "stop ids": Sampling(temperature=1.3, stop_ids=(1, 5, 9, 13), seed=5),
    "logprobs": Sampling(temperature=0.8, logprobs=3, logit_bias=((4, 1.5), (7, -2.0)), seed=6),
}


@cache
def requests(n: int) -> list[Submit]:
    """One of each kind, of different lengths, and prompts of which some begin alike."""
    submits = []
    for number, sampling in enumerate(KNOBS.values()):
        prompt = [(7 * i + 3 * (number // 2)) % VOCAB for i in range(9)] + [number] * (1 + number % 3)
        submits.append(Submit(number, tuple(prompt), 14 + number, sampling, n if number % 2 else 1))
    return submits


def pressed(way: Preemption, num_blocks: int, depth: int = 2, block_size: int = 4) -> Served:
    return Served(
        ToyModel(1),
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        preemption=way,
        depth=depth,
        block_size=block_size,
    )


def undisturbed(submits: list[Submit]) -> dict[tuple[int, int], Answer]:
    return alone_in_the_world(tuple(submits))


@cache
def alone_in_the_world(submits: tuple[Submit, ...]) -> dict[tuple[int, int], Answer]:
    served = Served(ToyModel(1), num_blocks=400, num_host_blocks=0)
    answers = served.answers(submits)
    assert served.snapshot.preempted_by_recompute == 0
    return answers


def check(served: Served, submits: list[Submit], way: Preemption) -> None:
    expected, answers = undisturbed(submits), served.answers(submits)
    assert answers.keys() == expected.keys()
    for key, answer in answers.items():
        assert answer.tokens == expected[key].tokens, key
        assert answer.reason == expected[key].reason, key
        assert answer.score == pytest.approx(expected[key].score, abs=1e-4)
        assert len(answer.logprobs) == len(expected[key].logprobs)
        for ours, theirs in zip(answer.logprobs, expected[key].logprobs, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs], key
            assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-4)
    found = served.snapshot
    match way:
        case Preemption.SWAP:
            assert found.preempted_by_swap >= 1
            assert found.swapped_in >= 1
        case Preemption.RECOMPUTE:
            assert found.preempted_by_recompute >= 1
            assert found.preempted_by_swap == 0
        case Preemption.AUTO:
            assert found.preempted_by_swap + found.preempted_by_recompute >= 1
    returned = [note for note in served.notes if note.kind is NoteKind.RETURNED]
    assert len(returned) == found.returned_by_swap + found.returned_by_recompute >= 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("depth", "block_size", "num_blocks"), [(1, 4, 26), (2, 1, 104), (3, 16, 9)])
def test_every_kind_of_request_is_as_if_it_had_never_left(
    way: Preemption, n: int, depth: int, block_size: int, num_blocks: int
) -> None:
    check(pressed(way, num_blocks, depth, block_size), requests(n), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("early", list(EarlyStopping))
def test_beams_are_as_if_they_had_never_left(way: Preemption, early: EarlyStopping) -> None:
    beams = BeamSettings(3, 0.8, early)
    submits = [
        Submit(
            number,
            tuple((5 * i + number) % VOCAB for i in range(8 + number)),
            16,
            Sampling(temperature=0.0),
            2,
            beams=beams,
        )
        for number in range(4)
    ]
    check(pressed(way, 19), submits, way)


def test_the_undisturbed_is_itself_what_each_would_be_alone() -> None:
    submits = requests(1)
    answers = undisturbed(submits)
    for submit in submits:
        made = answers[submit.request_id, 0].tokens
        assert made == oracle(ToyModel(1), list(submit.prompt), submit.sampling, len(made)), submit


def test_another_seed_is_another_answer() -> None:
    """So that equality above is not that of answers which nothing could change."""
    submits = requests(1)
    turned = [replace(s, sampling=replace(s.sampling, seed=s.sampling.seed + 1)) for s in submits]
    one, other = undisturbed(submits), undisturbed(turned)
    assert one[0, 0].tokens == other[0, 0].tokens, "greedy"
    assert sum(one[key].tokens != other[key].tokens for key in one) >= 5
