"""What was sent need not be received: accidents of the network under a stream, each survived within its deadline.

A stream's text is what it would have been; a lease is lost where it must be, and only there; nothing is left.
"""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kilburn.controller.simulate.fake_worker import by_oracle
from tests.api.world import VOCAB, served
from tests.wire.apart import RECOVERY_S, SILENCE_S, play

# (scenario, leases that end: at least, at most)
IN_PLACE = [
    ("delay", 0, 0),
    ("cut", 1, 2),
    ("late_join", 1, 3),
    ("controllers_clock_jumps", 1, 2),
    ("wall_clock_jumps", 0, 0),
]

PARTED = [("partition", 1, 2), ("blip", 0, 0), ("loss", 0, 2)]


def judge(name: str, came: dict[str, float], least: int, most: int) -> None:
    assert came["is_equal"], (name, came)
    assert least <= came["leases_ended"] <= most, (name, came)
    assert came["leases_began"] == came["leases_ended"], (name, came)
    assert came["seconds"] < RECOVERY_S + 10, (name, came)


@pytest.mark.parametrize(("name", "least", "most"), IN_PLACE)
def test_a_stream_survives(name: str, least: int, most: int) -> None:
    judge(name, asyncio.run(play(name)), least, most)


def test_a_stream_survives_a_network_that_is_not_there() -> None:
    """Packets are lost by the kernel, in a network namespace of the scenarios' own, where one can be had."""
    isolated = ["unshare", "-rn"]
    is_allowed = shutil.which("ip") and subprocess.run([*isolated, "ip", "link"], capture_output=True).returncode == 0
    names = [name for name, _, _ in PARTED]
    command = [sys.executable, "-m", "tests.wire.apart", "namespace" if is_allowed else "proxy", *names]
    ended = subprocess.run(
        [*isolated, *command] if is_allowed else command, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    for (name, least, most), line in zip(PARTED, ended.stdout.splitlines(), strict=True):
        judge(name, json.loads(line), least, most)


def test_a_worker_that_stops_reading_loses_its_lease_and_nobody_an_answer(tmp_path: Path) -> None:
    """SIGSTOP: its sockets stay, its kernel acknowledges, it answers nothing. Another takes over; then it is back."""

    def another(endpoint: str) -> subprocess.Popen[bytes]:
        words = ["--address", endpoint, "--name", "w1", "--vocab-size=330", "--max-len=256", "--delay-s=0.01"]
        return subprocess.Popen([sys.executable, "-m", "kilburn.controller.simulate.fake_daemon", *words])

    async def test() -> None:
        settings = {"beat_seconds": 0.1, "silence_seconds": 2 * SILENCE_S}
        async with served(tmp_path, delay_s=0.01, settings=settings, choose=by_oracle(VOCAB)) as world:
            body = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            _, expected = await world.post("/v1/completions", body)
            process = another(world.running.endpoint)
            try:
                await world.until(lambda: len(world.driver.engine.snapshot().groups) == 2, RECOVERY_S)
                asking = [asyncio.create_task(world.post("/v1/completions", body)) for _ in range(8)]
                await world.until(
                    lambda: [bool(g.running_requests) for g in world.driver.engine.snapshot().groups] == [True, True]
                )
                process.send_signal(signal.SIGSTOP)
                ended = world.driver.engine.snapshot().leases_ended
                await world.until(lambda: world.driver.engine.snapshot().leases_ended > ended, RECOVERY_S)
                for status, whole in await asyncio.gather(*asking):
                    assert (status, whole["choices"]) == (200, expected["choices"])
                process.send_signal(signal.SIGCONT)
                await world.until(lambda: len(world.driver.engine.snapshot().groups) == 2, RECOVERY_S)
            finally:
                process.kill()
                process.wait()

    asyncio.run(test())
