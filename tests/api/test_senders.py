"""Clients that never come to the end of what they ask: told so and disconnected, by controllers and gateways alike."""

import asyncio
import contextlib
import errno
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from kilburn.controller.api.crowds import Crowd
from kilburn.controller.api.errors import every_error
from kilburn.controller.api.looking import looking
from kilburn.controller.api.malformed import OPENING_BYTES
from kilburn.controller.api.senders import STRIDE_BYTES, Senders
from kilburn.controller.listening import listen, runner_of
from kilburn.shared.config import ControllerSettings
from tests.api.test_answers import COMPLETION
from tests.api.test_gateway import fronted, settle
from tests.api.world import served, text_after

PATIENCE_S = 100.0
SECRET = "sk-secret-of-alice-0001"
LIVE = "GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
TOO_LITTLE = "the request did not come to the end of its {} within the time for it here (--sending-seconds)"


def post(path: str, length: str = "Content-Length: 1000", more: str = "") -> str:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n{more}\r\n"


VERSION = "anthropic-version: 2023-06-01\r\n"
# What is sent, and nothing after it; in whose shape the answer is; what had come.
UNFINISHED = (
    ("", "nobody", "nothing"),
    ("P", "OpenAI", "head"),
    (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}", "OpenAI", "head"),
    (f"GET /v1/models HTTP/1.1\r\nX-Long: {'/v1/messages ' * 500}", "OpenAI", "head"),
    ("POST /v1/messages HTTP/1.1\r\nHost: loc", "Anthropic", "head"),
    ("GET /v1/models HTTP/1.1\r\nAnthropic-Version: 2023-06-01\r\nHost", "Anthropic", "head"),
    (post("/v1/completions"), "OpenAI", "body"),
    (post("/v1/chat/completions") + f'{{"user": "{SECRET}', "OpenAI", "body"),
    (post("/v1/responses", "Transfer-Encoding: chunked") + "5\r\n{", "OpenAI", "body"),
    (post("/v1/messages") + "{", "Anthropic", "body"),
    (post("/v1/completions", more=VERSION) + "{", "Anthropic", "body"),
    (post("/tokenize") + "{", "OpenAI", "body"),
)


