"""What is refused, with which status and naming which field; and the server is as before afterwards."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from kilburn.controller.api.anthropic import CountTokensRequest, MessagesRequest
from kilburn.controller.api.checks import read_as, read_json
from kilburn.controller.api.errors import ApiError
from kilburn.controller.api.responses import ResponsesRequest
from kilburn.controller.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
    TokenizeRequest,
)
from tests.api.world import VOCAB, World, served, text_after

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]

COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    # empty prompts, in every form
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["x", ""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    # prompts of wrong kinds
    ({"prompt": 7}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [2**31]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": ["x"] * 65}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": {"tensor": "gASV"}}, "prompt"),
    # numbers
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 65, "prompt": ["a", "b"]}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 65, "prompt": ["a", "b"]}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    # ids
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 5}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias.5"),
    ({"logit_bias": {"5": None}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [[5, 1]]}, "logit_bias"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    # texts and flags
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    # what is understood and not offered
    ({"suffix": "x"}, "suffix"),
    ({"prompt_embeds": "gASVKAAAAAAAAACM"}, "prompt_embeds"),
    # beams
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"beam_width": 0}, "beam_width"),
    ({"beam_width": 17}, "beam_width"),
    ({"use_beam_search": False, "beam_width": 4}, "beam_width"),
    ({"use_beam_search": True, "n": 17}, "n"),
    ({"beam_width": 4, "n": 5}, "n"),
    ({"beam_width": 16, "stream": False, "prompt": ["a"] * 9}, "beam_width"),
    ({"beam_width": 16, "stream": False, "stop_token_ids": list(range(3, 33))}, "beam_width"),
    ({"beam_width": 4, "stream": True}, "stream"),
    ({"beam_width": 4, "stop": ["x"], "stream": False}, "stop"),
    ({"beam_width": 4, "presence_penalty": 1, "stream": False}, "presence_penalty"),
    ({"beam_width": 4, "frequency_penalty": 1, "stream": False}, "frequency_penalty"),
    ({"beam_width": 4, "repetition_penalty": 1.1, "stream": False}, "repetition_penalty"),
    ({"beam_width": 4, "temperature": 0.5, "stream": False}, "temperature"),
    ({"beam_width": 4, "top_k": 5, "stream": False}, "top_k"),
    ({"beam_width": 4, "top_p": 0.5, "stream": False}, "top_p"),
    ({"beam_width": 4, "min_p": 0.5, "stream": False}, "min_p"),
    ({"beam_width": 4, "logprobs": 0, "stream": False}, "logprobs"),
    ({"beam_width": 4, "best_of": 4, "stream": False}, "best_of"),
    ({"beam_width": 4, "max_tokens": 0, "echo": True, "stream": False}, "max_tokens"),
    ({"beam_width": 4, "length_penalty": 11}, "length_penalty"),
    ({"beam_width": 4, "early_stopping": "always"}, "early_stopping"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"beam_width": 4, "response_format": {"type": "json_object"}}, "response_format"),
    ({"beam_width": 4, "guided_regex": "a+"}, "guided_regex"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
]
CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user\n<|im_start|>", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]


def well_formed(error: Any) -> dict[str, Any]:
    assert list(error) == ["error"]
    about: dict[str, Any] = error["error"]
    assert about.keys() == {"message", "type", "param", "code"}
    assert isinstance(about["message"], str)
    assert about["message"]
    for tell_tale in ("Traceback", "/usr", "/tmp", ".py", " at 0x", "kilburn.", "Error", "NoneType"):
        assert tell_tale not in about["message"]
    return about


async def still_serves(world: World) -> None:
    status, whole = await world.post(COMPLETION, {"prompt": "x", "max_tokens": 3})
    assert (status, whole["choices"][0]["text"]) == (200, text_after(3))


@pytest.mark.parametrize(("path", "cases"), [(COMPLETION, COMPLETIONS), (CHAT, CHATS)])
async def test_every_bad_request_names_its_field(tmp_path: Path, path: str, cases: list[Any]) -> None:
    async with served(tmp_path) as world:
        sound = {"prompt": "x"} if path == COMPLETION else {"messages": HELLO}
        for body, param in cases:
            for stream in (False, True):
                wanted = {**sound, "stream": stream, **body} if "stream_options" not in body else {**sound, **body}
                if body == {}:
                    wanted = {"stream": stream}
                status, error = await world.post(path, wanted)
                about = well_formed(error)
                assert (status, about["param"], about["type"]) == (400, param, "invalid_request_error"), body
        await still_serves(world)
        assert world.driver.engine.snapshot().requests == 0


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b"\x80\x04\x95\x00",
]


async def test_bodies_that_are_no_requests(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for body in BODIES:
            for path in (COMPLETION, CHAT, "/tokenize", "/detokenize"):
                async with world.session.post(world.url + path, data=body) as response:
                    assert response.status == 400, body[:40]
                    well_formed(await response.json())
        await still_serves(world)


async def test_explicit_nulls_mean_absent_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    nulls = dict.fromkeys(CompletionRequest.__dataclass_fields__)
    async with served(tmp_path) as world:
        status, whole = await world.post(COMPLETION, {**nulls, "prompt": "x", "no_such_field": {"a": [1]}})
        assert (status, whole["usage"]["completion_tokens"]) == (200, 16)
        nulls = dict.fromkeys(ChatRequest.__dataclass_fields__)
        status, _ = await world.post(CHAT, {**nulls, "messages": HELLO, "max_tokens": 2, "user": "me"})
        assert status == 200
        for path, kind, given in (
            ("/v1/responses", ResponsesRequest, {"input": "hello"}),
            ("/v1/messages", MessagesRequest, {"messages": HELLO, "max_tokens": 2}),
            ("/v1/messages/count_tokens", CountTokensRequest, {"messages": HELLO}),
            ("/v1/prefixes", PrefixRequest, {"name": "p", "text": "hello"}),
            ("/tokenize", TokenizeRequest, {"prompt": "hello"}),
            ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
        ):
            status, told = await world.post(path, {**dict.fromkeys(kind.__dataclass_fields__), **given})
            assert status in (200, 201), (path, told)
        async with world.session.delete(world.url + "/v1/prefixes/p") as response:
            assert response.status == 200


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_a_model_of_another_name(tmp_path: Path, path: str) -> None:
    async with served(tmp_path) as world:
        status, error = await world.post(path, {"model": "gpt-9", "prompt": "x", "messages": HELLO})
        assert (status, well_formed(error)["code"]) == (404, "model_not_found")
        async with world.session.get(world.url + "/v1/models/gpt-9") as response:
            assert response.status == 404
        async with world.session.get(world.url + "/v1/models/toy") as response:
            assert (await response.json())["id"] == "toy"


async def test_addresses_methods_and_sizes(tmp_path: Path) -> None:
    async with served(tmp_path, settings={"max_body": 4096}) as world:
        for path in ("/v1/../etc/passwd", "/map/..%2f..%2fapp.py", "/map/%2e%2e/routes.py", "/map/routes.py"):
            async with world.session.get(URL(world.url + path, encoded=True)) as response:
                assert response.status == 404, "the files that there are were named at the start"
                well_formed(await response.json())
        async with world.session.get(world.url + COMPLETION) as response:
            assert response.status == 405
            assert "POST" in response.headers["Allow"]
            assert response.headers["Server"] == "kilburn", "no versions of what is at work here"
            well_formed(await response.json())
        status, error = await world.post(COMPLETION, {"prompt": "x" * 5000})
        assert status == 413
        well_formed(error)

        async def endless() -> Any:
            for _ in range(1000):
                yield b" " * 1024

        async with world.session.post(world.url + COMPLETION, data=endless()) as response:
            assert response.status == 413, "found out while reading, whatever Content-Length says or does not say"
        async with world.session.get(world.url + "/health", headers={"X-Big": "x" * 9000}) as response:
            assert response.status == 400
        try:
            async with world.session.get(world.url + "/health?" + "x" * 9000) as response:
                assert response.status == 400
        except aiohttp.ClientConnectionError:
            pass  # closed on us, as is right too
        await still_serves(world)


async def test_a_fault_of_our_own_tells_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        counts = world.driver.streams.counts
        kept, counts.finished = counts.finished, None  # type: ignore[assignment]  # a bug, as one might be made
        async with world.session.get(world.url + "/metrics") as response:
            assert response.status == 500
            assert well_formed(await response.json())["message"] == "internal error"
        counts.finished = kept
        await still_serves(world)


def test_values_at_their_borders_are_taken() -> None:
    body = {"prompt": "x", "temperature": 0, "top_p": 0, "top_k": -1, "min_p": 1, "presence_penalty": -2, "seed": -1}
    more = {"max_tokens": 5.0, "n": 1, "best_of": 1, "stop": [], "logit_bias": {"0": -100}, "suffix": ""}
    taken = read_as(CompletionRequest, read_json(json.dumps(body | more).encode()))
    assert (taken.temperature, taken.top_p, taken.max_tokens, taken.logit_bias) == (0.0, 0.0, 5, ((0, -100.0),))
    with pytest.raises(ApiError):
        read_as(CompletionRequest, {"prompt": "x", "temperature": float("nan")})
