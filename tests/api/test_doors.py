"""TLS, pages of elsewhere, addresses in requests: what comes in, what goes out, and what never does."""

import asyncio
import hashlib
import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kilburn.controller.listening import tls_of
from kilburn.shared.config import ControllerSettings, SettingsError, load
from kilburn.shared.keys import SettingError
from tests.api.world import served, text_after

COMPLETION, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODY = {"prompt": "x", "max_tokens": 3}

# Of localhost, made for these tests and for nothing else.
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgO6OnCT/sVzvuSz70
02mg0Bm+kGworN8m6Y20OY7DWg+hRANCAAS7+d/hmPnIqDKf8kKH/RRKJUB9bgDB
SiTVZjIBefY1meo6IQYPsHIcM/zap8fHM3KZI8pN++xtGm/63bpIEgfu
-----END PRIVATE KEY-----
"""
CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUR9ARK9+6HQh5e1ghnXFCdPwjIuUwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEzMDEyNDkzMloYDzIxMjYxMTA2
MTI0OTMyWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAS7+d/hmPnIqDKf8kKH/RRKJUB9bgDBSiTVZjIBefY1meo6IQYPsHIc
M/zap8fHM3KZI8pN++xtGm/63bpIEgfuo28wbTAdBgNVHQ4EFgQU+l/hEAqlRHtQ
kd7+fln8KSrJg+0wHwYDVR0jBBgwFoAU+l/hEAqlRHtQkd7+fln8KSrJg+0wDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhAOcGyDUGNoLFQMVB88YJh1YDM1SaJu76Wde5C9ddDrBuAiAp
1NbMK33lCIUZ0C6RQDTCyvGT6nT7u0lrAragxMByMA==
-----END CERTIFICATE-----
"""


def write_pair(folder: Path) -> dict[str, str]:
    (folder / "cert.pem").write_text(CERTIFICATE)
    (folder / "key.pem").write_text(KEY)
    return {"tls_certificate": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}


async def test_tls(tmp_path: Path) -> None:
    """That certificate and no other: by its digest, so that no clock and no authority matters."""
    ours = aiohttp.Fingerprint(hashlib.sha256(ssl.PEM_cert_to_DER_cert(CERTIFICATE)).digest())
    async with served(tmp_path, settings=write_pair(tmp_path)) as world:
        assert world.url.startswith("https://127.0.0.1:")
        status, whole = await world.post(COMPLETION, BODY, ssl=ours)
        assert (status, whole["choices"][0]["text"]) == (200, text_after(3))
        streamed = BODY | {"stream": True, "max_tokens": 60}
        async with world.session.post(world.url + COMPLETION, json=streamed, ssl=ours) as response:
            lines = (await response.text()).split("\n")
            text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))
            assert (text, lines[-3]) == (text_after(60), "data: [DONE]")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await world.post(COMPLETION, BODY)  # signed by nobody that this client knows
        with pytest.raises(aiohttp.ClientError):
            async with world.session.get(world.url.replace("https", "http") + "/health"):
                pass
        status, _ = await world.post(COMPLETION, BODY, ssl=ours)
        assert status == 200


async def test_who_leaves_a_stream_over_tls_is_missed_by_nobody(tmp_path: Path) -> None:
    """Of a connection with TLS that is closed next to nothing may be asked: neither by a turn that brings it text, nor
    by who looks whether it reads; the server's end tells whether that one lives."""
    ours = aiohttp.Fingerprint(hashlib.sha256(ssl.PEM_cert_to_DER_cert(CERTIFICATE)).digest())
    settings = write_pair(tmp_path) | {"stalled_seconds": 0.1}
    async with served(tmp_path, worker={"num_blocks": 1024, "max_len": 2048}, settings=settings) as world:
        endless = BODY | {"stream": True, "max_tokens": 1500}
        for _ in range(3):
            leaving = [await world.session.post(world.url + COMPLETION, json=endless, ssl=ours) for _ in range(6)]
            whole = asyncio.ensure_future(world.post(COMPLETION, BODY | {"max_tokens": 200}, ssl=ours))
            for response in leaving:
                await response.content.readany()
                response.close()
            async with asyncio.timeout(20.0):
                status, answer = await whole
            assert (status, answer["choices"][0]["text"]) == (200, text_after(200))
            await world.until(lambda: world.driver.streams.num_answers == 0)
            await asyncio.sleep(0.05)  # somebody looks


