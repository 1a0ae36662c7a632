"""What a start shows: the time of each phase, and how far a long one has come. Imports nothing that computes."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("kilburn.worker")
_is_logged = False


def say_to_log() -> None:
    """From here on progress is logged, for those who read nothing else."""
    global _is_logged
    _is_logged = True


def say(line: str) -> None:
    """A line of progress, for whoever started this process."""
    if _is_logged:
        _log.info("%s", line.strip())
    else:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def phase(name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    say(f"phase {name} {time.perf_counter() - began:.1f} s")


class Progress:
    """Shows how far a long phase has come: at most one line per second, and nothing for what takes no time."""

    def __init__(self, quiet_s: float = 1.0) -> None:
        self._quiet_s, self._next = quiet_s, time.monotonic() + quiet_s

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._quiet_s
        say(f"  {what} {100 * done // total} %" if total else f"  {what}")
