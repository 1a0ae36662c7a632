"""Limits as clients meet them: 429 with a time to come back, 503 and 408, and answers that time cut short."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kilburn.controller.app import running_controller
from kilburn.controller.core.limits import Patience
from kilburn.controller.simulate.fake_daemon import FakeDaemon, fake_hello
from kilburn.shared.config import ControllerSettings
from tests.api.vocabularies import write_folder
from tests.api.world import World, served

COMPLETION = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 240, "ignore_eos": True}


async def asked(world: World, body: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
    async with world.session.post(world.url + COMPLETION, json=body) as response:
        return response.status, await response.json(), response.headers.get("Retry-After", "")


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    settings = {"max_waiting_tokens": 4}
    async with served(tmp_path, worker={"max_rows": 1}, settings=settings) as world:
        with world.held():  # one runs, one waits, and there is no room for another's three tokens
            body = {"prompt": [5, 6, 7], "max_tokens": 20}
            asking = [asyncio.ensure_future(asked(world, body))]
            await world.until(lambda: world.owned_blocks() > 0)
            asking += [asyncio.ensure_future(asked(world, body)) for _ in range(5)]
            await world.until(lambda: sum(answer.done() for answer in asking) == 4)
        answers = await asyncio.gather(*asking)
        refused = [(whole["error"], after) for status, whole, after in answers if status == 429]
        assert len(refused) == 4
        for error, after in refused:
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert 1 <= int(after) <= 600
            assert f"try again in {after} s" in error["message"]


async def test_who_waits_too_long_gets_a_503(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.01, worker={"max_rows": 1}) as world:
        first = asyncio.ensure_future(asked(world, LONG))
        await world.until(lambda: world.owned_blocks() > 0)
        status, whole, after = await asked(world, {"prompt": "x", "queue_timeout": 0.05})
        assert (status, whole["error"]["code"]) == (503, "queue_timeout")
        assert int(after) >= 1
        status, whole, _ = await asked(world, {"prompt": "x", "timeout": 0.05})
        assert (status, whole["error"]["code"]) == (408, "request_timeout")
        assert not first.done()
        assert (await first)[0] == 200


@pytest.mark.parametrize(
    ("settings", "body", "status", "code"),
    [
        ({}, {"queue_timeout": 0.05}, 503, "queue_timeout"),
        ({}, {"timeout": 0.05}, 408, "request_timeout"),
        ({"queue_seconds": 0.05}, {"timeout": 60}, 503, "queue_timeout"),
        ({"request_seconds": 0.05}, {"timeout": 60, "queue_timeout": 30}, 408, "request_timeout"),
        ({"recovery_seconds": 0.05}, {"timeout": 60, "queue_timeout": 30}, 503, "no_worker"),
    ],
)
async def test_limits_hold_where_no_worker_has_come_yet(
    tmp_path: Path, settings: dict[str, Any], body: dict[str, Any], status: int, code: str
) -> None:
    """With any other limit than its own, none of these would be answered within the test's patience."""
    write_folder(tmp_path)
    plain = ControllerSettings(
        model=str(tmp_path), served_model_name="toy", port=0, bind="tcp://127.0.0.1:0", recovery_seconds=3600.0
    )
    asked = [
        (COMPLETION, {"prompt": ["x", "y"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ]
    async with running_controller(replace(plain, **settings)) as running, aiohttp.ClientSession() as session:
        for path, what in asked:
            async with asyncio.timeout(20), session.post(running.http_address + path, json=what | body) as response:
                whole = await response.json()
                assert (response.status, whole["error"]["code"]) == (status, code)
                assert ("Retry-After" in response.headers) is (status == 503)


async def test_what_was_waited_for_a_worker_counts(tmp_path: Path) -> None:
    """The worker comes while the request waits for one; its Submit asks for what is left of both times."""
    write_folder(tmp_path)
    settings = ControllerSettings(
        model=str(tmp_path), served_model_name="toy", port=0, bind="tcp://127.0.0.1:0", request_seconds=50.0
    )
    async with running_controller(settings) as running:
        patience = Patience(queue_s=40.0)
        room = asyncio.ensure_future(running.driver.room_for(3, 1, patience))
        await asyncio.sleep(0.01)
        daemon = asyncio.create_task(FakeDaemon(running.endpoint, fake_hello(max_len=256)).run())
        try:
            assert await room == 253
        finally:
            daemon.cancel()
            await asyncio.wait([daemon])
        assert patience.queue_s is not None
        assert patience.request_s is not None
        assert patience.queue_s < 40.0
        assert patience.request_s == pytest.approx(patience.queue_s + 10.0)


async def test_an_answer_that_time_cut_short_has_what_there_was(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.02, settings={"request_seconds": 1.0}) as world:
        status, whole, _ = await asked(world, LONG)
        [choice] = whole["choices"]
        assert (status, choice["finish_reason"], choice["stop_reason"]) == (200, "length", "timeout")
        assert 0 < whole["usage"]["completion_tokens"] < 240
        async with world.session.post(world.url + COMPLETION, json={**LONG, "stream": True}) as response:
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        last = json.loads(lines[-3].removeprefix("data: "))["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("length", "timeout")


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("priority", -1, 400),
        ("priority", 101, 400),
        ("priority", 100, 200),
        ("priority", None, 200),
        ("timeout", 0, 400),
        ("timeout", "soon", 400),
        ("timeout", None, 200),
        ("queue_timeout", 1e9, 400),
        ("queue_timeout", 60, 200),
    ],
)
async def test_fields_are_checked(tmp_path: Path, field: str, value: object, status: int) -> None:
    async with served(tmp_path) as world:
        found, whole, _ = await asked(world, {"prompt": "x", "max_tokens": 1, field: value})
        assert found == status
        if status == 400:
            assert whole["error"]["param"] == field


async def test_a_server_may_allow_urgent_requests(tmp_path: Path) -> None:
    async with served(tmp_path, settings={"least_priority": -2}) as world:
        assert [(await asked(world, {"prompt": "x", "priority": p}))[0] for p in (-2, -3)] == [200, 400]
