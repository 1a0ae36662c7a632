"""Workers die by kill -9 in every phase of a step, fall silent and leave, and 32 clients notice no more than a pause.

Two worker groups of a tiny model with tight pools, so that requests are swapped all the time; the controller is real
and in this process. The same 32 requests are asked while nothing happens, while each life of a worker ends at a drawn
place (mortal.py), while one is stopped, while one leaves. Every answer must be the same, greedy or drawn by a seed.
"""

import asyncio
import json
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
from tests.deaths.mortal import NUM_MORTAL, PHASES
from tests.worker.tiny_models import make_tiny

HERE = Path(__file__).parent
NUM_STREAMS = 32
FLAGS = (
    *("--device=cpu", "--dtype=float32", "--threads=1", "--max-rows=16", "--num-blocks=80", "--block-size=4"),
    *("--max-len=128", "--host-pool=4MiB", "--exit-with-parent", "--log-level=error"),
)
PATIENCE_S = 120.0


def bodies() -> list[dict[str, Any]]:
    """Half of them greedy, half of them drawn by a seed."""
    found = []
    for number in range(NUM_STREAMS):
        drawn = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
        prompt = f"The {number} of the sea and the {number % 5} hands"
        found.append({"model": "tiny", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "stream": True, **drawn})
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


def start_worker(model: Path, notes: Path, endpoint: str, name: str, log: Any) -> "subprocess.Popen[bytes]":
    words = [str(model), f"--connect={endpoint}", f"--name={name}", *FLAGS]
    command = [sys.executable, str(HERE / "mortal.py"), str(notes), name, *words]
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
            workers = [start_worker(model, folder, running.endpoint, name, log) for name in ("left", "right")]
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while len(running.driver.engine.snapshot().groups) < 2:
                        await asyncio.sleep(0.02)
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


def test_clients_notice_nothing_of_deaths_silence_and_departures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(play(tmp_path, capsys))


async def play(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other on the same two groups, since starting them takes its time."""
    async with two_groups(folder) as (running, workers):
        undisturbed = await all_answers(running)
        assert {reason for _, reason in undisturbed} == {"length"}
        await kill(running, folder, undisturbed, capsys)
        await stop(running, undisturbed)
        await drain(running, workers, undisturbed)


async def kill(running: Running, folder: Path, undisturbed: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """By SIGKILL, in every phase of a step."""
    (folder / "mortal").touch()
    deaths: Counter[str] = Counter()
    while deaths.total() < 2 * NUM_MORTAL:
        assert await all_answers(running) == undisturbed
        deaths = Counter((folder / "deaths").read_text().splitlines())
    num_pauses = await figure(running, "kilburn_displaced_pause_seconds_count")
    paused_s = await figure(running, "kilburn_displaced_pause_seconds_sum")
    with capsys.disabled():
        counts = ", ".join(f"{deaths[phase]} {phase}" for phase in PHASES)
        print(f"\nkills: {counts}; {num_pauses:g} pauses of {paused_s / max(num_pauses, 1):.2f} s on average")
    assert all(deaths[phase] for phase in PHASES), deaths
    assert num_pauses > 0, "each is bounded by --recovery-seconds: whoever waits longer gets an error, and none did"
    snapshot = running.driver.engine.snapshot()
    assert snapshot.requests_recovered == snapshot.requests_displaced > 0
    assert snapshot.poison_requests == 0


async def both(running: Running) -> None:
    """Until both groups are at work."""
    async with asyncio.timeout(PATIENCE_S):
        while [bool(group.running_requests) for group in running.driver.engine.snapshot().groups] != [True, True]:
            await asyncio.sleep(0.005)


async def stop(running: Running, undisturbed: list[Any]) -> None:
    """A group that says nothing slows nobody, and loses its requests."""
    engine = running.driver.engine
    asked = asyncio.create_task(all_answers(running))
    await both(running)
    before = {group.name: group for group in engine.snapshot().groups}
    ended = engine.snapshot().leases_ended
    os.kill(before["left"].pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while engine.snapshot().leases_ended == ended:
                await asyncio.sleep(0.005)
        [right] = [group for group in engine.snapshot().groups if group.name == "right"]
        assert right.lease == before["right"].lease
        assert right.steps > before["right"].steps, "the other went on meanwhile"
    finally:
        os.kill(before["left"].pid, signal.SIGCONT)
    assert await asked == undisturbed


async def drain(running: Running, workers: list["subprocess.Popen[bytes]"], undisturbed: list[Any]) -> None:
    """A group that is to leave gives its requests away, and its process ends well."""
    asked = asyncio.create_task(all_answers(running))
    await both(running)
    moved = running.driver.engine.snapshot().requests_displaced
    url = f"{running.http_address}/admin/groups/left/drain"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        assert (response.status, (await response.json())["state"]) == (202, "leaving")
    assert await asked == undisturbed
    assert running.driver.engine.snapshot().requests_displaced > moved
    assert await asyncio.to_thread(workers[0].wait, PATIENCE_S) == 0
    assert [group.name for group in running.driver.engine.snapshot().groups] == ["right"]
