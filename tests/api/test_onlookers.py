"""Whoever only counts, records or traces may fail as often as it likes: answers are whole, and serving goes on."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kilburn.controller.core.histogram import Histogram
from kilburn.controller.counts import Pace
from kilburn.controller.onlookers import Onlookers
from kilburn.controller.story import Chronicle
from kilburn.controller.tracing import Tracing
from tests.api.world import served, text_after

COMPLETION = "/v1/completions"
TOLD_OF_ALL: list[tuple[type, str]] = [
    (Pace, "started"),
    (Pace, "token"),
    (Pace, "ended"),
    (Chronicle, "begin"),
    (Chronicle, "note"),
    (Tracing, "sent"),
    (Tracing, "landed"),
]


def raising(onlooker: type, name: str) -> Any:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("an onlooker's own fault")

    broken.__qualname__ = f"{onlooker.__name__}.{name}"
    return broken


async def test_answers_are_whole_though_every_onlooker_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for onlooker, name in TOLD_OF_ALL:
        monkeypatch.setattr(onlooker, name, raising(onlooker, name))
    async with served(tmp_path, settings={"trace_every": 1}, exporter=InMemorySpanExporter()) as world:
        bodies: list[dict[str, Any]] = [{"prompt": [5, 6, 7], "max_tokens": 20}] * 3
        bodies.append({"prompt": "hello world", "max_tokens": 20, "n": 2})
        for status, whole in await asyncio.gather(*[world.post(COMPLETION, body) for body in bodies]):
            assert status == 200, whole
            assert {choice["text"] for choice in whole["choices"]} == {text_after(20)}
        status, whole = await world.post(COMPLETION, {"prompt": "hello world", "max_tokens": 5})
        assert (status, whole["choices"][0]["text"]) == (200, text_after(5))
        assert not world.driver.fatal.done()
        assert world.running.is_ready()
        faults = world.driver.onlookers.faults
        assert {whose for whose, _ in faults} == {f"{onlooker.__name__}.{name}" for onlooker, name in TOLD_OF_ALL}
        assert faults["Pace.token", ZeroDivisionError] == 3 * 20 + 2 * 20 + 5
    logged = [record.getMessage() for record in caplog.records if "serving goes on without it" in record.getMessage()]
    assert len(logged) == len(TOLD_OF_ALL), "the first of each kind"


async def test_a_client_that_leaves_frees_its_blocks_though_nobody_can_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chronicle, "cancelled", raising(Chronicle, "cancelled"))
    async with served(tmp_path, delay_s=0.01) as world:
        reading = asyncio.ensure_future(world.post(COMPLETION, {"prompt": "hello world", "max_tokens": 200}))
        await world.until(lambda: world.owned_blocks() > 0)
        reading.cancel()
        await world.until(world.is_quiet)
        assert not world.driver.fatal.done()
        assert list(world.driver.onlookers.faults) == [("Chronicle.cancelled", ZeroDivisionError)]


def test_what_is_told_arrives_and_kinds_are_told_apart() -> None:
    onlookers, heard = Onlookers(), list[int]()
    onlookers.tell(heard.append, 7)
    assert (heard, onlookers.faults) == ([7], {})
    for _ in range(3):
        onlookers.tell(heard.remove, 8)
    onlookers.tell({}.__getitem__, "nothing")
    assert sorted(onlookers.faults.values()) == [1, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, -0.0, 0, 2**63, 1e308])
def test_no_value_makes_a_histogram_raise(value: float) -> None:
    histogram = Histogram((0.1, 0.5))
    for _ in range(2):
        histogram.observe(value)
    histogram.observe(0.3)
    assert histogram.spread().count == 3
