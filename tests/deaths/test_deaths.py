"""Workers die by kill -9 in every phase of a step, fall silent and leave, and 32 clients notice no more than a pause.

Two worker groups of a tiny model, one of them of two ranks, with tight pools, so that requests are swapped all the
time; the controller is real and in this process. The same 32 requests are asked while nothing happens, while each life
of a worker ends at a drawn place (mortal.py), beside a request that no worker survives, while a group is stopped, while
one leaves. Every answer must be the same, greedy or drawn by a seed.
"""

import asyncio
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kilburn.controller.app import Running, running_controller
from kilburn.shared.config import ControllerSettings
from tests.deaths.mortal import BY_POISON, PHASES, POISON, Death, phases_of
from tests.worker.tiny_models import make_tiny

HERE = Path(__file__).parent
NUM_STREAMS = 32
FLAGS = (
    *("--device=cpu", "--dtype=float32", "--threads=1", "--max-rows=16", "--num-blocks=80", "--block-size=4"),
    *("--max-len=128", "--host-pool=4MiB", "--exit-with-parent", "--log-level=error"),
)
WORLDS = {"left": 2, "right": 1}  # ranks
PATIENCE_S = 120.0
NOTICED_S = 2.0  # after a death, far sooner than by silence
NUM_BESIDE_POISON = 12


def bodies() -> list[dict[str, Any]]:
    """Half of them greedy, half of them drawn by a seed."""
    found = []
    for number in range(NUM_STREAMS):
        drawn = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
        prompt = f"The {number} of the sea and the {number % 5} hands"
        found.append({"model": "tiny", "prompt": prompt, "max_tokens": 28, "ignore_eos": True, "stream": True, **drawn})
    return found


async def answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, str | None]:
    """Text and reason of a stream. An error of any kind is a failure."""
    text, reason = "", None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
    return text, reason


async def all_answers(running: Running) -> list[tuple[str, str | None]]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        return list(await asyncio.gather(*(answer(session, running.http_address, body) for body in bodies())))


def start_worker(model: Path, notes: Path, endpoint: str, name: str, rank: int, log: Any) -> "subprocess.Popen[bytes]":
    words = [str(model), f"--connect={endpoint}", f"--name={name}", *FLAGS]
    if WORLDS[name] > 1:
        words += [f"--tp={WORLDS[name]}", f"--rank={rank}"]
    command = [sys.executable, str(HERE / "mortal.py"), str(notes), name, str(WORLDS[name]), str(rank), *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ)


@asynccontextmanager
async def two_groups(folder: Path) -> AsyncIterator[tuple[Running, list["subprocess.Popen[bytes]"]]]:
    model = make_tiny(folder / "tiny", "llama")
    settings = ControllerSettings(
        model=str(model), served_model_name="tiny", port=0, bind="tcp://127.0.0.1:0", preemption="swap"
    )
    with (folder / "workers.log").open("wb") as log:
        async with running_controller(settings) as running:
            workers = [
                start_worker(model, folder, running.endpoint, name, rank, log)
                for name, world in WORLDS.items()
                for rank in range(world)
            ]
            try:
                await all_there(running)
                yield running, workers
            finally:
                for worker in workers:
                    worker.kill()
                    worker.wait()


