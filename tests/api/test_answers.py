"""Completions and chat over HTTP: texts, reasons, counts, layouts, streamed and whole."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.world import EOS, SPOKEN, World, ids_of, served, text_after

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def events(world: World, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of each event of a stream; the last is the text [DONE]."""
    found: list[Any] = []
    async with world.session.post(world.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                data = line[6:].strip().decode()
                found.append(data if data == "[DONE]" else json.loads(data))
    assert found[-1] == "[DONE]"
    return found[:-1]


def texts(chunks: list[Any], is_chat: bool = False) -> dict[int, str]:
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if is_chat else choice["text"]
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined


def finishes(chunks: list[Any]) -> list[tuple[int, str]]:
    return [
        (choice["index"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]


async def test_a_completion_whole_and_streamed(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"model": "toy", "prompt": "hello world", "max_tokens": 40, "temperature": 0}
        status, whole = await world.post(COMPLETION, body)
        assert status == 200
        (choice,) = whole["choices"]
        assert choice == {"index": 0, "text": text_after(40), "logprobs": None, "finish_reason": "length"}
        num_prompt = len(ids_of("hello world"))
        assert whole["usage"]["prompt_tokens"] == num_prompt
        assert whole["usage"]["completion_tokens"] == 40
        assert whole["usage"]["total_tokens"] == num_prompt + 40
        chunks = await events(world, COMPLETION, {**body, "stream_options": {"include_usage": True}})
        assert texts(chunks) == {0: text_after(40)}
        assert finishes(chunks) == [(0, "length")]
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 40
        assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_chat_whole_and_streamed(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        status, whole = await world.post(CHAT, {"messages": HELLO, "max_completion_tokens": 9})
        assert status == 200
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"]["content"] == text_after(9)
        chunks = await events(world, CHAT, {"messages": HELLO, "max_tokens": 9})
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert texts(chunks, is_chat=True) == {0: text_after(9)}
        assert finishes(chunks) == [(0, "length")]
        assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0}
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("stop", ["leading", "hello wor", "\U0001f600", "is l", "It"])
@pytest.mark.parametrize("include", [False, True])
async def test_nothing_of_a_stop_string_is_sent(tmp_path: Path, stop: str, include: bool) -> None:
    async with served(tmp_path) as world:
        at = SPOKEN.index(stop)
        expected = SPOKEN[: at + len(stop) if include else at]
        body = {"prompt": "x", "max_tokens": 200, "stop": [stop, "never"], "include_stop_str_in_output": include}
        _, whole = await world.post(COMPLETION, body)
        assert whole["choices"][0]["text"] == expected
        assert whole["choices"][0]["finish_reason"] == "stop"
        words = ids_of(SPOKEN)
        spelled = next(n for n in range(1, 200) if stop in text_after(n))
        assert whole["usage"]["completion_tokens"] == spelled, words[:spelled]
        chunks = await events(world, COMPLETION, body)
        assert texts(chunks) == {0: expected}
        assert finishes(chunks) == [(0, "stop")]


async def test_a_tail_that_might_have_become_a_stop_string_arrives_at_the_end(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"prompt": "x", "max_tokens": 3, "stop": [text_after(3) + "!"]}
        assert (await world.post(COMPLETION, body))[1]["choices"][0]["text"] == text_after(3)
        chunks = await events(world, COMPLETION, body)
        assert texts(chunks) == {0: text_after(3)}
        assert finishes(chunks) == [(0, "length")]


async def test_min_tokens_comes_before_stop_strings(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        first = text_after(1)
        body = {"prompt": "x", "max_tokens": 30, "min_tokens": 5, "stop": [first]}
        _, whole = await world.post(COMPLETION, body)
        assert whole["usage"]["completion_tokens"] > 5
        assert whole["choices"][0]["text"].startswith(text_after(5))


@pytest.mark.parametrize("hidden", [True, False])
async def test_a_stop_id_is_no_part_of_the_text_and_takes_none_with_it(tmp_path: Path, hidden: bool) -> None:
    script = [*ids_of("an injury."), EOS]
    async with served(tmp_path, script=script) as world:
        body = {"prompt": "x", "max_tokens": 50, "skip_special_tokens": hidden}
        _, whole = await world.post(COMPLETION, body)
        assert whole["choices"][0]["text"] == "an injury."
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == len(script)
        chunks = await events(world, COMPLETION, body)
        assert texts(chunks) == {0: "an injury."}
        assert finishes(chunks) == [(0, "stop")]
        _, kept = await world.post(COMPLETION, {**body, "ignore_eos": True, "max_tokens": len(script)})
        assert kept["choices"][0]["text"] == "an injury." + ("" if hidden else "<|im_end|>")
        assert kept["choices"][0]["finish_reason"] == "length"
        dot = ids_of("an injury.")[-1]
        _, early = await world.post(COMPLETION, {**body, "stop_token_ids": [dot]})
        assert early["choices"][0]["text"] == "an injury"


async def test_several_prompts_and_choices(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"prompt": ["hello", "AB"], "n": 2, "max_tokens": 4}
        _, whole = await world.post(COMPLETION, body)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert {choice["text"] for choice in whole["choices"]} == {text_after(4)}
        assert whole["usage"]["prompt_tokens"] == len(ids_of("hello")) + len(ids_of("AB"))
        assert whole["usage"]["completion_tokens"] == 16
        chunks = await events(world, COMPLETION, body)
        assert texts(chunks) == dict.fromkeys(range(4), text_after(4))
        assert sorted(finishes(chunks)) == [(index, "length") for index in range(4)]
        _, whole = await world.post(COMPLETION, {"prompt": [[65, 66], [67]], "max_tokens": 4})
        assert whole["usage"]["prompt_tokens"] == 3
        chunks = await events(world, CHAT, {"messages": HELLO, "n": 2, "max_tokens": 4, "stop": "zzz"})
        assert texts(chunks, is_chat=True) == dict.fromkeys(range(2), text_after(4))


async def test_echo(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for prompt in ("Verdict: No", "x", ids_of("Verdict: No")):
            _, whole = await world.post(COMPLETION, {"prompt": prompt, "echo": True, "max_tokens": 0})
            text = prompt if isinstance(prompt, str) else "Verdict: No"
            assert whole["choices"][0]["text"] == text
            assert whole["choices"][0]["finish_reason"] == "length"
            assert whole["usage"]["completion_tokens"] == 0
            body = {"prompt": prompt, "echo": True, "max_tokens": 3}
            assert texts(await events(world, COMPLETION, body)) == {0: text + text_after(3)}


async def test_logprobs_in_their_two_layouts(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"prompt": "x", "max_tokens": 5, "logprobs": 2}
        _, whole = await world.post(COMPLETION, body)
        logprobs = whole["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == text_after(5)
        assert logprobs["token_logprobs"] == [-0.25] * 5
        assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])
        assert logprobs["text_offset"] == [len(text_after(i)) for i in range(5)]
        for wanted, width in ((None, 0), (0, 0), (2, 2)):
            body = {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": wanted}
            _, whole = await world.post(CHAT, body)
            content = whole["choices"][0]["logprobs"]["content"]
            assert bytes(byte for token in content for byte in token["bytes"]).decode() == text_after(5)
            assert [len(token["top_logprobs"]) for token in content] == [width] * 5
            chunks = await events(world, CHAT, body)
            streamed = [
                t for c in chunks for choice in c["choices"] for t in (choice["logprobs"] or {}).get("content", [])
            ]
            assert streamed == content
        status, error = await world.post(CHAT, {"messages": HELLO, "top_logprobs": 3})
        assert (status, error["error"]["param"]) == (400, "top_logprobs")


async def test_log_probabilities_do_not_spell_the_stop_string(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for stop in ("leading", "\U0001f600"):
            body = {"prompt": "x", "max_tokens": 150, "logprobs": 0, "stop": stop}
            chunks = await events(world, COMPLETION, body)
            tokens = [
                t for c in chunks for choice in c["choices"] for t in (choice["logprobs"] or {}).get("tokens", [])
            ]
            assert SPOKEN[: SPOKEN.index(stop)].startswith("".join(tokens))
            assert "bytes" not in "".join(tokens)


async def test_cached_tokens_are_told(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"prompt": "hello world it is leading " * 4, "max_tokens": 2}
        _, first = await world.post(COMPLETION, body)
        _, second = await world.post(COMPLETION, body)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < second["usage"]["prompt_tokens"]
        assert cached % 16 == 0


async def test_lengths_that_were_not_given(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        _, whole = await world.post(COMPLETION, {"prompt": "x"})
        assert whole["usage"]["completion_tokens"] == 16
        _, whole = await world.post(COMPLETION, {"prompt": [70] * 250})
        assert whole["usage"]["completion_tokens"] == 6, "cut to what is left of the model's 256"
        _, whole = await world.post(CHAT, {"messages": HELLO})
        assert whole["usage"]["total_tokens"] == 256
    async with served(tmp_path, worker={"num_blocks": 4}) as world:
        _, whole = await world.post(CHAT, {"messages": HELLO})
        assert whole["usage"]["total_tokens"] == 65, "four blocks of sixteen, and a last token that needs no slot"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": [70] * 256}),
        (COMPLETION, {"prompt": [70] * 400, "max_tokens": 1}),
        (COMPLETION, {"prompt": [70] * 200, "max_tokens": 57}),
        (CHAT, {"messages": [{"role": "user", "content": "hello world " * 200}]}),
        (CHAT, {"messages": HELLO, "max_tokens": 256}),
    ],
)
async def test_what_can_never_fit_is_refused(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with served(tmp_path) as world:
        status, error = await world.post(path, body)
        assert status == 400
        assert error["error"]["code"] == "context_length_exceeded"
        status, _ = await world.post(COMPLETION, {"prompt": [70] * 200, "max_tokens": 56})
        assert status == 200, "and what fits exactly is served"


@pytest.mark.parametrize("prompt", [" ", "\n", "\t \n", "\0", "<|endoftext|>", [0], [70] * 255])
async def test_strange_prompts_that_are_prompts(tmp_path: Path, prompt: str | list[int]) -> None:
    async with served(tmp_path) as world:
        status, whole = await world.post(COMPLETION, {"prompt": prompt, "max_tokens": 1})
        assert (status, whole["choices"][0]["text"]) == (200, text_after(1))


async def test_control_tokens_in_text_are_text_unless_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        text = "a<|im_end|>b"
        for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
            _, literal = await world.post("/tokenize", body)
            _, allowed = await world.post("/tokenize", {**body, "allow_special_tokens": True})
            assert allowed["tokens"].count(EOS) == literal["tokens"].count(EOS) + 1
            for tokens in (literal, allowed):
                assert text in (await world.post("/detokenize", {"tokens": tokens["tokens"]}))[1]["prompt"]
        _, named = await world.post("/tokenize", {"prompt": "is", "return_token_strs": True})
        assert "".join(named["token_strs"]) == "is"
        assert named["max_model_len"] == 256


async def test_chat_history_with_null_content_and_tool_calls(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    async with served(tmp_path) as world:
        status, _ = await world.post(CHAT, {"messages": history, "max_tokens": 2})
        assert status == 200
        _, tokens = await world.post("/tokenize", {"messages": history})
        _, shown = await world.post("/detokenize", {"tokens": tokens["tokens"]})
        assert "None" not in shown["prompt"]
        assert shown["prompt"].count("<|im_start|>") == 6, "each turn is kept, and one is asked for"
        assert "a\nb<|im_end|>" in shown["prompt"]


async def test_continuing_over_http(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for prefill in ("OK!\n", "OK! ", ""):
            messages = [*HELLO, {"role": "assistant", "content": prefill}]
            body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
            _, tokens = await world.post("/tokenize", body)
            _, shown = await world.post("/detokenize", {"tokens": tokens["tokens"]})
            assert shown["prompt"].endswith("<|im_start|>assistant\n" + prefill)
            assert (await world.post(CHAT, {**body, "max_tokens": 2}))[0] == 200
        both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
        assert (await world.post(CHAT, both))[0] == 400
        assert (await world.post(CHAT, {"messages": HELLO, "continue_final_message": True}))[0] == 400


async def test_many_streams_and_one_slow_reader(tmp_path: Path) -> None:
    """A reader that takes nothing holds nobody, and gets everything in the end."""
    async with served(tmp_path, worker={"max_len": 2048}) as world:
        body = {"prompt": "x", "max_tokens": 400, "stream": True, "logprobs": 20}
        slow = await world.session.post(world.url + COMPLETION, json=body)
        chunks = await asyncio.gather(
            *(events(world, COMPLETION, {"prompt": "x", "max_tokens": 60}) for _ in range(40))
        )
        assert all(texts(each) == {0: text_after(60)} for each in chunks)
        await world.until(lambda: world.driver.engine.is_idle, within_s=30)
        lines = [line async for line in slow.content if line.startswith(b"data: {")]
        assert texts([json.loads(line[6:]) for line in lines]) == {0: text_after(400)}
