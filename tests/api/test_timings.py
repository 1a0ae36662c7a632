"""Where the time of a call went: in its answer when asked, in the header Server-Timing, in a stream's last event."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller.choice import Origin
from kilburn.controller.core.events import Turn, Turned
from kilburn.controller.story import End, Record
from kilburn.controller.timings import Timings, timings_of
from tests.api.test_answers import CHAT, COMPLETION, HELLO, events, texts
from tests.api.world import World, served, text_after

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EVERY_API: tuple[tuple[str, dict[str, Any]], ...] = (  # ten tokens of each
    (COMPLETION, {"prompt": "hello world it is " * 4, "max_tokens": 10}),
    (CHAT, {"messages": HELLO, "max_tokens": 10}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 10}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 10}),
)
SPANS = ("queue", "prefill", "decode", "swap")


def by_name(header: str) -> dict[str, float]:
    found = re.findall(r'(\w+);(?:dur=([0-9.]+)|desc="([0-9]+)")', header)
    return {name: float(seconds or count) for name, seconds, count in found}


async def post(world: World, path: str, body: dict[str, Any]) -> tuple[Any, str]:
    async with world.session.post(world.url + path, json=body) as response:
        assert response.status == 200
        return await response.json(), response.headers["Server-Timing"]


async def test_an_answer_says_where_its_time_went(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.004) as world:
        begun = asyncio.get_running_loop().time()
        for path, body in EVERY_API:
            whole, header = await post(world, path, {**body, "timings": True})
            told = whole["timings"]
            assert by_name(header) == pytest.approx(
                {
                    **{name: 1000 * told[name] for name in SPANS},
                    "cached_tokens": told["cached_tokens"],
                    "preemptions": 0,
                },
                abs=1e-3,
            )
            assert (told["cached_tokens"] > 0) == (path in (RESPONSES, MESSAGES)), "what the chat has computed"
            # On a busy machine a result may be read late, and the next one right behind it.
            assert told["decode"] >= 7 * 0.004, "nine steps behind the first"
            assert told["prefill"] >= 0.004 * 0.9
            assert told["swap"] == 0.0
            taken_s = asyncio.get_running_loop().time() - begun
            assert told["queue"] + told["prefill"] + told["decode"] <= taken_s
        whole, header = await post(world, COMPLETION, {"prompt": "hello world it is " * 4, "max_tokens": 2})
        assert "timings" not in whole
        for path, body in EVERY_API:
            assert "timings" not in (await post(world, path, body))[0], path
        assert by_name(header)["cached_tokens"] == whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize(("path", "ask"), [(COMPLETION, {"prompt": "x"}), (CHAT, {"messages": HELLO})])
async def test_in_a_stream_they_ride_in_the_last_event(
    tmp_path: Path, path: str, ask: dict[str, Any], with_usage: bool
) -> None:
    async with served(tmp_path) as world:
        body = {**ask, "max_tokens": 5, "timings": True, "stream_options": {"include_usage": with_usage}}
        *before, last = await events(world, path, body)
        assert last["choices"] == []
        assert last["timings"].keys() == {*SPANS, "cached_tokens", "preemptions"}
        assert ("usage" in last) == with_usage
        assert not any("timings" in chunk for chunk in before)
        assert texts(before, is_chat=path == CHAT) == {0: text_after(5)}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_and_so_they_do_in_other_apis(tmp_path: Path, path: str) -> None:
    async with served(tmp_path) as world:
        for asked in (False, True):
            body = {**dict(EVERY_API)[path], "stream": True, "timings": asked}
            async with world.session.post(world.url + path, json=body) as response:
                frames = [line[6:] for line in (await response.text()).split("\n") if line.startswith("data: ")]
            told = ["timings" in json.loads(data).get("response", json.loads(data)) for data in frames]
            assert told == [False] * (len(frames) - 1) + [asked]


async def test_preemptions_and_swaps_are_told(tmp_path: Path) -> None:
    worker = {"num_blocks": 12, "num_host_blocks": 24, "max_rows": 4}
    async with served(tmp_path, delay_s=0.002, worker=worker, settings={"preemption": "swap"}) as world:
        body = {"max_tokens": 70, "timings": True}
        posts = [post(world, COMPLETION, {**body, "prompt": f"{i} of four"}) for i in range(4)]
        with world.held():
            asked = [asyncio.ensure_future(one) for one in posts]
            await world.until(lambda: world.driver.engine.snapshot().requests == 4)
        told = [whole["timings"] for whole, _ in await asyncio.gather(*asked)]
        (group,) = world.driver.engine.snapshot().groups
        assert sum(timings["preemptions"] for timings in told) == group.preempted_by_swap > 0
        assert sum(timings["swap"] for timings in told) > 0.0


def record(submitted: float, started: float | None, first: float | None, end: float | None, cached: int = 0) -> Record:
    found = Record(1, Origin(), 8, 4, 1, submitted, num_cached=cached, started_at=started, first_token_at=first)
    found.end = None if end is None else End(end, "length")
    return found


def test_spans_by_hand() -> None:
    assert timings_of([record(1.0, 1.5, 3.5, 10.0, 16)], 99.0) == Timings(0.5, 2.0, 6.5, 0.0, 16, 0)
    assert timings_of([record(1.0, 1.5, None, 2.0)], 99.0) == Timings(0.5, 0.5, 0.0), "nothing was drawn"
    assert timings_of([record(1.0, None, None, None)], 3.0) == Timings(2.0), "it waits still"
    several = [record(1.0, 1.5, 3.5, 10.0, 16), record(1.0, 4.0, 5.0, 6.0, 32)]
    assert timings_of(several, 99.0) == Timings(3.0, 2.0, 6.5, 0.0, 48, 0)
    assert timings_of([], 5.0) == Timings(), "nobody could record it"
    moved = record(0.0, 0.0, 1.0, 9.0)
    for turn, since, at in ((Turn.PREEMPTED, None, 2.0), (Turn.SWAPPED_OUT, 2.0, 2.5), (Turn.SWAPPED_IN, 4.0, 4.25)):
        moved.turned(Turned(1, turn, "", since), at)
    assert timings_of([moved], 9.0) == Timings(0.0, 1.0, 8.0, 0.75, 0, 1)
