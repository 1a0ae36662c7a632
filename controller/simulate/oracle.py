"""What every finished sequence must be: a language model of one line.

A model's next token depends on every token before it, and a draw besides on (seed, stream, position). The oracle has
just these dependencies and nothing else: the prefix is folded into one number, its *chain*,

    chain(()) = ROOT        chain(tokens + (t,)) = mix(chain(tokens), t)

which is also what a cell of the fake worker's KV holds for its position. Two prefixes that differ anywhere have
different chains, so a token computed from a foreign or a stale cell is a wrong token.

It knows nothing of blocks, rows, steps or leases. Vocabularies are small, so that stop ids come up by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason

MASK = (1 << 62) - 1
GRAIN = 1 << 18  # log probabilities are multiples of 1 / GRAIN
ROOT = 0x2545F4914F6CDD1D & MASK  # the chain of no tokens


def mix(chain: int, token: int) -> int:
    """The chain of a prefix that grew by one token."""
    folded = ((chain ^ (token + 1)) * 0x9E3779B97F4A7C15) & MASK
    return folded ^ (folded >> 31)


def chain_of(tokens: Sequence[int], chain: int = ROOT) -> int:
    """The chain of `tokens` after a prefix whose chain is given."""
    for token in tokens:
        chain = mix(chain, token)
    return chain


def next_token(chain: int, sampling: Sampling, stream: int, position: int, num_prompt: int, vocab_size: int) -> int:
    """The token at `position` after the prefix with this chain.

    `position` counts from 0 and equals the length of the prefix; `num_prompt` of its tokens are the prompt. A greedy
    row ignores seed and stream. Until sampling.min_tokens are generated no stop id comes. The border between prompt
    and generated tokens is part of a penalized choice, as it is of a real one.
    """
    state = chain
    if not sampling.is_greedy:
        state = mix(mix(state, sampling.seed & MASK), (stream << 20) + position)
    if sampling.is_penalised:
        state = mix(state, num_prompt)
    if sampling.grammar:  # what may come depends on it
        state = mix(state, int.from_bytes(sampling.grammar[:7], "little"))
    token = (state >> 7) % vocab_size
    if position - num_prompt < sampling.min_tokens:
        for _ in range(vocab_size):
            if token not in sampling.stop_ids:
                break
            token = (token + 1) % vocab_size
    return token


def candidates(chain: int, count: int, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens after a prefix, best first, with log probabilities."""
    first, state, logprob = (chain >> 7) % vocab_size, chain, 0.0
    found: list[tuple[int, float]] = []
    for i in range(min(count, vocab_size)):
        state = mix(state, i)
        logprob -= (1 + (state >> 9) % GRAIN) / GRAIN  # exact in float32, and a tie is rare
        found.append(((first + i) % vocab_size, logprob))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one sequence. A stop id is its last token."""

    tokens: tuple[int, ...]
    reason: FinishReason


def finish(prompt: Sequence[int], sampling: Sampling, max_tokens: int, n: int, vocab_size: int) -> list[Answer]:
    """The answers of an undisturbed request, one per index; index i draws from stream i."""
    return [_answer(prompt, sampling, max_tokens, stream, vocab_size) for stream in range(n)]


def _answer(prompt: Sequence[int], sampling: Sampling, max_tokens: int, stream: int, vocab_size: int) -> Answer:
    chain, num_prompt = chain_of(prompt), len(prompt)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        token = next_token(chain, sampling, stream, num_prompt + len(tokens), num_prompt, vocab_size)
        tokens.append(token)
        if token in sampling.stop_ids:
            return Answer(tuple(tokens), FinishReason.STOP)
        chain = mix(chain, token)
    return Answer(tuple(tokens), FinishReason.LENGTH)
