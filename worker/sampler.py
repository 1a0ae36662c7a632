"""From logits to tokens, for all the rows that sample in a step at once.

What happens to one row's logits, in this order:

    logits -> repetition -> presence, frequency -> bias -> grammar -> no stop ids until min_tokens   here
           -> temperature -> top_k -> top_p -> min_p -> draw                                     kernels.sample

and log probabilities are those of the model's own distribution, before all of it (kernels.likeliest); or, where that is
asked for, those of what is drawn from, after all of it. Of prompts they are always the model's own.

Logits stay where the model left them. To the kernels go a few numbers a row and a draw; to the host come a token a
draw, and the highest logit of each row, which tells whether the row has failed: one that is NaN or +inf, or nothing
that can be drawn, fails its row alone. Nothing in here depends on which other rows are in the batch.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilburn.kernels.dispatch import Kernels, Odds
from kilburn.kernels.reference import drawn_from
from kilburn.shared.sampling import LEAST_TEMPERATURE
from kilburn.worker.knobs import Knobs, Seen

NOT_FINITE = "the model's logits are not finite"
NOTHING_LEFT = "no token can be drawn: bias and masks leave none"

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Report:
    """Log probabilities of one row: per token drawn, `width` entries, the token itself first."""

    width: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class Chosen:
    """What each row chose. A row in `failed` chose nothing."""

    num_tokens: Ints  # [rows]
    tokens: Ints  # all of them, row by row
    failed: dict[int, str] = field(default_factory=dict)  # place among the rows -> reason
    reports: dict[int, Report] = field(default_factory=dict)


def choose(logits: Tensor, knobs: Knobs, rows: Ints, positions: Ints, kernels: Kernels) -> Chosen:
    """Choose for logits float32 [n, vocabulary] of the n `rows`, at the `positions` of the tokens to be drawn."""
    columns = knobs.columns[rows]
    if columns["is_plain"].all():
        top, best = _highest(logits, kernels)
        if np.isfinite(top).all():
            return Chosen(np.ones(len(rows), np.int64), best)
    failed: dict[int, str] = {}
    shaped = logits
    if (columns["is_shaped"] & (columns["num_draws"] > 0)).any():
        raw_top, _ = _highest(logits, kernels)
        failed = dict.fromkeys(np.flatnonzero(~np.isfinite(raw_top)).tolist(), NOT_FINITE)
        shaped = shape(logits, knobs, rows, positions, failed)
    lane, sample = _spread(columns["num_draws"])
    is_random = ~columns["is_greedy"][lane]
    odds = _odds(columns, positions, lane[is_random], sample[is_random], logits.device)
    sampled = kernels.sample(shaped, odds)
    top, best, drawn = _host(sampled.top, sampled.best, sampled.tokens)
    for place in np.flatnonzero(~np.isfinite(top)).tolist():
        is_empty = top[place] == -np.inf and shaped is not logits
        failed.setdefault(place, NOTHING_LEFT if is_empty else NOT_FINITE)
    tokens = best[lane]  # without chance every draw is the likeliest token
    tokens[is_random] = drawn
    stands = np.ones(len(rows), np.bool_)
    stands[list(failed)] = False
    tokens, num_tokens = tokens[stands[lane]], np.where(stands, columns["num_draws"], 0)
    reports = _report(logits, shaped, columns, num_tokens, tokens, failed, kernels)
    if columns["num_candidates"].any():
        num_tokens, tokens = _with_candidates(columns, num_tokens, tokens, reports)
    return Chosen(num_tokens, tokens, failed, reports)


def _highest(logits: Tensor, kernels: Kernels) -> tuple[NDArray[np.float32], Ints]:
    sampled = kernels.sample(logits)
    top, best = _host(sampled.top, sampled.best)
    return top, best


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [2, 1]: the owner of each place, [0, 0, 1], and its number with the owner, [0, 1, 0]."""
    lane = np.repeat(np.arange(len(counts)), counts)
    return lane, np.arange(len(lane)) - np.repeat(np.cumsum(counts) - counts, counts)


def _odds(columns: NDArray[np.void], positions: Ints, lane: Ints, sample: Ints, device: torch.device) -> Odds:
    """Draw number i is the sample[i]-th of the row lane[i]."""
    rows = np.empty((len(columns), 4), np.float64)
    rows[:, 0] = np.where(columns["is_greedy"], 0.0, columns["temperature"])
    rows[:, 1], rows[:, 2] = columns["top_k"], columns["top_p"]
    with np.errstate(divide="ignore"):
        rows[:, 3] = np.log(np.minimum(columns["min_p"], 1.0))  # min_p 0: no floor
    draws = np.empty((len(lane), 4), np.int64)
    draws[:, 0], draws[:, 1] = lane, columns["seed"][lane].view(np.int64)
    draws[:, 2], draws[:, 3] = columns["first_stream"][lane] + sample, positions[lane]
    return Odds(torch.from_numpy(rows).to(device), torch.from_numpy(draws).to(device))


