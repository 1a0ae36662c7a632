"""Bytes that are no HTTP request, sent to the real server: nothing of them is kept, and it goes on."""

import asyncio
import json
import logging
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.api.world import World, served

KEY = "sk-secret-of-alice-0001"
GET = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"


async def answer_to(world: World, sent: bytes) -> bytes:
    at = urlsplit(world.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 10)  # to the end: the server closes
    writer.close()
    return answer


MALFORMED = (
    f"{GET}Authorization: Bearer {KEY}\x01\r\n\r\n",
    f"{GET}Authorization : Bearer {KEY}\r\n\r\n",
    f"{GET}Authorization: Bearer {KEY}\r\nAuthorization Bearer {KEY}\r\n\r\n",
    f"{KEY} / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    f"GET http://[{KEY} HTTP/1.1\r\nHost: localhost\r\n\r\n",
    f"GET / {KEY}\r\n\r\n",
    f"{GET}X-Long: {KEY}{'x' * 9000}\r\n\r\n",
    f"{GET}Content-Length: {KEY}\r\n\r\n",
    f"{CHUNKED}Authorization: Bearer {KEY}\r\nConnection: close\r\n\r\n{KEY}\r\n",
    f"{CHUNKED}Content-Encoding: gzip\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    f"{len(KEY):x}\r\n{KEY}\r\n0\r\n\r\n",
)


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_nothing_of_it_is_logged_and_no_software_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    (tmp_path / "keys").write_text(f"alice:{KEY}\n")
    with caplog.at_level(level, "kilburn"):
        async with served(tmp_path, settings={"api_key_file": str(tmp_path / "keys")}) as world:
            for text in MALFORMED:
                answer = await answer_to(world, text.encode("latin-1"))
                assert re.match(rb"HTTP/1\.[01] 400 ", answer), answer
                assert b"\r\nServer: kilburn\r\n" in answer
                assert b"Python" not in answer
                assert b"aiohttp" not in answer
                told = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
                assert (told["type"], "header" in told["message"]) == ("invalid_request_error", "X-Long" in text)
            headers = {"Authorization": f"Bearer {KEY}"}
            async with world.session.get(world.url + "/v1/models", headers=headers) as response:
                assert response.status == 200
    assert KEY not in caplog.text
    assert "Traceback" not in caplog.text
    lines = [record for record in caplog.records if record.name != "kilburn"]
    assert {line.levelno for line in lines} == ({logging.DEBUG} if level == logging.DEBUG else set())
    if level == logging.DEBUG:  # that they came is told there, and of what kind they were
        assert "what came on a connection is no HTTP request: BadHttpMessage" in {line.getMessage() for line in lines}
