"""A real controller that can be looked into: `python -m tests.system.watched_controller --model=...`.

stdout   {"http": ..., "workers": ...} once it is bound
stdin    snapshot   -> a line of JSON: the engine's own numbers at this moment
         break      -> loses a free block of the first worker group, if it has one: a fault of ours, as one might be
                       made; says which
"""

import asyncio
import json
import os
import socket
import sys
from dataclasses import asdict, fields
from enum import Enum
from typing import Any

from kilburn.controller.app import Running, run_controller
from kilburn.controller.core.histogram import Spread
from kilburn.shared.config import ControllerSettings, load_or_exit
from kilburn.shared.messages import WorkerMemory


def plain(value: Any) -> Any:
    match value:
        case Enum():
            return value.value
        case Spread():
            return {"count": value.count, "total": value.total}
        case dict():
            return {" ".join(part.value for part in key): number for key, number in value.items()}
        case WorkerMemory():
            return asdict(value)
        case tuple():
            return [{f.name: plain(getattr(entry, f.name)) for f in fields(entry)} for entry in value]
        case _:
            return value


def say(thing: dict[str, Any]) -> None:
    print(json.dumps(thing), flush=True)


def keep_little_in_the_kernel() -> None:
    """Whoever connects from now on gets small buffers: a reader that does not read is noticed after some kilobytes."""
    for word in os.listdir("/proc/self/fd"):
        try:
            held = socket.socket(fileno=os.dup(int(word)))
        except OSError:
            continue  # no socket, or gone
        with held:
            if held.family == socket.AF_INET and held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                held.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def listen(running: Running) -> None:
    keep_little_in_the_kernel()

    def heard() -> None:
        engine = running.driver.engine
        match sys.stdin.readline().strip():
            case "snapshot":
                snapshot = engine.snapshot()
                say({f.name: plain(getattr(snapshot, f.name)) for f in fields(snapshot)})
            case "break":
                home = next(iter(engine._homes.values()))
                free = home.scheduler.pool._free
                lost = [free.pop()] if free else []
                say({"lost": lost})

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), heard)
    say({"http": running.http_address, "workers": running.endpoint})


if __name__ == "__main__":
    asyncio.run(run_controller(load_or_exit(ControllerSettings, sys.argv[1:], "watched", "A controller."), listen))
