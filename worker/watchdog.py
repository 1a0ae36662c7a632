"""Ends this process when a step of it will never end.

A collective cannot be cancelled: where another rank hangs, or a device does, whoever waits in one waits for ever, and
so does the thread that would hear of it. A thread of its own looks at two things while a step runs:

    the step's deadline has passed            nobody waits for its result any more
    the lease has ended, and some time since  whoever can still raise an error has done so by now

Either way the process ends at once, and whoever supervises it starts another.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("kilburn.worker")

EXIT_CODE = 3


class Watchdog:
    """Watches one thread. `is_over` says whether the lease has ended; it is asked while a step runs."""

    def __init__(
        self,
        is_over: Callable[[], bool],
        grace_s: float = 5.0,
        poll_s: float = 0.25,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._is_over, self._grace_s, self._poll_s, self._end = is_over, grace_s, poll_s, end
        self._deadline: float | None = None  # of the step that runs
        self._limit_s = 0.0
        threading.Thread(target=self._watch, name="kilburn-watchdog", daemon=True).start()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """What runs inside ends within `seconds`, or the process does."""
        self._limit_s = seconds
        # Errors of its own are to come first, where there are any: they keep the process and its weights.
        self._deadline = time.monotonic() + seconds + self._grace_s
        try:
            yield
        finally:
            self._deadline = None

    def _watch(self) -> None:
        over_since: float | None = None
        while True:
            time.sleep(self._poll_s)
            deadline, now = self._deadline, time.monotonic()
            if deadline is None:
                over_since = None
                continue
            if now >= deadline:
                self._stop(f"a step is stuck: it runs for over {self._limit_s:g} s, its deadline")
                return
            if not self._is_over():
                over_since = None
            elif over_since is None:
                over_since = now
            elif now - over_since >= self._grace_s:
                self._stop("a step is stuck: its lease is over, and it does not end")
                return

    def _stop(self, why: str) -> None:
        log.critical("%s; this process ends, and is to be started again", why)
        self._end(EXIT_CODE)
