"""Anthropic's messages: by their own client, and by hand where it would not send what is to be refused."""

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.api.world import EOS, World, ids_of, served, text_after

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
SOUND = {"model": "toy", "max_tokens": 8, "messages": HELLO}
YES = [*ids_of("Yes, it is."), EOS]


def client_of(world: World, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=world.url, api_key=key, max_retries=0)


async def events(world: World, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    async with world.session.post(world.url + PATH, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    found = []
    for one in frames:
        name, data = one.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


async def test_their_client_whole_and_streamed(tmp_path: Path) -> None:
    async with served(tmp_path) as world, client_of(world) as client:
        whole = await client.messages.create(model="toy", max_tokens=9, messages=HELLO, system="Be brief.")
        assert [(block.type, block.text) for block in whole.content] == [("text", text_after(9))]
        assert (whole.stop_reason, whole.stop_sequence, whole.usage.output_tokens) == ("max_tokens", None, 9)
        async with client.messages.stream(model="toy", max_tokens=9, messages=HELLO, system="Be brief.") as stream:
            pieces = [piece async for piece in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(pieces) == final.content[0].text == text_after(9)
        assert len(pieces) > 3
        seen = final.usage
        assert seen.input_tokens + (seen.cache_read_input_tokens or 0) == whole.usage.input_tokens
        assert (final.stop_reason, seen.output_tokens) == ("max_tokens", 9)
        counted = await client.messages.count_tokens(model="toy", messages=HELLO, system="Be brief.")
        assert counted.input_tokens == whole.usage.input_tokens
        assert [(model.id, model.type) async for model in client.models.list()] == [("toy", "model")]


async def test_why_an_answer_ended(tmp_path: Path) -> None:
    async with served(tmp_path, script=YES) as world:
        for more, reason, sequence, text in (
            ({"max_tokens": 50}, "end_turn", None, "Yes, it is."),
            ({"max_tokens": 50, "stop_sequences": ["no", "it"]}, "stop_sequence", "it", "Yes, "),
            ({"max_tokens": 2}, "max_tokens", None, text_after(2, YES)),
        ):
            _, whole = await world.post(PATH, SOUND | more)
            assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
            assert whole["content"] == [{"type": "text", "text": text}]
            found = await events(world, SOUND | more)
            last = found[-2][1]
            assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
            assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_the_order_of_events(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        found = await events(world, SOUND)
        names = [name for name, _ in found]
        assert names[:3] == ["message_start", "ping", "content_block_start"]
        assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(names[3:-3]) == {"content_block_delta"}
        assert found[0][1]["message"]["content"] == []
        assert found[2][1]["content_block"] == {"type": "text", "text": ""}
        assert "".join(data["delta"]["text"] for _, data in found[3:-3]) == text_after(8)


async def test_conversations_become_the_chats_that_they_are(tmp_path: Path) -> None:
    """By the count of tokens, which is that of the same conversation as a chat."""
    call = {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "CET"}}
    as_chat_call = {"id": "t1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {"messages": HELLO, "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"messages": [{"role": "system", "content": "a\nb"}, *HELLO]},
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "Sure: "}]},
            {
                "messages": [*HELLO, {"role": "assistant", "content": "Sure: "}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]},
                            {"type": "text", "text": "Well?"},
                        ],
                    },
                ]
            },
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": "Let me see.", "tool_calls": [as_chat_call]},
                    {"role": "tool", "tool_call_id": "t1", "content": "noon"},
                    {"role": "user", "content": "Well?"},
                ]
            },
        ),
    ]
    async with served(tmp_path) as world:
        for theirs, chat in cases:
            status, counted = await world.post(PATH + "/count_tokens", theirs)
            _, tokens = await world.post("/tokenize", chat)
            assert (status, counted) == (200, {"input_tokens": tokens["count"]})
            status, whole = await world.post(PATH, SOUND | theirs | {"max_tokens": 2})
            assert (status, whole["usage"]["output_tokens"]) == (200, 2)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "hello world " * 200}]}, "messages"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": {}, "type": "bash_20250124"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "some"}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"mcp_servers": [{"url": "http://127.0.0.1"}]}, "mcp_servers"),
]


async def test_refusals_have_their_shape_and_name_the_field(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for body, field in REFUSED:
            for stream in (False, True):
                status, told = await world.post(PATH, SOUND | {"stream": stream} | body)
                assert (status, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error"), body
                assert field in told["error"]["message"], body
        status, told = await world.post(PATH, SOUND | {"model": "claude-9"})
        assert (status, told["error"]["type"]) == (404, "not_found_error")
        async with world.session.get(world.url + PATH) as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")
        headers = {"anthropic-version": "2023-06-01"}
        async with world.session.post(world.url + "/v1/nowhere", headers=headers) as response:
            assert (await response.json())["error"]["type"] == "not_found_error"
        async with world.session.post(world.url + PATH, data=b"{") as response:
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_errors_arrive_as_their_exceptions(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice-0001\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}) as world:
        async with client_of(world, "wrong-key") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="toy", max_tokens=2, messages=HELLO)
        async with client_of(world, "sk-alice-0001") as client:
            with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
                await client.messages.create(model="toy", max_tokens=2, messages=HELLO, stop_sequences=[""])
            whole = await client.messages.create(model="toy", max_tokens=2, messages=HELLO)
            assert whole.content[0].text == text_after(2)
            world.daemon.bad_rows = lambda plan: tuple(plan.rows)
            async with client.messages.stream(model="toy", max_tokens=9, messages=HELLO) as stream:
                with pytest.raises(anthropic.APIStatusError, match="could not compute"):
                    await stream.until_done()