def test_what_cannot_be_used_for_tls_is_named(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    assert tls_of("", "") is None
    with pytest.raises(SettingError, match="cannot be read"):
        tls_of(str(tmp_path / "none"), pair["tls_key"])
    with pytest.raises(SettingError, match="is not its key"):
        tls_of(pair["tls_certificate"], pair["tls_certificate"])
    with pytest.raises(SettingsError, match="give both"):
        load(ControllerSettings, ["--model=m", "--tls-key=k"], {})


@pytest.mark.parametrize("origins", ["chat.example", "https://chat.example/page", "https://", "https://a b"])
def test_origins_are_origins(origins: str) -> None:
    with pytest.raises(SettingsError, match="without a path"):
        load(ControllerSettings, ["--model=m", f"--cors-origins={origins}"], {})


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


async def test_pages_of_elsewhere_are_let_in_by_name_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice-0001\n")
    ours, other = {"Origin": "https://chat.example"}, {"Origin": "https://evil.example"}
    allowed: dict[str, Any] = {"cors_origins": "https://chat.example, http://localhost:3000"}
    key = {"Authorization": "Bearer sk-alice-0001"}
    async with served(tmp_path, settings={"api_key_file": str(keys), **allowed}) as world:

        async def asked(method: str, path: str, headers: dict[str, str]) -> tuple[int, str | None]:
            async with world.session.request(method, world.url + path, headers=headers) as response:
                assert "Access-Control-Allow-Credentials" not in response.headers
                return response.status, response.headers.get("Access-Control-Allow-Origin")

        mine = ours["Origin"]
        assert await asked("OPTIONS", COMPLETION, ours | PREFLIGHT) == (204, mine)
        assert await asked("GET", "/v1/models", ours | key) == (200, mine)
        assert await asked("GET", "/v1/models", ours) == (401, mine), "the page may read why"
        assert await asked("OPTIONS", COMPLETION, other | PREFLIGHT) == (401, None)
        assert await asked("GET", "/v1/models", other | key) == (200, None), "which a browser then keeps from the page"
        async with world.session.post(
            world.url + COMPLETION, json=BODY | {"stream": True}, headers=ours | key
        ) as stream:
            assert stream.headers["Access-Control-Allow-Origin"] == mine
            assert stream.headers["Vary"] == "Origin"
            await stream.read()
    async with (
        served(tmp_path) as world,
        world.session.options(world.url + COMPLETION, headers=ours | PREFLIGHT) as response,
    ):
        assert response.status == 403
        assert not [name for name in response.headers if name.startswith("Access-Control")]
    async with served(tmp_path, settings=allowed) as world:
        for headers, status in ((ours, 200), (other, 403)):
            async with world.session.get(world.url + "/v1/models", headers=headers) as response:
                assert response.status == status, "without keys the named pages may ask, too"


async def test_no_address_in_a_request_is_ever_asked(tmp_path: Path) -> None:
    """Every place where the APIs know addresses, with one that would tell if it were asked."""
    num_calls = 0

    def called(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_calls
        num_calls += 1
        writer.close()

    listener = await asyncio.start_server(called, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/picture.png"
    image, user = {"type": "image_url", "image_url": {"url": url}}, "user"
    cases: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [{"role": user, "content": [image]}]}),
        (CHAT, {"messages": [{"role": user, "content": [{"type": "input_audio", "input_audio": {"data": url}}]}]}),
        (CHAT, {"messages": [{"role": user, "content": url}], "chat_template": "{% include '" + url + "' %}"}),
        (CHAT, {"messages": [{"role": user, "content": "x"}], "documents": [{"url": url}], "web_search_options": {}}),
        (COMPLETION, {"prompt": url, "suffix": url, "prompt_embeds": url}),
        (RESPONSES, {"input": [{"role": user, "content": [{"type": "input_image", "image_url": url}]}]}),
        (RESPONSES, {"input": [{"role": user, "content": [{"type": "input_file", "file_url": url}]}]}),
        (RESPONSES, {"input": "x", "tools": [{"type": "mcp", "server_url": url}]}),
        (
            MESSAGES,
            {"messages": [{"role": user, "content": [{"type": "image", "source": {"type": "url", "url": url}}]}]},
        ),
        (MESSAGES, {"messages": [{"role": user, "content": "x"}], "mcp_servers": [{"type": "url", "url": url}]}),
        ("/v1/prefixes", {"name": "../../etc/passwd", "text": "x"}),
        ("/v1/prefixes", {"name": url, "text": "x"}),
    ]
    async with listener, served(tmp_path) as world:
        for path, body in cases:
            status, told = await world.post(path, {"max_tokens": 1, **body})
            assert status == 400 or "documents" in body, (body, told)
        headers = {"X-Request-Id": "../../etc/passwd", "Referer": url, "X-Forwarded-For": url, "Callback": url}
        assert (await world.post(COMPLETION, BODY, headers=headers))[0] == 200
    assert num_calls == 0
