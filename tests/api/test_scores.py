"""How likely a prompt was: every position once, whatever the chunks, with what a fake worker says of its prefix."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller.simulate.fake_worker import logprobs_of, rank_of
from kilburn.controller.simulate.oracle import chain_of
from tests.api.test_answers import CHAT, COMPLETION, events, finishes
from tests.api.world import PLAIN, VOCAB, World, ids_of, served, text_after

WORDS = (
    "hello world it is leading x. It is. injury. 漢字 \U0001f600 the quick brown fox jumps over the lazy dog 0123456789"
)
PROMPT = ids_of(WORDS)


def due(ids: list[int], position: int, count: int) -> list[tuple[int, float]]:
    """(id, log probability) of a position's own token, and of the likeliest."""
    return logprobs_of(chain_of(ids[:position]), ids[position], count, VOCAB)


def told_as_vllm_does(ids: list[int], count: int) -> list[dict[str, Any] | None]:
    told: list[dict[str, Any] | None] = [None]
    for position in range(1, len(ids)):
        (own, logprob), *best = due(ids, position, count)
        ranked = [(own, logprob, rank_of(chain_of(ids[:position]), own, VOCAB))]
        ranked += [(id, value, i + 1) for i, (id, value) in enumerate(best) if id != own]
        told.append({str(id): {"logprob": value, "rank": rank} for id, value, rank in ranked})
    return told


