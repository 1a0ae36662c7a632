"""Both ends of the wire on real sockets, for tests: a controller's link that notes events, and raw strangers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import zmq

from kilburn.controller.core.events import Arrived, Left
from kilburn.controller.link import ControllerLink, LinkLimits
from kilburn.shared import messages as m
from kilburn.shared.codec import encode
from kilburn.shared.keys import ControllerKeys, WorkerKeys
from kilburn.worker.link import LinkLost, WorkerLink
from tests.wire.samples import HELLO

PATIENCE_S = 20.0  # far above anything here; only a failure waits so long


class Controller:
    """A link and all that it delivered."""

    def __init__(self, link_of: Callable[[Callable[[list[Arrived | Left]], None]], ControllerLink]) -> None:
        self.events: list[Arrived | Left] = []
        self.link = link_of(self.events.extend)

    @property
    def lefts(self) -> list[Left]:
        return [event for event in self.events if isinstance(event, Left)]

    def messages(self, kind: type) -> list[Arrived]:
        return [event for event in self.events if isinstance(event, Arrived) and isinstance(event.message, kind)]

    async def peer(self, nth: int = 0) -> bytes:
        """Who sent the nth Hello."""
        await until(lambda: len(self.messages(m.Hello)) > nth)
        return self.messages(m.Hello)[nth].peer


@asynccontextmanager
async def controller(
    keys: ControllerKeys | None = None, limits: LinkLimits | None = None, endpoint: str = "tcp://127.0.0.1:0"
) -> AsyncIterator[Controller]:
    side = Controller(lambda deliver: ControllerLink(endpoint, deliver, keys=keys, limits=limits))
    await side.link.start()
    try:
        yield side
    finally:
        await side.link.close()


@contextmanager
def worker(endpoint: str, name: str = "w0", keys: WorkerKeys | None = None) -> Iterator[WorkerLink]:
    link = WorkerLink(endpoint, name, keys=keys)
    try:
        yield link
    finally:
        link.close()


@contextmanager
def stranger(endpoint: str, identity: bytes | None = b"stranger.1", kind: int = zmq.DEALER) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.setsockopt(zmq.RCVHWM, 16)
        if identity is not None:
            socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.connect(endpoint)
        yield socket


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.002)


async def received(link: WorkerLink) -> m.FromController | LinkLost:
    message = await asyncio.to_thread(link.receive, PATIENCE_S)
    assert message is not None
    return message


async def welcomed(side: Controller, link: WorkerLink, beat_s: float = 0.02, silence_s: float = 60.0) -> bytes:
    """Say Hello, be welcomed with lease 9, and give the peer."""
    nth = len(side.messages(m.Hello))
    link.send(HELLO)
    peer = await side.peer(nth)
    side.link.send(peer, m.Welcome(9, beat_s, silence_s, 2))
    assert isinstance(await received(link), m.Welcome)
    return peer


def run(test: Callable[..., Awaitable[None]], *arguments: object) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await test(*arguments)

    asyncio.run(bounded())


def hello_frame() -> bytes:
    return encode(HELLO)
