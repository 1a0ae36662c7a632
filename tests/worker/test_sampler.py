"""The sampler against a float64 twin that takes one row at a time, and against the laws of chance."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kilburn.kernels import reference
from kilburn.kernels.cpu.sampling import NUCLEUS
from kilburn.kernels.dispatch import Kernels, kernels_for
from kilburn.kernels.philox import philox4x32, uniform
from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.worker import sampler
from kilburn.worker.knobs import Knobs, fault_of
from kilburn.worker.sampler import Chosen, choose
from tests.worker.toy import plain_choice, plain_distribution, plain_logits

KERNELS = kernels_for(torch.device("cpu"))


def lane(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers of the paper's own library
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    words = philox4x32(tuple(lane(word) for word in counter), tuple(lane(word) for word in key))
    assert tuple(int(word[0]) for word in words) == expected


def test_every_part_of_the_key_changes_the_number() -> None:
    places = [(s, t, p) for s in (0, 1, 2**32, 2**64 - 1) for t in (0, 1, 127) for p in (0, 1, 2**31, 2**33)]
    numbers = uniform(*(lane(*column) for column in zip(*places, strict=True)))
    assert len(set(numbers.tolist())) == len(places)
    assert 0.0 <= numbers.min() <= numbers.max() < 1.0


# --- twins


class Case:
    """One row: its sampling, what it knows, its logits."""

    def __init__(self, seed: int, vocab: int, sampling: Sampling) -> None:
        rng = np.random.default_rng(seed)
        self.logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
        self.known = rng.integers(0, vocab, 12).tolist()
        self.num_prompt = int(rng.integers(1, 12))
        self.sampling = sampling

    def expected(self, stream: int = 0) -> int:
        return plain_choice(self.logits, self.sampling, self.known, self.num_prompt, stream)


def chosen_by(cases: list[Case], kernels: Kernels = KERNELS) -> Chosen:
    """All cases as one batch, in rows that are not their places."""
    vocab = len(cases[0].logits)
    knobs = Knobs(2 * len(cases) + 1, vocab)
    rows = [2 * i + 1 for i in range(len(cases))]
    for row, case in zip(rows, cases, strict=True):
        knobs.set(row, case.sampling, np.array(case.known, np.int32), case.num_prompt)
    logits = torch.from_numpy(np.stack([case.logits for case in cases]))
    return choose(logits, knobs, np.array(rows), np.array([len(case.known) for case in cases]), kernels)


def some_sampling(rng: random.Random, vocab: int) -> Sampling:
    def maybe(value: float, neutral: float) -> float:
        return value if rng.random() < 0.3 else neutral

    return Sampling(
        temperature=rng.choice((0.0, 1e-6, 0.3, 1.0, 2.5)),
        top_k=rng.choice((0, 0, 1, 2, 40, vocab, 10 * vocab)),
        top_p=rng.choice((1.0, 1.0, 0.0, 0.2, 0.9, 0.999)),
        min_p=rng.choice((0.0, 0.0, 0.05, 1.0)),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=((rng.randrange(vocab), 5.0), (rng.randrange(vocab), -100.0)) if rng.random() < 0.3 else (),
        seed=rng.getrandbits(64),
        min_tokens=rng.choice((0, 0, 4, 40)),
        stop_ids=tuple(rng.sample(range(vocab), 3)),
    )


@pytest.mark.parametrize("kernels", [KERNELS, reference], ids=["fast", "reference"])
@pytest.mark.parametrize("vocab", [7, 256, 301, 1100])
def test_any_batch_chooses_what_each_row_would_alone(vocab: int, kernels: Kernels) -> None:
    rng = random.Random(vocab)
    cases = [Case(i, vocab, some_sampling(rng, vocab)) for i in range(150)]
    assert chosen_by(cases, kernels).tokens.tolist() == [case.expected() for case in cases]


def test_a_nucleus_wider_than_what_is_ranked_is_cut_where_it_ends() -> None:
    cases = []
    for i in range(40):
        case = Case(i, 4 * NUCLEUS, Sampling(top_p=0.95, top_k=(0, 700)[i % 2], temperature=4.0, seed=i))
        kept = plain_distribution(case.logits.astype(np.float64), case.sampling) > 0
        assert NUCLEUS < kept.sum() < len(kept)
        cases.append(case)
    assert chosen_by(cases).tokens.tolist() == [case.expected() for case in cases]


def test_equal_logits_stand_or_fall_together() -> None:
    case = Case(0, 12, Sampling(top_k=2, seed=1, choose=Draws(0, 400)))
    case.logits[:] = -5.0
    case.logits[[1, 4, 6]] = 2.0
    assert set(chosen_by([case]).tokens.tolist()) == {1, 4, 6}


def test_a_draw_does_not_depend_on_the_batch() -> None:
    rng = random.Random(3)
    cases = [Case(i, 97, some_sampling(rng, 97)) for i in range(30)]
    together = chosen_by(cases).tokens.tolist()
    shuffled = random.Random(4).sample(range(30), 30)
    apart = chosen_by([cases[i] for i in shuffled]).tokens.tolist()
    assert [apart[shuffled.index(i)] for i in range(30)] == together
    assert [int(chosen_by([case]).tokens[0]) for case in cases] == together


def test_many_draws_are_the_draws_of_their_streams() -> None:
    for sampling in (Sampling(seed=9), Sampling(seed=9, top_k=5, top_p=0.8), Sampling(temperature=0.0)):
        case = Case(5, 64, replace(sampling, choose=Draws(3, 20)))
        result = chosen_by([Case(1, 64, Sampling(seed=2)), case, Case(2, 64, Sampling(temperature=0.0))])
        assert result.num_tokens.tolist() == [1, 20, 1]
        assert result.tokens[1:21].tolist() == [case.expected(stream) for stream in range(3, 23)]


# --- chance


def chi_square(counts: np.ndarray, chance: np.ndarray) -> tuple[float, float]:
    """The statistic, and the value that it exceeds once in 10^5 (Wilson and Hilferty's approximation)."""
    possible = chance > 0
    assert counts[~possible].sum() == 0, "a token was drawn that could not be"
    expected = chance[possible] * counts.sum()
    assert expected.min() > 5, "too few draws for this test"
    freedom = possible.sum() - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts[possible] - expected) ** 2 / expected).sum()), float(limit)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=3.0, top_k=9),
        Sampling(temperature=1.5, top_p=0.8),
        Sampling(temperature=2.0, min_p=0.1),
        Sampling(temperature=2.0, top_k=12, top_p=0.9, min_p=0.02),
        Sampling(temperature=1.5, repetition_penalty=1.5, presence_penalty=0.5, logit_bias=((2, 1.0),)),
    ],
)
@pytest.mark.parametrize("by", ["seed", "stream", "position"])
def test_draws_follow_the_distribution(sampling: Sampling, by: str) -> None:
    num_draws, vocab, rows = 6_000, 12, 2_000
    case = Case(77, vocab, sampling)
    case.logits = (case.logits / 6).astype(np.float32)
    logits = plain_logits(case.logits, sampling, case.known, case.num_prompt)
    if by == "stream":
        case.sampling = replace(sampling, seed=123, choose=Draws(0, num_draws))
        tokens = chosen_by([case]).tokens
    else:
        # Rows that differ in seed, or in place, only.
        knobs, drawn = Knobs(rows, vocab), []
        batch = torch.from_numpy(case.logits).repeat(rows, 1)
        for turn in range(0, num_draws, rows):
            for row in range(rows if by == "seed" or turn == 0 else 0):
                seed = turn + row if by == "seed" else 5
                knobs.set(row, replace(sampling, seed=seed), np.array(case.known, np.int32), case.num_prompt)
            positions = np.full(rows, 12) if by == "seed" else np.arange(rows) + turn
            drawn.append(choose(batch, knobs, np.arange(rows), positions, KERNELS).tokens)
        tokens = np.concatenate(drawn)
    statistic, limit = chi_square(np.bincount(tokens, minlength=vocab), plain_distribution(logits, sampling))
    assert statistic < limit


