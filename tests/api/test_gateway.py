"""A gateway before controllers of every kind: sound ones, with hints of theirs in Redis, and those that fail midway."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kilburn.controller.gateway import fleet as fleets
from kilburn.controller.gateway import prompts, roster
from kilburn.controller.gateway.app import RunningGateway, running_gateway
from kilburn.controller.gateway.events import EventCutter, is_for_another, is_opening
from kilburn.controller.gateway.fleet import Fleet, Lost
from kilburn.controller.gateway.roster import REQUEST_TOKENS, Roster, State
from kilburn.controller.registry import Announcement
from kilburn.controller.registry_redis import RedisRegistry
from kilburn.shared.config import GatewaySettings
from kilburn.shared.keys import SettingError
from tests.api.test_salts import ALICE, BOB, ROOT, with_keys
from tests.api.vocabularies import write_folder
from tests.api.world import SPOKEN, World, served, text_after
from tests.system.redis_server import RedisServer

PROMPT = SPOKEN[:120]
CHAT_PAGE = "https://chat.example"
COMPLETION = {"prompt": PROMPT, "max_tokens": 5}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5}


class Client:
    """Asks one address."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def ask(self, path: str, body: Any, method: str = "POST", **headers: str) -> tuple[int, Any, Any]:
        async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def events(self, path: str, body: Any) -> list[str]:
        """What follows `data: ` in each event of a stream; nothing else may be in it."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200
            *events, rest = (await response.text()).split("\n\n")
        assert rest == ""
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]


@asynccontextmanager
async def fronted(folder: Path, addresses: list[str], **settings: Any) -> AsyncIterator[tuple[RunningGateway, Client]]:
    write_folder(folder)
    wanted = GatewaySettings(
        model=str(folder), served_model_name="toy", port=0, controllers=",".join(addresses), lost_seconds=60.0
    )
    async with running_gateway(replace(wanted, **settings)) as gateway, aiohttp.ClientSession() as session:
        yield gateway, Client(gateway.http_address, session)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


# --- sound controllers


async def settle(gateway: RunningGateway, ready: int) -> None:
    await until(lambda: sum(member.state is State.READY for member in gateway.fleet.members) == ready)


def asked_of(world: World) -> int:
    return sum(world.driver.streams.counts.finished.values())


async def test_requests_go_where_their_beginning_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By names that the gateway works out as the controllers do: a tenant's own salt, a template, a public prefix."""
    monkeypatch.setattr(prompts, "ASK_S", 10.0)  # however slow this machine is, the registry is waited for
    # A controller's word of its requests is a second old, and one that has ended meanwhile would outweigh short hits.
    monkeypatch.setattr(roster, "REQUEST_TOKENS", 1)
    (tmp_path / "server.key").write_bytes(b"0123456789abcdef")
    for name in "abg":
        (tmp_path / name).mkdir()
    with RedisServer(tmp_path) as redis:
        shared = {"redis": redis.url, "server_key_file": str(tmp_path / "server.key"), **with_keys(tmp_path)}
        async with AsyncExitStack() as stack:
            a, b = [await stack.enter_async_context(served(tmp_path / name, settings=shared)) for name in "ab"]
            gateway, client = await stack.enter_async_context(fronted(tmp_path / "g", [], **shared))
            await settle(gateway, 2)  # both announced themselves, and then how they name blocks: at first nobody knows
            await until(lambda: all(m.about is not None and m.about.block_sizes for m in gateway.fleet.members))

            async def cached(key: str, path: str, body: Any, of: World | Client = client) -> int:
                whole = (await Client(of.url, client.session).ask(path, body, Authorization=f"Bearer {key}"))[1]
                return int(whole["usage"]["prompt_tokens_details"]["cached_tokens"])

            async def told(world: World) -> None:
                """Redis has every hint and name that there was to tell."""
                registry = world.driver.registry
                assert isinstance(registry, RedisRegistry)
                await until(
                    lambda: not world.driver.engine.snapshot().groups[0].flights
                )  # whose blocks would not count
                num_told = world.driver.engine.snapshot().groups[0].cached_blocks
                await until(lambda: not registry._hints and not registry._names and registry.counters.sent >= num_told)

            public = {"name": "all", "text": SPOKEN[60:180], "public": True}
            for path, body, key in (
                ("/v1/completions", COMPLETION, ALICE),
                ("/v1/chat/completions", CHAT, BOB),
                ("/v1/completions", COMPLETION | {"cache_salt": "own"}, BOB),
            ):
                assert await cached(key, path, body, a) == 0
                await told(a)
                assert min([await cached(key, path, body) for _ in range(4)]) > 0, (path, key)
            # The same conversation in other protocols.
            messages = {"model": "toy", "max_tokens": 5, "messages": CHAT["messages"]}
            for path, body in (
                ("/v1/messages", messages),
                ("/v1/responses", {"input": PROMPT, "max_output_tokens": 5}),
            ):
                before = gateway.door.forwarder.counters.hit_tokens
                assert (await client.ask(path, body, Authorization=f"Bearer {BOB}"))[0] == 200
                assert gateway.door.forwarder.counters.hit_tokens > before, path
            # What one tenant computed steers nobody else's requests.
            before = gateway.door.forwarder.counters.hit_tokens
            await cached(ROOT, "/v1/completions", COMPLETION)
            assert gateway.door.forwarder.counters.hit_tokens == before
            # A public prefix is everybody's.
            assert (await Client(b.url, client.session).ask("/v1/prefixes", public, Authorization=f"Bearer {ROOT}"))[
                0
            ] == 201
            await told(b)
            await until(lambda: bool(gateway.door.prompts.public))
            body = {"prompt": SPOKEN[60:190], "max_tokens": 5}
            assert min([await cached(key, "/v1/completions", body) for key in (ALICE, BOB, ALICE)]) > 0
            # A Redis that is flushed, or gone, costs hits and nothing else.
            redis.client().flushall()
            redis.kill()
            for _ in range(4):
                assert (await client.ask("/v1/completions", COMPLETION, Authorization=f"Bearer {ALICE}"))[0] == 200
            await until(lambda: not gateway.door.prompts.registry.counters.is_up)
            assert len(gateway.fleet.members) == 2  # who is known and answers is not forgotten
            assert (await client.ask("/v1/completions", COMPLETION, Authorization=f"Bearer {ALICE}"))[0] == 200
            await client.ask("/v1/prefixes/all", None, "DELETE", Authorization=f"Bearer {ROOT}")
            for world in (a, b):
                await Client(world.url, client.session).ask(
                    "/v1/prefixes/all", None, "DELETE", Authorization=f"Bearer {ROOT}"
                )


