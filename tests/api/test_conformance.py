"""What really comes back, from every route, is what the document says: no field less and none more."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from aiohttp.test_utils import make_mocked_request

from kilburn.controller.api.anthropic_layout import AnthropicLayout
from kilburn.controller.api.layout import ChatLayout, CompletionLayout
from kilburn.controller.api.openapi import OPERATIONS
from kilburn.controller.api.responses_layout import ResponsesLayout
from kilburn.controller.gateway.events import broken_off
from tests.api.test_answers import CHAT, COMPLETION, HELLO
from tests.api.test_call_items import ROOM, SCRIPT, TEMPLATE
from tests.api.world import World, served

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FULL = {"timings": True, "n": 2, "temperature": 0.5}
# Of each route what it is asked: legal requests with all that an answer may have, and wrong ones.
ASKED: list[tuple[str, str, Any]] = [
    ("POST", COMPLETION, {"prompt": "x", "max_tokens": 3}),
    ("POST", COMPLETION, {"prompt": ["x", "y"], "max_tokens": 3, "logprobs": 2, "echo": True, **FULL}),
    ("POST", COMPLETION, {"prompt": "xy", "max_tokens": 3, "prompt_logprobs": 2}),
    ("POST", COMPLETION, {"prompt": "xy", "max_tokens": 3, "n": 2, "use_beam_search": True}),
    ("POST", COMPLETION, {"prompt": "x", "n": 0}),
    ("POST", CHAT, {"messages": HELLO, "max_tokens": 3}),
    ("POST", CHAT, {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, **FULL}),
    ("POST", CHAT, {"messages": HELLO, "max_tokens": 3, "prompt_logprobs": 1}),
    ("POST", CHAT, {"messages": HELLO, "max_tokens": 3, "n": 2, "beam_width": 2}),
    ("POST", CHAT, {"messages": []}),
    ("POST", "/v1/responses", {"input": "hello", "max_output_tokens": 3, "timings": True}),
    ("POST", "/v1/responses", {"input": "hello", "instructions": "be", "metadata": {"a": "b"}, "user": "me"}),
    ("POST", "/v1/responses", {"input": 5}),
    ("GET", "/v1/responses/resp_1", None),
    ("DELETE", "/v1/responses/resp_1", None),
    ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 3, "timings": True}),
    ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 30, "stop_sequences": ["lead"]}),
    ("POST", "/v1/messages", {"messages": HELLO}),
    ("POST", "/v1/messages/count_tokens", {"messages": HELLO}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/toy", None),
    ("GET", "/v1/models/other", None),
    ("POST", "/v1/prefixes", {"name": "p", "text": "hello world " * 20}),
    ("POST", "/v1/prefixes", {"name": "p", "text": "hello world " * 20}),
    ("POST", "/v1/prefixes", {"name": "p", "text": "another"}),
    ("GET", "/v1/prefixes", None),
    ("GET", "/v1/prefixes/p", None),
    ("GET", "/v1/prefixes/q", None),
    ("DELETE", "/v1/prefixes/p", None),
    ("POST", "/tokenize", {"prompt": "hello"}),
    ("POST", "/tokenize", {"messages": HELLO, "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/detokenize", {"tokens": [1 << 30]}),
    ("GET", "/debug/requests/mine", None),
    ("GET", "/admin/groups", None),
    ("POST", "/admin/groups/nobody/drain", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/live", None),
    ("GET", "/openapi.json", None),
]


def operation_of(method: str, path: str) -> str:
    """The row of the document that an address belongs to."""
    (found,) = {
        pattern
        for verb, pattern in OPERATIONS
        if verb == method
        and (pattern == path or re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path))
        and (pattern == path or (method, path) not in OPERATIONS)
    }
    return found


class Document:
    def __init__(self, about: dict[str, Any]) -> None:
        self._about, self.seen = about, Counter[tuple[str, str, int]]()

    def check(self, method: str, path: str, status: int, answer: Any) -> None:
        pattern = operation_of(method, path)
        self.seen[method, pattern, status] += 1
        responses = self._about["paths"][pattern][method.lower()]["responses"]
        self.conforms(answer, responses.get(str(status), responses["default"])["content"]["application/json"]["schema"])

    def conforms(self, answer: Any, schema: dict[str, Any]) -> None:
        whole = {**schema, "components": self._about["components"]}
        jsonschema.Draft202012Validator(whole).validate(answer)

    def kinds_of(self, name: str) -> set[str]:
        events = self._about["components"]["schemas"][name]["anyOf"]
        return {kind for event in events for kind in event["properties"]["type"]["enum"]}

    def event_of(self, path: str) -> dict[str, Any]:
        content = self._about["paths"][path]["post"]["responses"]["200"]["content"]
        schema: dict[str, Any] = content["text/event-stream"]["schema"]["contentSchema"]
        return schema


async def the_document(world: World) -> Document:
    async with world.session.get(world.url + "/openapi.json") as response:
        return Document(await response.json())


async def test_every_answer_is_what_the_document_says(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        about = await the_document(world)
        for method, path, body in ASKED:
            headers = {"X-Request-Id": "mine"}
            async with world.session.request(method, world.url + path, json=body, headers=headers) as response:
                about.check(method, path, response.status, await response.json())
        group = world.driver.engine.snapshot().groups[0].name
        status, told = await world.post(f"/admin/groups/{group}/drain", None)
        about.check("POST", f"/admin/groups/{group}/drain", status, told)
        async with world.session.get(world.url + "/ready") as response:
            about.check("GET", "/ready", response.status, await response.json())
        for (method, pattern), operation in OPERATIONS.items():
            if operation.kind == "application/json":
                statuses = {status for verb, path, status in about.seen if (verb, path) == (method, pattern)}
                assert set(operation.status) <= statuses, f"{method} {pattern}"


CALLING = {"messages": HELLO, "max_tokens": 200}
BY_OPENAI = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
BY_ANTHROPIC = {"name": "weather", "input_schema": {"type": "object"}}
# What is asked of a model that says some words and calls two functions.
CALLED: list[tuple[str, Any]] = [
    (CHAT, CALLING | {"tools": [{"type": "function", "function": {"name": "weather"}}]}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 200, "tools": [BY_OPENAI]}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 20, "tools": [BY_OPENAI]}),
    ("/v1/messages", CALLING | {"tools": [BY_ANTHROPIC], "timings": True}),
    ("/v1/messages", CALLING | {"stop_sequences": ["see"]}),
]


async def streamed(world: World, path: str, body: Any) -> list[Any]:
    """The data of each event; nothing where it cannot be streamed."""
    async with world.session.post(world.url + path, json=body | {"stream": True}) as response:
        if response.status != 200:
            return []
        frames = [line[6:] for line in (await response.text()).split("\n") if line.startswith("data: ")]
    if path in (COMPLETION, CHAT):
        assert frames.pop() == "[DONE]"
    return [json.loads(data) for data in frames]


def faulty(layout: Any, delta: Any) -> str:
    raise KeyError("of our own")


async def test_every_event_is_what_the_document_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    seen: dict[str, Counter[str]] = {path: Counter() for path in (COMPLETION, CHAT, "/v1/responses", "/v1/messages")}
    async with served(tmp_path, script=SCRIPT, worker=ROOM) as world:
        about = await the_document(world)

        def check(path: str, events: list[Any]) -> None:
            for event in events:
                about.conforms(event, about.event_of(path))
                seen[path][event.get("type", "chunk" if "choices" in event else "error")] += 1

        asked = [(path, body) for method, path, body in ASKED if method == "POST" and path in seen]
        for path, body in asked + CALLED:
            check(path, await streamed(world, path, body | {"stream_options": {"include_usage": True}}))
        for layout in (CompletionLayout, ChatLayout, ResponsesLayout, AnthropicLayout):
            monkeypatch.setattr(layout, "chunks", faulty)
        for path, body in ((COMPLETION, {"prompt": "x"}), (CHAT, CALLING), *CALLED[1:]):
            check(path, await streamed(world, path, body))
        monkeypatch.undo()
    for path in seen:  # a gateway's word where it has lost its controller
        lines = broken_off(make_mocked_request("POST", path), b"").decode().split("\n")
        check(path, [json.loads(line[6:]) for line in lines if line.startswith("data: {")])
    assert seen[COMPLETION].keys() == seen[CHAT].keys() == {"chunk", "error"}
    assert min(seen[COMPLETION]["chunk"], seen[CHAT]["chunk"]) > 20
    for path, name in (("/v1/responses", "ResponseEvent"), ("/v1/messages", "MessageEvent")):
        assert seen[path].keys() == about.kinds_of(name), "what is written down is said, all of it"


def test_what_nobody_wrote_down_is_noticed() -> None:
    about = Document({"components": {"schemas": {"Text": {"type": "object", "additionalProperties": False}}}})
    about.conforms({}, {"$ref": "#/components/schemas/Text"})
    with pytest.raises(jsonschema.ValidationError):
        about.conforms({"more": 1}, {"$ref": "#/components/schemas/Text"})
