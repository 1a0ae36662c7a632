"""The virtual clock: what is to happen and when, in order. Time jumps from one to the next."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]
NEVER_S = float("inf")


class Agenda:
    """Of two things at one moment, that which was put down first happens first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, Action]] = []
        self._num_noted = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def next_s(self) -> float:
        return self._waiting[0][0] if self._waiting else NEVER_S

    def after(self, seconds: float, action: Action) -> None:
        self._num_noted += 1
        heapq.heappush(self._waiting, (self.now + seconds, self._num_noted, action))

    def next(self) -> None:
        """The next thing happens. There is one."""
        at_s, _, action = heapq.heappop(self._waiting)
        self.now = max(self.now, at_s)
        action()