def without_names(told: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    for position in told[1:]:
        for entry in (position or {}).values():
            assert isinstance(entry.pop("decoded_token"), str)
    return told


async def test_prompt_logprobs_as_vllm_tells_them_in_chunks_and_never_from_the_cache(tmp_path: Path) -> None:
    async with served(tmp_path, worker={"max_step_tokens": 7, "max_rows": 4}) as world:
        for count in (0, 2):
            body = {"prompt": [PROMPT, PROMPT[:1]], "max_tokens": 3, "prompt_logprobs": count, "logprobs": 0}
            for _ in range(2):
                _, whole = await world.post(COMPLETION, body)
                first, second = whole["choices"]
                assert without_names(first["prompt_logprobs"]) == told_as_vllm_does(PROMPT, count)
                assert second["prompt_logprobs"] == [None], "nothing tells how likely a first token is"
                assert first["text"] == second["text"] == text_after(3)
                assert len(first["logprobs"]["tokens"]) == 3
                assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        _, plain = await world.post(COMPLETION, {"prompt": WORDS, "max_tokens": 1})
        assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "others find what it computed"
        assert "prompt_logprobs" not in plain["choices"][0]


async def test_blocks_computed_again_to_be_scored_stay_unnamed(tmp_path: Path) -> None:
    """Names stay with the blocks that had them; the copies are free as soon as the request is over."""
    async with served(tmp_path) as world:
        (home,) = world.driver.engine._homes.values()
        pool, asked = home.scheduler.pool, {"prompt": PROMPT * 3, "max_tokens": 1}
        await world.post(COMPLETION, asked)
        named, num_free = dict(pool._named), pool.num_free
        assert len(named) == len(PROMPT * 3) // home.scheduler.block_size > 1
        _, scored = await world.post(COMPLETION, asked | {"prompt_logprobs": 0})
        assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (pool._named, pool.num_free) == (named, num_free)


async def test_a_chat_tells_them_beside_its_choices_and_may_ask_for_nothing_else(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 0, "prompt_logprobs": 1, "n": 2}
        _, whole = await world.post(CHAT, body)
        _, tokens = await world.post("/tokenize", {"messages": body["messages"]})
        assert without_names(whole["prompt_logprobs"]) == told_as_vllm_does(tokens["tokens"], 1)
        assert [choice["message"]["content"] for choice in whole["choices"]] == ["", ""]
        assert whole["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_an_echo_with_logprobs_is_one_list(tmp_path: Path, max_tokens: int) -> None:
    async with served(tmp_path, worker={"max_step_tokens": 16, "max_rows": 4}) as world:
        body = {"prompt": WORDS, "max_tokens": max_tokens, "echo": True, "logprobs": 2, "n": 2}
        _, whole = await world.post(COMPLETION, body)
        streamed = await events(world, COMPLETION, body)
        for choice in whole["choices"]:
            told = choice["logprobs"]
            assert choice["text"] == WORDS + text_after(max_tokens)
            assert {len(column) for column in told.values()} == {len(PROMPT) + max_tokens}
            assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
            assert told["token_logprobs"][1:] == [-0.25] * (len(PROMPT) + max_tokens - 1)
            for position in range(1, len(PROMPT)):
                text = PLAIN.decode(PROMPT[:position])
                if not text.endswith("\ufffd"):  # of half a character nothing is there yet
                    assert told["text_offset"][position] == len(text)
            best = due(PROMPT, 5, 2)
            assert sorted(told["top_logprobs"][5].values()) == sorted(dict(best[1:] + best[:1]).values())
            assert told["text_offset"][len(PROMPT) :] == [len(WORDS + text_after(i)) for i in range(max_tokens)]
            pieces = [c for chunk in streamed for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            for key, column in told.items():
                parts = [piece["logprobs"][key] for piece in pieces if piece["logprobs"]]
                assert [entry for part in parts for entry in part] == column
        assert sorted(finishes(streamed)) == [(0, "length"), (1, "length")]


async def test_a_worker_that_is_lost_on_the_way_leaves_no_position_out_and_none_twice(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.01, worker={"max_step_tokens": 4, "max_rows": 4}) as world:
        body = {"prompt": WORDS, "max_tokens": 2, "prompt_logprobs": 1}
        asked = asyncio.ensure_future(world.post(COMPLETION, body))
        await world.until(lambda: world.daemon.steps > 4)
        world.running.worker_ended(world.daemon.hello.name, world.daemon.hello.pid, "killed")
        _, whole = await asked
        assert without_names(whole["choices"][0]["prompt_logprobs"]) == told_as_vllm_does(PROMPT, 1)
        assert world.driver.engine.snapshot().leases_ended == 1


async def test_a_row_that_fails_while_its_prompt_is_scored_breaks_a_stream_off(tmp_path: Path) -> None:
    async with served(tmp_path, worker={"max_step_tokens": 8, "max_rows": 4}) as world:
        world.daemon.bad_rows = lambda plan: tuple(plan.rows)
        body = {"prompt": WORDS, "max_tokens": 2, "echo": True, "logprobs": 0}
        (error,) = await events(world, COMPLETION, body)
        assert error["error"]["code"] == "request_failed"
        world.daemon.bad_rows = lambda plan: ()
        assert texts_of(await world.post(COMPLETION, body)) == [WORDS + text_after(2)]


def texts_of(answer: tuple[int, Any]) -> list[str]:
    return [choice["text"] for choice in answer[1]["choices"]]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt_logprobs", {"prompt": PROMPT, "prompt_logprobs": 20}),
        ("logprobs", {"prompt": PROMPT[:40], "echo": True, "logprobs": 1, "n": 3}),
        ("prompt_logprobs", {"prompt": [PROMPT[:40]] * 3, "prompt_logprobs": 1}),
        ("prompt_logprobs", {"prompt": "x", "prompt_logprobs": 1, "stream": True}),
        ("prompt_logprobs", {"prompt": "x", "prompt_logprobs": 21}),
        ("logprobs_mode", {"prompt": "x", "logprobs_mode": "logits"}),
    ],
)
async def test_what_would_be_too_much_is_refused_before_anything_is_computed(
    tmp_path: Path, field: str, body: dict[str, Any]
) -> None:
    async with served(tmp_path, settings={"max_prompt_logprobs": 200}) as world:
        status, error = await world.post(COMPLETION, body)
        assert (status, error["error"]["param"]) == (400, field)
        assert world.daemon.steps == 0
        status, _ = await world.post(COMPLETION, {"prompt": PROMPT[:40], "echo": True, "logprobs": 4, "max_tokens": 0})
        assert status == 200


async def modes(world: World) -> list[bool]:
    """By which distribution the worker was told to report, of the requests that it has seen."""
    worker = world.daemon._worker
    assert worker is not None
    return [row.sampling.logprobs_are_processed for row in worker.rows.values()]


async def test_a_request_says_of_which_distribution_it_wants_logprobs(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for mode, is_processed in (("raw_logprobs", False), ("processed_logprobs", True), (None, False)):
            body = {"prompt": "x", "max_tokens": 2, "logprobs": 1, "logprobs_mode": mode}
            status, _ = await world.post(COMPLETION, body)
            assert (status, await modes(world)) == (200, [is_processed])
