"""A whole controller on loopback and a fake worker behind a real socket, in one event loop.

The worker says what a script tells it to: token i of every answer is script[i]. So the text of every answer is known,
and every difference is the edge's. On the way out the world checks that nothing is left behind.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import zmq.asyncio
from opentelemetry.sdk.trace.export import SpanExporter
from tokenizers import Tokenizer

from kilburn.controller.app import Running, running_controller
from kilburn.controller.driver import Driver
from kilburn.controller.page.feed import Feed
from kilburn.controller.simulate.fake_daemon import FakeDaemon, fake_hello
from kilburn.controller.simulate.fake_worker import Chooser
from kilburn.controller.text import Text
from kilburn.shared.config import ControllerSettings
from kilburn.shared.messages import StepPlan
from tests.api.vocabularies import byte_level_json, write_folder

VOCAB = 330
SPOKEN = "It is leading. hello world, the quick brown fox. \U0001f600 漢字 injury. the end" * 3
PLAIN = Tokenizer.from_str(byte_level_json())
EOS = 2


def ids_of(text: str) -> list[int]:
    ids: list[int] = PLAIN.encode(text, add_special_tokens=False).ids
    return ids


@dataclass(slots=True)
class Worker(FakeDaemon):
    """One that can be held: it is heard, and answers no plan before it goes on."""

    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def _answer(self, socket: zmq.asyncio.Socket, plan: StepPlan) -> None:
        await self.goes_on.wait()
        await FakeDaemon._answer(self, socket, plan)


@dataclass
class World:
    running: Running
    daemon: Worker
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.running.http_address

    @property
    def driver(self) -> Driver:
        return self.running.driver

    @property
    def feed(self) -> Feed:
        return self.running.feed

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def ready(self) -> None:
        while not self.running.is_ready():
            await asyncio.sleep(0.005)

    async def until(self, holds: Callable[[], bool], within_s: float = 60.0) -> None:
        """Fails where it does not come true in time."""
        async with asyncio.timeout(within_s):
            while not holds():
                await asyncio.sleep(0.005)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step ends while this lasts: what is asked meanwhile finds the worker as it is now."""
        self.daemon.goes_on.clear()
        try:
            yield
        finally:
            self.daemon.goes_on.set()

    def owned_blocks(self) -> int:
        return sum(group.owned_blocks for group in self.driver.engine.snapshot().groups)

    def is_quiet(self) -> bool:
        return self.driver.engine.is_idle and self.driver.streams.num_open == 0 and self.owned_blocks() == 0


@asynccontextmanager
async def served(
    folder: Path,
    *,
    script: list[int] | None = None,
    delay_s: float = 0.0,
    settings: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
    choose: Chooser | None = None,
    exporter: SpanExporter | None = None,
) -> AsyncIterator[World]:
    """A world of one worker. It ends with every block free and no request open, or fails."""
    write_folder(folder)
    wanted = ControllerSettings(
        model=str(folder), served_model_name="toy", port=0, bind="tcp://127.0.0.1:0", recovery_seconds=5.0
    )
    words = ids_of(SPOKEN) if script is None else script
    async with running_controller(replace(wanted, **(settings or {})), exporter) as running:
        hello = fake_hello(**({"vocab_size": VOCAB, "max_len": 256, "num_blocks": 512} | (worker or {})))
        daemon = Worker(
            running.endpoint,
            hello,
            delay_s,
            choose=choose or (lambda row, stream: words[(len(row.tokens) - row.num_prompt) % len(words)]),
        )
        daemon.goes_on.set()
        task = asyncio.create_task(daemon.run())
        try:
            async with aiohttp.ClientSession() as session:
                world = World(running, daemon, session)
                await world.ready()
                yield world
                await world.until(world.is_quiet)
            world.driver.engine.validate()
            assert daemon.faults == []
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def text_after(num_tokens: int, script: list[int] | None = None) -> str:
    """What an answer of so many tokens says."""
    words = ids_of(SPOKEN) if script is None else script
    return str(PLAIN.decode([words[i % len(words)] for i in range(num_tokens)], skip_special_tokens=True))


__all__ = ["EOS", "SPOKEN", "VOCAB", "Text", "World", "ids_of", "served", "text_after"]