BORDERS = [
    # a sampling, and one that must choose alike whatever the logits
    (Sampling(temperature=1e-8), Sampling(temperature=0.0)),
    (Sampling(temperature=9.9e-6, top_p=0.5), Sampling(temperature=0.0)),
    (Sampling(top_p=0.0), Sampling(temperature=0.0)),
    (Sampling(top_p=1e-9), Sampling(temperature=0.0)),
    (Sampling(top_k=1), Sampling(temperature=0.0)),
    (Sampling(min_p=1.0), Sampling(temperature=0.0)),
    (Sampling(top_p=1.0, min_p=0.0), Sampling()),
    (Sampling(top_k=90), Sampling()),
    (Sampling(top_k=2**31 - 1), Sampling()),
    (Sampling(presence_penalty=-0.0, frequency_penalty=0.0, repetition_penalty=1.0), Sampling()),
    (Sampling(min_tokens=5, stop_ids=()), Sampling()),
    (Sampling(stop_ids=(3,), min_tokens=0), Sampling()),
]


@pytest.mark.parametrize(("sampling", "like"), BORDERS)
def test_knobs_at_their_borders_choose_as_without_them(sampling: Sampling, like: Sampling) -> None:
    cases = [Case(i, 90, replace(sampling, seed=i)) for i in range(60)]
    twins = [Case(i, 90, replace(like, seed=i)) for i in range(60)]
    assert chosen_by(cases).tokens.tolist() == chosen_by(twins).tokens.tolist()
    assert len(set(chosen_by(twins).tokens.tolist())) > 5