async def figure(running: Running, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{running.http_address}/metrics") as response:
        text = await response.text()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"no {name} in\n{text}"
    return float(found[1])


class Leases:
    """When each lease of each group began and ended, by the controller's own log."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self._log = log
        log.set_level(logging.INFO, "kilburn")

    def of(self, name: str) -> list[tuple[float, float]]:
        began, ended = dict[str, float](), dict[str, float]()
        for record in self._log.records:
            found = re.match(r"lease (began|ended): lease (\d+): (.*)", record.getMessage())
            if found is None:
                continue
            what, lease, rest = found.groups()
            if what == "ended":
                ended[lease] = record.created
            elif rest.startswith(f"{name},"):
                began[lease] = record.created
        return [(at, ended.get(lease, math.inf)) for lease, at in began.items()]

    def noticed_after_s(self, death: Death) -> float:
        """How long the lease that the dead had was kept; 0 where it was over already."""
        return max([end - death.at for began, end in self.of(death.name) if began <= death.at < end], default=0.0)


def test_clients_notice_nothing_of_deaths_silence_and_departures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(play(tmp_path, capsys, Leases(caplog)))


async def play(folder: Path, capsys: pytest.CaptureFixture[str], leases: Leases) -> None:
    """One after the other on the same two groups, since starting them takes its time."""
    async with two_groups(folder) as (running, workers):
        undisturbed = await all_answers(running)
        assert {reason for _, reason in undisturbed} == {"length"}
        await kill(running, folder, undisturbed, capsys, leases)
        await poison(running, folder, undisturbed)
        await stop(running, undisturbed)
        await drain(running, workers, undisturbed)


async def kill(
    running: Running, folder: Path, undisturbed: list[Any], capsys: pytest.CaptureFixture[str], leases: Leases
) -> None:
    """By SIGKILL, in every phase of a step."""
    (folder / "mortal").touch()
    while len(all_deaths := Death.all_in(folder)) < sum(len(phases_of(world)) for world in WORLDS.values()):
        assert await all_answers(running) == undisturbed
    deaths = Counter(death.phase for death in all_deaths)
    noticed_s = [leases.noticed_after_s(death) for death in all_deaths]
    num_pauses = await figure(running, "kilburn_displaced_pause_seconds_count")
    paused_s = await figure(running, "kilburn_displaced_pause_seconds_sum")
    with capsys.disabled():
        counts = ", ".join(f"{deaths[phase]} {phase}" for phase in PHASES)
        pauses = f"{num_pauses:g} pauses of {paused_s / max(num_pauses, 1):.2f} s on average"
        print(f"\nkills: {counts}; noticed after {max(noticed_s):.3f} s at most; {pauses}")
    assert all(deaths[phase] for phase in PHASES), deaths
    assert max(noticed_s) < NOTICED_S
    assert num_pauses > 0, "each is bounded by --recovery-seconds: whoever waits longer gets an error, and none did"
    snapshot = running.driver.engine.snapshot()
    assert snapshot.requests_recovered == snapshot.requests_displaced > 0
    assert snapshot.poison_requests == 0


async def poison(running: Running, folder: Path, undisturbed: list[Any]) -> None:
    """A request that kills whoever computes it: twice in company, then alone, and then it is told so."""
    few = bodies()[:NUM_BESIDE_POISON]
    body = {**few[0], "seed": POISON, "temperature": 0.9, "stream": False}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def poisonous() -> tuple[int, str]:
            async with session.post(f"{running.http_address}/v1/completions", json=body) as response:
                return response.status, await response.text()

        others = [answer(session, running.http_address, body) for body in few]
        (status, text), *found = await asyncio.gather(poisonous(), *others)
    assert found == undisturbed[:NUM_BESIDE_POISON]
    assert status == 500
    assert "nothing beside it" in text
    assert running.driver.engine.snapshot().poison_requests == 1
    victims = [death.name for death in Death.all_in(folder) if death.phase == BY_POISON]
    assert len(victims) >= 3


async def all_there(running: Running) -> None:
    """Until both groups have a lease: what is asked before stands in the line of the one that has."""
    async with asyncio.timeout(PATIENCE_S):
        while len(running.driver.engine.snapshot().groups) < len(WORLDS):
            await asyncio.sleep(0.02)


async def both(running: Running) -> None:
    """Until both groups are at work."""
    async with asyncio.timeout(PATIENCE_S):
        while [bool(group.running_requests) for group in running.driver.engine.snapshot().groups] != [True, True]:
            await asyncio.sleep(0.005)


async def stop(running: Running, undisturbed: list[Any]) -> None:
    """A group that says nothing slows nobody, and loses its requests."""
    engine = running.driver.engine
    await all_there(running)
    asked = asyncio.create_task(all_answers(running))
    await both(running)
    before = {group.name: group for group in engine.snapshot().groups}
    ended = engine.snapshot().leases_ended
    os.kill(before["right"].pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while engine.snapshot().leases_ended == ended:
                await asyncio.sleep(0.005)
        [left] = [group for group in engine.snapshot().groups if group.name == "left"]
        assert left.lease == before["left"].lease
        assert left.steps > before["left"].steps, "the other went on meanwhile"
    finally:
        os.kill(before["right"].pid, signal.SIGCONT)
    assert await asked == undisturbed


async def drain(running: Running, workers: list["subprocess.Popen[bytes]"], undisturbed: list[Any]) -> None:
    """A group that is to leave gives its requests away, and its process ends well."""
    await all_there(running)
    asked = asyncio.create_task(all_answers(running))
    await both(running)
    moved = running.driver.engine.snapshot().requests_displaced
    url = f"{running.http_address}/admin/groups/left/drain"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        assert (response.status, (await response.json())["state"]) == (202, "leaving")
    assert await asked == undisturbed
    assert running.driver.engine.snapshot().requests_displaced > moved
    assert [await asyncio.to_thread(rank.wait, PATIENCE_S) for rank in workers[: WORLDS["left"]]] == [0, 0]
    assert [group.name for group in running.driver.engine.snapshot().groups] == ["right"]