async def test_without_a_registry_load_is_spread_and_what_fails_is_passed_by(tmp_path: Path) -> None:
    for name in "abg":
        (tmp_path / name).mkdir()
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef")
    async with served(tmp_path / "a", delay_s=0.01) as a, served(tmp_path / "b", delay_s=0.01) as b:
        addresses = [a.url, b.url, "http://127.0.0.1:1"]
        settings = {"redis": "redis://127.0.0.1:1", "server_key_file": str(key), "cors_origins": CHAT_PAGE}
        async with fronted(tmp_path / "g", addresses, **settings) as (gateway, client):
            await settle(gateway, 2)
            answers = await asyncio.gather(*(client.ask("/v1/completions", COMPLETION) for _ in range(16)))
            assert {(status, whole["choices"][0]["text"]) for status, whole, _ in answers} == {(200, text_after(5))}
            assert abs(asked_of(a) - asked_of(b)) <= 2
            events = await client.events("/v1/chat/completions", CHAT)
            assert events[-1] == "[DONE]"
            said = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])
            assert said == text_after(5)
            # What is asked and answered passes through.
            _, _, headers = await client.ask("/v1/completions", COMPLETION, **{"X-Request-Id": "mine-1"})
            assert headers["X-Request-Id"] == "mine-1"
            assert headers["Server"] == "kilburn"
            status, whole, _ = await client.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": -1})
            assert (status, whole["error"]["param"]) == (400, "max_tokens")
            status, whole, _ = await client.ask("/v1/models", None, "GET")
            assert whole["data"][0]["id"] == "toy"
            assert (await client.ask("/tokenize", {"prompt": PROMPT}))[1]["count"] > 10
            assert (await client.ask("/health", None, "GET"))[0] == 200
            assert (await client.ask("/ready", None, "GET"))[0] == 200
            assert (await client.ask("/debug/requests/1", None, "GET"))[0] == 404  # for who runs a controller
            # What a client of a controller has, a client of a gateway has: the API's own document, and pages that ask.
            for path in ("/openapi.json", "/docs"):
                page, own = [await client.session.get(url + path) for url in (client.url, a.url)]
                assert (page.status, await page.text()) == (200, await own.text()), path
                for name in ("Content-Type", "Content-Security-Policy"):
                    assert page.headers.get(name) == own.headers.get(name), (path, name)
            asking = {"Origin": CHAT_PAGE, "Access-Control-Request-Method": "POST"}
            allowed = await client.session.options(client.url + "/v1/chat/completions", headers=asking)
            assert (allowed.status, allowed.headers["Access-Control-Allow-Origin"]) == (204, CHAT_PAGE)
            _, _, headers = await client.ask("/v1/completions", COMPLETION, Origin=CHAT_PAGE)
            assert headers.getall("Access-Control-Allow-Origin") == [CHAT_PAGE]
            assert (await client.ask("/v1/completions", COMPLETION, Origin="https://other.example"))[0] == 403
            text = await (await client.session.get(client.url + "/metrics")).text()
            assert 'kilburn_gateway_controllers{state="ready"} 2.0' in text
            assert 'kilburn_gateway_controllers{state="unready"} 1.0' in text or 'state="lost"} 1.0' in text
            # A client that leaves is heard of by the controller.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 100})
            await a.until(lambda: a.is_quiet() and b.is_quiet())
            # Draining, requests that are there go on.
            asking = asyncio.create_task(client.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 40}))
            await until(lambda: any(member.under_way for member in gateway.fleet.members))
            draining = asyncio.create_task(gateway.door.drain(20.0, asyncio.Event()))
            await until(lambda: gateway.door.is_draining)
            status, whole, headers = await client.ask("/v1/completions", COMPLETION)
            assert (status, whole["error"]["code"], headers["Retry-After"]) == (503, "shutting_down", "1")
            assert (await asking)[1]["choices"][0]["text"] == text_after(40)
            await draining


