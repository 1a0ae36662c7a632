"""From lengths to requests: when they come, and of which tokens their prompts are.

Tokens mean nothing here, save that equal beginnings are equal: a trace's prefix blocks become runs of one token each,
what all requests have in common another, and the rest of a prompt a token of its own. Of a conversation, questions are
of its token, and answers of the one that the worker draws, so that what was generated is found again. A trace without
times is a distribution to draw from; one with times is replayed, faster or slower.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from kilburn.controller.core.events import BeamSettings, Submit
from kilburn.controller.simulate.cluster import Timed
from kilburn.controller.simulate.quick import FIRST_ID, TOKEN
from kilburn.controller.simulate.traces import MOONCAKE_BLOCK, Asked
from kilburn.shared.sampling import Sampling

_COMMON = FIRST_ID
_FIRST_PREFIX = _COMMON + 1
_FIRST_OWN = 1 << 30
_FIRST_CONVERSATION = 1 << 29


def poisson(lengths: Sequence[Asked], rate: float, seconds: float, seed: int) -> list[Asked]:
    """Arrivals of so many a second, each as long as one of `lengths`, drawn with equal chances."""
    rng, at_s, found = Random(seed), 0.0, list[Asked]()
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        found.append(replace(lengths[rng.randrange(len(lengths))], at_s=at_s))
    return found


def replayed(asked: Iterable[Asked], speed: float, seconds: float = 0.0) -> list[Asked]:
    """A trace's requests in order of time, `speed` times as fast; those of its first `seconds`, if not 0."""
    timed = sorted((one for one in asked if one.at_s is not None), key=lambda one: one.at_s or 0.0)
    return [replace(one, at_s=(one.at_s or 0.0) / speed) for one in timed if not seconds or (one.at_s or 0.0) < seconds]


def superposed(asked: Sequence[Asked], factor: int, seconds: float) -> list[Asked]:
    """So many times the load of a trace with times: copy number i begins at i / factor of it, and goes round.

    Those of the first `seconds`, if not 0. Copies are of other people: their prompts have nothing in common.
    """
    length_s = max((one.at_s or 0.0 for one in asked), default=0.0)
    most_s, found = seconds or length_s, list[Asked]()
    for copy in range(factor):
        for one in asked:
            at_s = (one.at_s or 0.0) - copy / factor * length_s
            at_s += length_s if at_s < 0 else 0.0
            if at_s < most_s or factor == 1:
                found.append(replace(one, at_s=at_s, prefix_blocks=tuple(b * factor + copy for b in one.prefix_blocks)))
    return sorted(found, key=lambda one: one.at_s or 0.0)


def cut(asked: Asked, max_len: int) -> Asked:
    """So that it fits: an answer of at most half, and of the prompt what is left."""
    num_output = min(asked.num_output, max_len // 2)
    return replace(asked, num_output=num_output, num_prompt=min(max(asked.num_prompt, 1), max_len - num_output))


@dataclass(frozen=True, slots=True)
class Decoding:
    """What every request asks for."""

    n: int = 1
    beams: bool = False  # n of them, and all are returned
    sure_share: float = 0.0  # of a beam's positions, at which one candidate is all but certain
    num_common: int = 0  # tokens with which every prompt begins, beside its own
    shares: bool = True  # equal prefixes may be found; otherwise each request is alone
    heavy_percent: int = 0  # of the requests, those of one tenant; all others are of another

    def tenant_of(self, number: int) -> bytes:
        # 37 and 100 have nothing in common: so many of every hundred in a row, and no hundred begins with one tenant's.
        return b"heavy" if number * 37 % 100 < self.heavy_percent else b"light"


def submits(asked: Iterable[Asked], decoding: Decoding) -> Iterator[Timed]:
    """The requests, made as they come: prompts of a trace need not all be there at once."""
    common = [_COMMON] * decoding.num_common
    beams = BeamSettings(decoding.n) if decoding.beams else None
    for number, one in enumerate(asked):
        salt = b"" if decoding.shares else b"alone" + number.to_bytes(8, "little")
        sampling = Sampling(temperature=0.0, seed=number)
        prompt = common + _prompt(one, number)
        yield Timed(
            one.at_s or 0.0,
            Submit(
                number,
                prompt,
                one.num_output,
                sampling,
                n=decoding.n,
                salt=salt,
                beams=beams,
                tenant=decoding.tenant_of(number),
            ),
        )


PLAIN = Decoding()


def _prompt(asked: Asked, number: int) -> list[int]:
    prompt: list[int] = []
    for block in asked.prefix_blocks:
        prompt += [_FIRST_PREFIX + block] * MOONCAKE_BLOCK
    own = _FIRST_CONVERSATION + asked.conversation if asked.conversation else _FIRST_OWN + number
    for turn, num_tokens in enumerate(asked.before):
        prompt += [TOKEN if turn % 2 else own] * num_tokens
    return (prompt + [own] * max(asked.num_prompt - len(prompt), 0))[: asked.num_prompt]


def best_hit_share(asked: Iterable[Asked], block_size: int, decoding: Decoding = PLAIN, num_blocks: int = 0) -> float:
    """Of the prompt tokens, those that a cache without end would have found: full blocks that an earlier request had.

    As the engine counts: whole blocks, never the newest token. Every request, its answer included, is known as soon as
    it has come. With `num_blocks` a cache of so many, which are those that were in use last: what a pool of that size
    would find if it held nothing but cache, and requests came one after the other.
    """
    known, num_hit, total = OrderedDict[int, None](), 0, 0
    for timed in submits(asked, decoding):
        prompt, names = timed.submit.prompt, list[int]()
        total += len(prompt)
        # Of the last token drawn there is no KV.
        said = [*prompt, *[TOKEN] * (timed.submit.max_tokens - 1)]
        for end in range(block_size, len(said) + 1, block_size):
            names.append(hash((names[-1] if names else 0, tuple(said[end - block_size : end]))))
        for name in names[: (len(prompt) - 1) // block_size]:
            if name not in known:
                break
            num_hit += block_size
        for name in reversed(names):  # beginnings last: they outlive what extends them
            known[name] = None
            known.move_to_end(name)
        while num_blocks and len(known) > num_blocks:
            known.popitem(last=False)
    return num_hit / max(total, 1)
