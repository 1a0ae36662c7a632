"""Named prefixes over REST: computed once, held, found by whoever begins with them and may."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller import named as named_module
from kilburn.controller.core.events import Event, NotPinned, Pin, Pinned, Refusal, Refused, Submit, Unpin
from kilburn.controller.named import Named, NamedPrefixes
from kilburn.controller.registry import InProcessRegistry, NamedEntry
from kilburn.controller.salts import Salts
from kilburn.shared.sampling import Sampling
from tests.api.test_salts import ALICE, BOB, ROOT, cached, with_keys
from tests.api.world import World, served

SYSTEM = "You are a helpful assistant, and you always answer in rhymes. " * 3
PATH = "/v1/prefixes"
SALTS, TOKENS = Salts(b"0123456789abcdef"), (1, 2, 3)


async def call(world: World, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with world.session.request(method, world.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def pinned(world: World, body: dict[str, Any], key: str = "") -> dict[str, Any]:
    """Registers a prefix and waits until it is held."""
    status, about = await call(world, "POST", PATH, body, key)
    assert status == 201, about
    async with asyncio.timeout(60):
        while about["state"] != "ready":
            await asyncio.sleep(0.005)
            _, about = await call(world, "GET", f"{PATH}/{body['name']}", None, key)
    found: dict[str, Any] = about
    return found


def pinned_blocks(world: World) -> int:
    return sum(group.pinned_blocks for group in world.driver.engine.snapshot().groups)


async def test_a_prefix_beyond_the_model_is_a_400_that_says_how_long_it_may_be(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        status, body = await call(world, "POST", PATH, {"name": "book", "text": "word " * 20_000})
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "text")
        assert await call(world, "GET", PATH) == (200, {"object": "list", "data": []})


async def test_a_life_of_a_name(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        about = await pinned(world, {"name": "rhymes", "text": SYSTEM})
        num_tokens = about["tokens"]
        assert about == {
            "name": "rhymes",
            "object": "prefix",
            "public": False,
            "tokens": num_tokens,
            "blocks": -(-num_tokens // 16),
            "state": "ready",
        }
        assert await call(world, "GET", PATH) == (200, {"object": "list", "data": [about]})
        # The whole of it, its last and partial block too, which the prompt may have to share by a run of tokens.
        assert num_tokens - 2 <= await cached(world, prompt=SYSTEM + "And now?") <= num_tokens
        assert pinned_blocks(world) == about["blocks"]
        metrics = await (await world.session.get(world.url + "/metrics")).text()
        assert f'kilburn_pinned_blocks{{group="fake"}} {about["blocks"]}.0' in metrics
        assert await call(world, "POST", PATH, {"name": "rhymes", "text": SYSTEM}) == (200, about)
        status, error = await call(world, "POST", PATH, {"name": "rhymes", "text": SYSTEM + "x"})
        assert (status, error["error"]["code"]) == (409, "name_taken")
        assert (await call(world, "DELETE", f"{PATH}/rhymes"))[0] == 200
        assert (await call(world, "GET", f"{PATH}/rhymes"))[0] == 404
        assert (await call(world, "DELETE", f"{PATH}/rhymes"))[0] == 404
        await world.until(lambda: pinned_blocks(world) == 0)


async def test_a_prefix_of_messages_serves_chats_that_begin_with_them(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        first = [{"role": "system", "content": SYSTEM}]
        about = await pinned(world, {"name": "chat", "messages": first})
        body = {"messages": [*first, {"role": "user", "content": "hello"}], "max_tokens": 2}
        _, whole = await world.post("/v1/chat/completions", body)
        found = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert about["tokens"] - 2 <= found <= about["tokens"]
        await call(world, "DELETE", f"{PATH}/chat")


async def test_private_names_are_their_tenants_and_public_ones_everybodys(tmp_path: Path) -> None:
    async with served(tmp_path, settings=with_keys(tmp_path)) as world:
        private = await pinned(world, {"name": "mine", "text": SYSTEM}, ALICE)
        assert (await call(world, "GET", f"{PATH}/mine", None, BOB))[0] == 404
        assert (await call(world, "DELETE", f"{PATH}/mine", None, BOB))[0] == 404
        assert (await call(world, "GET", PATH, None, BOB))[1]["data"] == []
        assert await cached(world, ALICE, prompt=SYSTEM + "a") >= private["tokens"] - 2
        assert await cached(world, ALICE, prompt=SYSTEM + "a", cache_salt="x") == 0  # narrower than the name
        assert await cached(world, BOB, prompt=SYSTEM + "a") == 0
        other = "Translate from English to German, sentence by sentence. " * 3
        body = {"name": "mine", "text": other, "public": True}
        assert (await call(world, "POST", PATH, body, BOB))[0] == 403
        public = await pinned(world, {**body, "name": "theirs"}, ROOT)
        assert public["public"] is True
        for key in (ALICE, BOB):
            assert await cached(world, key, prompt=other + "a") >= public["tokens"] - 2
            # Its own blocks behind the public ones are its own again.
            assert await cached(world, key, prompt=other + "b" * 20) <= public["tokens"]
            assert (await call(world, "DELETE", f"{PATH}/theirs", None, key))[0] == 403
            assert (await call(world, "DELETE", f"{PATH}/theirs?public=true", None, key))[0] == 403
        assert (await call(world, "POST", PATH, {"name": "theirs", "text": SYSTEM}, BOB))[0] == 201
        assert (await call(world, "GET", f"{PATH}/theirs", None, BOB))[1]["public"] is False  # its own comes first
        assert (await call(world, "GET", f"{PATH}/theirs?public=true", None, BOB))[1]["public"] is True
        assert (await call(world, "GET", f"{PATH}/theirs?public=yes", None, BOB))[0] == 400
        # Whoever has a private name of his own can still reach, and as an admin delete, the public one.
        assert (await call(world, "POST", PATH, {"name": "theirs", "text": SYSTEM}, ROOT))[0] == 201
        assert (await call(world, "DELETE", f"{PATH}/theirs?public=true", None, ROOT))[0] == 200
        assert (await call(world, "GET", f"{PATH}/theirs?public=true", None, ROOT))[0] == 404
        assert (await call(world, "GET", f"{PATH}/theirs", None, ROOT))[1]["public"] is False
        for key, name in ((ALICE, "mine"), (BOB, "theirs"), (ROOT, "theirs")):
            assert (await call(world, "DELETE", f"{PATH}/{name}", None, key))[0] == 200


async def test_what_cannot_be_held_is_refused_and_says_why(tmp_path: Path) -> None:
    settings = {"pinned_percent": 25, "max_prefixes": 2}
    async with served(tmp_path, settings=settings, worker={"num_blocks": 32}) as world:
        status, error = await call(world, "POST", PATH, {"name": "big", "text": SYSTEM})
        assert (status, error["error"]["code"]) == (409, "pins_full")
        assert "at most 8 may be" in error["error"]["message"]
        assert (await call(world, "GET", f"{PATH}/big"))[0] == 404
        for name in "ab":
            await pinned(world, {"name": name, "text": name * 20})
        status, error = await call(world, "POST", PATH, {"name": "c", "text": "c"})
        assert (status, error["error"]["code"]) == (409, "too_many_names")
        for name in "ab":
            await call(world, "DELETE", f"{PATH}/{name}")


async def test_it_is_held_again_after_a_worker_was_lost(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        about = await pinned(world, {"name": "kept", "text": SYSTEM})
        world.driver.worker_ended(world.daemon.hello.name, world.daemon.hello.pid, "killed")
        await world.until(lambda: world.driver.engine.snapshot().leases_ended == 1)
        await world.until(lambda: pinned_blocks(world) == about["blocks"])
        assert (await call(world, "GET", f"{PATH}/kept"))[1] == about
        assert await cached(world, prompt=SYSTEM + "x") >= about["tokens"] - 2
        await call(world, "DELETE", f"{PATH}/kept")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "", "text": "x"}, "name"),
        ({"name": "a/b", "text": "x"}, "name"),
        ({"name": "a" * 65, "text": "x"}, "name"),
        ({"name": "a"}, "text"),
        ({"name": "a", "text": ""}, "text"),
        ({"name": "a", "text": "x", "messages": [{"role": "user", "content": "x"}]}, "text"),
        ({"name": "a", "messages": [{"role": "user"}]}, "messages[0].content"),
        ({"name": "a", "text": "x", "public": "yes"}, "public"),
        ({"name": "a", "text": "x", "public": True, "cache_salt": "s"}, "cache_salt"),
    ],
)
async def test_bad_ones_name_their_field(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with served(tmp_path) as world:
        status, error = await call(world, "POST", PATH, body)
        assert (status, error["error"]["param"]) == (400, param)


# --- without a server


def some_names(posted: list[Event]) -> NamedPrefixes:
    ids = itertools.count(1)
    return NamedPrefixes(
        posted.append, lambda: next(ids), SALTS, InProcessRegistry(), lambda: {"worker": 1}, lambda: 100, most_names=8
    )


async def registered(names: NamedPrefixes) -> Named:
    task = asyncio.create_task(names.register("alice", "a", "", TOKENS))
    await asyncio.sleep(0)
    names.turn_ended()
    return await task


async def test_one_that_could_not_be_pinned_says_so_and_is_tried_again_by_whom_it_serves() -> None:
    posted: list[Event] = []
    names = some_names(posted)
    named = await registered(names)
    assert names.perform(NotPinned(1, "w", "no room"))
    assert (named.trouble, names.is_held(named)) == ("no room", False)
    submit = Submit(10, (*TOKENS, 4), 1, Sampling(), salt=named.salt)
    names.used_by(submit)  # so soon after
    names.used_by(replace(submit, salt=b"other"))
    assert [type(event) for event in posted] == [Pin]
    named.retry_at = 0.0
    names.used_by(replace(submit, salt=b"other"))
    assert [type(event) for event in posted] == [Pin]
    names.used_by(submit)
    assert posted[1:] == [Unpin(1), Pin(2, TOKENS, named.salt)]
    assert names.perform(Pinned(2, "worker", 1))
    assert (named.trouble, names.is_held(named)) == ("", True)
    names.used_by(submit)
    assert len(posted) == 3


async def test_a_post_of_one_that_could_not_be_pinned_tries_at_once() -> None:
    posted: list[Event] = []
    names = some_names(posted)
    await registered(names)
    names.perform(NotPinned(1, "w", "no room"))
    await registered(names)
    assert [type(event) for event in posted] == [Pin, Unpin, Pin]


async def test_a_deletion_outlives_those_who_have_not_heard_of_it() -> None:
    names = some_names([])
    stale = NamedEntry("alice", "a", "", TOKENS, stamp=5)
    deletion = replace(stale, tokens=(), stamp=1 << 60)  # of a controller whose clock is ahead
    assert names.heard({stale.key: deletion}, True) == []
    assert names.heard({stale.key: stale}, True) == [deletion]
    assert names.find("alice", "a") is None
    named = await registered(names)
    assert named.entry.stamp > deletion.stamp
    assert names.heard({stale.key: deletion}, True) == [named.entry]
    assert names.find("alice", "a") is named


async def test_a_name_that_was_not_read_is_neither_forgotten_nor_published_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(named_module, "GRACE_S", 0.0)
    names = some_names([])
    ours, theirs = await registered(names), NamedEntry("bob", "b", "", TOKENS, stamp=5)
    assert names.heard({theirs.key: theirs, ours.entry.key: ours.entry}, True) == []
    for _ in range(3):
        assert names.heard({}, False) == []
        await asyncio.sleep(0.001)
    assert names.find("bob", "b") is not None
    for _ in range(3):
        assert names.heard({}, True) == [ours.entry]
        await asyncio.sleep(0.001)
    assert names.find("bob", "b") is None


async def test_two_posts_of_one_name_are_refused_together() -> None:
    names = some_names([])
    tasks = [asyncio.create_task(names.register("alice", "a", "", TOKENS)) for _ in range(2)]
    await asyncio.sleep(0)
    refused = Refused(1, Refusal.PINS_FULL, "no room")
    assert names.perform(refused)
    names.turn_ended()
    assert [named.refused for named in await asyncio.gather(*tasks)] == [refused, refused]
    assert names.find("alice", "a") is None