# --- controllers that fail midway

FIRST = 'data: {"choices":[{"index":0,"text":"one","finish_reason":null}]}\n\n'
ROLE = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
CUT = 'data: {"error":{"message":"stops","type":"server_error","param":null,"code":"cut_short"}}\n\ndata: [DONE]\n\n'
Failing = Callable[[web.Request], Awaitable[web.StreamResponse]]


def says(*parts: str, then: str) -> Failing:
    """A stream that says so much, and then breaks off, or says no more."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part.encode())
            await asyncio.sleep(0.01)
        if then == "silence":
            await asyncio.Event().wait()
        if then == "cut" and request.transport is not None:
            request.transport.abort()
        return response

    return handler


def refuses(status: int, code: str) -> Failing:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"error": {"code": code, "message": "no"}}, status=status, headers={"Retry-After": "7"}
        )

    return handler


async def goes(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


class Poor:
    """A controller that fails in a way of its own; `is_mute`: it does not answer probes either, any more."""

    def __init__(self, fails: Failing) -> None:
        self.fails, self.is_mute, self.asked, self.url = fails, False, 0, ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            if self.is_mute:
                await asyncio.Event().wait()
            return web.json_response({"status": "ok"})
        self.asked += 1
        return await self.fails(request)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Poor"]:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


BEFORE_A_TOKEN: list[tuple[str, Failing]] = [
    ("refuses: queue", refuses(429, "queue_full")),
    ("refuses: no worker", refuses(503, "no_worker")),
    ("refuses: stops", refuses(503, "shutting_down")),
    ("refuses: connections", refuses(503, "too_many_connections")),
    ("goes at once", goes),
    ("opens and goes", says(ROLE, ": still here\n\n", then="cut")),
    ("goes in the middle of its first event", says(ROLE, FIRST[:30], then="cut")),
    ("ends in the middle of its first event", says(FIRST[:30], then="end")),
    ("opens and stops", says(ROLE, CUT, then="end")),
]
TAKEN = [
    ("answers that it is at fault", refuses(500, "request_failed"), 500),
    ("waited", refuses(503, "queue_timeout"), 503),
]


async def test_before_the_first_token_another_controller_takes_the_request(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "a").mkdir()
    async with served(tmp_path / "a") as sound, AsyncExitStack() as stack:
        poor = await stack.enter_async_context(Poor(goes).listening())
        gateway, client = await stack.enter_async_context(fronted(tmp_path / "g", [poor.url, sound.url]))
        await settle(gateway, 2)
        for name, poor.fails in BEFORE_A_TOKEN:
            asked = poor.asked
            while poor.asked < asked + 2:  # they take turns
                events = await client.events("/v1/completions", COMPLETION)
                said = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
                assert (said, events[-1]) == (text_after(5), "[DONE]"), name
                status, whole, _ = await client.ask("/v1/completions", COMPLETION)
                assert (status, whole["choices"][0]["text"]) == (200, text_after(5)), name
        retried = gateway.door.forwarder.counters.retried
        assert retried >= 2 * len(BEFORE_A_TOKEN)
        for name, poor.fails, expected in TAKEN:  # it is the answer: nobody else is troubled with it
            asked, statuses = poor.asked, []
            while poor.asked == asked:
                statuses.append((await client.ask("/v1/completions", COMPLETION))[0])
            assert statuses[-1] == expected, name
        assert gateway.door.forwarder.counters.retried == retried


async def test_after_it_the_stream_ends_with_an_error_at_once(tmp_path: Path) -> None:
    async with Poor(goes).listening() as poor, fronted(tmp_path, [poor.url], lost_seconds=1.0) as (gateway, client):
        await settle(gateway, 1)
        for parts in ((FIRST,), (ROLE, FIRST, FIRST[:25])):
            poor.fails = says(*parts, then="cut")
            *events, last, done = await client.events("/v1/completions", COMPLETION)
            assert events[-1] == FIRST.strip().removeprefix("data: ")
            assert json.loads(last)["error"]["code"] == "controller_lost"
            assert done == "[DONE]"
        poor.fails = says('data: {"type":"response.output_text.delta","sequence_number":6}\n\n', then="cut")
        for path, expected in (
            ("/v1/messages", '{"type": "error", "error": {"type": "overloaded_error", "message": '),
            ("/v1/responses", '{"type": "error", "code": "server_error", "message": '),
        ):
            async with client.session.post(client.url + path, json={"stream": True}) as response:
                name, data = (await response.text()).split("\n\n")[-2].splitlines()
            assert (name, data[: len(expected) + 6]) == ("event: error", f"data: {expected}")
        assert json.loads(data[6:])["sequence_number"] == 7
        # Whoever is named in the request's own line is not asked: controllers come from settings and the registry.
        raw_reader, raw = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
        raw.write(b"GET http://127.0.0.1:1/v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        poor.fails, asked = refuses(418, "teapot"), poor.asked
        assert (await raw_reader.read()).startswith(b"HTTP/1.1 418")
        assert poor.asked == asked + 1
        raw.close()
        # A machine that is gone says nothing: its streams end when its probes have been unanswered for long enough.
        poor.fails = says(FIRST, then="silence")
        asking = asyncio.create_task(client.events("/v1/completions", COMPLETION))
        await until(lambda: any(member.under_way for member in gateway.fleet.members))
        poor.is_mute = True
        async with asyncio.timeout(60):
            assert json.loads((await asking)[-2])["error"]["code"] == "controller_lost"
        # Nobody is left: a whole answer says so in its own form, and may be asked for again.
        poor.fails = hangs
        status, whole, headers = await client.ask("/v1/completions", COMPLETION)
        assert (status, whole["error"]["code"], headers["Retry-After"]) == (503, "no_controller", "1")
        assert (await client.ask("/health", None, "GET"))[0] == 503
        assert gateway.door.forwarder.counters.broken == 5
        poor.is_mute, poor.fails = False, refuses(429, "queue_full")
        await settle(gateway, 1)
        status, whole, headers = await client.ask("/v1/completions", COMPLETION)
        assert (status, whole["error"]["code"], headers["Retry-After"]) == (429, "queue_full", "7")


def test_the_order_is_by_state_then_by_cost() -> None:
    def about(address: str, num_requests: int) -> Announcement:
        return Announcement(address, num_requests, b"m", (16,))

    fleet = Roster(["http://listed"], 1.0, 0.0)
    fleet.heard({"x": about("http://x", 0), "y": about("http://y", 3), "z": about("http://z", 0)}, 0.0)
    x, y, z = (next(m for m in fleet.members if m.id == id) for id in "xyz")
    for member in (x, y):
        member.state = State.READY
    z.state = State.LOST
    assert [m.id for m in fleet.order(100, {})] == ["x", "y", "", "z"]
    assert fleet.order(9000, {"y": 3 * REQUEST_TOKENS - 1})[0].id == "x"
    assert fleet.order(9000, {"y": 3 * REQUEST_TOKENS + 1, "z": 9000})[0].id == "y"
    y.about = about("http://y", 0)
    assert {fleet.order(100, {})[0].id for _ in range(4)} == {"x", "y"}  # equals take turns


def test_who_has_taken_a_lost_members_place_keeps_what_it_was_asked_since() -> None:
    """A probe may have been sent to the one before, whose machine said nothing more, and its silence be found late."""
    fleet, broken = Roster([], 2.0, 0.0), list[str]()
    fleet.heard({"x": Announcement("http://x", 0, b"m", (16,))}, 0.0)
    (member,) = fleet.members
    fleet.answered(member, True, 1.0)
    fleet.begins(member, lambda: broken.append("of the one before"), 1.5)
    fleet.begins(member, lambda: broken.append("of the one who came"), 3.2)
    fleet.heard({}, 3.5)  # it has not announced itself yet
    fleet.unanswered(member, 3.0, 4.0)
    assert (broken, member.state, member.num_lost) == (["of the one before"], State.LOST, 1)
    assert fleet.members == [member]
    fleet.unanswered(member, 4.0, 4.1)  # so there was nobody
    assert broken == ["of the one before", "of the one who came"]
    assert not fleet.members


async def test_what_goes_on_with_a_lost_member_is_broken_off_once() -> None:
    async def probe(address: str) -> bool:
        raise ConnectionRefusedError

    fleet = Fleet(["http://listed"], 0.0, probe)
    (member,) = fleet.members
    stubborn = asyncio.Event()

    async def work() -> None:
        async with fleet.working(member):
            try:
                await asyncio.Event().wait()
            finally:
                await stubborn.wait()

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    for _ in range(3):  # probes go on while it takes its time to end
        await fleet._look(member)
        await asyncio.sleep(0.01)
    stubborn.set()
    with pytest.raises(Lost):
        await working
    assert (member.state, member.num_lost, member.under_way) == (State.LOST, 1, {})


async def test_who_answers_no_probe_holds_up_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "PROBE_S", 0.005)
    monkeypatch.setattr(fleets, "PATIENCE_S", 60.0)
    asked: list[str] = []

    async def probe(address: str) -> bool:
        asked.append(address)
        if address == "http://mute":
            await asyncio.Event().wait()
        return True

    fleet = Fleet(["http://mute", "http://sound"], 60.0, probe)
    fleet.start()
    await until(lambda: asked.count("http://sound") >= 3)
    await fleet.close()
    assert asked.count("http://mute") == 1, "and it is asked again once it has answered, or was given up"
    assert {member.address: member.state for member in fleet.members} == {
        "http://mute": State.UNREADY,
        "http://sound": State.READY,
    }


def test_events_are_cut_whole_and_openings_known() -> None:
    cutter, whole = EventCutter(), (ROLE + ": here\n\n" + FIRST + CUT).encode()
    events = [event for i in range(0, len(whole), 7) for event in cutter.feed(whole[i : i + 7])]
    assert b"".join(events) == whole
    assert cutter.is_between
    assert [is_opening(event) for event in events] == [True, True, False, False, False]
    assert [is_for_another(event) for event in events] == [False, False, False, True, False]
    for said in (
        '{"choices":[]}',
        '{"choices":[{"delta":{},"finish_reason":"stop"}]}',
        '{"choices":[{"delta":5}]}',
        "[1]",
    ):
        assert not is_opening(f"data: {said}\n\n".encode())
    for opened in ('{"type":"message_start"}', '{"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}'):
        assert is_opening(f"data: {opened}\n\n".encode())


async def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="beyond loopback API keys are needed"):
        async with fronted(tmp_path, ["http://127.0.0.1:1"], host="0.0.0.0"):
            pass
    assert dict(GatewaySettings(model="m").faults()).keys() == {"controllers"}
    assert dict(GatewaySettings(model="m", controllers="here:80").faults()).keys() == {"controllers"}
    assert dict(GatewaySettings(model="m", redis="redis://x").faults()).keys() == {"server_key_file"}
    assert dict(GatewaySettings(model="m", controllers="http://a:1, https://b").faults()) == {}
