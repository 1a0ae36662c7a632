"""What the three probes say, and when each says something else than the others."""

import asyncio
from pathlib import Path

import pytest

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Event, Retire, Shutdown, Submit, Tick
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.health import judged
from kilburn.controller.simulate.fake_daemon import fake_hello
from kilburn.shared.messages import Beat
from kilburn.shared.sampling import Sampling
from tests.api.world import World, served

WORK = Submit(1, [5, 6, 7], 10, Sampling())
HELLO = Arrived(b"w", fake_hello(vocab_size=330))
NARROW = Arrived(b"w", fake_hello(vocab_size=330, max_rows=1))
OTHER = Arrived(b"v", fake_hello("other", vocab_size=330))
BEAT = Arrived(b"w", Beat(1, 0))
OK = (None, None, None)
LEAVING = "the workers were told to leave"
NO_WORKER, SILENT, STUCK = "no worker is ready", "the workers are silent", "work has made no progress for 2 s"

# What happens, by time in seconds; then, asked at the time given: why not live, healthy, ready. Silence: 10 s.
CASES: dict[str, tuple[dict[float, list[Event]], float, tuple[str | None, str | None, str | None]]] = {
    "nobody came": ({0: [Tick()]}, 0, (None, NO_WORKER, NO_WORKER)),
    "a worker, and no work": ({0: [HELLO]}, 4, OK),
    "no work for long": ({0: [HELLO], 4: [BEAT], 8: [BEAT]}, 8, OK),
    "work under way": ({0: [HELLO], 4: [BEAT, WORK]}, 5.9, OK),
    "work that hangs beneath a steady pulse": ({0: [HELLO], 3: [WORK], 4: [BEAT]}, 5, (None, STUCK, STUCK)),
    "one of two hangs": ({0: [HELLO, OTHER], 3: [WORK], 4: [BEAT, Arrived(b"v", Beat(2, 0))]}, 5, OK),
    "silent for half of what is allowed": ({0: [HELLO], 5: [Tick()]}, 5, (None, SILENT, SILENT)),
    "heard again": ({0: [HELLO], 5: [Tick()], 6: [BEAT]}, 6, OK),
    "silent for too long": ({0: [HELLO], 5: [Tick()], 10: [Tick()]}, 10, (None, NO_WORKER, NO_WORKER)),
    "the only one is to leave": ({0: [HELLO], 1: [WORK], 2: [Retire("fake")]}, 2, (None, None, LEAVING)),
    "the only one has nothing to do and leaves": ({0: [HELLO], 1: [Retire("fake")]}, 2, (None, LEAVING, LEAVING)),
    "one of two is to leave": ({0: [HELLO, OTHER], 1: [Retire("fake")]}, 2, OK),
    "shutting down": ({0: [HELLO, Shutdown()]}, 0, (None, "shutting down", "shutting down")),
    "as many wait as may": ({0: [NARROW], 1: [WORK], 2: [Submit(i, [5], 9, Sampling()) for i in (2, 3)]}, 2, (
        None, None, "the queue is full")),
    "as many tokens wait as may": ({0: [NARROW], 1: [WORK], 2: [Submit(2, [5] * 6, 9, Sampling())]}, 2, (
        None, None, "the queue is full")),
    "fewer tokens wait than may": ({0: [NARROW], 1: [WORK], 2: [Submit(2, [5] * 5, 9, Sampling())]}, 2, OK),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_the_probes_say(name: str) -> None:
    happened, asked_at, expected = CASES[name]
    engine = Engine(EngineSettings(silence_s=10.0, max_waiting=2))
    for at, events in happened.items():
        engine.handle(events, at)
    told = judged(engine.snapshot(), asked_at, progress_s=2.0, max_waiting=2, max_waiting_tokens=6, has_failed=False)
    assert (told.dead, told.unhealthy, told.unready) == expected


def test_an_engine_that_failed_is_dead_and_so_nothing_else() -> None:
    engine = Engine(EngineSettings())
    engine.handle([HELLO], 0.0)
    told = judged(engine.snapshot(), 0.0, 2.0, 9, 0, has_failed=True)
    assert told.dead == told.unhealthy == told.unready == "the engine has failed"


async def probe(world: World, path: str) -> tuple[int, str | None]:
    async with world.session.get(world.url + path) as response:
        return response.status, (await response.json()).get("reason")


async def test_a_step_that_hangs_turns_health_and_its_answer_turns_it_back(tmp_path: Path) -> None:
    """It takes longer than the deadline of progress, and not longer than the deadline of a step."""
    async with served(tmp_path, settings={"progress_seconds": 0.1}) as world:
        assert [await probe(world, path) for path in ("/live", "/health", "/ready")] == [(200, None)] * 3
        with world.held():
            answer = asyncio.ensure_future(world.post("/v1/completions", {"prompt": "x", "max_tokens": 3}))
            await world.until(lambda: not world.running.is_ready())
            assert await probe(world, "/health") == (503, "work has made no progress for 0.1 s")
            assert (await probe(world, "/live"))[0] == 200
        assert (await answer)[0] == 200
        await world.until(world.running.is_ready)
        assert await probe(world, "/health") == (200, None)


async def test_a_full_queue_is_healthy_and_not_ready(tmp_path: Path) -> None:
    settings = {"max_waiting": 1, "progress_seconds": 60.0}
    async with served(tmp_path, worker={"max_rows": 1}, settings=settings) as world:
        body = {"prompt": "x", "max_tokens": 30}
        with world.held():
            first = asyncio.ensure_future(world.post("/v1/completions", body))
            await world.until(lambda: world.owned_blocks() > 0)
            assert await probe(world, "/ready") == (200, None)
            second = asyncio.ensure_future(world.post("/v1/completions", body))
            await world.until(lambda: world.driver.engine.num_waiting == 1)
            assert await probe(world, "/ready") == (503, "the queue is full")
            assert await probe(world, "/health") == (200, None)
            assert (await world.post("/v1/completions", body))[0] == 429
        assert [(await answer)[0] for answer in (first, second)] == [200, 200]
