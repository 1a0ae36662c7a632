"""Keeping one worker process alive: start it, say why it ended, start it again, and know when to stop trying.

    start -> runs -> ends -> on_end(pid, why) -> pause -> start ...        pauses double while lives are short
                       |
                       +-- status 2: its settings cannot work; a second start would end the same way
                       +-- too many short lives in a row: a storm; the last reason is the answer

The worker has a process group of its own, so that Ctrl-C in a terminal reaches only the one who started it, who then
ends it in good order: SIGTERM, and SIGKILL after a bound.

What this file does not know: leases, engines, models. It knows processes.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

SETTINGS_STATUS = 2  # how a command ends whose settings cannot work


@dataclass(slots=True)
class Patience:
    """When to start a process again. Lives shorter than `short_s` count; a longer one is forgiven everything."""

    short_s: float = 30.0
    max_short_lives: int = 5
    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0
    num_short: int = 0

    def pause_after(self, life_s: float) -> float | None:
        """Seconds until the next start; None: no more."""
        self.num_short = self.num_short + 1 if life_s < self.short_s else 0
        if self.num_short > self.max_short_lives:
            return None
        return min(self.first_pause_s * 4.0 ** max(self.num_short - 1, 0), self.longest_pause_s)


class WorkerFailed(Exception):
    """No worker can be kept alive. The text is for the user."""


def why(status: int) -> str:
    """An exit status, as asyncio has it, in words."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class Supervisor:
    """Runs `command` again and again until `stop`, or until it ends when it is no longer wanted."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        on_end: Callable[[int, str], None],
        say: Callable[[str], None],
        patience: Patience | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._command, self._environ = list(command), dict(environ)
        self._on_end, self._say, self._is_wanted = on_end, say, is_wanted
        self._patience = patience or Patience()
        self._process: asyncio.subprocess.Process | None = None
        self._killed_since = ""  # why it was killed here; empty: it was not
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Returns when nobody wants the process any more; raises WorkerFailed when there is no point in going on."""
        while not self._stopping:
            begun = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environ, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
            self._process, self._killed_since = process, ""
            if self._stopping:  # said while the process was being made
                _ask_to_leave(process)
            status = await process.wait()
            self._process = None
            if self._stopping or not self._is_wanted():
                return
            ended = self._killed_since or why(status)
            self._on_end(process.pid, f"its process {ended}")
            if status == SETTINGS_STATUS:
                raise WorkerFailed("the worker cannot run with these settings; its message is above")
            pause_s = self._patience.pause_after(time.monotonic() - begun)
            if pause_s is None:
                raise WorkerFailed(f"{self._patience.num_short} workers in a row ended early; the last one {ended}")
            self._say(f"worker (pid {process.pid}) {ended}; starting another in {pause_s:g} s")
            await asyncio.sleep(pause_s)

    def kill(self, since: str) -> None:
        """End the process that runs now, whatever state it is in; another is started, as after any end."""
        if self._process is not None:
            self._killed_since = f"{since}, and was killed"
            with suppress(ProcessLookupError):  # it may have ended a moment ago
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. The process is gone when this returns."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        _ask_to_leave(process)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            self._say(f"worker (pid {process.pid}) did not leave within {grace_s:g} s and is killed")
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _ask_to_leave(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it has just ended by itself, as workers do when their controller leaves
        process.terminate()
