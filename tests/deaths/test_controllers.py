"""A gateway, two controllers and their workers, all of them processes, and the loss of a controller under streams.

Workers outlive it: they keep their weights, drop what was computed, and say Hello to the one that comes in its place.
"""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from bench.chaos import held
from bench.chaos_world import World, running_world
from tests.worker.tiny_models import make_tiny

ASKED = {"max_tokens": 250, "temperature": 0, "ignore_eos": True}
NUM_STREAMS = 12


class Stream:
    """One request, and what it was told."""

    def __init__(self, number: int) -> None:
        self.body = ASKED | {"prompt": f"stream number {number} of many", "stream": True}
        self.text, self.code, self.is_done = "", "", False

    async def run(self, world: World) -> "Stream":
        async with world.session.post(f"{world.url}/v1/completions", json=self.body) as response:
            async for line in response.content:
                name, _, data = line.decode().strip().partition(": ")
                if name != "data":
                    continue
                if data == "[DONE]":
                    self.is_done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    self.code = event["error"]["code"]
                else:
                    self.text += event["choices"][0]["text"]
        return self


async def undisturbed(world: World) -> list[str]:
    return [done.text for done in await asyncio.gather(*(Stream(i).run(world) for i in range(NUM_STREAMS)))]


async def until(streams: list[Stream], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not all(stream.text for stream in streams):
            await asyncio.sleep(0.005)


@pytest.mark.timeout(180)
def test_the_loss_of_a_controller_ends_the_streams_that_it_held_and_no_other(tmp_path: Path) -> None:
    async def test() -> None:
        model = make_tiny(tmp_path / "tiny-llama", "llama", overrides={"max_position_embeddings": 512})
        async with running_world(str(model), 2, tmp_path) as world:
            await world.healthy(90)
            expected = await undisturbed(world)
            lives = [worker.pid for worker in world.workers]
            streams = [Stream(i) for i in range(NUM_STREAMS)]
            running = [asyncio.create_task(stream.run(world)) for stream in streams]
            await until(streams, 30)
            world.controllers[0].is_wanted = False
            world.controllers[0].send(signal.SIGKILL)
            # Whoever asks now is served by the other, without noticing anything.
            body = ASKED | {"prompt": "one more", "max_tokens": 5}
            for _ in range(4):
                async with world.session.post(f"{world.url}/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
            await asyncio.gather(*running)
            lost = [stream for stream in streams if stream.code]
            assert 0 < len(lost) < NUM_STREAMS
            for stream, text in zip(streams, expected, strict=True):
                assert stream.is_done
                if stream.code:
                    assert stream.code == "controller_lost"
                    assert text.startswith(stream.text)
                else:
                    assert stream.text == text
            # They were told at once: nobody had to wait until the silence was long enough.
            found = [line for line in (await world.metrics(world.url)).splitlines() if "requests_lost_total{" in line]
            assert len(found) == 2
            assert all(line.endswith(" 0.0") for line in found)
            # It comes back, its worker says Hello to it, and it is asked again.
            world.controllers[0].is_wanted = True
            await world.healthy(90)
            assert await undisturbed(world) == expected
            assert [worker.pid for worker in world.workers] == lives, "the workers are the same, with their weights"
            assert (tmp_path / "worker-0.log").read_text().count(" begins") >= 2, "of leases"
            assert await held(world) == []

    asyncio.run(test())
