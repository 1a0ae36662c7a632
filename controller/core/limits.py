"""Time, as requests feel it: how fast the queue drains, and whose time is up.

    Submit ---- waits ----> begins ------ runs ------> ends
      |------- queue_s ------>|                             else refused
      |--------------------- request_s ------------------>  else ended with what it has, or refused if it never began

Both are counted from the Submit and end at the first turn of the engine after them, whose `deadline` says when. What a
request has waited before its Submit for a worker to come is `Patience`: its Submit asks for what is left.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from kilburn.controller.core.events import Refusal, Refused

WINDOW_S = 30.0  # what "of late" means
MOST_WAIT_S = 600.0  # nobody is told to stay away for longer


class Outflow:
    """Requests that began of late, and the tokens of their prompts, by the second."""

    def __init__(self) -> None:
        self._seconds: deque[list[float]] = deque()  # [when the first of them began, requests, tokens]

    def began(self, num_requests: int, num_tokens: int, now: float) -> None:
        if not self._seconds or now >= self._seconds[-1][0] + 1.0:
            self._seconds.append([now, 0, 0])
        self._seconds[-1][1] += num_requests
        self._seconds[-1][2] += num_tokens
        while self._seconds[0][0] < now - WINDOW_S:
            self._seconds.popleft()

    def rates(self, now: float) -> tuple[float, float]:
        """Requests and tokens that leave the queue in a second."""
        recent = [entry for entry in self._seconds if entry[0] >= now - WINDOW_S]
        if not recent:
            return 0.0, 0.0
        span_s = max(now - recent[0][0], 1.0)
        return sum(entry[1] for entry in recent) / span_s, sum(entry[2] for entry in recent) / span_s

    def wait_s(self, num_requests: int, num_tokens: int, now: float) -> int:
        """Whole seconds until so much has left the queue; where nothing does, until more is known."""
        requests_per_s, tokens_per_s = self.rates(now)
        if not requests_per_s:
            return math.ceil(WINDOW_S)
        waits = [num_requests / requests_per_s, num_tokens / tokens_per_s if tokens_per_s else 0.0]
        return math.ceil(min(max(*waits, 1.0), MOST_WAIT_S))


class Limit(Enum):
    """Which of a request's times is up."""

    QUEUE = "queue"
    REQUEST = "request"


def shorter(setting_s: float, asked_s: float | None) -> float | None:
    """A time limit: what was asked for, within what the setting allows (0: anything). None: there is none."""
    if asked_s is None:
        return setting_s or None
    return min(asked_s, setting_s) if setting_s else asked_s


@dataclass(slots=True)
class Patience:
    """What is left of a request's times. None: as long as the settings allow."""

    queue_s: float | None = None
    request_s: float | None = None

    def bound(self, queue_s: float, request_s: float) -> None:
        """Within what the settings allow, from now on."""
        self.queue_s, self.request_s = shorter(queue_s, self.queue_s), shorter(request_s, self.request_s)

    def spend(self, seconds: float) -> None:
        if self.queue_s is not None:
            self.queue_s = max(self.queue_s - seconds, 0.0)
        if self.request_s is not None:
            self.request_s = max(self.request_s - seconds, 0.0)

    def first_within(self, seconds: float) -> tuple[float, Limit | None]:
        """How long it lasts, and what ends it: one of its times, or None where `seconds` are over before."""
        limit_s, limit = seconds, None
        for found_s, found in ((self.queue_s, Limit.QUEUE), (self.request_s, Limit.REQUEST)):
            if found_s is not None and found_s < limit_s:
                limit_s, limit = found_s, found
        return limit_s, limit


def gave_up_waiting(request_id: int, limit: Limit, retry_after_s: int) -> Refused:
    """What becomes of a request whose time is up before it began."""
    if limit is Limit.REQUEST:
        message = "the request's time ran out before it could begin; allow more (timeout, --request-seconds)"
        return Refused(request_id, Refusal.REQUEST_TIMEOUT, message)
    message = "the request waited too long to begin; allow more (queue_timeout, --queue-seconds) or try again"
    return Refused(request_id, Refusal.QUEUE_TIMEOUT, message, retry_after_s)


class Clocks:
    """The times at which requests run out of it. What has ended meanwhile is left in, and cleared away now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # a Limit by its word: both of a request may end at once

    def set(self, at: float, request_id: int, limit: Limit) -> None:
        heapq.heappush(self._heap, (at, request_id, limit.value))

    @property
    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[tuple[int, Limit]]:
        while self._heap and self._heap[0][0] <= now:
            _, request_id, word = heapq.heappop(self._heap)
            yield request_id, Limit(word)

    def clear_away(self, is_known: Callable[[int], bool], num_known: int) -> None:
        """Forget those who are not known any more, once they are most of what is here."""
        if len(self._heap) > 64 + 4 * num_known:
            self._heap = [entry for entry in self._heap if is_known(entry[1])]
            heapq.heapify(self._heap)
