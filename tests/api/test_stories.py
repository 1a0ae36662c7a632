"""What happened to a request: as /debug/requests, as a line of the log, as spans; all three say the same."""

import asyncio
import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kilburn.controller.core.events import Turn, Turned
from kilburn.controller.story import Chronicle, Record
from kilburn.controller.tracing import exporter_to
from kilburn.shared import logs
from kilburn.shared.keys import SettingError
from tests.api.world import World, served, text_after

PATH = "/v1/completions"
CANARY = "zanzibar quetzal"
TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}
# Four requests of some five blocks each: two of them fit, so that somebody has to leave and to come back.
TIGHT = {"num_blocks": 10, "max_rows": 4, "block_size": 16}
BODY = {"prompt": CANARY, "max_tokens": 70, "ignore_eos": True}


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """Whatever Kilburn logs while the test runs, down to debug, as its own JSON."""
    stream, kept = io.StringIO(), list[dict[str, Any]]()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonLines())
    log = logging.getLogger("kilburn")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    handler.emit = lambda record: kept.append(json.loads(handler.format(record)))  # type: ignore[method-assign]
    yield kept
    log.removeHandler(handler)
    log.setLevel(before)


@asynccontextmanager
async def pressed(folder: Path, way: str, **more: Any) -> AsyncIterator[tuple[World, list[dict[str, Any]]]]:
    """A world in which four requests have displaced each other, and what /debug says of each."""
    settings = {"preemption": way, **more.pop("settings", {})}
    async with served(folder, settings=settings, worker={**TIGHT, "num_host_blocks": 16}, **more) as world:
        # Each its own prompt: a block that another request holds under the same name need not be swapped in.
        posts = [
            world.post(PATH, {**BODY, "prompt": f"{i} {CANARY}"}, headers={**TRACEPARENT, "X-Request-Id": f"mine/{i}"})
            for i in range(4)
        ]
        with world.held():  # until all four are there, so that none has ended before another comes
            asked = [asyncio.ensure_future(post) for post in posts]
            await world.until(lambda: world.driver.engine.snapshot().requests == 4)
        answers = await asyncio.gather(*asked)
        assert [(status, whole["choices"][0]["text"]) for status, whole in answers] == [(200, text_after(70))] * 4
        told = []
        for _, whole in answers:
            async with world.session.get(f"{world.url}/debug/requests/{whole['id']}") as response:
                text = await response.text()
                assert CANARY.split()[0] not in text
                told += json.loads(text)["requests"]
        yield world, told


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_debug_tells_what_happened_in_order(tmp_path: Path, way: str) -> None:
    async with pressed(tmp_path, way) as (world, told):
        assert [record["client_id"] for record in told] == [f"mine/{i}" for i in range(4)]
        (group,) = world.driver.engine.snapshot().groups
        preempted = group.preempted_by_swap + group.preempted_by_recompute
        assert sum(record["preemptions"] for record in told) == preempted
        (loser, *_) = [record for record in told if record["preemptions"]]
        names = [turn["turn"] for turn in loser["turns"]]
        # A group may be planned to come back before it is known to have left: plans are two deep.
        paths = [("placed", "chunk", "preempted", "resumed", "returned")]
        if way == "swap":
            paths += [("preempted", "swapped out", "swapped in", "returned"), ("resumed", "swapped in")]
        for path in paths:
            places = [names.index(name) for name in path]
            assert places == sorted(places), path
        assert f"by {way}" in next(turn["text"] for turn in loser["turns"] if turn["turn"] == "preempted")
        times = [turn["at_s"] for turn in loser["turns"]]
        assert times == sorted(times)
        assert 0 <= loser["started_s"] <= loser["first_token_s"] <= loser["ended_s"]
        assert (loser["state"], loser["output_tokens"], loser["trace_id"]) == ("length", 70, TRACE_ID)
        async with world.session.get(f"{world.url}/debug/requests/mine/0") as response:
            assert response.status == 404  # one part of an address: a slash is to be quoted
        async with world.session.get(f"{world.url}/debug/requests/mine%2F0") as response:
            assert (await response.json())["requests"] == told[:1]


