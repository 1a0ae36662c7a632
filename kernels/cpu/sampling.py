"""Choosing tokens on the host, in torch: `sample` and `likeliest` of the CPU set.

Every cut is a floor, so no row needs its vocabulary sorted, save where a nucleus is wider than NUCLEUS tokens; and a
draw walks the tokens in the order of their ids:

    u in [0, 1)  keyed by (seed, stream, position)        the first id at which the cumulative mass exceeds u * total

(the inverse of the distribution function; a draw is sensitive only where u lies at the edge of its token's interval).
Both the walk and the search for the likeliest token go over two levels, CHUNK tokens at a time and then within one
chunk, which costs one vectorised pass over the vocabulary. A greedy batch costs that pass and no other. Nothing in here
depends on which other rows are in the batch.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kilburn.kernels.checks import check_count, check_odds
from kilburn.kernels.contract import Likeliest, Odds, Sampled
from kilburn.kernels.philox import uniform

CHUNK = 256  # tokens whose masses, or maxima, are taken together
NUCLEUS = 256  # tokens that top_p looks at before it sorts them all

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def sample(logits: Tensor, odds: Odds | None = None) -> Sampled:
    """As the contract says."""
    check_odds(logits, odds)
    top, best = highest(logits)
    if odds is None or not len(odds.draws):
        return Sampled(top, best, best[:0])
    rows, *words = odds.draws.numpy().T
    drawn, lane = np.unique(rows, return_inverse=True)
    row_odds = odds.rows.numpy()[drawn]
    is_drawn = np.isfinite(top.numpy()[drawn]) & (row_odds[:, 0] > 0.0)
    tokens = best[torch.from_numpy(rows)]
    if is_drawn.any():
        places = np.cumsum(is_drawn) - 1
        draws = np.flatnonzero(is_drawn[lane])
        drawn, row_odds = drawn[is_drawn], row_odds[is_drawn]
        u = uniform(*(word[draws].astype(np.uint64) for word in words))
        mass = masses(_some(logits, drawn), top[torch.from_numpy(drawn)], row_odds)
        tokens[torch.from_numpy(draws)] = torch.from_numpy(invert(mass, places[lane[draws]], u))
    return Sampled(top, best, tokens)


def likeliest(logits: Tensor, count: int) -> Likeliest:
    """As the contract says."""
    check_odds(logits, None)
    check_count(logits, count)
    log_total = torch.logsumexp(logits, dim=1)
    if not count:
        none = logits[:, :0]
        return Likeliest(log_total, none.long(), none)
    found = torch.topk(logits, count, dim=1)
    ids, values = found.indices.numpy(), found.values.numpy()
    last = values[:, -1:]
    equals = (logits == torch.from_numpy(last)).sum(dim=1).numpy()
    # Of more equals than there is room for, topk takes any.
    for row in np.flatnonzero(equals > (values == last).sum(axis=1)).tolist():
        is_last = values[row] == last[row]
        ids[row, is_last] = np.flatnonzero(logits[row].numpy() == last[row])[: is_last.sum()]
    order = np.lexsort((ids, -values), axis=1)
    ids, values = (torch.from_numpy(np.take_along_axis(x, order, axis=1)) for x in (ids, values))
    return Likeliest(log_total, ids, values - log_total[:, None])


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each row, and the first token that has it. NaN counts as the highest of all."""
    vocab = logits.shape[1]
    whole = vocab - vocab % CHUNK
    maxima = [logits[:, :whole].view(-1, whole // CHUNK, CHUNK).amax(dim=2)] if whole else []
    if whole < vocab:
        maxima.append(logits[:, whole:].amax(dim=1, keepdim=True))
    chunk = torch.cat(maxima, dim=1).argmax(dim=1, keepdim=True) * CHUNK
    # A last chunk that is not whole is looked at together with the end of the one before it.
    start = chunk.clamp_(max=max(vocab - CHUNK, 0))
    places = start + torch.arange(min(CHUNK, vocab))
    inside = logits.gather(1, places)
    place = inside.argmax(dim=1, keepdim=True)
    return inside.gather(1, place)[:, 0], (start + place)[:, 0]


def masses(logits: Tensor, top: Tensor, odds: Floats) -> Tensor:
    """What each token weighs in the draw: float32 [n, chunks, CHUNK], zero where it is cut off, one at the likeliest.

    `top` is the highest logit of each row, `odds` its row of Odds.rows.
    """
    num_rows, vocab = logits.shape
    heat = torch.from_numpy(odds[:, 0].astype(np.float32))
    scaled = (logits - top[:, None]).div_(heat[:, None])
    num_chunks = -(-vocab // CHUNK)
    padded = torch.empty((num_rows, num_chunks * CHUNK), dtype=torch.float32)
    padded[:, vocab:] = 0.0
    weighed = padded[:, :vocab]
    torch.exp(scaled, out=weighed)
    floor = floors(scaled, weighed, odds)
    if floor is not None:
        weighed.mul_(scaled >= floor[:, None])
    return padded.view(num_rows, num_chunks, CHUNK)


def floors(scaled: Tensor, weighed: Tensor, odds: Floats) -> Tensor | None:
    """The lowest scaled logit of each row that may be drawn, [n]; None where no row cuts anything.

    scaled [n, vocabulary]: logits less the highest, over temperature; weighed: exp of that. One row's cuts come one
    after the other: top_p takes its share of what top_k left.
    """
    vocab = scaled.shape[1]
    _, k, p, least = odds.T
    k = np.where((k > 0) & (k < vocab), k, 0).astype(np.int64)
    if not (k.any() or (p < 1.0).any() or (least > -np.inf).any()):
        return None
    floor = least.copy()
    cut = np.flatnonzero((k > 0) | (p < 1.0))
    if len(cut):
        floor[cut] = np.maximum(floor[cut], _ranked_floors(scaled, weighed, cut, k[cut], p[cut]))
    # The likeliest token always stands: exp and log need not be inverses to the last bit.
    return torch.from_numpy(np.minimum(floor, 0.0).astype(np.float32))


def _ranked_floors(scaled: Tensor, weighed: Tensor, rows: Ints, k: Ints, p: Floats) -> Floats:
    """Floors of top_k (0: all) and top_p for `rows`, which have at least one of them."""
    vocab = scaled.shape[1]
    # The nucleus of a row with top_k lies within it.
    wanted = min(max(int(k.max()), NUCLEUS if ((p < 1.0) & (k == 0)).any() else 1), vocab)
    ranked = torch.topk(_some(scaled, rows), wanted, dim=1).values.numpy()
    floor = np.where(k > 0, ranked[np.arange(len(k)), np.maximum(k - 1, 0)], -np.inf).astype(np.float64)
    nucleus = np.flatnonzero(p < 1.0)
    if not len(nucleus):
        return floor
    least = torch.from_numpy(floor[nucleus].astype(np.float32))[:, None]
    weight = _some(weighed, rows[nucleus])
    if (k[nucleus] > 0).any():
        weight = weight * (_some(scaled, rows[nucleus]) >= least)
    total = weight.sum(dim=1, dtype=torch.float64).numpy()
    share = p[nucleus] * total
    found, is_found = _reached(ranked[nucleus], floor[nucleus], share)
    for i in np.flatnonzero(~is_found).tolist():
        # Wider than what was ranked: only now is it worth sorting everything, ten times as fast in numpy as in torch.
        everything = scaled[int(rows[nucleus[i]])].numpy()
        values, enough = _reached(np.sort(everything)[None, ::-1], floor[nucleus[i : i + 1]], share[i : i + 1])
        # Where rounding keeps even the whole from its share, nothing is cut that top_k left.
        found[i] = values[0] if enough[0] else floor[nucleus[i]]
    floor[nucleus] = found
    return floor


def _reached(ranked: NDArray[np.float32], least: Floats, share: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """The value at which the mass of ranked [n, m], best first and not below `least`, reaches `share`; if it does."""
    stands = ranked >= least[:, None]
    mass = np.cumsum(np.exp(ranked.astype(np.float64)) * stands, axis=1)
    place = (mass < share[:, None]).sum(axis=1)
    is_found = place < stands.sum(axis=1)
    return ranked[np.arange(len(ranked)), np.where(is_found, place, 0)].astype(np.float64), is_found


def invert(mass: Tensor, lane: Ints, u: Floats) -> Ints:
    """The token at which the cumulative mass of row lane[i] first exceeds u[i] times its total. Returns int64 [draws].

    mass float32 [n, chunks, CHUNK], u in [0, 1).
    """
    at = torch.from_numpy(lane)
    ends = mass.sum(dim=2, dtype=torch.float32).double().cumsum(dim=1)  # [n, chunks]
    target = torch.from_numpy(u) * ends[at, -1]
    # Chunks of no mass end where the one before them ends, and are passed over; rounding must not walk off the row.
    last = _last_positive(ends.diff(dim=1, prepend=ends.new_zeros((len(ends), 1))))[at]
    chunk = torch.minimum((ends[at] <= target[:, None]).sum(dim=1), last)
    inside = mass[at, chunk].double()  # [draws, CHUNK]
    before = torch.where(chunk > 0, ends[at, (chunk - 1).clamp_(min=0)], 0.0)
    steps = inside.cumsum(dim=1) <= (target - before)[:, None]
    return (chunk * CHUNK + torch.minimum(steps.sum(dim=1), _last_positive(inside))).numpy()


def _last_positive(values: Tensor) -> Tensor:
    """Index of the last positive entry of each row."""
    places = torch.arange(values.shape[1])
    return torch.where(values > 0, places, 0).amax(dim=1)


def _some(values: Tensor, rows: Ints) -> Tensor:
    """values[rows]; without a copy where that is all of them."""
    return values if len(rows) == len(values) else values[torch.from_numpy(rows)]
