"""Real processes under load, while workers, controllers, Redis and connections are killed, paused and cut at random.

    python bench/chaos.py --seconds 600 --seed 7                                  fake workers: the most accidents
    python bench/chaos.py --seconds 600 --seed 7 --model smollm2-135m-instruct    real ones

Accidents and requests are drawn from the seed; how they fall together is up to the machine. Afterwards all of this must
hold, or the run has failed (status 1):

    every request sent was finished, or refused with a reason, or its client had left
    what was finished says what it said undisturbed; what a broken stream had said was right so far
    every block is free or cached, no request and no stream is open, no law was broken, no traceback is in a log
    no process that lived through most of it grew, and none keeps more descriptors open than before
"""

import argparse
import asyncio
import contextlib
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.chaos_load import Load
from bench.chaos_world import FAKE, Process, World, running_world

START_S = 180.0
SETTLE_S = 120.0  # for everything to be well again, and for what is idle to be closed
GAP_S = (0.2, 1.2)  # between one accident and the next
CALM_OF_REAL = 4.0  # times as long where workers load a model, or hardly anything would ever be computed
PAUSE_S = (0.1, 4.0)  # of a process, a connection; up to twice what a worker may be silent
SAMPLE_S = 0.5
LOADING_S, GROWING_S = 30.0, 60.0  # of a process's life: to load all that it needs, and to be judged afterwards
MOST_GROWTH_MB = 48.0
MOST_NEW_DESCRIPTORS = 8  # connections that are kept for the next request come and go
FLOOD_FRAMES = 2000

Accident = Callable[[World, int, random.Random], Awaitable[None]]


# --- what happens to whom


async def _paused(process: Process, dice: random.Random) -> None:
    process.send(signal.SIGSTOP)
    await asyncio.sleep(dice.uniform(*PAUSE_S))
    process.send(signal.SIGCONT)


async def worker_killed(world: World, i: int, dice: random.Random) -> None:
    world.workers[i].send(signal.SIGKILL)


async def worker_told_to_leave(world: World, i: int, dice: random.Random) -> None:
    world.workers[i].send(signal.SIGTERM)


async def worker_paused(world: World, i: int, dice: random.Random) -> None:
    await _paused(world.workers[i], dice)


async def controller_killed(world: World, i: int, dice: random.Random) -> None:
    world.controllers[i].send(signal.SIGKILL)


async def controller_paused(world: World, i: int, dice: random.Random) -> None:
    await _paused(world.controllers[i], dice)


async def link_cut(world: World, i: int, dice: random.Random) -> None:
    world.to_workers[i].cut()


async def link_half_open(world: World, i: int, dice: random.Random) -> None:
    world.to_workers[i].stall()
    await asyncio.sleep(dice.uniform(*PAUSE_S))
    world.to_workers[i].flow()


async def link_slow(world: World, i: int, dice: random.Random) -> None:
    world.to_workers[i].lag_s = dice.uniform(0.01, 0.2)
    await asyncio.sleep(dice.uniform(*PAUSE_S))
    world.to_workers[i].lag_s = 0.0


async def rest_cut(world: World, i: int, dice: random.Random) -> None:
    world.to_controllers[i].cut()


async def rest_half_open(world: World, i: int, dice: random.Random) -> None:
    world.to_controllers[i].stall()
    await asyncio.sleep(dice.uniform(*PAUSE_S))
    world.to_controllers[i].flow()


async def redis_killed(world: World, i: int, dice: random.Random) -> None:
    world.redis.is_wanted = False
    world.redis.send(signal.SIGKILL)
    await asyncio.sleep(dice.uniform(*PAUSE_S))
    world.redis.is_wanted = True


async def redis_paused(world: World, i: int, dice: random.Random) -> None:
    await _paused(world.redis, dice)


async def redis_flushed(world: World, i: int, dice: random.Random) -> None:
    port = int(world.redis.command[world.redis.command.index("--port") + 1])
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"FLUSHALL\r\n")
            await writer.drain()
            writer.close()


