"""Who looks on, and what each is sent: a whole at first, then changes, at most some times a second.

    look() --(one task, while anybody looks on)--> Picture --> one event, made once --+--> viewer took the last one:
                                                                                      |    this one is next
                                                                                      +--> another did not: a whole,
                                                                                           when it is back

Nobody looks on: nothing runs. A viewer that is slow has one event waiting at most, holds nobody up, and is sent a whole
when it is back. The more a look costs, the rarer it is: of the loop, which also drives the engine, looking takes
`MOST_SHARE` at most, however large the pools are.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from kilburn.controller.api.layout import to_json
from kilburn.controller.page.picture import Picture, Rates, Totals, change, whole

log = logging.getLogger("kilburn")
LEAST_INTERVAL_S = 0.25
MOST_SHARE = 0.02  # of the loop's time
QUIET_S = 1.0  # while nothing happens, a sign of life so often
WINDOW_S = 5.0  # that rates are taken over
MOST_VIEWERS = 32


class TooManyViewers(Exception):
    """The feed has no room for one more."""


class _Viewer:
    """One reader. It is behind when it was not there for an event."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.next: str | None = None
        self.is_behind = True
        self.has_ended = False

    def offer(self, event: str) -> None:
        if self.next is not None or self.is_behind:
            self.next, self.is_behind = None, True
        else:
            self.next = event
        self.news.set()


@dataclass(slots=True)
class FeedCosts:
    """What the feed has cost since the start."""

    events: int = 0
    seconds: float = 0.0
    last_s: float = 0.0
    bytes_made: int = 0


class Feed:
    """See the file's head. `look` is asked on the loop's thread, between turns of the engine."""

    def __init__(self, look: Callable[[], Picture], clock: Callable[[], float]) -> None:
        self._look, self._clock = look, clock
        self._viewers: list[_Viewer] = []
        self._picture: Picture | None = None
        self._whole: str | None = None  # of the present picture, once somebody wanted it
        self._number = 0
        self._task: asyncio.Task[None] | None = None
        self._history: deque[tuple[float, Totals]] = deque()
        self._is_closed = False
        self.costs = FeedCosts()

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def is_looking(self) -> bool:
        return self._task is not None

    @property
    def interval_s(self) -> float:
        """Until the next look."""
        return max(LEAST_INTERVAL_S, self.costs.last_s / MOST_SHARE)

    async def events(self) -> AsyncGenerator[str]:
        """JSON, one event at a time, until the feed closes. Raises TooManyViewers."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise TooManyViewers
        viewer = _Viewer()
        self._viewers.append(viewer)
        if self._task is None and not self._is_closed:
            self._take(self._clock())
            self._task = asyncio.create_task(self._run())
        viewer.news.set()
        try:
            while True:
                await viewer.news.wait()
                viewer.news.clear()
                if viewer.has_ended or self._is_closed:
                    return  # also one that came while the feed was closing
                event, viewer.next = viewer.next, None
                if viewer.is_behind:
                    viewer.is_behind, event = False, self._as_whole()
                if event is not None:
                    yield event
        finally:
            self._viewers.remove(viewer)
            if not self._viewers:
                self._stop()

    def end_all(self) -> None:
        """Every viewer is sent away, and may come again."""
        for viewer in self._viewers:
            viewer.has_ended = True
            viewer.news.set()

    def close(self) -> None:
        """Every viewer is sent away, for good."""
        self._is_closed = True
        self._stop()
        self.end_all()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = self._picture = self._whole = None
        self._history.clear()

    async def _run(self) -> None:
        try:
            await self._tell_on()
        except Exception:
            log.exception("the block map cannot be shown")
            self.end_all()

    async def _tell_on(self) -> None:
        told_at = self._clock()
        while True:
            await asyncio.sleep(self.interval_s)
            now, before = self._clock(), self._picture
            begun = time.thread_time()  # not the time of others that had the core meanwhile
            picture = self._take(now)
            if before is not None and now - told_at < QUIET_S and picture.shows_the_same(before):
                self._picture = before
                self._spent(begun)
                continue
            told_at, self._whole = now, None
            self._number += 1
            event = to_json(change(before or picture, picture, self._number))
            for viewer in self._viewers:
                viewer.offer(event)
            self._spent(begun)
            self.costs.events += 1
            self.costs.bytes_made += len(event)

    def _spent(self, begun: float) -> None:
        self.costs.last_s = time.thread_time() - begun
        self.costs.seconds += self.costs.last_s

    def _take(self, now: float) -> Picture:
        picture = self._look()
        self._picture = replace(picture, rates=self._rates(now, picture.totals))
        return self._picture

    def _as_whole(self) -> str:
        if self._whole is None:
            self._whole = to_json(whole(self._picture or self._take(self._clock()), self._number))
        return self._whole

    def _rates(self, now: float, totals: Totals) -> Rates:
        history = self._history
        history.append((now, totals))
        while len(history) > 2 and history[1][0] <= now - WINDOW_S:
            history.popleft()
        since, before = history[0]
        if now <= since:
            return Rates()
        num_prompt = totals.prompt_tokens - before.prompt_tokens
        return Rates(
            output_tokens_per_s=round((totals.output_tokens - before.output_tokens) / (now - since), 1),
            prompt_tokens_per_s=round(num_prompt / (now - since), 1),
            hit_rate=round((totals.cached_tokens - before.cached_tokens) / num_prompt, 4) if num_prompt else None,
        )
