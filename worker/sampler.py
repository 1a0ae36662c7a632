"""From logits to tokens, for all the rows that sample in a step at once.

What happens to one row's logits, in this order:

    logits -> repetition -> presence, frequency -> bias -> stop ids masked until min_tokens
           -> temperature -> top_k -> top_p -> min_p -> draw

and log probabilities are those of the model's own distribution, before all of it.

Every cut is a floor: top_k, top_p and min_p each come down to a value below which a token cannot be drawn, and equal
logits stand or fall together. So no row needs its vocabulary sorted, save where a nucleus is wider than NUCLEUS
tokens; and the draw always walks the tokens in the order of their ids:

    u in [0, 1)  keyed by (seed, stream, position)        the first id at which the cumulative mass exceeds u * total

(the inverse of the distribution function; a draw is sensitive only where u lies at the edge of its token's interval).
Both the walk and the search for the likeliest token go over two levels, CHUNK tokens at a time and then within one
chunk, which costs one vectorised pass over the vocabulary. A greedy batch costs that pass and no other. Nothing in here
depends on which other rows are in the batch.

A row whose logits hold NaN or +inf, or nothing that can be drawn, fails alone.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilburn.worker.knobs import Knobs, Seen
from kilburn.worker.philox import uniform

CHUNK = 256  # tokens whose masses, or maxima, are taken together
NUCLEUS = 256  # tokens that top_p looks at before it sorts them all

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


def choose(logits: Tensor, knobs: Knobs, rows: Ints, positions: Ints) -> Chosen:
    """Choose for logits float32 [n, vocabulary] of the n `rows`, at the `positions` of the tokens to be drawn."""
    columns = knobs.columns[rows]
    top, best = highest(logits)
    is_good = np.isfinite(top)
    if is_good.all() and columns["is_plain"].all():
        return Chosen(np.ones(len(rows), np.int64), best)
    failed = dict.fromkeys(np.flatnonzero(~is_good).tolist(), NOT_FINITE)
    is_random = ~columns["is_greedy"] & (columns["num_draws"] > 0)
    todo = np.flatnonzero(is_good & (is_random | columns["is_shaped"]) & (columns["num_draws"] > 0))
    shaped = _some(logits, todo)
    if columns["is_shaped"][todo].any():
        shaped = shape(shaped, knobs, rows[todo], positions[todo])
        top[todo], best[todo] = highest(shaped)
        for place in todo[~np.isfinite(top[todo])].tolist():
            failed[place] = NOTHING_LEFT if top[place] == -np.inf else NOT_FINITE
    num_tokens = np.where(np.isfinite(top), columns["num_draws"], 0)
    tokens = np.repeat(best, num_tokens)  # without chance every draw is the likeliest token
    random = np.flatnonzero(is_random[todo] & np.isfinite(top[todo]))
    if len(random):
        place = todo[random]
        lane, sample = _spread(num_tokens[place])
        drawn = _draw(_some(shaped, random), top[place], columns[place], positions[place], lane, sample)
        first = np.cumsum(num_tokens) - num_tokens
        tokens[first[place][lane] + sample] = drawn
    reports = _report(logits, columns, num_tokens, tokens, failed)
    if columns["num_candidates"].any():
        num_tokens, tokens = _with_candidates(columns, num_tokens, tokens, reports)
    return Chosen(num_tokens, tokens, failed, reports)


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [2, 1]: the owner of each place, [0, 0, 1], and its number with the owner, [0, 1, 0]."""
    lane = np.repeat(np.arange(len(counts)), counts)
    return lane, np.arange(len(lane)) - np.repeat(np.cumsum(counts) - counts, counts)


def _draw(
    logits: Tensor, top: NDArray[np.float32], columns: NDArray[np.void], positions: Ints, lane: Ints, sample: Ints
) -> Ints:
    """Draw number i is the sample[i]-th of the row lane[i]."""
    streams = (columns["first_stream"][lane] + sample).astype(np.uint64)
    u = uniform(columns["seed"][lane], streams, positions[lane].astype(np.uint64))
    return invert(masses(logits, top, columns), lane, u)


