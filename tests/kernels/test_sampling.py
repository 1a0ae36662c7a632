"""`sample` and `likeliest` of every set against the reference: cuts, ties, draws, poison beside the rows.

Every set rounds (logit - highest) / temperature alike, and so top_k and min_p cut alike to the last bit. The masses
that top_p and the draws add up are float32 in the fast sets: a draw, or a cut, nearer than 1e-6 to an edge may fall to
its other side, and none of those below is.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.contract import Kernels, Odds, Sampled
from kilburn.kernels.dispatch import kernels_for
from kilburn.kernels.philox import uniform
from tests.kernels.interpreted import triton_kernels

SETS = [kernels_for(torch.device("cpu")), triton_kernels()]
each_set = pytest.mark.parametrize("kernels", SETS, ids=["cpu", "triton"])
NO_CUT = (0, 1.0, 0.0)

# temperature, top_k, top_p, min_p
TABLE = (
    (1.0, *NO_CUT),
    (0.0, 5, 0.5, 0.1),  # nothing is drawn
    (1e-8, *NO_CUT),
    (0.7, 1, 1.0, 0.0),
    (2.0, 3, 1.0, 0.0),
    (1.0, -1, 1.0, 0.0),
    (1.0, 10**9, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.5, 0, 0.9, 0.0),
    (5.0, 0, 0.9999, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 1.0, 1.0),
    (0.9, 40, 0.6, 0.02),
)


def odds_of(table: tuple[tuple[float, float, float, float], ...], draws_each: int = 6) -> Odds:
    least = [math.log(min_p) if min_p else -math.inf for *_, min_p in table]
    rows = [[*row[:3], floor] for row, floor in zip(table, least, strict=True)]
    draws = [
        [row, 0x9E3779B97F4A7C15 * (row + 1) % 2**63 * (-1) ** row, i, (row + 1) * 2**33 * (i % 2) + 7 * i]
        for i in range(draws_each)
        for row in range(len(table))
    ]
    return Odds(torch.tensor(rows, dtype=torch.float64), torch.tensor(draws, dtype=torch.int64).reshape(-1, 4))


def logits_of(num_rows: int, vocab: int, seed: int, step: float = 0.0) -> Tensor:
    """A view of something wider, whose other columns are NaN. `step`: rounded to multiples of it, so that many tie."""
    drawn = np.random.default_rng(seed).standard_normal((num_rows, vocab)) * 3.0
    values = np.round(drawn / step) * step if step else drawn
    wide = torch.full((num_rows, vocab + 5), torch.nan)
    wide[:, 2:-3] = torch.from_numpy(values.astype(np.float32))
    return wide[:, 2:-3]


def check(kernels: Kernels, logits: Tensor, odds: Odds) -> Sampled:
    got, wanted = kernels.sample(logits, odds), reference.sample(logits, odds)
    assert torch.equal(got.top, wanted.top)
    assert torch.equal(got.best, wanted.best)
    assert got.best.dtype == got.tokens.dtype == torch.int64
    is_drawn = odds.rows[odds.draws[:, 0], 0] > 0.0
    assert got.tokens[is_drawn].tolist() == wanted.tokens[is_drawn].tolist()
    return got


@each_set
@pytest.mark.parametrize("vocab", [1, 7, 300, 4097])
def test_the_table_over_vocabularies_that_are_no_power_of_two(kernels: Kernels, vocab: int) -> None:
    check(kernels, logits_of(len(TABLE), vocab, seed=vocab), odds_of(TABLE))


@each_set
def test_a_whole_vocabulary(kernels: Kernels) -> None:
    table = ((0.8, 50, 0.95, 0.01), (1.3, 0, 0.7, 0.0), (1.0, *NO_CUT))
    check(kernels, logits_of(3, 49152, seed=1), odds_of(table, draws_each=20))


@each_set
def test_equals_stand_or_fall_together(kernels: Kernels) -> None:
    """Three values, each of many tokens: the third, the half of the mass, cut in the middle of none of them."""
    table = ((1.0, 3, 1.0, 0.0), (1.0, 0, 0.3, 0.0), (1.0, 0, 0.7, 0.0), (2.0, 20, 0.5, 0.0))
    logits = logits_of(len(table), 90, seed=3, step=4.0)
    odds = odds_of(table, draws_each=80)
    got = check(kernels, logits, odds)
    for row in range(len(table)):
        own = logits[row]
        drawn = set(own[got.tokens[odds.draws[:, 0] == row]].tolist())
        assert min(drawn) > float(own.min())  # each table row cuts something ...
        for value in drawn:  # ... and draws different tokens of each value that stands, where there are any
            tokens = set(
                got.tokens[odds.draws[:, 0] == row][own[got.tokens[odds.draws[:, 0] == row]] == value].tolist()
            )
            assert len(tokens) > 1 or int((own == value).sum()) < 4
    found = kernels.likeliest(logits, 30)
    assert torch.equal(found.ids, reference.likeliest(logits, 30).ids)


@each_set
def test_equal_logits_are_drawn_where_u_lies(kernels: Kernels) -> None:
    """With one mass for all, the token is u times the vocabulary: 15 bits of u are seen."""
    seeds = [0, 1, 2**32, 2**63 - 1, -1, -(2**63), 12345678901234567]
    draws = [[0, seed, stream, position] for seed in seeds for stream in (0, 77) for position in (3, 2**40 + 1)]
    odds = Odds(torch.tensor([[1.0, 0.0, 1.0, -math.inf]], dtype=torch.float64), torch.tensor(draws))
    got = kernels.sample(torch.full((1, 49152), 2.5), odds)
    _, *words = np.array(draws).T
    u = uniform(*(word.astype(np.uint64) for word in words))
    assert got.tokens.tolist() == np.floor(u * 49152).astype(int).tolist()
    assert (got.top.item(), got.best.item()) == (2.5, 0)


@each_set
def test_rows_that_are_not_finite_are_told_and_harm_no_other(kernels: Kernels) -> None:
    logits = logits_of(6, 777, seed=5)
    logits[0, 776] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[3, 700] = -1e30  # all that is left
    logits[4, :700] = -torch.inf
    odds = odds_of(((1.0, 5, 0.5, 0.0),) * 6, draws_each=3)
    got, wanted = kernels.sample(logits, odds), reference.sample(logits, odds)
    assert got.top[0].isnan()
    assert got.top[1:].tolist() == wanted.top[1:].tolist()
    assert got.top[1:4].tolist() == [-math.inf, math.inf, logits[3, 700].item()]
    of_good = odds.draws[:, 0] >= 3
    assert got.tokens[of_good].tolist() == wanted.tokens[of_good].tolist()
    assert got.tokens[odds.draws[:, 0] == 3].tolist() == [700] * 3
    plain = kernels.sample(logits)
    assert plain.top[1:].tolist() == wanted.top[1:].tolist()
    assert plain.best[2:].tolist() == wanted.best[2:].tolist()
    assert len(plain.tokens) == 0


@each_set
def test_whoever_else_is_in_the_batch(kernels: Kernels) -> None:
    logits, odds = logits_of(3, 500, seed=9), odds_of(((1.0, 0, 0.9, 0.0), (0.5, *NO_CUT), (1.0, 7, 1.0, 0.0)))
    together = kernels.sample(logits, odds).tokens
    for row in range(3):
        own = odds.draws[odds.draws[:, 0] == row].clone()
        own[:, 0] = 0
        alone = kernels.sample(logits[row : row + 1], Odds(odds.rows[row : row + 1], own))
        assert alone.tokens.tolist() == together[odds.draws[:, 0] == row].tolist()


@each_set
@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (5, 5), (300, 0), (300, 17), (4097, 40)])
@pytest.mark.parametrize("step", [0.0, 2.0], ids=["apart", "ties"])
def test_the_likeliest_and_what_they_are_worth(kernels: Kernels, vocab: int, count: int, step: float) -> None:
    logits = logits_of(2, vocab, seed=count, step=step)
    if vocab > 1:
        logits[1, : vocab - 3] = -torch.inf
    got, wanted = kernels.likeliest(logits, count), reference.likeliest(logits, count)
    assert got.ids.tolist() == wanted.ids.tolist()
    torch.testing.assert_close(got.log_probs, wanted.log_probs, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(got.log_total, wanted.log_total, atol=2e-6, rtol=1e-6)
    for row in got.log_probs.tolist():
        assert all(first >= second for first, second in pairwise(row))


@settings(max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 600),
    st.integers(0, 1000),
    st.sampled_from((0.0, 0.5)),
    st.tuples(
        st.sampled_from((1e-8, 0.5, 1.0, 30.0)),
        st.integers(-1, 700),
        st.sampled_from((0.0, 0.05, 0.5, 0.97, 1.0)),
        st.sampled_from((0.0, 0.001, 0.5)),
    ),
)
def test_drawn_rows(vocab: int, seed: int, step: float, row: tuple[float, float, float, float]) -> None:
    logits = logits_of(1, vocab, seed, step)
    for kernels in SETS:
        check(kernels, logits, odds_of((row,), draws_each=8))


@each_set
def test_refusals_name_the_argument(kernels: Kernels) -> None:
    logits, odds = torch.zeros(2, 9), odds_of(((1.0, *NO_CUT),) * 2)
    for name, call in (
        ("logits", lambda: kernels.sample(logits.double(), odds)),
        ("logits", lambda: kernels.sample(torch.zeros(2, 18)[:, ::2], odds)),
        ("logits", lambda: kernels.likeliest(torch.zeros(2, 0), 0)),
        (r"odds\.rows", lambda: kernels.sample(logits, Odds(odds.rows[:1], odds.draws))),
        (r"odds\.rows", lambda: kernels.sample(logits, Odds(odds.rows.float(), odds.draws))),
        (r"odds\.draws", lambda: kernels.sample(logits, Odds(odds.rows, odds.draws.int()))),
        ("count", lambda: kernels.likeliest(logits, 10)),
        ("count", lambda: kernels.likeliest(logits, -1)),
    ):
        with pytest.raises(ValueError, match=name):
            call()