def _with_candidates(
    columns: NDArray[np.void], num_tokens: Ints, tokens: Ints, reports: dict[int, Report]
) -> tuple[Ints, Ints]:
    """The candidates are in the reports: each token's own entry."""
    own = np.split(tokens, np.cumsum(num_tokens)[:-1])
    for place in np.flatnonzero(columns["num_candidates"]).tolist():
        if place in reports:
            own[place] = np.array(reports[place].ids[:: reports[place].width], np.int64)
    return np.array([len(tokens) for tokens in own], np.int64), np.concatenate(own)


# --- from rank to rank


_FAILED = -1
_ELSEWHERE = "rank 0 could not draw"


def told(chosen: Chosen, knobs: Knobs, rows: Ints) -> Ints:
    """What `rows` chose, in as many numbers as every rank expects: how many tokens each, or that it failed, and all
    tokens. Reports and reasons are not told. A rank that did not choose says token 0 throughout; only rehearsals hear
    it."""
    columns = knobs.columns[rows]
    most = np.maximum(columns["num_draws"], columns["num_candidates"])
    words = np.zeros(len(rows) + int(most.sum()), np.int64)
    words[: len(rows)] = most
    if len(chosen.num_tokens) == len(rows):
        words[: len(rows)] = chosen.num_tokens
        words[len(rows) : len(rows) + len(chosen.tokens)] = chosen.tokens
        words[list(chosen.failed)] = _FAILED
    return words


def heard(words: Ints, num_rows: int) -> Chosen:
    """The rows' choices, as `told`."""
    num_tokens = np.maximum(words[:num_rows], 0)
    failed = dict.fromkeys(np.flatnonzero(words[:num_rows] == _FAILED).tolist(), _ELSEWHERE)
    return Chosen(num_tokens, words[num_rows : num_rows + int(num_tokens.sum())], failed)


# --- shaping


def shape(logits: Tensor, knobs: Knobs, rows: Ints, positions: Ints, failed: dict[int, str]) -> Tensor:
    """A copy of logits [n, vocabulary] with the penalties, biases and masks of the rows that draw applied.

    Rows for which there is no mask are added to `failed`.
    """
    columns = knobs.columns[rows]
    logits, draws = logits.clone(), columns["num_draws"] > 0
    penalised = np.flatnonzero(columns["is_penalised"] & draws)
    if len(penalised):
        seen = knobs.seen_by(rows[penalised])
        _penalise(logits, penalised[seen.place], seen, columns[penalised])
    must_end = _follow_grammars(logits, knobs, rows, draws, failed) if knobs.bound else frozenset()
    for i in np.flatnonzero(columns["is_shaped"] & draws).tolist():
        row = int(rows[i])
        if row in knobs.biases:
            ids, by = knobs.biases[row]
            # Accumulated: a token named twice is biased twice.
            logits[i].index_add_(0, _device(ids, logits), torch.from_numpy(by).to(logits.device))
        is_early = positions[i] - columns["num_prompt"][i] < columns["min_tokens"][i]
        if row in knobs.stop_ids and is_early and i not in must_end:
            logits[i, _device(knobs.stop_ids[row], logits)] = -torch.inf
    return logits


def _follow_grammars(
    logits: Tensor, knobs: Knobs, rows: Ints, draws: NDArray[np.bool_], failed: dict[int, str]
) -> frozenset[int]:
    """In place, what the grammars of rows forbid. Returns the places of those that allow nothing but the end."""
    places = [i for i, row in enumerate(rows.tolist()) if draws[i] and row in knobs.bound]
    if not places:
        return frozenset()
    bounds = [knobs.bound[int(rows[i])] for i in places]
    masks = knobs.masks(bounds)
    at, allowed = _device(np.array(places), logits), torch.from_numpy(masks.allowed).to(logits.device)
    logits[at] = logits[at].masked_fill(~allowed, -torch.inf)
    failed |= {i: bound.failure for i, bound in zip(places, bounds, strict=True) if bound.failure}
    return frozenset(i for i, must_end in zip(places, masks.only_ends.tolist(), strict=True) if must_end)


