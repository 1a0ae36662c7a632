"""Beam search by brute force: what a search of the core must come to.

Every continuation of every beam is looked at, all of the vocabulary, with the whole prefix folded anew each time; the
rules are written down once more from their source (transformers' beam search), and nothing of the core is used but the
request. Of equals, the one whose parent ranked higher is first, then the likelier token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kilburn.controller.core.events import BeamSettings, EarlyStopping
from kilburn.controller.simulate.oracle import candidates, chain_of
from kilburn.shared.types import FinishReason

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A choice of a finished search."""

    tokens: Tokens
    cumulative: float
    score: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Search:
    """A finished search. `levels[k]` are the beams that went on after k generated tokens."""

    outcomes: list[Outcome]  # best first
    levels: list[list[Tokens]]


def search(
    prompt: Sequence[int], stop_ids: Sequence[int], max_tokens: int, settings: BeamSettings, vocab_size: int
) -> Search:
    width, penalty = settings.width, settings.length_penalty
    beams: list[tuple[float, Tokens]] = [(0.0, ())]
    kept: list[Outcome] = []
    levels: list[list[Tokens]] = [[()]]
    for length in range(1, max_tokens + 1):
        every = []
        for total, tokens in beams:
            likely = candidates(chain_of([*prompt, *tokens]), vocab_size, vocab_size)
            every += [(total + logprob, (*tokens, token)) for token, logprob in likely]
        every.sort(key=lambda one: one[0], reverse=True)  # stable, also when reversed
        for total, tokens in every[:width]:
            if tokens[-1] in stop_ids:
                kept.append(Outcome(tokens, total, total / length**penalty, FinishReason.STOP))
            elif length == max_tokens:
                kept.append(Outcome(tokens, total, total / length**penalty, FinishReason.LENGTH))
        kept = sorted(kept, key=lambda one: one.score, reverse=True)[:width]
        beams = [(total, tokens) for total, tokens in every if tokens[-1] not in stop_ids][:width]
        if length == max_tokens or _is_over(kept, beams[0][0], length, max_tokens, settings):
            break
        levels.append([tokens for _, tokens in beams])
    return Search(kept, levels)


def _is_over(kept: list[Outcome], best: float, length: int, max_tokens: int, settings: BeamSettings) -> bool:
    if len(kept) < settings.width:
        return False
    match settings.early_stopping:
        case EarlyStopping.FULL:
            return True
        case EarlyStopping.HEURISTIC:
            hoped = best / length**settings.length_penalty
        case EarlyStopping.NEVER:  # log probabilities are negative: a longer answer may score higher
            hoped = best / (max_tokens if settings.length_penalty > 0 else length) ** settings.length_penalty
    return bool(hoped <= kept[-1].score)
