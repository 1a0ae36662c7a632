"""Clients that do not read: they are disconnected after a while, and those that read slowly are not."""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from kilburn.controller.api.readers import Readers
from tests.api.test_answers import COMPLETION
from tests.api.test_gateway import fronted, settle
from tests.api.test_long_streams import unread
from tests.api.world import served, text_after

PATIENCE_S = 100.0
ALL = b"x" * (1 << 22)  # more than kernels take


@contextlib.asynccontextmanager
async def asked(readers: Readers, *, is_stream: bool) -> AsyncIterator[socket.socket]:
    """A client of a server that has much to say. It reads when told to."""

    async def say(request: web.Request) -> web.StreamResponse:
        if not is_stream:
            return web.Response(body=ALL)
        response = web.StreamResponse()
        await response.prepare(request)
        for at in range(0, len(ALL), 1 << 14):
            await response.write(ALL[at : at + (1 << 14)])
        return response

    app = web.Application()
    app.router.add_get("/", say)
    readers.watch_all(app)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    try:
        with contextlib.closing(sock):
            await loop.sock_connect(sock, runner.addresses[0])
            await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(60.0):
                while not readers.num_waiting:
                    await asyncio.sleep(0.005)
            yield sock
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_who_takes_a_little_now_and_then_stays_and_who_takes_nothing_goes(
    is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[str] = []
    readers = Readers(PATIENCE_S, lambda: lost.append("one"))
    loop = asyncio.get_running_loop()
    async with asked(readers, is_stream=is_stream) as sock:
        now = loop.time()
        await asyncio.sleep(0.05)  # for all that fits on the way to be on the way
        readers.look(now)
        for _ in range(3):  # as long as is allowed, but for a little that it takes each time
            for _ in range(64):
                await loop.sock_recv(sock, 4096)
                await asyncio.sleep(0.001)
            now += PATIENCE_S
            readers.look(now)
        assert lost == []
        readers.look(now + 0.99 * PATIENCE_S)
        assert lost == []
        with caplog.at_level(logging.WARNING):
            for _ in range(50):  # of what was on its way, some may still arrive
                now += PATIENCE_S
                if not lost:
                    readers.look(now)
        assert (lost, len(caplog.messages)) == (["one"], 1)
        assert "xxx" not in caplog.text
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(sock, 1 << 16):
                pass
        assert readers.num_waiting == 0
    assert lost == ["one"]


async def test_a_stream_that_nobody_reads_ends_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"stalled_seconds": 0.2}
    async with served(tmp_path, worker={"num_blocks": 1024, "max_len": 2048}, settings=settings) as world:
        streams = world.driver.streams
        async with unread(world.url, {"prompt": "x", "max_tokens": 1500}) as sock:
            await world.until(lambda: streams.counts.stalled == 1, within_s=30.0)
            await world.until(lambda: streams.num_answers == 0)
            assert streams.outbox_characters() == 0
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                    pass
        assert text_after(5) not in caplog.text
        async with world.session.get(world.url + "/metrics") as response:
            assert "kilburn_clients_stalled_total 1.0" in await response.text()
        async with world.session.post(world.url + COMPLETION, json={"prompt": "x", "max_tokens": 9}) as response:
            assert json.loads(await response.read())["choices"][0]["text"] == text_after(9)


async def test_a_gateway_gives_them_up_too_and_so_does_the_controller_behind_it(tmp_path: Path) -> None:
    for name in "cg":
        (tmp_path / name).mkdir()
    async with (
        served(tmp_path / "c", worker={"num_blocks": 1024, "max_len": 2048}) as world,
        fronted(tmp_path / "g", [world.url], stalled_seconds=0.2) as (gateway, client),
    ):
        await settle(gateway, 1)
        async with unread(client.url, {"prompt": "x", "max_tokens": 1500}):
            await world.until(lambda: gateway.door.forwarder.counters.stalled == 1, within_s=30.0)
            await world.until(lambda: world.driver.streams.num_answers == 0)
