"""Reading the feed of a controller under test, as the terminal does."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from kilburn.controller.core.block_map import BlockMap
from kilburn.controller.page.reader import Reader
from tests.api.world import World


@asynccontextmanager
async def watched(world: World, key: str = "") -> AsyncGenerator[AsyncGenerator[dict[str, Any]]]:
    """The events of /map/events, as they come."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with world.session.get(world.url + "/map/events", headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"

        async def events() -> AsyncGenerator[dict[str, Any]]:
            data = b""
            async for piece in response.content.iter_any():
                data += piece
                *lines, data = data.split(b"\n\n")
                for line in lines:
                    assert line.startswith(b"data: ")
                    if line != b"data: [DONE]":
                        yield json.loads(line.removeprefix(b"data: "))

        yield events()


def expect_same(reader: Reader, map: BlockMap) -> None:
    """What a reader knows is what the engine says."""
    for worker in map.workers:
        assert bytes(reader.cells[worker.lease]) == worker.device
        assert bytes(reader.host_cells[worker.lease]) == worker.host
    assert len(reader.cells) == len(reader.host_cells) == len(map.workers)
    assert {row.id: row._asdict() for row in map.requests} == reader.requests
    assert reader.tables == {key: (lease, tier.value, blocks) for key, (lease, tier, blocks) in map.tables.items()}