@pytest.mark.parametrize("temperature", [1e-5, 2e-5, 1e-3, 2.0])
def test_the_least_temperature_that_is_no_greedy_one_overflows_nothing(temperature: float) -> None:
    cases = [Case(i, 90, Sampling(temperature=temperature, seed=i)) for i in range(60)]
    for case in cases:
        case.logits *= 1e4
    result = chosen_by(cases)
    assert result.failed == {}
    if temperature < 1e-2:
        assert result.tokens.tolist() == [int(case.logits.argmax()) for case in cases]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=100.0),
        Sampling(presence_penalty=-2.0, frequency_penalty=-2.0, repetition_penalty=1e-3),
        Sampling(temperature=2.0, top_k=2, top_p=1e-6, min_p=1.0, repetition_penalty=1e-3),
        Sampling(temperature=0.0, frequency_penalty=-2.0, logit_bias=((4, 100.0), (5, -100.0))),
    ],
)
def test_penalties_at_their_borders_are_those_of_the_twin(sampling: Sampling) -> None:
    cases = [Case(i, 90, replace(sampling, seed=i)) for i in range(60)]
    assert chosen_by(cases).tokens.tolist() == [case.expected() for case in cases]


# --- what is reported


@pytest.mark.parametrize("beside", [[], [Case(1, 40, Sampling(temperature=0.0))]])
def test_log_probabilities_are_the_models_own(beside: list[Case]) -> None:
    """Before temperature, penalties, bias and cuts; the token itself first, then the likeliest, best first."""
    sampling = Sampling(temperature=2.0, top_k=3, logit_bias=((7, 50.0),), repetition_penalty=2.0, logprobs=4, seed=3)
    case = Case(6, 40, sampling)
    result = chosen_by([*beside, case])
    logprobs = torch.log_softmax(torch.from_numpy(case.logits).double(), 0).numpy()
    report = result.reports[len(beside)]
    best = np.argsort(-logprobs)[:4].tolist()
    assert set(result.reports) == {len(beside)}
    assert report.width == 5
    assert list(report.ids) == [7, *best] == [result.tokens[-1], *best]
    np.testing.assert_allclose(report.logprobs, logprobs[list(report.ids)], atol=1e-5)


PROCESSED = Sampling(seed=3, logprobs=5, logprobs_are_processed=True)
SHAPED = replace(PROCESSED, repetition_penalty=1.5, presence_penalty=0.5, logit_bias=((7, 3.0), (2, -100.0)))


@pytest.mark.parametrize(
    "sampling",
    [
        replace(PROCESSED, temperature=0.5),
        replace(SHAPED, temperature=1.7, top_k=4),
        replace(SHAPED, temperature=2.0, top_p=0.7, min_p=0.05),
        replace(SHAPED, top_k=1),
        replace(SHAPED, min_tokens=40, stop_ids=(1, 2, 3)),
        replace(SHAPED, temperature=0.0, top_k=3),
    ],
)
@pytest.mark.parametrize("kernels", [KERNELS, reference], ids=["fast", "reference"])
def test_processed_log_probabilities_are_of_what_is_drawn_from(sampling: Sampling, kernels: Kernels) -> None:
    """After penalties, bias, masks, temperature and cuts. Without chance: of what the choice is made by."""
    case, plain = Case(6, 40, sampling), Case(9, 40, Sampling(seed=1, logprobs=2))
    result = chosen_by([plain, case], kernels)
    shaped = plain_logits(case.logits, sampling, case.known, case.num_prompt)
    as_if = replace(sampling, temperature=1.0, top_k=0) if sampling.is_greedy else sampling
    with np.errstate(divide="ignore"):
        logprobs = np.log(plain_distribution(shaped, as_if))
    report = result.reports[1]
    assert report.ids[0] == result.tokens[1] == case.expected()
    np.testing.assert_allclose(report.logprobs, logprobs[list(report.ids)], atol=1e-5)
    np.testing.assert_allclose(report.logprobs[1:], np.sort(logprobs)[::-1][:5], atol=1e-5)
    raw = torch.log_softmax(torch.from_numpy(plain.logits).double(), 0).numpy()
    np.testing.assert_allclose(result.reports[0].logprobs, raw[list(result.reports[0].ids)], atol=1e-5)