async def strangers(world: World, i: int, dice: random.Random) -> None:
    """Bytes that are no ZeroMQ, and frames that are no message, as fast as they are taken."""
    port, junk = world.link_ports[i], dice.randbytes(4096)

    def flood() -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as raw:
            raw.sendall(junk)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.SNDTIMEO, 50)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            for at in range(FLOOD_FRAMES):
                with contextlib.suppress(zmq.Again):
                    dealer.send(junk[at : at + 64])

    await asyncio.to_thread(flood)


# Accidents and their weights.
ACCIDENTS: tuple[tuple[Accident, int], ...] = (
    (worker_killed, 5),
    (worker_told_to_leave, 1),
    (worker_paused, 3),
    (controller_killed, 1),
    (controller_paused, 2),
    (link_cut, 3),
    (link_half_open, 3),
    (link_slow, 2),
    (rest_cut, 3),
    (rest_half_open, 2),
    (redis_killed, 2),
    (redis_paused, 2),
    (redis_flushed, 2),
    (strangers, 2),
)


async def havoc(world: World, seed: int, seconds: float, calm: float, happened: Counter[str]) -> None:
    """Accidents for so long; when it returns, nothing is paused or stalled any more."""
    dice, loop = random.Random(f"{seed} accidents"), asyncio.get_running_loop()
    kinds, weights = zip(*ACCIDENTS, strict=True)
    deadline, under_way = loop.time() + seconds, set()
    while loop.time() < deadline:
        (accident,) = dice.choices(kinds, weights)
        happened[accident.__name__.replace("_", " ")] += 1
        whose = random.Random(dice.random())  # its own, so that which accidents there are is up to the seed alone
        under_way.add(asyncio.create_task(accident(world, dice.randrange(len(world.controllers)), whose)))
        await asyncio.sleep(calm * dice.uniform(*GAP_S))
    await asyncio.gather(*under_way)


# --- what must hold afterwards


