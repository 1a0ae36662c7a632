"""Named prefixes: sequences that are computed once, never decode, and are held for whoever begins like them.

    pin       [ s y s t ][ e m . . ]         PINNED: a table, no row; never a victim
    request   [ s y s t ][ e m h i ]         shares the full blocks by name, and copies what it has in common with the
                  shared     copied           partial one, which it would write at once

A pin belongs to one worker group and ends with its lease; the engine makes a new one on the next. What it holds is
taken off the pool before anybody is told that a request can ever fit.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass

from kilburn.controller.core.prefix_index import Salt
from kilburn.controller.core.sequence import Group, Place
from kilburn.shared.sampling import Sampling

FIRST = -(1 << 31) - 1  # before every request: pins are few, short and wanted by many


@dataclass(frozen=True, slots=True)
class Prefix:
    """A name as the engine keeps it. Public ones are unsalted and everybody's."""

    prefix_id: int
    tokens: tuple[int, ...]
    salt: Salt
    is_public: bool

    def serves(self, salt: bytes) -> bool:
        """Whether a request with this salt may begin with it."""
        return self.is_public or self.salt.value == salt


class PinGroup(Group):
    """A prefix being computed, or held, on one worker group. Its limit is its length, and its one draw is not used."""

    __slots__ = ("prefix",)

    def __init__(self, prefix: Prefix, arrival: int) -> None:
        greedy = Sampling(temperature=0.0)
        super().__init__(prefix.prefix_id, Place(FIRST, arrival), prefix.tokens, 1, greedy, 1, prefix.salt)
        self.prefix = prefix


def common_run(a: Listing[int], b: Listing[int]) -> int:
    """How many leading tokens two lists share."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # a[:low] == b[:low], and they differ before `high` + 1
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def public_run(tokens: Listing[int], prefixes: Iterable[Prefix]) -> int:
    """How many leading tokens lie inside a public prefix."""
    public = [prefix for prefix in prefixes if prefix.is_public]
    tokens = tuple(tokens) if public else ()  # a copy, which most servers never need
    return max((common_run(tokens, prefix.tokens) for prefix in public), default=0)


def longest_pin(prompt: Listing[int], salt: bytes, pins: Iterable[PinGroup]) -> tuple[PinGroup | None, int]:
    """Of the pins that a request with this salt may use, the one that shares most with its prompt, and how much."""
    able = [pin for pin in pins if pin.prefix.serves(salt)]
    prompt = tuple(prompt) if able else ()
    best: PinGroup | None = None
    run = 0
    for pin in able:
        shared = common_run(prompt, pin.prefix.tokens)
        if shared > run:
            best, run = pin, shared
    return best, run
