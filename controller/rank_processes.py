"""The ranks of one worker group as processes of this machine: their commands, and `kilburn worker --tp N` with them.

Each rank is a process and has a supervisor: one that dies, or ends itself because it is stuck, is started again, while
the others keep their weights and wait for it. Where each rank has a machine of its own (one pod of a StatefulSet, say)
it is started there by `kilburn worker --tp N --rank R`, and what supervises that supervises it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace

from kilburn.controller.supervise import Supervisor, WorkerFailed
from kilburn.shared.config import WorkerSettings, as_flags
from kilburn.shared.threads import threads_for

GRACE_S = 10.0  # after SIGTERM


def rank_commands(worker: WorkerSettings) -> list[list[str]]:
    """One for each rank, in their order; `worker` has a name. CPU threads are divided among them."""
    if worker.tp == 1:
        return [_command(worker)]
    worker = replace(worker, threads=threads_for(worker.threads, worker.tp * worker.sharers))
    return [_command(replace(worker, rank=rank)) for rank in range(worker.tp)]


def _command(worker: WorkerSettings) -> list[str]:
    return [sys.executable, "-m", "kilburn.worker", *as_flags(replace(worker, exit_with_parent=True))]


def run_ranks(worker: WorkerSettings) -> int:
    """All ranks, until told to stop. Exit status: 0 after a signal, 1 if one of them cannot be kept alive."""
    return asyncio.run(_run(rank_commands(worker), lambda text: print(f"kilburn worker: {text}", file=sys.stderr)))


async def _run(commands: list[list[str]], say: Callable[[str], None]) -> int:
    supervisors = [Supervisor(command, os.environ, on_end=lambda pid, reason: None, say=say) for command in commands]
    runs = [asyncio.create_task(supervisor.run()) for supervisor in supervisors]
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    stopping = asyncio.create_task(told.wait())
    await asyncio.wait({stopping, *runs}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*[supervisor.stop(GRACE_S) for supervisor in supervisors])
    stopping.cancel()
    failures = [end for end in await asyncio.gather(*runs, return_exceptions=True) if end is not None]
    for failure in failures:
        if not isinstance(failure, WorkerFailed):
            raise failure
        say(str(failure))
    return 1 if failures else 0
