"""How often values fell where, for onlookers: counts between edges, and a sum.

    edges   0.1   0.2   0.5            counts[i]: values above edges[i - 1] and up to edges[i]; the last: above all
    counts    3     0     7     1

Numbers only, and none goes down. It is cheap enough to be told of every token: a value that comes twice in a row, as
the gaps of all sequences of one step do, is looked up once.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram at one moment."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]  # one more than edges
    total: float  # of all values

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """See the file's head. `edges` ascend."""

    __slots__ = ("_at", "_counts", "_edges", "_last", "_total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._total = 0.0
        self._last = edges[0]
        self._at = 0  # where the last value fell

    def observe(self, value: float, times: int = 1) -> None:
        if value != self._last:
            self._last = value
            self._at = bisect_left(self._edges, value)
        self._counts[self._at] += times
        self._total += value * times

    def observe_each(self, values: Iterable[float]) -> None:
        for value in values:
            if value != self._last:
                self._last = value
                self._at = bisect_left(self._edges, value)
            self._counts[self._at] += 1
            self._total += value

    def spread(self) -> Spread:
        return Spread(self._edges, tuple(self._counts), self._total)