def _with_candidates(
    columns: NDArray[np.void], num_tokens: Ints, tokens: Ints, reports: dict[int, Report]
) -> tuple[Ints, Ints]:
    """The candidates are in the reports: each token's own entry."""
    own = np.split(tokens, np.cumsum(num_tokens)[:-1])
    for place in np.flatnonzero(columns["num_candidates"]).tolist():
        if place in reports:
            own[place] = np.array(reports[place].ids[:: reports[place].width], np.int64)
    return np.array([len(tokens) for tokens in own], np.int64), np.concatenate(own)


def highest(logits: Tensor) -> tuple[NDArray[np.float32], Ints]:
    """The highest logit of each row, and the first token that has it. NaN counts as the highest of all."""
    vocab = logits.shape[1]
    whole = vocab - vocab % CHUNK
    maxima = [logits[:, :whole].view(-1, whole // CHUNK, CHUNK).amax(dim=2)] if whole else []
    if whole < vocab:
        maxima.append(logits[:, whole:].amax(dim=1, keepdim=True))
    chunk = torch.cat(maxima, dim=1).argmax(dim=1, keepdim=True) * CHUNK
    # A last chunk that is not whole is looked at together with the end of the one before it.
    start = chunk.clamp_(max=max(vocab - CHUNK, 0))
    places = start + torch.arange(min(CHUNK, vocab), device=logits.device)
    inside = logits.gather(1, places)
    place = inside.argmax(dim=1, keepdim=True)
    top, best = _host(inside.gather(1, place)[:, 0], (start + place)[:, 0])
    return top, best


# --- shaping


def shape(logits: Tensor, knobs: Knobs, rows: Ints, positions: Ints) -> Tensor:
    """A copy of logits [n, vocabulary] with the penalties, biases and masks of the rows applied."""
    columns = knobs.columns[rows]
    logits = logits.clone()
    penalised = np.flatnonzero(columns["is_penalised"])
    if len(penalised):
        seen = knobs.seen_by(rows[penalised])
        _penalise(logits, penalised[seen.place], seen, columns[penalised])
    for i, row in enumerate(rows.tolist()):
        if row in knobs.biases:
            ids, by = knobs.biases[row]
            # Accumulated: a token named twice is biased twice.
            logits[i].index_add_(0, _device(ids, logits), torch.from_numpy(by).to(logits.device))
        if row in knobs.stop_ids and positions[i] - columns["num_prompt"][i] < columns["min_tokens"][i]:
            logits[i, _device(knobs.stop_ids[row], logits)] = -torch.inf
    return logits


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


# --- drawing


def masses(logits: Tensor, top: NDArray[np.float32], columns: NDArray[np.void]) -> Tensor:
    """What each token weighs in the draw: float32 [n, chunks, CHUNK], zero where it is cut off, one at the likeliest.

    `top` is the highest logit of each row.
    """
    device, (num_rows, vocab) = logits.device, logits.shape
    heat = torch.from_numpy(columns["temperature"].astype(np.float32)).to(device)
    scaled = (logits - torch.from_numpy(top).to(device)[:, None]).div_(heat[:, None])
    num_chunks = -(-vocab // CHUNK)
    padded = torch.empty((num_rows, num_chunks * CHUNK), dtype=torch.float32, device=device)
    padded[:, vocab:] = 0.0
    weighed = padded[:, :vocab]
    torch.exp(scaled, out=weighed)
    floor = floors(scaled, weighed, columns)
    if floor is not None:
        weighed.mul_(scaled >= floor[:, None])
    return padded.view(num_rows, num_chunks, CHUNK)


def floors(scaled: Tensor, weighed: Tensor, columns: NDArray[np.void]) -> Tensor | None:
    """The lowest scaled logit of each row that may be drawn, [n]; None where no row cuts anything.

    scaled [n, vocabulary]: logits less the highest, over temperature; weighed: exp of that. One row's cuts come one
    after the other: top_p takes its share of what top_k left.
    """
    vocab = scaled.shape[1]
    k, p, min_p = columns["top_k"].copy(), columns["top_p"], columns["min_p"]
    k[k >= vocab] = 0
    if not (k.any() or (p < 1.0).any() or (min_p > 0.0).any()):
        return None
    with np.errstate(divide="ignore"):
        floor = np.log(np.minimum(min_p, 1.0))  # min_p 0: no floor
    cut = np.flatnonzero((k > 0) | (p < 1.0))
    if len(cut):
        floor[cut] = np.maximum(floor[cut], _ranked_floors(scaled, weighed, cut, k[cut], p[cut]))
    # The likeliest token always stands: exp and log need not be inverses to the last bit.
    return torch.from_numpy(np.minimum(floor, 0.0).astype(np.float32)).to(scaled.device)


def _ranked_floors(scaled: Tensor, weighed: Tensor, rows: Ints, k: Ints, p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Floors of top_k (0: all) and top_p for `rows`, which have at least one of them."""
    vocab = scaled.shape[1]
    # The nucleus of a row with top_k lies within it.
    wanted = min(max(int(k.max()), NUCLEUS if ((p < 1.0) & (k == 0)).any() else 1), vocab)
    (ranked,) = _host(torch.topk(_some(scaled, rows), wanted, dim=1).values)
    floor = np.where(k > 0, ranked[np.arange(len(k)), np.maximum(k - 1, 0)], -np.inf).astype(np.float64)
    nucleus = np.flatnonzero(p < 1.0)
    if not len(nucleus):
        return floor
    least = torch.from_numpy(floor[nucleus].astype(np.float32)).to(scaled.device)[:, None]
    weight = _some(weighed, rows[nucleus])
    if (k[nucleus] > 0).any():
        weight = weight * (_some(scaled, rows[nucleus]) >= least)
    (total,) = _host(weight.sum(dim=1, dtype=torch.float64))
    share = p[nucleus] * total
    found, is_found = _reached(ranked[nucleus], floor[nucleus], share)
    for i in np.flatnonzero(~is_found).tolist():
        # Wider than what was ranked: only now is it worth sorting everything, ten times as fast in numpy as in torch.
        (everything,) = _host(scaled[int(rows[nucleus[i]])])
        values, enough = _reached(np.sort(everything)[None, ::-1], floor[nucleus[i : i + 1]], share[i : i + 1])
        # Where rounding keeps even the whole from its share, nothing is cut that top_k left.
        found[i] = values[0] if enough[0] else floor[nucleus[i]]
    floor[nucleus] = found
    return floor


def _reached(
    ranked: NDArray[np.float32], least: NDArray[np.float64], share: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The value at which the mass of ranked [n, m], best first and not below `least`, reaches `share`; if it does."""
    stands = ranked >= least[:, None]
    mass = np.cumsum(np.exp(ranked.astype(np.float64)) * stands, axis=1)
    place = (mass < share[:, None]).sum(axis=1)
    is_found = place < stands.sum(axis=1)
    return ranked[np.arange(len(ranked)), np.where(is_found, place, 0)].astype(np.float64), is_found


def invert(mass: Tensor, lane: Ints, u: NDArray[np.float64]) -> Ints:
    """The token at which the cumulative mass of row lane[i] first exceeds u[i] times its total. Returns int64 [draws].

    mass float32 [n, chunks, CHUNK], u in [0, 1).
    """
    at = _device(lane, mass)
    ends = mass.sum(dim=2, dtype=torch.float32).double().cumsum(dim=1)  # [n, chunks]
    target = torch.from_numpy(u).to(mass.device) * ends[at, -1]
    # Chunks of no mass end where the one before them ends, and are passed over; rounding must not walk off the row.
    last = _last_positive(ends.diff(dim=1, prepend=ends.new_zeros((len(ends), 1))))[at]
    chunk = torch.minimum((ends[at] <= target[:, None]).sum(dim=1), last)
    inside = mass[at, chunk].double()  # [draws, CHUNK]
    before = torch.where(chunk > 0, ends[at, (chunk - 1).clamp_(min=0)], 0.0)
    steps = inside.cumsum(dim=1) <= (target - before)[:, None]
    (token,) = _host(chunk * CHUNK + torch.minimum(steps.sum(dim=1), _last_positive(inside)))
    return token


def _last_positive(values: Tensor) -> Tensor:
    """Index of the last positive entry of each row."""
    places = torch.arange(values.shape[1], device=values.device)
    return torch.where(values > 0, places, 0).amax(dim=1)


# --- reporting


def _report(
    logits: Tensor, columns: NDArray[np.void], num_tokens: Ints, tokens: Ints, failed: dict[int, str]
) -> dict[int, Report]:
    """Log probabilities for the rows that want them, and the candidates of those that return candidates."""
    is_wanted = (columns["logprobs"] >= 0) | (columns["num_candidates"] > 0)
    is_wanted[list(failed)] = False
    wanted = np.flatnonzero(is_wanted)
    if not len(wanted):
        return {}
    rows, vocab = _some(logits, wanted), logits.shape[1]
    log_total = torch.logsumexp(rows, dim=1, keepdim=True)
    beside = np.clip(columns["logprobs"][wanted], 0, vocab)
    num_candidates = columns["num_candidates"][wanted]
    ids, values = _likeliest(rows, log_total, np.maximum(beside, num_candidates))
    own = np.split(tokens, np.cumsum(num_tokens)[:-1])
    drawn = [ids[k][:count] if count else own[wanted[k]] for k, count in enumerate(num_candidates.tolist())]
    lane = np.repeat(np.arange(len(wanted)), [len(tokens) for tokens in drawn])
    at = _device(lane, rows), _device(np.concatenate(drawn), rows)
    (drawn_values,) = _host(rows[at] - log_total[at[0], 0])
    reports, first = {}, 0
    for k, place in enumerate(wanted.tolist()):
        width, end = 1 + int(beside[k]), first + len(drawn[k])
        flat_ids: list[int] = []
        flat_values: list[float] = []
        top_ids, top_values = ids[k][: width - 1].tolist(), values[k][: width - 1].tolist()
        for token, value in zip(drawn[k].tolist(), drawn_values[first:end].tolist(), strict=True):
            flat_ids += [token, *top_ids]
            flat_values += [value, *top_values]
        reports[place], first = Report(width, tuple(flat_ids), tuple(flat_values)), end
    return reports


def _likeliest(rows: Tensor, log_total: Tensor, count: Ints) -> tuple[list[Ints], list[NDArray[np.float32]]]:
    """The count[i] likeliest tokens of each row, best first, of equals the lower id; ids and log probabilities."""
    ids: list[Ints] = [np.zeros(0, np.int64)] * len(count)
    values: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(count)
    for number in np.unique(count[count > 0]).tolist():  # one request, one answer: never more than it asked for
        at = np.flatnonzero(count == number)
        found = torch.topk(_some(rows, at), number, dim=1)
        value, token = _host(found.values - _some(log_total, at), found.indices)
        order = np.lexsort((token, -value), axis=1)
        for i, own in enumerate(at):
            ids[own], values[own] = token[i, order[i]], value[i, order[i]]
    return ids, values


# --- the border between host and device


def _host(*tensors: Tensor) -> tuple[NDArray[Any], ...]:
    return tuple(tensor.cpu().numpy() for tensor in tensors)


def _device(values: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def _some(values: Tensor, rows: Ints) -> Tensor:
    """values[rows]; without a copy where that is all of them."""
    return values if len(rows) == len(values) else values[_device(rows, values)]