async def told(url: str, sent: str, *, before: str = "") -> bytes:
    """What is answered until the server closes. `before`: a whole request on the same connection."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    async with asyncio.timeout(10.0):
        if before:
            writer.write(before.encode())
            await reader.readuntil(b'"ok"}')
        writer.write(sent.encode())
        answer = await reader.read()
    writer.close()
    return answer


def check(answer: bytes, shape: str, part: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    if shape == "nobody":
        assert answer == b""
        return
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n"), answer
    assert {b"Server: kilburn", b"Connection: close"} <= set(head.split(b"\r\n")), head
    about = json.loads(body)
    message = TOO_LITTLE.format("headers" if part == "head" else part)
    if shape == "Anthropic":
        assert about == {"type": "error", "error": {"type": "timeout_error", "message": message}}
    else:
        kind = {"type": "invalid_request_error", "param": None, "code": "request_incomplete"}
        assert about == {"error": {"message": message, **kind}}


async def test_it_is_told_in_its_own_shape_counted_and_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "cg":
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.DEBUG):
        async with (
            served(tmp_path / "c", settings={"sending_seconds": 0.2}) as world,
            fronted(tmp_path / "g", [world.url], sending_seconds=0.2) as (gateway, client),
        ):
            await settle(gateway, 1)
            wanted = [*UNFINISHED, ("", "OpenAI", "head")]  # the last on a connection that was of use before
            asked = [
                asking
                for url in (world.url, client.url)
                for asking in (*(told(url, sent) for sent, _, _ in UNFINISHED), told(url, LIVE[:30], before=LIVE))
            ]
            for (_, shape, part), answer in zip(wanted * 2, await asyncio.gather(*asked), strict=True):
                check(answer, shape, part)
            _, whole, _ = await client.ask(COMPLETION, {"prompt": "x", "max_tokens": 9})
            assert whole["choices"][0]["text"] == text_after(9)
            expected = Counter(part for _, _, part in wanted)
            assert world.driver.streams.counts.incomplete == gateway.door.forwarder.counters.incomplete == expected
            for url, prefix in ((world.url, "kilburn"), (client.url, "kilburn_gateway")):
                async with client.session.get(url + "/metrics") as response:
                    assert f'{prefix}_requests_incomplete_total{{part="head"}} 6.0' in await response.text()
    assert SECRET not in caplog.text
    assert "Traceback" not in caplog.text


@contextlib.asynccontextmanager
async def connected(
    senders: Senders,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, web.AppRunner]]:
    """To a server that says how many bytes it was sent."""

    async def say(request: web.Request) -> web.Response:
        return web.Response(text=f"{len(await request.read())} bytes")

    app = web.Application(client_max_size=1 << 20, middlewares=[every_error])
    app.router.add_post("/", say)
    runner = runner_of(app, ControllerSettings(model="m"), Crowd())
    senders.watch_all(runner)
    await runner.setup()
    try:
        at = urlsplit(await listen(runner, "127.0.0.1", 0))
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        yield reader, writer, runner
        writer.close()
    finally:
        await runner.cleanup()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not holds():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(("stride", "is_taken"), [(STRIDE_BYTES, True), (1, False)])
async def test_a_body_may_take_its_time_but_not_a_byte_a_minute(stride: int, is_taken: bool) -> None:
    """The times are those that whoever looks is told."""
    given_up: list[str] = []
    senders = Senders(PATIENCE_S, given_up.append)
    async with connected(senders) as (reader, writer, runner):
        now = asyncio.get_running_loop().time()
        writer.write(post("/", f"Content-Length: {4 * stride}").encode())
        for turn in (1, 2, 3):
            writer.write(bytes(stride))
            come = turn * stride
            await until(lambda come=come: [body.content.total_bytes for body in senders._bodies] == [come])
            senders.look(runner, now + turn * 0.45 * PATIENCE_S)
        writer.write(bytes(stride))
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 " if is_taken else b"HTTP/1.1 408 ")
        assert given_up == ([] if is_taken else ["body"])
    assert senders._bodies == set()


async def test_headers_are_complete_in_time_however_steadily_they_come() -> None:
    given_up: list[str] = []
    senders = Senders(PATIENCE_S, given_up.append)
    async with connected(senders) as (reader, writer, runner):
        now = asyncio.get_running_loop().time()
        for turn in (0, 1, 2, 3):
            writer.write(b"POST / HTTP/1.1\r\n" if turn == 0 else b"X-More: " + b"x" * OPENING_BYTES + b"\r\n")
            await until(lambda: any(connection.opening for connection in runner.server.connections))
            senders.look(runner, now + turn * 0.33 * PATIENCE_S)
        assert given_up == []
        senders.look(runner, now + 1.01 * PATIENCE_S)
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        assert given_up == ["head"]


async def test_whoever_left_in_the_moment_of_giving_up_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[str] = []
    senders = Senders(PATIENCE_S, given_up.append)
    async with connected(senders) as (_, writer, runner):
        writer.write(b"P")
        await until(lambda: any(connection.opening for connection in runner.server.connections))
        (connection,) = runner.server.connections

        def not_connected(_: asyncio.Transport) -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        monkeypatch.setattr(type(connection.transport), "write_eof", not_connected)
        senders.look(runner, asyncio.get_running_loop().time() + 1.01 * PATIENCE_S)
        assert given_up == ["head"]


async def test_a_fault_in_one_look_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[float] = []

    def look(now: float) -> None:
        looks.append(now)
        if len(looks) == 1:
            raise RuntimeError("of our own")

    app = web.Application()
    app.cleanup_ctx.append(looking(0.01, look))
    runner = web.AppRunner(app)
    await runner.setup()
    await until(lambda: len(looks) > 2)
    await runner.cleanup()
    assert caplog.messages == ["a look at the connections failed"]


async def test_whoever_leaves_amid_a_body_is_no_fault_and_none_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    given_up: list[str] = []
    senders = Senders(PATIENCE_S, given_up.append)
    async with connected(senders) as (_, writer, _):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nxx")
        await until(lambda: len(senders._bodies) == 1)
        writer.close()
        await until(lambda: not senders._bodies)
    assert (given_up, caplog.messages) == ([], [])
