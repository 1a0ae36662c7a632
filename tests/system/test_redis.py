"""Two controllers and one Redis, which may be down, paused, flushed, full or lying: no answer changes."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller import registry_redis
from kilburn.controller.app import running_controller
from kilburn.controller.redis_urls import UrlFault, connector
from kilburn.controller.registry import Announcement, NamedEntry
from kilburn.controller.registry_entries import EntrySigner
from kilburn.controller.registry_redis import RedisRegistry
from kilburn.controller.salts import Salts
from kilburn.shared.config import ControllerSettings
from kilburn.shared.keys import SettingError
from tests.api.vocabularies import write_folder
from tests.api.world import World, served, text_after
from tests.system.redis_server import RedisServer

SYSTEM = "You are a helpful assistant, and you always answer in rhymes. " * 3
KEY = b"0123456789abcdef0123456789abcdef"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@asynccontextmanager
async def pair(folder: Path, url: str) -> AsyncIterator[tuple[World, World]]:
    """Two controllers, each with a worker of its own, that share a key and a Redis."""
    (folder / "server.key").write_bytes(KEY)
    for name in ("a", "b"):
        (folder / name).mkdir()
    settings = {"redis": url, "server_key_file": str(folder / "server.key")}
    async with served(folder / "a", settings=settings) as a, served(folder / "b", settings=settings) as b:
        yield a, b


def registry_of(world: World) -> RedisRegistry:
    registry = world.driver.registry
    assert isinstance(registry, RedisRegistry)
    return registry


async def call(world: World, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with world.session.request(method, world.url + path, json=body) as response:
        return response.status, await response.json()


async def until_state(world: World, name: str, states: tuple[str, ...], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            status, about = await call(world, "GET", f"/v1/prefixes/{name}")
            if (about.get("state") if status == 200 else "gone") in states:
                return
            await asyncio.sleep(0.02)


async def cached(world: World, prompt: str) -> int:
    status, whole = await world.post("/v1/completions", {"prompt": prompt, "max_tokens": 5})
    assert status == 200, whole
    assert whole["choices"][0]["text"] == text_after(5)
    found: int = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_two_controllers_see_each_others_prefixes(tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(tmp_path, server.url) as (a, b):
            status, about = await call(a, "POST", "/v1/prefixes", {"name": "rhymes", "text": SYSTEM})
            assert status == 201
            await until_state(b, "rhymes", ("known",))
            assert b.owned_blocks() == 0  # known, and not yet computed
            await cached(b, SYSTEM + "one")
            await until_state(b, "rhymes", ("ready",))
            assert await cached(b, SYSTEM + "and two") >= about["tokens"] - 2
            server.client().flushall()
            await a.until(lambda: server.client().exists(registry_of(a)._names_at) == 1, 60)  # published again
            # Deleted where it was not registered: nobody has it any more.
            assert (await call(b, "DELETE", "/v1/prefixes/rhymes"))[0] == 200
            await until_state(a, "rhymes", ("gone",))
            assert (await call(b, "GET", "/v1/prefixes"))[1]["data"] == []
            status, _ = await call(b, "POST", "/v1/prefixes", {"name": "rhymes", "text": SYSTEM})
            assert status == 201  # a deletion ends what was before it only
            await until_state(a, "rhymes", ("known",))
            await call(b, "DELETE", "/v1/prefixes/rhymes")
            await until_state(a, "rhymes", ("gone",))

    with RedisServer(tmp_path) as server:
        run(test)


async def harm(server: RedisServer, a: World, asked: list[int]) -> None:
    """All that may happen to a Redis, one after the other; meanwhile some more are asked and answered."""

    async def some(seconds: float) -> None:
        most = asked[0] + 8
        await asyncio.sleep(seconds)
        await a.until(lambda: asked[0] >= most)

    client = server.client()
    await some(0.3)
    server.send(signal.SIGSTOP)
    await some(5.0)  # longer than any of the registry's patience, and than a slow machine is slow
    server.send(signal.SIGCONT)
    await a.until(lambda: registry_of(a).is_up, 60)
    client.flushall()
    await some(0.3)
    client.config_set("maxmemory", "1")  # full
    await some(1.0)
    client.config_set("maxmemory", "0")
    server.kill()
    await some(0.5)
    server.start()
    await a.until(lambda: registry_of(a).is_up, 60)


def test_a_redis_that_is_paused_flushed_full_and_killed_changes_no_answer(tmp_path: Path) -> None:
    async def load(world: World, is_over: asyncio.Event, asked: list[int]) -> None:
        while not is_over.is_set():
            length = 20 + asked[0] % 13
            body = {"prompt": SYSTEM[: 60 + asked[0] % 90], "max_tokens": length}
            async with asyncio.timeout(4.5):  # less than the pause: nobody waits for Redis
                status, whole = await world.post("/v1/completions", body)
            assert (status, whole["choices"][0]["text"]) == (200, text_after(length))
            asked[0] += 1

    async def test() -> None:
        async with pair(tmp_path, server.url) as (a, b):
            status, _ = await call(a, "POST", "/v1/prefixes", {"name": "kept", "text": SYSTEM})
            assert status == 201
            is_over, asked = asyncio.Event(), [0]
            loads = [asyncio.create_task(load(world, is_over, asked)) for world in (a, b, a, b)]
            harming = asyncio.create_task(harm(server, a, asked))
            await asyncio.wait([harming, *loads], return_when=asyncio.FIRST_COMPLETED)  # loads end by a fault alone
            await harming
            # After all that the name is there again, for both.
            await until_state(a, "kept", ("ready",))
            await until_state(b, "kept", ("known", "ready"))
            await a.until(lambda: server.client().exists(registry_of(a)._names_at) == 1, 60)
            is_over.set()
            await asyncio.gather(*loads)
            assert registry_of(a).counters.failures > 0
            await call(a, "DELETE", "/v1/prefixes/kept")
            await until_state(b, "kept", ("gone",))

    with RedisServer(tmp_path) as server:
        run(test)


def test_hostile_entries_are_ignored_and_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with pair(tmp_path, server.url) as (a, b):
            await call(a, "POST", "/v1/prefixes", {"name": "true", "text": SYSTEM})
            await until_state(b, "true", ("known",))
            client, registry = server.client(), registry_of(a)
            signer, at = registry._signer, registry._names_at
            (field, value), *_ = client.hgetall(at).items()
            stranger = EntrySigner(Salts(b"another key of theirs").service_key(), signer._namespace)
            forged = NamedEntry("", "forged", "", (5, 6, 7), 1)
            foreign = NamedEntry("", "foreign", "", (10**9,), 1)  # signed with our key, and no token of this model
            entries: dict[bytes, bytes] = {
                b"x": b"y",
                b"": b"",
                signer.field_of("", "moved"): value,
                signer.field_of("", "forged"): stranger.write_name(forged),
                stranger.field_of("", "forged"): stranger.write_name(forged),
                signer.field_of("", "cut"): value[:40],
                signer.field_of("", "bare"): json.dumps(["", "bare", "", [5], 1]).encode(),
                b"\xff" * 64: b"\x00" * 100_000,
                signer.field_of(*foreign.key): signer.write_name(foreign),
            }
            before = registry.counters.ignored
            client.hset(at, mapping=entries)  # type: ignore[arg-type]
            await a.until(lambda: registry.counters.ignored >= before + len(entries) - 1, 60)
            for world in (a, b):
                assert [p["name"] for p in (await call(world, "GET", "/v1/prefixes"))[1]["data"]] == ["true"]
                await cached(world, SYSTEM + "x")
            # The keys are of other kinds, and the true value is damaged: names go on being known where they are.
            client.hset(at, field, b"damaged")
            await asyncio.sleep(1.5)
            assert (await call(a, "GET", "/v1/prefixes/true"))[0] == 200
            client.set(at, "a text")
            failures = registry.counters.failures
            await a.until(lambda: registry.counters.failures > failures, 60)
            await cached(a, SYSTEM + "y")
            client.delete(at)
            await a.until(lambda: registry.is_up and client.exists(at) == 1, 60)
            await call(a, "DELETE", "/v1/prefixes/true")
            await until_state(b, "true", ("gone",))

    with RedisServer(tmp_path) as server:
        run(test)


async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speaks what might be Redis, and means nothing."""
    answers = [
        b"+OK\r\n",
        b"*-5\r\n",
        b"$99999\r\nx\r\n",
        b":1\r\n" * 50,
        b"*2\r\n$1\r\n0\r\n*1\r\n:7\r\n",
        b"\xff\x00!\r\n",
    ]
    for i in range(1000):
        if not await reader.read(4096):
            break
        writer.write(answers[i % len(answers)])
        await writer.drain()
    writer.close()


