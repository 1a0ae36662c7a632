"""What brought other servers down, over HTTP; and the server goes on."""

from pathlib import Path

import pytest

from tests.api.test_answers import CHAT, COMPLETION, events, texts
from tests.api.world import served, text_after


async def test_scoring_a_prompt_draws_nothing_and_harms_nobody(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"prompt": "Verdict: No", "echo": True, "max_tokens": 0, "logprobs": 1}
        for _ in range(2):
            status, whole = await world.post(COMPLETION, body)
            (choice,) = whole["choices"]
            assert (status, choice["text"], choice["finish_reason"]) == (200, "Verdict: No", "length")
            assert whole["usage"]["completion_tokens"] == 0
            first, *others = choice["logprobs"]["token_logprobs"]
            assert first is None
            assert "".join(choice["logprobs"]["tokens"]) == "Verdict: No"
            assert len(others) == len(choice["logprobs"]["tokens"]) - 1
            assert all(logprob <= 0.0 for logprob in others)
        status, whole = await world.post(COMPLETION, {"prompt": "x", "max_tokens": 3})
        assert (status, whole["choices"][0]["text"]) == (200, text_after(3))


@pytest.mark.parametrize("num_tokens", [16, 32, 48])
async def test_a_prompt_that_is_wholly_cached_and_fills_its_blocks(tmp_path: Path, num_tokens: int) -> None:
    async with served(tmp_path, worker={"block_size": 16}) as world:
        body = {"prompt": [70 + i % 9 for i in range(num_tokens)], "max_tokens": 20}
        for cached in (0, num_tokens - 16, num_tokens - 16):
            status, whole = await world.post(COMPLETION, body)
            assert (status, whole["choices"][0]["text"]) == (200, text_after(20))
            assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(1000, 8), (700, 200), (784, 2)])
async def test_what_exceeds_the_pool_is_refused_at_the_door_and_holds_up_nobody(
    tmp_path: Path, num_prompt: int, max_tokens: int
) -> None:
    worker = {"num_blocks": 49, "block_size": 16, "max_len": 2048}
    async with served(tmp_path, worker=worker) as world:
        for body in ({}, {"prompt_logprobs": 0}):
            ask = {"prompt": [70] * num_prompt, "max_tokens": max_tokens, **body}
            status, error = await world.post(COMPLETION, ask)
            assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
            assert texts(await events(world, COMPLETION, {"prompt": "x", "max_tokens": 9})) == {0: text_after(9)}
        status, whole = await world.post(COMPLETION, {"prompt": [70] * 784, "max_tokens": 1, "prompt_logprobs": 0})
        assert (status, len(whole["choices"][0]["prompt_logprobs"])) == (200, 784), "and what fits exactly is served"


@pytest.mark.parametrize("prefill", ["OK!\n", "OK! ", " OK", "", "OK!<|im_end|>"])
async def test_an_answer_goes_on_just_where_its_beginning_ends(tmp_path: Path, prefill: str) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": prefill}]
    async with served(tmp_path) as world:
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        _, tokens = await world.post("/tokenize", body)
        _, shown = await world.post("/detokenize", {"tokens": tokens["tokens"]})
        assert shown["prompt"].endswith("<|im_start|>assistant\n" + prefill)
        status, whole = await world.post(CHAT, {**body, "max_tokens": 3})
        assert (status, whole["usage"]["prompt_tokens"]) == (200, len(tokens["tokens"]))
        status, error = await world.post(CHAT, {**body, "add_generation_prompt": True})
        assert (status, error["error"]["param"]) == (400, "continue_final_message")


async def test_a_last_token_without_text_ends_a_choice_once(tmp_path: Path) -> None:
    async with served(tmp_path, script=[72, 73, 0, 0]) as world:  # hidden ones at the end
        for body in ({"max_tokens": 4, "ignore_eos": True}, {"max_tokens": 4}):
            chunks = await events(world, COMPLETION, {"prompt": "x", **body})
            reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
            assert [reason for reason in reasons if reason] == ["length" if "ignore_eos" in body else "stop"]
