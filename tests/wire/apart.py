"""A controller and a real worker's link and life on real sockets, and accidents of the network between them.

    python -m tests.wire.apart namespace|proxy SCENARIO...

plays scenarios and prints what came of each, a line of JSON. Where the kernel allows it (`unshare -rn`) a partition is
made by taking down the only interface of a network namespace: both ends keep their sockets, nobody is told, no packet
passes; loss is netem's, where the kernel has it. Elsewhere, and for delays, a proxy stands between. The worker computes
by the oracle.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from bench.chaos_proxy import Wire
from kilburn.controller.app import Running, running_controller
from kilburn.controller.simulate.fake_daemon import fake_hello, limits_of
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.shared import messages as m
from kilburn.shared.config import ControllerSettings
from kilburn.worker.daemon import Daemon, Patience
from kilburn.worker.link import WorkerLink
from tests.api.vocabularies import write_folder

BEAT_S, SILENCE_S = 0.1, 0.8
AWAY_S = 3 * SILENCE_S
LONG_SILENCE_S = 8.0  # where nobody is to be silent for too long, however busy the machine is
RECOVERY_S = 20.0  # for a stream to go on once the network is whole: reconnecting, Hello, and a busy machine
STEP_S = 0.01
ASKED = {"prompt": "hello world, the quick brown fox", "max_tokens": 90, "temperature": 0, "ignore_eos": True}
HELLO = fake_hello(vocab_size=330, max_len=256)


class OracleSteps:
    """What a worker computes, without a model: the simulator's worker, a lease at a time."""

    def __init__(self) -> None:
        self._worker: FakeWorker | None = None

    def run(self, plan: m.StepPlan, idle_s: float = 0.0) -> m.StepResult:
        if self._worker is None or self._worker.lease != plan.lease:
            self._worker = FakeWorker(plan.lease, limits_of(HELLO), HELLO.vocab_size)
        time.sleep(STEP_S)
        return self._worker.run(plan)

    def clear(self) -> None:
        self._worker = None

    # One rank, and no grammars.

    def place(self) -> str:
        return ""

    def begin(self, rendezvous: str, step_s: float) -> None:
        pass

    def prepare(self, asked: m.Prepare, answer: Callable[[m.Prepared | m.Unpreparable], None]) -> None:
        answer(m.Unpreparable(asked.lease, asked.number, "this worker follows no grammars"))

    def forget(self, forgotten: m.Forget) -> None:
        pass


class Life:
    """A worker's daemon in a thread, with its real link."""

    def __init__(self, endpoint: str) -> None:
        self.stop, self.link = threading.Event(), WorkerLink(endpoint, "w0")
        soon = Patience(poll_s=0.05, hello_s=1.0, gone_s=0.5, first_wait_s=0.05, last_wait_s=0.4)
        self.daemon = Daemon(replace(HELLO, name="w0"), OracleSteps(), self.link, self.stop, soon)
        self.thread = threading.Thread(target=self.daemon.run)
        self.thread.start()

    def end(self) -> None:
        self.stop.set()
        self.thread.join(20)
        self.link.close()


class Partition:
    """The network of this process's namespace, which has no other process."""

    def part(self) -> None:
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)

    def heal(self) -> None:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def worsen(self) -> bool:
        """One packet in five is lost, and the others are late. False: this kernel cannot do that."""
        words = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "loss", "20%", "delay", "10ms", "5ms"]
        return shutil.which("tc") is not None and subprocess.run(words, capture_output=True).returncode == 0

    def mend(self) -> None:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


@dataclass(slots=True)
class Place:
    """A controller and a worker that serve, and the network between them."""

    running: Running
    lives: list[Life]
    wire: Wire
    network: Partition | None  # None: only the wire can be parted
    session: aiohttp.ClientSession

    def part(self) -> None:
        self.network.part() if self.network is not None else self.wire.stall()

    def heal(self) -> None:
        self.network.heal() if self.network is not None else self.wire.flow()

    def another_life(self) -> None:
        """A worker of the same name starts, at the controller itself."""
        self.lives.append(Life(self.running.endpoint))

    @property
    def counts(self) -> tuple[int, int, int]:
        seen = self.running.driver.engine.snapshot()
        return seen.leases_began, seen.leases_ended, seen.stale_messages

    async def until(self, holds: Callable[[], bool], within_s: float = RECOVERY_S) -> None:
        async with asyncio.timeout(within_s):
            while not holds():
                await asyncio.sleep(0.005)

    def is_well(self) -> bool:
        return self.running.is_ready()

    async def text(self, when_halfway: Callable[[], Awaitable[None]] | None = None) -> str:
        """What a stream says; halfway through something happens."""
        said, num_events, happening = "", 0, None
        async with self.session.post(
            f"{self.running.http_address}/v1/completions", json=ASKED | {"stream": True}
        ) as response:
            async for line in response.content:
                name, _, data = line.decode().strip().partition(": ")
                if name != "data" or data == "[DONE]":
                    continue
                event = json.loads(data)
                said += event["choices"][0]["text"] if "choices" in event else f"<{event['error']['code']}>"
                num_events += 1
                if num_events == 20 and when_halfway is not None:
                    happening = asyncio.create_task(when_halfway())  # type: ignore[arg-type]
        if happening is not None:
            await happening
        return said


