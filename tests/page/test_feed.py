"""The feed over HTTP: who may read it, what it says, that unread it costs nothing, and that readers wait for nobody."""

import asyncio
import json
from pathlib import Path

import pytest

from kilburn.controller.page import feed as feeding
from kilburn.controller.page.reader import Reader
from kilburn.controller.page.routes import page_files
from tests.api.world import World, served
from tests.page.watching import expect_same, watched

ALICE, ROOT = "sk-alice-0001", "sk-root-00002"


def num_viewers(world: World) -> int:
    return world.feed.num_viewers


async def test_the_feed_follows_a_request_from_the_door_to_the_end(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.03) as world:
        assert num_viewers(world) == 0
        async with watched(world) as events:
            reader = Reader()
            reader.apply(await anext(events))
            assert reader.requests == {}
            body = {"prompt": "hello world, the quick brown fox", "max_tokens": 120}
            asking = asyncio.create_task(world.post("/v1/completions", body))
            seen: list[dict[str, int]] = []
            rates: list[float] = []
            async for event in events:
                reader.apply(event)
                seen += [dict(row) for row in reader.requests.values()]
                rates.append(event["rates"]["output_tokens_per_s"])
                if asking.done() and not reader.requests and event["totals"]["output_tokens"] == 120:
                    break
            expect_same(reader, world.driver.engine.block_map())
            assert {row["id"] for row in seen} == {1}
            assert any(row["generated_tokens"] > 0 and row["blocks"] > 0 for row in seen)
            assert max(rates) > 0
            assert [note["kind"] for note in reader.notes] == ["lease began"]
            (worker,) = reader.latest["workers"]
            assert (worker["state"], worker["num_blocks"], worker["steps"] > 100) == ("ready", 512, True)
            assert "quick" not in json.dumps(reader.latest)
            assert num_viewers(world) == 1
        await world.until(lambda: num_viewers(world) == 0)
        told = world.feed.costs.events
        await world.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
        assert (world.feed.costs.events, world.feed.is_looking) == (told, False)


async def test_it_says_what_health_says(tmp_path: Path) -> None:
    """A step that takes long under a steady pulse: a lease alone is not health."""
    async with served(tmp_path, settings={"progress_seconds": 0.1}) as world, watched(world) as events:
        assert (await anext(events))["trouble"] == ""
        with world.held():
            asking = asyncio.create_task(world.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))
            async with asyncio.timeout(60):
                async for event in events:
                    if event["trouble"]:
                        break
        assert event["trouble"] == "work has made no progress for 0.1 s"
        assert [worker["state"] for worker in event["workers"]] == ["ready"]
        await asking


async def test_a_streamed_answer_says_what_the_map_calls_it(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        async with world.session.post(world.url + "/v1/completions", json=body) as response:
            assert response.headers["X-Kilburn-Requests"] == "1"


async def test_only_admin_keys_may_look_and_the_page_itself_is_no_secret(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE}\nroot:{ROOT}:admin\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}) as world:
        for key, status in (("", 401), (ALICE + "x", 401), (ALICE, 403)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with world.session.get(world.url + "/map/events", headers=headers) as response:
                assert response.status == status
        async with watched(world, ROOT) as events:
            text = json.dumps(await anext(events))
            assert not any(key in text for key in (ALICE, ROOT))
        body = {"prompt": "x", "max_tokens": 1, "stream": True}
        for key, is_told in ((ALICE, False), (ROOT, True)):
            headers = {"Authorization": f"Bearer {key}"}
            async with world.session.post(world.url + "/v1/completions", json=body, headers=headers) as response:
                assert ("X-Kilburn-Requests" in response.headers) == is_told
        for path in page_files():
            async with world.session.get(world.url + path) as response:
                assert response.status == 200
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert "Access-Control-Allow-Origin" not in response.headers
                etag = response.headers["ETag"]
            async with world.session.get(world.url + path, headers={"If-None-Match": etag}) as response:
                assert (response.status, await response.read()) == (304, b"")


async def test_a_slow_reader_holds_nobody_up_and_is_sent_a_whole_when_it_is_back(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.002) as world:
        slow, quick = world.feed.events(), world.feed.events()
        readers = (Reader(), Reader())
        readers[0].apply(json.loads(await anext(slow)))
        readers[1].apply(json.loads(await anext(quick)))
        asking = asyncio.create_task(world.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 150}))
        changes = 0
        while changes < 4:  # the slow one takes nothing meanwhile
            event = json.loads(await anext(quick))
            changes += not event["whole"]
            readers[1].apply(event)
        event = json.loads(await anext(slow))
        assert event["whole"]
        readers[0].apply(event)
        event = json.loads(await anext(slow))
        assert not event["whole"]
        readers[0].apply(event)
        await asking
        await slow.aclose()
        await quick.aclose()
        assert num_viewers(world) == 0


async def test_there_is_an_end_to_how_many_may_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "MOST_VIEWERS", 2)
    async with served(tmp_path) as world:
        async with watched(world) as one, watched(world) as two:
            await anext(one)
            await anext(two)
            async with world.session.get(world.url + "/map/events") as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "too_many_viewers"
        await world.until(lambda: num_viewers(world) == 0)


async def test_a_look_that_fails_is_told_and_ends_the_streams(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as world:
        async with watched(world) as events:
            await anext(events)
            monkeypatch.setattr(world.driver.engine, "block_map", lambda: 1 // 0)
            async for _ in events:
                pass
        monkeypatch.undo()
        assert "the block map cannot be shown" in caplog.text
        async with watched(world) as events:
            assert (await anext(events))["whole"]
        assert (await world.post("/v1/completions", {"prompt": "x", "max_tokens": 2}))[0] == 200


async def test_an_open_page_does_not_hold_up_the_end_of_the_server(tmp_path: Path) -> None:
    async with served(tmp_path) as world, watched(world) as events:
        await anext(events)
        await world.running.app.shutdown()
        async with asyncio.timeout(60):
            assert [event async for event in events] == []


async def test_what_a_look_costs_bounds_how_often_there_is_one(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        feed = world.feed
        assert feed.interval_s == feeding.LEAST_INTERVAL_S
        feed.costs.last_s = 0.05
        assert feed.interval_s == pytest.approx(0.05 / feeding.MOST_SHARE)
