"""A supervised process is kept alive while that makes sense, and is gone when we are."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kilburn.controller.processes import Processes
from kilburn.controller.serve import worker_settings
from kilburn.controller.simulate.fake_daemon import fake_hello
from kilburn.controller.supervise import Patience, Supervisor, WorkerFailed, why
from kilburn.shared.config import ServeSettings
from kilburn.shared.kinds import Share
from kilburn.shared.threads import threads_for
from tests.system.serving import TINY_FLAGS, Service, is_alive
from tests.worker.tiny_models import make_tiny

FOREVER = "import time, pathlib, sys; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + FOREVER


class World:
    """A supervisor of small Python programs, and what it told."""

    def __init__(self, program: str, *arguments: str, patience: Patience | None = None) -> None:
        self.ended: list[tuple[int, str]] = []
        self.said: list[str] = []
        self.supervisor = Supervisor(
            [sys.executable, "-c", program, *arguments],
            os.environ,
            on_end=lambda pid, reason: self.ended.append((pid, reason)),
            say=self.said.append,
            patience=patience or Patience(first_pause_s=0.001),
        )


async def up_of(world: World, path: Path) -> int:
    """The process that is up, once its supervisor knows it: a program may be quicker than whoever started it."""
    while not path.exists() or world.supervisor.pid is None:
        await asyncio.sleep(0.005)
    path.unlink()
    return world.supervisor.pid


@asynccontextmanager
async def supervised(program: str, up: Path, grace_s: float = 10.0) -> AsyncIterator[tuple[World, int]]:
    """A world whose program is up (it touches that file), and its pid. At the end it is stopped."""
    world = World(program, str(up))
    running = asyncio.create_task(world.supervisor.run())
    pid = await up_of(world, up)
    try:
        yield world, pid
    finally:
        await world.supervisor.stop(grace_s)
        await running


def test_pauses_grow_with_short_lives_and_a_long_life_is_forgiven_everything() -> None:
    patience = Patience(short_s=30, max_short_lives=4, first_pause_s=0.1, longest_pause_s=5)
    assert [patience.pause_after(1) for _ in range(3)] == pytest.approx([0.1, 0.4, 1.6])
    assert patience.pause_after(31) == pytest.approx(0.1)
    assert [patience.pause_after(29) for _ in range(5)] == pytest.approx([0.1, 0.4, 1.6, 5, None])


def test_ends_are_told_in_words() -> None:
    assert why(3) == "ended with status 3"
    assert why(-15) == "was killed by SIGTERM"
    assert why(-9) == "was killed by SIGKILL (out of memory?)"


def test_a_process_that_is_killed_is_started_again_and_the_end_is_told(tmp_path: Path) -> None:
    async def play() -> None:
        async with supervised(FOREVER, tmp_path / "up") as (world, first):
            os.kill(first, signal.SIGKILL)
            second = await up_of(world, tmp_path / "up")
            assert second != first
            assert world.ended == [(first, "its process was killed by SIGKILL (out of memory?)")]
            assert f"pid {first}" in world.said[0]
        assert not is_alive(second)
        assert len(world.ended) == 1  # an end that was asked for is no news

    asyncio.run(play())


def test_a_process_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    async def play() -> None:
        async with supervised(DEAF, tmp_path / "up", grace_s=0.1) as (world, pid):
            pass
        assert not is_alive(pid)
        assert "did not leave" in world.said[-1]

    asyncio.run(play())


def test_a_process_that_is_stopped_is_killed_and_started_again(tmp_path: Path) -> None:
    async def play() -> None:
        async with supervised(FOREVER, tmp_path / "up") as (world, first):
            os.kill(first, signal.SIGSTOP)
            world.supervisor.kill("was silent")
            await up_of(world, tmp_path / "up")
            assert world.ended == [(first, "its process was silent, and was killed")]

    asyncio.run(play())


HELLO = fake_hello("w")


def test_who_is_absent_is_stuck_unless_it_comes_back_or_ends() -> None:
    async def play() -> None:
        stuck: list[tuple[str, int, str]] = []
        processes = Processes(patience_s=0.02)
        all_told = asyncio.Event()

        def note(name: str, pid: int, reason: str) -> None:
            stuck.append((name, pid, reason))
            all_told.set()

        processes.on_stuck = note
        for pid in range(1, 5):
            processes.present(b"peer-%d" % pid, replace(HELLO, pid=pid))
        processes.absent([b"peer-1", b"peer-2", b"peer-3", b"nobody's"], "silent for 2 s")
        processes.present(b"peer-1-again", replace(HELLO, pid=1))
        assert processes.ended("w", 2) == b"peer-2"
        assert processes.ended("other", 3) is None
        await all_told.wait()
        await asyncio.sleep(0)
        assert stuck == [("w", 3, "did not come back within 0.02 s (silent for 2 s)")]
        assert processes.ended("w", 1) == b"peer-1-again"
        all_told.clear()
        processes.absent([b"peer-4"], "silent", busy_s=0.02)
        await all_told.wait()
        assert stuck[1:] == [("w", 4, "did not come back within 0.04 s (silent)")]
        processes.present(b"peer-5", replace(HELLO, pid=5))
        processes.absent([b"peer-5"], "late")
        processes.close()

    asyncio.run(play())


def test_a_worker_that_is_stopped_is_replaced_and_its_stream_goes_on(tmp_path: Path) -> None:
    """`kilburn serve` as it is: what is stopped neither ends nor speaks."""
    flags = (*TINY_FLAGS, "--max-len=512", "--beat-seconds=0.2", "--silence-seconds=2")
    with Service(str(make_tiny(tmp_path / "tiny-llama", "llama")), tmp_path, *flags) as service:

        def asked() -> Iterator[str]:
            extra = {"ignore_eos": True}
            words = {"model": "tiny-llama", "prompt": "The sea", "max_tokens": 300, "temperature": 0}
            for chunk in service.client().completions.create(stream=True, extra_body=extra, **words):
                yield chunk.choices[0].text

        expected = "".join(asked())
        stream = asked()
        said = next(stream)
        [pid] = service.children()
        os.kill(pid, signal.SIGSTOP)
        assert said + "".join(stream) == expected
        assert not is_alive(pid)
        assert len(service.children()) == 1
        assert "did not come back within 7 s (silent for 2 s), and was killed" in service.log


def test_a_storm_of_deaths_ends_with_the_last_reason() -> None:
    world = World("raise SystemExit(7)", patience=Patience(max_short_lives=2, first_pause_s=0.001))
    with pytest.raises(WorkerFailed, match="3 workers in a row ended early; the last one ended with status 7"):
        asyncio.run(world.supervisor.run())
    assert len(world.ended) == 3


def test_settings_that_cannot_work_are_not_tried_again() -> None:
    world = World("raise SystemExit(2)")
    with pytest.raises(WorkerFailed, match="settings"):
        asyncio.run(world.supervisor.run())
    assert len(world.ended) == 1


def test_stop_while_a_process_is_being_made_leaves_none_behind(tmp_path: Path) -> None:
    async def play() -> None:
        world = World(FOREVER, str(tmp_path / "up"))
        running = asyncio.create_task(world.supervisor.run())
        await asyncio.sleep(0)  # run() is now inside the making of the process
        await world.supervisor.stop(grace_s=10)
        begun = time.monotonic()
        await running
        assert time.monotonic() - begun < 60
        assert world.supervisor.pid is None

    asyncio.run(play())


@pytest.mark.parametrize("num_turns", range(4))
def test_stop_in_the_moment_in_which_a_process_ends_by_itself_is_no_fault(num_turns: int) -> None:
    """The supervisor hears of the end a turn of the loop or two after the loop does: whichever, when stop comes."""

    async def play() -> None:
        world = World("pass")
        running = asyncio.create_task(world.supervisor.run())
        while (process := world.supervisor._process) is None or process.returncode is None:
            await asyncio.sleep(0)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await world.supervisor.stop(grace_s=10)
        await running
        assert world.supervisor.pid is None

    asyncio.run(play())


def test_several_workers_divide_what_was_given() -> None:
    given = ServeSettings(model="m", groups=3, threads=7, num_blocks=100, host_pool=Share(0.3))
    found = [worker_settings(given, "tcp://127.0.0.1:1", number) for number in range(3)]
    assert [worker.name for worker in found] == ["worker-0", "worker-1", "worker-2"]
    for worker in found:
        assert (worker.threads, worker.num_blocks, worker.sharers) == (2, 33, 3)
        assert worker.host_pool == Share(pytest.approx(0.1))
    large = worker_settings(replace(given, num_blocks=0, kv_memory=900, host_pool=90, threads=0), "tcp://x:1", 1)
    assert (large.kv_memory, large.host_pool, large.num_blocks, large.threads) == (300, 30, 0, 0)
    alone = worker_settings(replace(given, groups=1, name="mine"), "tcp://x:1")
    assert (alone.name, alone.threads, alone.num_blocks, alone.sharers) == ("mine", 7, 100, 1)
    assert [threads_for(0, sharers) for sharers in (1, 64)] == [threads_for(0), 1]