@asynccontextmanager
async def place(is_namespace: bool, silence_s: float = SILENCE_S) -> AsyncIterator[Place]:
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        settings = ControllerSettings(
            model=folder, port=0, bind="tcp://127.0.0.1:0", beat_seconds=BEAT_S, silence_seconds=silence_s
        )
        async with (
            running_controller(settings) as running,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            Wire(int(running.endpoint.rpartition(":")[2])) as wire,
        ):
            lives = [Life(f"tcp://127.0.0.1:{wire.port}")]
            here = Place(running, lives, wire, Partition() if is_namespace else None, session)
            try:
                await here.until(here.is_well)
                yield here
                await here.until(lambda: running.driver.engine.is_idle)
                running.driver.engine.validate()
            finally:
                for life in lives:
                    await asyncio.to_thread(life.end)


# --- what may happen, halfway through a stream


async def partition(here: Place) -> None:
    """Half-open connections at both ends, for longer than silence is allowed: both notice, and begin anew."""
    _, ended, _ = here.counts
    begun = time.monotonic()
    here.part()
    await here.until(lambda: here.counts[1] > ended)
    noticed_s = time.monotonic() - begun
    if noticed_s < SILENCE_S / 4:  # what was heard last may be some beats old
        raise AssertionError(f"noticed after {noticed_s} s: that was no silence")
    await asyncio.sleep(AWAY_S - SILENCE_S)
    here.heal()
    await here.until(here.is_well)


async def blip(here: Place) -> None:
    """For less than that: nobody notices."""
    here.part()
    await asyncio.sleep(SILENCE_S / 4)
    here.heal()


async def loss(here: Place) -> None:
    """Packets are lost, one here and there, and sent again; without netem all of those of many short moments."""
    if here.network is not None and here.network.worsen():
        await asyncio.sleep(1.5)
        here.network.mend()
        return
    for _ in range(12):
        here.part()
        await asyncio.sleep(0.03)
        here.heal()
        await asyncio.sleep(0.09)


async def delay(here: Place) -> None:
    """Everything comes late, in order."""
    here.wire.lag_s = 0.06
    await asyncio.sleep(1.0)
    here.wire.lag_s = 0.0


async def cut(here: Place) -> None:
    here.wire.cut()
    await here.until(lambda: here.counts[1] > 0)
    await here.until(here.is_well)


async def late_join(here: Place) -> None:
    """A worker ends while its connection is half-open, and is started anew; then arrives what the old one had sent."""
    stale = here.counts[2]
    here.wire.stall()
    await asyncio.sleep(SILENCE_S / 4)
    here.lives[0].stop.set()
    here.another_life()
    await here.until(lambda: here.counts[0] >= 2)
    here.wire.flow()
    await here.until(lambda: here.counts[2] > stale or here.running.driver.engine.is_idle)
    await here.until(here.is_well)


def _jumping(loop: asyncio.AbstractEventLoop, by_s: float) -> None:
    time_before = loop.time
    loop.time = lambda: time_before() + by_s  # type: ignore[method-assign]


async def controllers_clock_jumps(here: Place) -> None:
    """As when its machine was asleep for an hour: everything is silent at once, and everything comes back.

    The wire is still for a moment before: what had come by then and was not yet read would break the silence.
    """
    _, ended, _ = here.counts
    here.wire.stall()
    await asyncio.sleep(SILENCE_S / 4)
    _jumping(asyncio.get_running_loop(), 3600.0)
    await here.until(lambda: here.counts[1] > ended)
    here.wire.flow()
    await here.until(here.is_well)


async def wall_clock_jumps(here: Place) -> None:
    """Nothing here goes by the time of day."""
    real = time.time
    for by_s in (-86400.0, 86400.0):
        time.time = lambda by_s=by_s: real() + by_s  # type: ignore[assignment,misc]
        await asyncio.sleep(0.3)
    time.time = real


SCENARIOS: dict[str, Callable[[Place], Awaitable[None]]] = {
    scenario.__name__: scenario
    for scenario in (partition, blip, loss, delay, cut, late_join, controllers_clock_jumps, wall_clock_jumps)
}


UNNOTICED = frozenset({"blip", "delay", "wall_clock_jumps"})


async def play(name: str, is_namespace: bool = False) -> dict[str, Any]:
    async with place(is_namespace, LONG_SILENCE_S if name in UNNOTICED else SILENCE_S) as here:
        expected = await here.text()
        before = here.counts
        begun = time.monotonic()
        said = await here.text(lambda: SCENARIOS[name](here))
        taken_s = time.monotonic() - begun
        await here.until(here.is_well)  # a lease may have ended after the stream, and the next not yet have begun
        began, ended, stale = (now - then for now, then in zip(here.counts, before, strict=True))
        return {
            "is_equal": said == expected and len(expected) > 20,
            "leases_ended": ended,
            "leases_began": began,
            "stale_messages": stale,
            "seconds": taken_s,
        }


def main(kind: str, *names: str) -> None:
    is_namespace = kind == "namespace"
    if is_namespace:
        Partition().heal()  # a new namespace's interface is down
    for name in names:
        print(json.dumps(asyncio.run(play(name, is_namespace))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