@dataclass(slots=True)
class Watch:
    """Sizes of the processes, by name and number, since they were started."""

    descriptors: dict[str, int]  # of each while load ran and nothing was broken
    resident_mb: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # every SAMPLE_S
    grown_up: set[tuple[str, int]] = field(default_factory=set)  # had been asked before the first sample

    async def sample(self, world: World) -> None:
        while True:
            for process in world.processes:
                with contextlib.suppress(OSError):
                    self.resident_mb.setdefault((process.name, process.pid), []).append(process.resident_mb)
            self.grown_up = self.grown_up or set(self.resident_mb)
            await asyncio.sleep(SAMPLE_S)

    def growth_mb(self, least_s: float) -> dict[str, float]:
        """By name: how far it is at the end above the most of its first half, of those that lived so long.

        A process that was started meanwhile is looked at from when it has loaded all that it needs.
        """
        grown = {}
        for (name, pid), sizes in self.resident_mb.items():
            judged = sizes if (name, pid) in self.grown_up else sizes[int(LOADING_S / SAMPLE_S) :]
            if len(judged) * SAMPLE_S >= least_s:
                grown[name] = judged[-1] - max(judged[: len(judged) // 2])
        return grown


def figures(text: str, name: str, *parts: str) -> float:
    """The sum of a figure's samples whose labels hold all of the parts."""
    lines = [line for line in text.splitlines() if re.match(rf"kilburn_{name}[ {{]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(part in line for part in parts))


async def held(world: World) -> list[str]:
    """What somebody still holds, though nobody asks for anything."""
    faults = []
    for controller, url in zip(world.controllers, world.urls, strict=True):
        text = await world.metrics(url)
        for state in ("owned", "quarantined"):
            if blocks := figures(text, "blocks", f'state="{state}"'):
                faults.append(f"{controller.name}: {blocks:g} blocks are {state}")
        if not figures(text, "blocks", 'state="free"') + figures(text, "blocks", 'state="cached"'):
            faults.append(f"{controller.name}: no block is free or cached")
        for name in ("requests", "streams_open", "laws_broken_total"):
            if count := figures(text, name):
                faults.append(f"{controller.name}: {name} is {count:g}")
    if count := figures(await world.metrics(world.url), "gateway_requests_under_way"):
        faults.append(f"gateway: {count:g} requests are under way")
    return faults


def leaked(world: World, before: dict[str, int]) -> list[str]:
    return [
        f"{process.name}: {now} descriptors are open, {before[process.name]} were"
        for process in world.processes
        if process is not world.redis and (now := process.num_descriptors) > before[process.name] + MOST_NEW_DESCRIPTORS
    ]


def tracebacks(world: World) -> list[str]:
    return [
        f"{process.name}: a traceback is in its log"
        for process in (world.gateway, *world.controllers)
        if "Traceback" in (process.folder / f"{process.name}.log").read_text(errors="replace")
    ]


async def settled(world: World, before: dict[str, int]) -> list[str]:
    """What is wrong still, once there was time to put it right."""
    await world.healthy(SETTLE_S)
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while (faults := await held(world) + leaked(world, before)) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.5)
    return faults + tracebacks(world)


# --- a run


@dataclass(slots=True)
class Report:
    load: Load
    happened: Counter[str]
    growth_mb: dict[str, float]
    faults: list[str]


async def run(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Report:
    happened: Counter[str] = Counter()
    async with running_world(options.model, options.controllers, folder) as world:
        await world.healthy(START_S)
        load = Load(world.session, world.url, options.seed)
        await load.rehearse()
        say("everything is up, and what is asked has been answered once")
        loading = asyncio.create_task(load.run(options.clients))
        await asyncio.sleep(min(options.seconds / 8, 5.0))  # connections are opened, caches filled
        watch = Watch({one.name: one.num_descriptors for one in world.processes})
        sampling = asyncio.create_task(watch.sample(world))
        calm = options.calm or (1.0 if options.model == FAKE else CALM_OF_REAL)
        await havoc(world, options.seed, options.seconds, calm, happened)
        say("no more accidents")
        await world.healthy(SETTLE_S)
        load.is_over = True
        await loading
        say("all is well again, and every client has its answer")
        sampling.cancel()
        faults = await settled(world, watch.descriptors)
    growth = watch.growth_mb(min(options.seconds / 3, GROWING_S))
    faults += [f"{name}: grew by {by:.0f} MB" for name, by in growth.items() if by > MOST_GROWTH_MB]
    if not load.tally.finished:
        faults.append("no request was finished: this shows nothing; give --calm more, or --seconds")
    if not load.tally.adds_up:
        faults.append("requests sent are not those finished, refused and left")
    return Report(load, happened, growth, load.tally.wrong[:20] + faults)


def tell(report: Report, console: Console) -> None:
    tally = report.load.tally
    table = Table("what", "times")
    for name, count in sorted(report.happened.items()):
        table.add_row(name, str(count))
    table.add_section()
    rows = {"sent": tally.sent, "finished as undisturbed": tally.finished, "left by their clients": tally.left}
    for name, count in rows.items():
        table.add_row(f"requests {name}", str(count))
    for code, count in tally.refused.most_common():
        table.add_row(f"refused: {code}", str(count))
    table.add_row("wrong", str(len(tally.wrong)))
    table.add_section()
    for name, by in report.growth_mb.items():
        table.add_row(f"{name}: growth, MB", f"{by:.1f}")
    console.print(table)
    for fault in report.faults:
        console.print(f"FAULT  {fault}", highlight=False, soft_wrap=True)
    console.print("clean" if not report.faults else f"{len(report.faults)} faults")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of accidents")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=FAKE, help="folder or name for real workers; fake: none")
    calm_of = f"times as long between accidents; 0: 1 with fake workers, {CALM_OF_REAL:g} with real ones"
    parser.add_argument("--calm", type=float, default=0.0, help=calm_of)
    parser.add_argument("--controllers", type=int, default=2, help="each with a worker of its own")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes; else they are dropped")
    options = parser.parse_args(words)
    if options.seconds <= 0 or options.calm < 0 or min(options.controllers, options.clients) < 1:
        parser.error("--seconds, --controllers and --clients must be positive, and --calm not negative")
    console, begun = Console(), time.monotonic()

    def say(text: str) -> None:
        console.print(f"seed {options.seed}, {time.monotonic() - begun:.0f} s: {text}", highlight=False)

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(run(options, folder, say))
    say("all is ended")
    tell(report, console)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
