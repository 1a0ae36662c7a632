"""Worker groups by REST: which there are, and one that is told to leave while it answers."""

import asyncio
from pathlib import Path
from typing import Any

from kilburn.controller.simulate.fake_daemon import FakeDaemon, fake_hello
from tests.api.world import VOCAB, World, served, text_after

ASKED = {"model": "toy", "prompt": "hello world", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


async def groups(world: World) -> dict[str, dict[str, Any]]:
    async with world.session.get(world.url + "/admin/groups") as response:
        assert response.status == 200
        return {group["name"]: group for group in (await response.json())["data"]}


async def drain(world: World, name: str) -> tuple[int, dict[str, Any]]:
    async with world.session.post(f"{world.url}/admin/groups/{name}/drain") as response:
        return response.status, await response.json()


async def test_a_group_that_is_drained_gives_its_requests_away_with_their_tokens(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.01) as world:
        asked = [asyncio.ensure_future(world.post("/v1/completions", ASKED)) for _ in range(3)]
        await world.until(lambda: world.driver.streams.counts.output_tokens > 6)
        hello = fake_hello("other", vocab_size=VOCAB, max_len=256, num_blocks=512)
        other = FakeDaemon(world.running.endpoint, hello, 0.001, choose=world.daemon.choose)
        serving = asyncio.create_task(other.run())
        try:
            await world.until(lambda: len(world.driver.engine.snapshot().groups) == 2)
            before = await groups(world)
            assert before["fake"]["state"] == "ready"
            assert before["fake"]["running_requests"] == 3
            assert (await drain(world, "nobody"))[0] == 404
            status, row = await drain(world, "fake")
            assert (status, row["state"]) == (202, "leaving")
            answers = await asyncio.gather(*asked)
            assert {answer["choices"][0]["text"] for _, answer in answers} == {text_after(60)}
            await world.until(lambda: len(world.driver.engine.snapshot().groups) == 1)
            assert list(await groups(world)) == ["other"]
            assert other.steps > 0
            assert world.driver.retired == {"fake"}
            assert world.driver.streams.counts.pause_s.spread().count == 3
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    assert other.faults == []