async def test_debug_is_for_admins_and_every_answer_has_an_id(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:alice-key-1\nroot:root-key-12:admin\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}) as world:
        alice, root = ({"Authorization": f"Bearer {key}"} for key in ("alice-key-1", "root-key-12"))
        for sent, comes_back in (("job-7", True), ("a\tb" * 50, False), ("", False)):
            headers = {**alice, "X-Request-Id": sent}
            body = {"prompt": [5, 6], "max_tokens": 2}
            async with world.session.post(world.url + PATH, json=body, headers=headers) as response:
                whole = await response.json()
                assert response.headers["X-Request-Id"] == (sent if comes_back else whole["id"])
        for headers, status in (({}, 401), (alice, 403), (root, 200)):
            async with world.session.get(f"{world.url}/debug/requests/job-7", headers=headers) as response:
                assert response.status == status
        async with world.session.get(f"{world.url}/debug/requests/other", headers=root) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "request_not_found")


async def test_a_failed_request_is_one_line_with_its_story_and_others_are_none(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    async with served(tmp_path) as world:
        assert (await world.post(PATH, BODY))[0] == 200
        world.daemon.bad_rows = lambda plan: tuple(plan.rows)
        status, _ = await world.post(PATH, BODY, headers={"X-Request-Id": "bad"})
        assert status == 500
    (line,) = [line for line in lines if line["logger"] == "kilburn.requests"]
    assert (line["level"], line["state"], line["client_id"]) == ("warning", "error", "bad")
    assert "the worker could not compute" in line["message"]
    assert "placed (lease 1 of fake)" in line["message"]
    assert "\n" not in line["message"]
    assert not [line for line in lines if CANARY.split()[0] in json.dumps(line)]


@pytest.mark.parametrize("log_text", [False, True])
async def test_every_request_is_a_line_and_texts_are_in_it_where_asked_to(
    tmp_path: Path, lines: list[dict[str, Any]], log_text: bool
) -> None:
    async with served(tmp_path, settings={"log_requests": True, "log_text": log_text}) as world:
        assert (await world.post(PATH, BODY))[0] == 200
        assert (await world.post(PATH, {**BODY, "max_tokens": 3, "n": 2}))[0] == 200
    first, second = [line for line in lines if line["logger"] == "kilburn.requests"]
    assert (first["level"], first["state"], second["choices"]) == ("info", "length", 2)
    if log_text:
        assert (first["prompt"], first["answers"]) == (CANARY, {"0": text_after(70)})
        assert second["answers"] == {"0": text_after(3), "1": text_after(3)}
    else:
        assert not [
            line for line in lines if CANARY.split()[0] in json.dumps(line) or text_after(5) in json.dumps(line)
        ]


def test_log_lines_for_machines_are_one_object_each() -> None:
    record = logging.LogRecord("kilburn", logging.ERROR, "", 0, "two\nlines %s", ("ü",), None)
    record.fields = {"request": 7}
    line = logs.JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"], told["request"]) == ("error", "kilburn", "two\nlines ü", 7)
    assert told["time"].endswith("Z")


def test_a_record_and_the_ring_of_records_are_bounded() -> None:
    from kilburn.controller import story
    from kilburn.controller.choice import Ask, Origin
    from kilburn.shared.sampling import Sampling

    ended: list[Record] = []
    chronicle = Chronicle(lambda: 1.0)
    chronicle.on_end += [lambda record: 1 / 0, ended.append]  # one who fails disturbs nobody
    for number in range(story.MOST_ENDED + 5):
        chronicle.begin(number, Ask([5], 3, Sampling(), origin=Origin(f"cmpl-{number}", "all")))
        for _ in range(story.MOST_TURNS + 3):
            chronicle.note(Turned(number, Turn.CHUNK), 2.0)
        chronicle.cancelled(number)
        chronicle.cancelled(number)
    assert len(ended) == story.MOST_ENDED + 5
    assert ended[0].num_turns_dropped == 3
    assert chronicle.find("cmpl-4") == []
    assert [record.request_id for record in chronicle.find("cmpl-5")] == [5]
    assert len(chronicle.find("all")) == story.MOST_ENDED


# --- spans


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def around(spans: list[ReadableSpan], span: ReadableSpan) -> ReadableSpan:
    assert span.parent is not None
    return next(other for other in spans if other.context.span_id == span.parent.span_id)


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_spans_are_nested_as_what_happened_was(tmp_path: Path, way: str) -> None:
    exporter = InMemorySpanExporter()
    async with pressed(tmp_path, way, exporter=exporter, settings={"trace_every": 3}) as (world, told):
        assert world.driver.tracing is not None
        await asyncio.to_thread(world.driver.tracing.flush)
    spans = list(exporter.get_finished_spans())
    roots = named(spans, "request")
    assert len(roots) == 4
    for root in roots:
        assert root.context.trace_id == int(TRACE_ID, 16)
        assert root.parent is not None
        assert (root.parent.span_id, root.parent.is_remote) == (int(CALLER, 16), True)
        assert root.attributes is not None
        assert root.attributes["gen_ai.usage.output_tokens"] == 70
        phases = [span.name for span in spans if span.parent and span.parent.span_id == root.context.span_id]
        assert phases == ["queue", "prefill", "decode"]
    inner = {"chunk", "preemption", "swap out", "swap in"}
    for span in spans:
        if span.name in {"queue", "prefill", "decode"} | inner:
            parent = around(spans, span)
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time, span.name
    assert len(named(spans, "preemption")) == sum(record["preemptions"] for record in told) > 0
    assert {around(spans, span).name for span in named(spans, "preemption")} <= {"decode", "prefill"}
    assert {around(spans, span).name for span in named(spans, "chunk")} >= {"prefill"}
    if way == "swap":
        for name in ("swap out", "swap in"):
            assert {around(spans, span).name for span in named(spans, name)} == {"preemption"}
    else:
        again = [span for span in named(spans, "chunk") if around(spans, span).name == "preemption"]
        assert again, "what was recomputed is a part of the preemption"
    steps = named(spans, "step")
    assert len(steps) == world.daemon.steps // 3
    assert all(
        step.parent is None and step.attributes and "kilburn.worker.forward_s" in step.attributes for step in steps
    )


async def test_a_caller_that_does_not_sample_is_obeyed_and_a_failure_is_an_error(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with served(tmp_path, exporter=exporter, settings={"trace_percent": 0}) as world:
        await world.post(PATH, BODY)  # nobody decided: 0 percent
        await world.post(PATH, BODY, headers={"traceparent": TRACEPARENT["traceparent"][:-1] + "0"})
        await world.post(PATH, BODY, headers={"traceparent": "nonsense"})
        world.daemon.bad_rows = lambda plan: tuple(plan.rows)
        await world.post(PATH, BODY, headers=TRACEPARENT)
        assert world.driver.tracing is not None
        await asyncio.to_thread(world.driver.tracing.flush)
    (root,) = named(list(exporter.get_finished_spans()), "request")
    assert root.status.status_code is StatusCode.ERROR
    assert "the worker could not compute" in str(root.status.description)


class Collector(BaseHTTPRequestHandler):
    """A collector of spans on loopback: keeps the names that it was sent."""

    names: list[str]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.names += [
            span.name for resource in sent.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


async def test_spans_reach_a_collector_by_its_url(tmp_path: Path) -> None:
    handler = type("Kept", (Collector,), {"names": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        async with served(tmp_path, settings={"trace_to": f"http://127.0.0.1:{server.server_port}"}) as world:
            await world.post(PATH, {**BODY, "max_tokens": 2})
        server.shutdown()
        thread.join()
    assert sorted(handler.names) == ["chunk", "decode", "prefill", "queue", "request"]


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(SettingError, match=r"--trace-to collector:4318.*http"):
        exporter_to("collector:4318")


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None  # as where it is not installed
import kilburn.controller.app, kilburn.controller.cli
from kilburn.controller.tracing import exporter_to
try:
    exporter_to("http://127.0.0.1:4318")
except ValueError as error:
    print(error)
print([name for name, module in sys.modules.items() if name.startswith("opentelemetry") and module])
"""


def test_without_the_package_nothing_of_it_is_imported_and_the_wish_for_it_is_told_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=True)
    told, loaded = done.stdout.splitlines()
    assert "pip install 'kilburn[tracing]'" in told
    assert loaded == "[]"
