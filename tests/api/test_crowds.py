"""More clients than may be connected: told so in their own shape; whoever looks whether all is well is answered."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kilburn.controller.api import crowds
from tests.api.test_gateway import fronted, settle
from tests.api.test_senders import LIVE, post, told
from tests.api.world import served, text_after

ASKED = json.dumps({"prompt": "x", "max_tokens": 5})
COMPLETION = post("/v1/completions", f"Content-Length: {len(ASKED)}") + ASKED
MESSAGE = post("/v1/messages", f"Content-Length: {len(ASKED)}") + ASKED
FULL = "2 clients are connected, as many as may be (--max-connections)"


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that was answered, and stays."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(LIVE.encode())
    await reader.readuntil(b'"ok"}')
    yield reader, writer
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("by_gateway", [False, True])
async def test_who_is_one_too_many_is_told_so_and_probes_and_figures_are_answered(
    tmp_path: Path, by_gateway: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "cg":
        (tmp_path / name).mkdir()
    few = {"max_connections": 2}
    async with contextlib.AsyncExitStack() as stack:
        world = await stack.enter_async_context(served(tmp_path / "c", settings={} if by_gateway else few))
        url, prefix = world.url, "kilburn"
        if by_gateway:
            gateway, client = await stack.enter_async_context(fronted(tmp_path / "g", [world.url], **few))
            await settle(gateway, 1)
            url, prefix = client.url, "kilburn_gateway"
        async with connected(url) as (reader, writer):
            async with connected(url):
                for asked, shape in ((COMPLETION, "OpenAI"), (MESSAGE, "Anthropic")):
                    head, _, body = (await told(url, asked)).partition(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 503 "), head
                    assert b"Connection: close" in head.split(b"\r\n")
                    error = json.loads(body)["error"]
                    assert error["message"] == FULL
                    assert (error["code"] if shape == "OpenAI" else error["type"]) == (
                        "too_many_connections" if shape == "OpenAI" else "overloaded_error"
                    )
                for path in ("/live", "/health", "/ready", "/metrics"):
                    answer = await told(url, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), path
                assert f"{prefix}_connections_refused_total 2.0".encode() in answer
                for asked, status in (("GET /nowhere", 503), ("POST /metrics", 405)):
                    answer = await told(url, f"{asked} HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
                    assert b"\r\nConnection: close\r\n" in answer
                monkeypatch.setattr(crowds, "SPARE", 0)
                with contextlib.suppress(ConnectionResetError):  # or closed: both say that nobody is there
                    assert await told(url, LIVE) == b""
                writer.write(COMPLETION.encode())  # who is connected already stays
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
                assert text_after(5).encode() in await reader.readuntil(b"}]")
            async with asyncio.timeout(60):
                answer = b""
                while not answer:
                    with contextlib.suppress(ConnectionResetError):
                        answer = await told(url, LIVE.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n"))
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("hard", "allowed", "told"),
    [(9000, 2 * 4096 + 64 + 256, ""), (1000, 1000, "--max-connections 4096 may take: give 340, or raise ulimit -Hn")],
)
def test_as_many_files_may_be_open_as_clients_may_come(hard: int, allowed: int, told: str) -> None:
    code = (
        "import resource as r; from kilburn.controller.listening import have_descriptors as have;"
        f"r.setrlimit(r.RLIMIT_NOFILE, (200, {hard})); have(4096); print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str((allowed, hard))
    assert told in ended.stderr
    assert bool(told) == bool(ended.stderr)