def test_a_redis_that_lies_or_is_not_there_costs_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        liar = await asyncio.start_server(lie, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{liar.sockets[0].getsockname()[1]}"
        for i, where in enumerate((url, "redis://127.0.0.1:1", "rediss://127.0.0.1:1", "redis+cluster://127.0.0.1:1")):
            (tmp_path / str(i)).mkdir()
            async with served(tmp_path / str(i), settings={"redis": where}) as world:
                registry = registry_of(world)
                for n in range(8):
                    await cached(world, SYSTEM + str(n))
                status, _ = await call(world, "POST", "/v1/prefixes", {"name": "mine", "text": SYSTEM})
                assert status == 201
                await until_state(world, "mine", ("ready",))
                await world.until(lambda registry=registry: registry.counters.failures > 0, 60)  # type: ignore[misc]
                assert (await call(world, "DELETE", "/v1/prefixes/mine"))[0] == 200
        liar.close()

    run(test)


def test_hints_are_found_until_they_are_withdrawn_expired_or_not_ours(tmp_path: Path) -> None:
    async def test() -> None:
        signer = EntrySigner(Salts(KEY).service_key(), b"model")
        a, b = (RedisRegistry(connector(server.url), signer, "n", name) for name in "ab")
        digests = [bytes([i]) * 32 for i in range(5)]
        for registry in (a, b):
            registry.start()
        a.learn("gpu", digests[:3], [], now=0.0)
        async with asyncio.timeout(60):
            while a.counters.sent < 3 or not b.is_up:
                await asyncio.sleep(0.02)
        client = server.client()
        at = f"kilburn:hint:{digests[3].hex()}"
        now_ms = int(time.time() * 1000)
        client.hset(at, b"c/gpu", b"unsigned")
        client.hset(at, b"d/gpu", signer.write_hint(digests[3], b"d/gpu", now_ms - 1))  # over
        client.hset(at, b"e/gpu", signer.write_hint(digests[4], b"e/gpu", now_ms + 1000))  # of another block
        client.hset(at, b"f/gpu", signer.write_hint(digests[3], b"f/gpu", 2**63))  # for ever
        client.set(f"kilburn:hint:{digests[4].hex()}", "a text")
        await b.fetch(digests, now=1.0, within_s=60.0)
        assert [b.holders(digest, 1.0) for digest in digests] == [{"a/gpu"}] * 3 + [set()] * 2
        assert a.holders(digests[0], 1.0) == {"gpu"}
        assert b.holders(digests[0], 1e6) == set()
        assert 0 < client.pttl(f"kilburn:hint:{digests[0].hex()}") <= 600_000
        a.learn("gpu", [], digests[:1], now=2.0)
        async with asyncio.timeout(60):
            while client.exists(f"kilburn:hint:{digests[0].hex()}"):
                await asyncio.sleep(0.02)
        assert b.counters.ignored == 2
        await b.fetch(digests[:1], now=3.0, within_s=60.0)
        assert b.holders(digests[0], 3.0) == set()  # nor does the asker remember what was withdrawn
        for registry in (a, b):
            await registry.close()

    with RedisServer(tmp_path) as server:
        run(test)


def test_hints_live_for_as_long_as_the_block_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewed at half their life, also after a flush; those of a process that was killed are gone at its end."""
    monkeypatch.setattr(registry_redis, "HINT_TTL_S", 2.0)

    async def test() -> None:
        signer = EntrySigner(Salts(KEY).service_key(), b"model")
        registry = RedisRegistry(connector(server.url), signer, "n", "a")
        registry.start()
        digests = [bytes([i]) * 32 for i in range(200)]
        registry.learn("gpu", digests, [], now=asyncio.get_running_loop().time())
        client, at = server.client(), f"kilburn:hint:{digests[7].hex()}"
        async with asyncio.timeout(60):
            while not client.exists(at):
                await asyncio.sleep(0.02)
            client.flushall()
            while len(client.keys("kilburn:hint:*")) < len(digests):  # each once more
                await asyncio.sleep(0.05)
            registry.learn("gpu", [], digests[:1], now=0.0)
            while client.exists(f"kilburn:hint:{digests[0].hex()}"):
                await asyncio.sleep(0.02)
            sent = registry.counters.sent
            while registry.counters.sent < sent + 2 * len(digests) - 2:  # two lives more
                await asyncio.sleep(0.05)
            while not client.exists(at):
                await asyncio.sleep(0.05)
            assert not client.exists(f"kilburn:hint:{digests[0].hex()}")
            await registry.close()
            while client.keys("kilburn:hint:*"):
                await asyncio.sleep(0.05)

    with RedisServer(tmp_path) as server:
        run(test)


def test_controllers_are_known_while_they_say_so_and_no_stranger_is(tmp_path: Path) -> None:
    async def test() -> None:
        signer = EntrySigner(Salts(KEY).service_key(), b"model")
        a, gateway = (RedisRegistry(connector(server.url), signer, "n", name) for name in "ag")
        about = Announcement("http://10.0.0.7:8000", 3, b"m" * 32, (16, 32))
        said: list[Announcement | None] = [about]
        heard: list[dict[str, Announcement]] = []
        a.announce(lambda: said[0])
        gateway.watch(lambda fleet: heard.append(dict(fleet)))
        client, at, now_ms = server.client(), "kilburn:fleet:n", int(time.time() * 1000)
        stranger = EntrySigner(Salts(b"another key of theirs").service_key(), b"model")
        forged = replace(about, address="http://thief")
        lies: dict[bytes, bytes] = {
            b"forged": stranger.write_controller(b"forged", forged, now_ms + 5000),
            b"moved": signer.write_controller(b"elsewhere", forged, now_ms + 5000),
            b"for ever": signer.write_controller(b"for ever", forged, now_ms + 10**12),
            b"old": signer.write_controller(b"old", forged, now_ms - 1),
            b"no address": signer.write_controller(b"no address", replace(forged, address="file:///"), now_ms + 5000),
            b"odd": b"\xff",
        }
        client.hset(at, mapping=lies)  # type: ignore[arg-type]
        a.start()
        gateway.start()
        async with asyncio.timeout(60):
            while {"a": about} not in heard:
                await asyncio.sleep(0.02)
            assert all(set(fleet) <= {"a"} for fleet in heard)
            assert gateway.counters.ignored >= 4
            assert not client.hexists(at, b"old")  # swept
            said[0] = None  # it drains
            while client.hexists(at, b"a") or heard[-1]:
                await asyncio.sleep(0.02)
        for registry in (a, gateway):
            await registry.close()

    with RedisServer(tmp_path) as server:
        run(test)


def test_the_word_of_a_deletion_is_not_kept_for_ever(tmp_path: Path) -> None:
    async def test() -> None:
        signer = EntrySigner(Salts(KEY).service_key(), b"model")
        registry = RedisRegistry(connector(server.url), signer, "n", "a")
        now = time.time_ns() // 1000
        old, new = (NamedEntry("alice", name, "", (), at) for name, at in (("old", now - 3601 * 10**6), ("new", now)))
        for entry in (old, new):
            registry.publish(entry)
        registry.start()
        client = server.client()
        async with asyncio.timeout(60):
            while client.hkeys("kilburn:names:n") != [signer.field_of("alice", "new")]:
                await asyncio.sleep(0.02)
        await registry.close()

    with RedisServer(tmp_path) as server:
        run(test)


def test_what_there_is_to_say_at_the_end_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    async def test() -> None:
        registry = RedisRegistry(connector(server.url), EntrySigner(KEY, b""), "n", "a")
        registry.start()
        async with asyncio.timeout(60):
            while not registry._work._waiters:  # type: ignore[attr-defined]  # it waits for something to send
                await asyncio.sleep(0.01)
            registry.learn("gpu", [], [b"d" * 32], now=1.0)  # in the turn in which it is told to end
            await registry.close()

    with RedisServer(tmp_path) as server:
        run(test)


def test_what_is_to_be_sent_is_bounded() -> None:
    async def test() -> None:
        registry = RedisRegistry(connector("redis://127.0.0.1:1"), EntrySigner(KEY, b""), "n", "a")
        for i in range(80):
            registry.learn("gpu", [bytes([i, j % 256, j // 256]) * 8 for j in range(1000)], [], now=0.0)
        assert len(registry._hints) == 1 << 16
        assert registry.counters.dropped == 80_000 - (1 << 16)

    run(test)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/2",
        "redis://user:pass%40word@host:6379",
        "rediss://:password@host:6380/0?ssl_cert_reqs=none",
        "unix:///run/redis.sock?db=1&password=x",
        "redis+cluster://:password@host:6379",
        "redis+sentinel://user:password@one:26379,two:26379/mymaster/3",
    ],
)
def test_urls_that_are_taken(url: str) -> None:
    async def test() -> None:
        connector(url)

    run(test)


@pytest.mark.parametrize(
    "url", ["host:6379", "http://:hunter2@x", "redis://:hunter2@x:port", "redis+sentinel://hunter2:1"]
)
def test_urls_that_are_not_are_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    write_folder(tmp_path)
    base = ControllerSettings(model=str(tmp_path), port=0, bind="tcp://127.0.0.1:0")

    async def test() -> None:
        with pytest.raises(UrlFault):
            connector(url)
        with pytest.raises(SettingError, match="--redis: the URL") as caught:
            async with running_controller(replace(base, redis=url)):
                pass
        assert "hunter2" not in str(caught.value)

    run(test)
