"""Calls of functions in the Responses and in Anthropic's messages, by their own clients: whole, streamed, answered."""

import json
from pathlib import Path
from typing import Any

import anthropic
import openai

from kilburn.controller.api.items import Items
from kilburn.controller.calls.forms import HERMES
from kilburn.controller.calls.reading import CallReader
from tests.api.vocabularies import CHATML
from tests.api.world import EOS, ids_of, served

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SPOKEN = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"a": 12}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
SCRIPT = [*ids_of(SPOKEN), EOS]
TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHATML
ROOM = {"max_len": 2048}


async def test_in_anthropics_messages(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tools: Any = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("weather", "now")]
    hello: list[Any] = [{"role": "user", "content": "hello"}]
    async with served(tmp_path, script=SCRIPT, worker=ROOM) as world:
        client = anthropic.AsyncAnthropic(base_url=world.url, api_key="none", max_retries=0)
        whole = await client.messages.create(model="toy", max_tokens=200, messages=hello, tools=tools)
        assert whole.stop_reason == "tool_use"
        said = [block.model_dump(include={"type", "text", "name", "input"}) for block in whole.content]
        assert said == [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "name": "weather", "input": {"a": 12}},
            {"type": "tool_use", "name": "now", "input": {}},
        ]
        async with client.messages.stream(model="toy", max_tokens=200, messages=hello, tools=tools) as stream:
            final = await stream.get_final_message()
        assert [block.model_dump(include={"type", "text", "name", "input"}) for block in final.content] == said
        assert final.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "12"}
            for block in whole.content
            if block.type == "tool_use"
        ]
        turns = [*hello, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        again = await client.messages.create(model="toy", max_tokens=2, messages=turns, tools=tools)
        assert again.stop_reason == "max_tokens"
        await client.close()
        status, told = await world.post("/v1/messages", body := {"messages": hello, "max_tokens": 200, "tools": tools})
        assert (status, told["stop_reason"]) == (200, "tool_use")
        _, none = await world.post("/v1/messages", body | {"tool_choice": {"type": "none"}})
        assert (none["stop_reason"], none["content"]) == ("end_turn", [{"type": "text", "text": SPOKEN}])
        for choice in (
            {"type": "any"},
            {"type": "tool", "name": "now"},
            {"type": "auto", "disable_parallel_tool_use": True},
        ):
            assert (await world.post("/v1/messages", body | {"tool_choice": choice}))[0] == 200
        _, with_tools = await world.post("/v1/messages/count_tokens", {"messages": hello, "tools": tools})
        _, without = await world.post("/v1/messages/count_tokens", {"messages": hello})
        assert with_tools["input_tokens"] > without["input_tokens"]
        status, told = await world.post("/v1/messages", body | {"tools": [*tools, tools[0]]})
        assert (status, "tools[2].name" in told["error"]["message"]) == (400, True)
        status, told = await world.post("/v1/messages", body | {"tool_choice": {"type": "tool", "name": "other"}})
        assert (status, "tool_choice" in told["error"]["message"]) == (400, True)


async def test_in_responses(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tools: Any = [
        {"type": "function", "name": name, "parameters": SCHEMA, "strict": True} for name in ("weather", "now")
    ]
    async with served(tmp_path, script=SCRIPT, worker=ROOM) as world:
        client = openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0)
        whole = await client.responses.create(model="toy", input="hello", tools=tools, max_output_tokens=200)
        assert whole.status == "completed"
        words, *calls = whole.output
        assert (words.type, whole.output_text) == ("message", "Let me see.")
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"a": 12}), ("now", {})]
        assert all(call.type == "function_call" and call.call_id and call.status == "completed" for call in calls)
        arguments, kinds = dict[str, str](), list[str]()
        async for event in await client.responses.create(
            model="toy", input="hello", tools=tools, max_output_tokens=200, stream=True
        ):
            kinds.append(event.type.removeprefix("response."))
            if event.type == "response.function_call_arguments.delta":
                arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
            elif event.type == "response.function_call_arguments.done":
                assert arguments[event.item_id] == event.arguments
        assert list(arguments.values()) == [call.arguments for call in calls]
        assert [kind for kind in kinds if kind.startswith("output_item")] == [
            "output_item.added",
            "output_item.done",
        ] * 3
        assert (kinds[0], kinds[-1]) == ("created", "completed")
        answers = [{"type": "function_call_output", "call_id": call.call_id, "output": "12"} for call in calls]
        turns: Any = [{"role": "user", "content": "hello"}, *(item.model_dump() for item in whole.output), *answers]
        again = await client.responses.create(model="toy", input=turns, tools=tools, max_output_tokens=2)
        assert again.status == "incomplete"
        await client.close()
        body = {"input": "hello", "tools": tools, "max_output_tokens": 200}
        for choice in ("required", "auto", {"type": "function", "name": "now"}):
            assert (await world.post("/v1/responses", body | {"tool_choice": choice}))[0] == 200
        _, none = await world.post("/v1/responses", body | {"tool_choice": "none"})
        assert [item["type"] for item in none["output"]] == ["message"]
        status, told = await world.post("/v1/responses", body | {"tools": [*tools, tools[0]]})
        assert (status, told["error"]["param"]) == (400, "tools[2].name")
        asked = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
        for beside in ({}, {"tools": tools}):
            answered = await world.post(
                "/v1/responses", {"input": "hello", "max_output_tokens": 2, "text": asked, **beside}
            )
            assert answered[0] == 200
        bad = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strange"}}}
        status, told = await world.post("/v1/responses", {"input": "hello", "text": bad})
        assert (status, told["error"]["param"].startswith("text.format")) == (400, True), told


async def test_tools_and_schemas_are_bounded(tmp_path: Path) -> None:
    def functions(num: int) -> list[Any]:
        return [{"type": "function", "function": {"name": f"f{i}", "parameters": SCHEMA}} for i in range(num)]

    def schema(num_chars: int) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "x" * num_chars}}}

    settings = {"tool_parser": "hermes", "max_tools": 2, "max_schema": 1000}
    sound = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    async with served(tmp_path, script=SCRIPT, settings=settings) as world:
        for field, at, beyond in (
            ("tools", functions(2), functions(3)),
            ("response_format", schema(500), schema(1500)),
        ):
            assert (await world.post("/v1/chat/completions", sound | {field: at}))[0] == 200
            status, told = await world.post("/v1/chat/completions", sound | {field: beyond})
            assert (status, told["error"]["param"].split(".")[0]) == (400, field)


def test_items_are_the_same_for_every_cut() -> None:
    """Each item is over before the next begins, and the steps tell the whole of it."""
    names = ("weather", "now")
    whole = Items(CallReader(HERMES, names))
    whole.feed(SPOKEN, True)
    expected = [(item.call and item.call.name, item.text) for item in whole.all]
    assert [name for name, _ in expected] == [None, "weather", "now"]
    for length in (1, 2, 3, 7, 20):
        items, told = Items(CallReader(HERMES, names)), dict[int, str]()
        order: list[tuple[str, int]] = []
        for start in range(0, len(SPOKEN), length):
            for step in items.feed(SPOKEN[start : start + length], start + length >= len(SPOKEN)):
                order.append((type(step).__name__, step.item.index))
                told[step.item.index] = told.get(step.item.index, "") + getattr(step, "text", "")
        assert [(item.call and item.call.name, item.text) for item in items.all] == expected
        assert list(told.values()) == [text for _, text in expected]
        assert [step for step in order if step[0] != "More"] == [
            (kind, index) for index in range(3) for kind in ("Begun", "Ended")
        ]