@pytest.mark.parametrize(("wanted", "width"), [(0, 1), (5, 6), (1000, 41)])
def test_as_many_log_probabilities_as_there_are(wanted: int, width: int) -> None:
    case = Case(6, 40, Sampling(seed=3, logprobs=wanted, choose=Draws(0, 3)))
    result = chosen_by([case])
    report = result.reports[0]
    assert (report.width, len(report.ids), len(report.logprobs)) == (width, 3 * width, 3 * width)
    assert list(report.ids[::width]) == result.tokens.tolist()


def test_candidates_are_the_likeliest_in_order_equals_by_id() -> None:
    case = Case(8, 50, Sampling(choose=Candidates(6)))
    case.logits[[40, 3, 21]] = 9.0
    result = chosen_by([Case(1, 50, Sampling(seed=1)), case, Case(2, 50, Sampling(choose=Candidates(2)))])
    logprobs = torch.log_softmax(torch.from_numpy(case.logits).double(), 0).numpy()
    expected = sorted(range(50), key=lambda token: (-logprobs[token], token))[:6]
    assert result.num_tokens.tolist() == [1, 6, 2]
    assert result.tokens[1:7].tolist() == expected
    assert expected[:3] == [3, 21, 40]
    assert result.reports[1].width == 1
    np.testing.assert_allclose(result.reports[1].logprobs, logprobs[expected], atol=1e-5)


# --- what cannot be


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(seed=4, top_p=0.5), Sampling(logprobs=2), Sampling(choose=Candidates(3))],
)
def test_a_bad_row_fails_alone(poison: float | str, sampling: Sampling) -> None:
    rng = random.Random(1)
    good = [Case(i, 300, some_sampling(rng, 300)) for i in range(6)]
    bad = Case(99, 300, sampling)
    if poison == "all -inf":
        bad.logits[:] = -math.inf
    else:
        bad.logits[280] = poison
    result = chosen_by([*good[:3], bad, *good[3:]])
    assert result.failed == {3: sampler.NOT_FINITE}
    assert 3 not in result.reports
    assert result.num_tokens.tolist() == [1, 1, 1, 0, 1, 1, 1]
    assert result.tokens.tolist() == [case.expected() for case in good]


def test_a_token_that_the_model_rules_out_is_never_drawn() -> None:
    case = Case(3, 20, Sampling(temperature=5.0, seed=2, choose=Draws(0, 2000)))
    case.logits[:10] = -math.inf
    result = chosen_by([case])
    assert set(result.tokens.tolist()) == set(range(10, 20))


def test_masks_that_leave_nothing_fail_the_row_with_a_reason() -> None:
    everything = Sampling(min_tokens=20, stop_ids=tuple(range(9)))
    greedy = replace(everything, temperature=0.0)
    result = chosen_by([Case(1, 9, everything), Case(2, 9, greedy), Case(3, 9, Sampling(seed=1))])
    assert result.failed == {0: sampler.NOTHING_LEFT, 1: sampler.NOTHING_LEFT}
    assert result.tokens.tolist() == [Case(3, 9, Sampling(seed=1)).expected()]


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        (Sampling(logit_bias=((50, 1.0),)), "logit_bias"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty"),
        (Sampling(temperature=math.nan), "temperature"),
        (Sampling(temperature=-1.0), "temperature"),
        (Sampling(choose=Candidates(51)), "beams"),
    ],
)
def test_the_impossible_is_named(sampling: Sampling, word: str) -> None:
    assert word in (fault_of(sampling, 50) or "")
    assert fault_of(Sampling(), 50) is None