def _penalise(logits: Tensor, lane: Ints, seen: Seen, columns: NDArray[np.void]) -> None:
    """In place, on the tokens that the rows have seen and on no others. lane[i]: row of logits of seen token i."""
    at = _device(lane, logits), _device(seen.tokens, logits)

    def per_token(name: str) -> Tensor:
        return torch.from_numpy(columns[name].astype(np.float32)[seen.place]).to(logits.device)

    repetition, generated = per_token("repetition"), torch.from_numpy(seen.generated).to(logits.device)
    value = logits[at]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= per_token("presence") * (generated > 0) + per_token("frequency") * generated
    logits[at] = value


# --- reporting


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of given tokens: of each `width` entries, itself first, then the likeliest; and its rank."""

    width: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    is_finite: bool


def score(logits: Tensor, tokens: Ints, num_likeliest: int, kernels: Kernels) -> Scores:
    """How likely each of `tokens` [n] is by its row of logits float32 [n, vocabulary]."""
    vocab = logits.shape[1]
    num_likeliest = min(num_likeliest, vocab)
    found = kernels.likeliest(logits, num_likeliest)
    own = logits.gather(1, _device(tokens, logits)[:, None])
    values, ranks = _host(own[:, 0] - found.log_total, (logits > own).sum(dim=1) + 1)
    top_ids, top_values, total = _host(found.ids, found.log_probs, found.log_total)
    ids = np.concatenate((tokens[:, None], top_ids), axis=1)
    logprobs = np.concatenate((values[:, None], top_values), axis=1)
    flat = tuple(ids.ravel().tolist()), tuple(logprobs.ravel().tolist())
    return Scores(1 + num_likeliest, *flat, tuple(ranks.tolist()), bool(np.isfinite(total).all()))


def _of_what_is_drawn_from(rows: Tensor, shaped: Tensor, columns: NDArray[np.void]) -> Tensor:
    """Rows of logits for a report, with those replaced that report of what they draw from."""
    rows = rows.clone()
    for place in np.flatnonzero(columns["is_processed"] & (columns["num_draws"] > 0)).tolist():
        row = columns[place]
        rows[place] = shaped[place]
        if row["temperature"] >= LEAST_TEMPERATURE:
            least = np.log(np.minimum(row["min_p"], 1.0)) if row["min_p"] > 0.0 else -np.inf
            odds = [float(row["temperature"]), float(row["top_k"]), float(row["top_p"]), float(least)]
            rows[place] = drawn_from(shaped[place], odds)
    return rows


def _report(
    logits: Tensor,
    shaped: Tensor,
    columns: NDArray[np.void],
    num_tokens: Ints,
    tokens: Ints,
    failed: dict[int, str],
    kernels: Kernels,
) -> dict[int, Report]:
    """Log probabilities for the rows that want them, and the candidates of those that return candidates."""
    is_wanted = (columns["logprobs"] >= 0) | (columns["num_candidates"] > 0)
    is_wanted[list(failed)] = False
    wanted = np.flatnonzero(is_wanted)
    if not len(wanted):
        return {}
    rows, vocab = _some(logits, wanted), logits.shape[1]
    if columns["is_processed"][wanted].any():
        rows = _of_what_is_drawn_from(rows, _some(shaped, wanted), columns[wanted])
    beside = np.clip(columns["logprobs"][wanted], 0, vocab)
    num_candidates = columns["num_candidates"][wanted]
    counts = np.maximum(beside, num_candidates)
    found = kernels.likeliest(rows, int(counts.max()))
    ids, values = _host(found.ids, found.log_probs)
    own = np.split(tokens, np.cumsum(num_tokens)[:-1])
    drawn = [ids[k, :count] if count else own[wanted[k]] for k, count in enumerate(num_candidates.tolist())]
    lane = np.repeat(np.arange(len(wanted)), [len(tokens) for tokens in drawn])
    at = _device(lane, rows), _device(np.concatenate(drawn), rows)
    (drawn_values,) = _host(rows[at] - found.log_total[at[0]])
    reports, first = {}, 0
    for k, place in enumerate(wanted.tolist()):
        width, end = 1 + int(beside[k]), first + len(drawn[k])
        flat_ids: list[int] = []
        flat_values: list[float] = []
        top_ids, top_values = ids[k, : width - 1].tolist(), values[k, : width - 1].tolist()
        for token, value in zip(drawn[k].tolist(), drawn_values[first:end].tolist(), strict=True):
            flat_ids += [token, *top_ids]
            flat_values += [value, *top_values]
        reports[place], first = Report(width, tuple(flat_ids), tuple(flat_values)), end
    return reports


# --- the border between host and device


def _host(*tensors: Tensor) -> tuple[NDArray[Any], ...]:
    return tuple(tensor.cpu().numpy() for tensor in tensors)


def _device(values: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def _some(values: Tensor, rows: Ints) -> Tensor:
    """values[rows]; without a copy where that is all of them."""
    return values if len(rows) == len(values) else values[_device(rows, values)]
