"""Streams under strain: silence, readers that do not read, errors on the way, and a thousand at once."""

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller.api.layout import CompletionLayout
from kilburn.controller.simulate.fake_daemon import FakeDaemon
from tests.api.test_answers import COMPLETION, events, texts
from tests.api.world import World, ids_of, served, text_after


async def test_a_long_silence_is_broken_by_comments_and_by_nothing_else(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.15, settings={"keep_alive_seconds": 0.04}) as world:
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        async with world.session.post(world.url + COMPLETION, json=body) as response:
            frames = (await response.read()).decode().split("\n\n")
        comments = [frame for frame in frames if frame == ": keep-alive"]
        assert len(comments) >= 2
        data = [json.loads(frame[6:]) for frame in frames if frame.startswith("data: {")]
        assert texts(data) == {0: text_after(2)}
        assert len(comments) + len(data) + 2 == len(frames), "those, [DONE], and what follows the last break"
    async with (
        served(tmp_path, delay_s=0.15, settings={"keep_alive_seconds": 0.0}) as world,
        world.session.post(world.url + COMPLETION, json=body) as response,
    ):
        assert b": keep-alive" not in await response.read()


@contextlib.asynccontextmanager
async def unread(url: str, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A stream whose client reads nothing, over a connection that holds little. The server is in this process."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.setblocking(False)
    with contextlib.closing(sock):
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, head.encode())
        async with asyncio.timeout(60.0):
            while not any(_is_of(transport, sock) for transport in loop._transports.values()):
                await asyncio.sleep(0.005)
        (server,) = [transport for transport in loop._transports.values() if _is_of(transport, sock)]
        server.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        server.set_write_buffer_limits(high=1024)  # however few deltas the text leaves in, they do not fit
        await loop.sock_sendall(sock, data)
        yield sock


def _is_of(transport: asyncio.Transport, sock: socket.socket) -> bool:
    """Whether this is the server's end of a client's socket."""
    return transport.get_extra_info("peername") == sock.getsockname()


async def test_a_reader_that_does_not_read_holds_up_nobody_and_gets_it_all_in_the_end(tmp_path: Path) -> None:
    num_tokens = 1500  # more than the buffers between here and there take
    async with (
        served(tmp_path, worker={"num_blocks": 1024, "max_len": 2048}) as world,
        unread(world.url, {"prompt": "x", "max_tokens": num_tokens}) as sock,
    ):
        streams = world.driver.streams
        await world.until(lambda: streams.counts.output_tokens == num_tokens, within_s=30.0)
        await world.until(lambda: streams.num_open == 0)
        assert world.owned_blocks() == 0, "what it computed with is free, though nobody has read it"
        assert streams.num_answers == 1
        assert 0 < streams.outbox_characters() < len(text_after(num_tokens)), "what was not sent waits as one delta"
        assert texts(await events(world, COMPLETION, {"prompt": "y", "max_tokens": 40})) == {0: text_after(40)}
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
        assert b"data: [DONE]" in received
        assert received.count(b'"finish_reason":"length"') == 1


async def test_a_fault_in_the_middle_of_a_stream_is_an_event_and_then_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = CompletionLayout.chunks

    def faulty(self: CompletionLayout, delta: Any) -> Any:
        if "leading" in delta.text or delta.finish is not None:
            raise KeyError("of our own, about /some/path")
        return whole(self, delta)

    async with served(tmp_path) as world:
        monkeypatch.setattr(CompletionLayout, "chunks", faulty)
        *before, error = await events(world, COMPLETION, {"prompt": "x", "max_tokens": 100})
        assert error == {
            "error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
        }
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in before)
        monkeypatch.undo()
        await world.until(world.is_quiet)
        assert texts(await events(world, COMPLETION, {"prompt": "x", "max_tokens": 9})) == {0: text_after(9)}


async def test_an_old_client_gets_its_stream_without_chunks_until_the_connection_ends(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 60, "stream": True}).encode()
    async with served(tmp_path, delay_s=0.001) as world:
        host, port = world.url.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {COMPLETION} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        head, _, told = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        assert "chunked" not in head
        *frames, done, rest = told.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert texts([json.loads(frame.removeprefix("data: ")) for frame in frames]) == {0: text_after(60)}


NUM_STREAMS, NUM_TOKENS = 1000, 6


async def read_raw(world: World, body: bytes) -> bytes:
    """One stream over a connection of its own, whole."""
    host, port = world.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_thousand_streams_at_once_and_memory_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_are_there, whole = asyncio.Event(), FakeDaemon._answer

    async def answer(daemon: FakeDaemon, *about: Any) -> None:
        await all_are_there.wait()
        await whole(daemon, *about)

    monkeypatch.setattr(FakeDaemon, "_answer", answer)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))
    worker = {"max_rows": 1024, "max_step_tokens": 4096, "num_blocks": 4096, "block_size": 16}
    prompt = ids_of("x")
    body = json.dumps({"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True}).encode()
    async with served(tmp_path, worker=worker, settings={"max_waiting": 2000, "max_step_tokens": 4096}) as world:
        streams, peaks = world.driver.streams, []
        for _ in range(2):
            all_are_there.clear()
            asked = [asyncio.ensure_future(read_raw(world, body)) for _ in range(NUM_STREAMS)]
            await world.until(lambda: streams.num_answers == NUM_STREAMS, within_s=60.0)
            all_are_there.set()
            answers = await asyncio.gather(*asked)
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            for answer in answers:
                frames = [
                    frame[6:] for frame in answer.decode().replace("\r\n", "\n").split("\n") if frame[:6] == "data: "
                ]
                assert frames[-1] == "[DONE]"
                assert "".join(json.loads(f)["choices"][0]["text"] for f in frames[:-1]) == text_after(NUM_TOKENS)
        assert streams.counts.output_tokens == 2 * NUM_STREAMS * NUM_TOKENS
        assert peaks[1] - peaks[0] < 8 << 10, f"kB of memory at the height: {peaks}"
