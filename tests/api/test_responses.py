"""OpenAI's Responses: by its own client, and by hand where it would not send what is to be refused."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.world import EOS, World, ids_of, served, text_after

PATH = "/v1/responses"
SOUND = {"model": "toy", "input": "hello", "max_output_tokens": 8}
YES = [*ids_of("Yes, it is."), EOS]


def client_of(world: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0)


async def events(world: World, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with world.session.post(world.url + PATH, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    found = []
    for one in frames:
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_the_client_whole_and_streamed(tmp_path: Path) -> None:
    async with served(tmp_path, script=YES) as world, client_of(world) as client:
        whole = await client.responses.create(model="toy", input="hello", instructions="Be brief.", store=False)
        assert (whole.status, whole.output_text, whole.error) == ("completed", "Yes, it is.", None)
        assert whole.usage is not None
        assert whole.usage.output_tokens == len(YES)
        async with client.responses.stream(model="toy", input="hello", instructions="Be brief.") as stream:
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(pieces) == final.output_text == whole.output_text
        assert len(pieces) > 2
        assert final.usage is not None
        assert final.usage.total_tokens == whole.usage.total_tokens
        with pytest.raises(openai.BadRequestError, match="nothing is kept here"):
            await client.responses.create(model="toy", input="hello", previous_response_id=whole.id)
        with pytest.raises(openai.NotFoundError, match="not stored"):
            await client.responses.retrieve(whole.id)


async def test_the_order_of_events(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        found = await events(world, SOUND)
        kinds = [event["type"].removeprefix("response.") for event in found]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert "".join(event["delta"] for event in found[4:-4]) == found[-4]["text"] == text_after(8)
        assert {event["response"]["id"] for event in (found[0], found[-1])} == {found[0]["response"]["id"]}
        assert found[0]["response"]["status"] == "in_progress"
        assert {event["item_id"] for event in found[3:-2]} == {found[2]["item"]["id"]}
        over = found[-1]["response"]
        assert over["incomplete_details"] == {"reason": "max_output_tokens"}
        assert over["output"] == [found[-2]["item"]]
        _, whole = await world.post(PATH, SOUND)
        volatile = {"id", "created_at", "usage", "output"}
        assert {n: v for n, v in whole.items() if n not in volatile} == {
            n: v for n, v in over.items() if n not in volatile
        }


async def test_an_error_in_mid_stream_is_an_event_and_then_the_end(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        world.daemon.bad_rows = lambda plan: tuple(plan.rows)
        *_, last = await events(world, SOUND)
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        assert "could not compute" in last["response"]["error"]["message"]


async def test_inputs_become_the_chats_that_they_are(tmp_path: Path) -> None:
    """By the count of tokens, which is that of the same conversation as a chat."""
    function = {"name": "now", "arguments": '{"zone": "CET"}'}
    cases: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({"input": "hello"}, [{"role": "user", "content": "hello"}]),
        (
            {"input": [{"role": "user", "content": "hello"}], "instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        ),
        (
            {
                "input": [
                    {"role": "developer", "content": "Be brief."},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "time?"}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                    {"type": "function_call", "call_id": "c1", "id": "fc_1", **function},
                    {"type": "function_call", "call_id": "c2", **function},
                    {"type": "function_call_output", "call_id": "c1", "output": "noon"},
                    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "text", "text": "one"}]},
                ]
            },
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "time?"},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "tool_calls": [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "noon"},
                {"role": "tool", "tool_call_id": "c2", "content": "one"},
            ],
        ),
    ]  # fmt: skip
    async with served(tmp_path) as world:
        for theirs, messages in cases:
            status, whole = await world.post(PATH, SOUND | theirs | {"max_output_tokens": 2})
            assert status == 200, whole
            _, tokens = await world.post("/tokenize", {"messages": messages})
            assert whole["usage"]["input_tokens"] == tokens["count"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["hello"]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[0].output"),
    ({"input": "hello world " * 200}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
]  # fmt: skip


async def test_refusals_name_the_field_that_the_client_wrote(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for body, param in REFUSED:
            for stream in (False, True):
                status, told = await world.post(PATH, SOUND | {"stream": stream} | body)
                assert (status, told["error"]["param"]) == (400, param), body
        everything_off = {"store": False, "background": False, "include": [], "truncation": "disabled", "user": "me"}
        status, whole = await world.post(PATH, SOUND | everything_off | {"text": {"format": {"type": "text"}}})
        assert (status, whole["output"][0]["content"][0]["text"]) == (200, text_after(8))
