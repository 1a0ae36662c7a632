"""Several choices of one prompt: samples, the best of more, and beams."""

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller.choice import Ask
from kilburn.controller.core.events import Emit, Event, Finished
from kilburn.controller.onlookers import Onlookers
from kilburn.controller.simulate.fake_worker import Row, by_oracle
from kilburn.controller.story import Chronicle
from kilburn.controller.streams import Streams
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason
from tests.api.vocabularies import byte_level
from tests.api.world import VOCAB, World, ids_of, served, text_after

PROMPT = "the quick brown fox jumps over the lazy dog, " * 3


async def chunks_of(world: World, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with world.session.post(world.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        lines = (await response.text()).split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def by_stream(row: Row, stream: int) -> int:
    """Sample number s says token 100 + s, again and again."""
    return row.tokens[-1] if len(row.tokens) > row.num_prompt else 100 + stream


async def test_128_samples_of_one_prompt_share_its_blocks_and_keep_their_index(tmp_path: Path) -> None:
    many = {"max_rows": 128, "max_step_tokens": 512}
    async with served(tmp_path, worker=many, choose=by_stream) as world:
        body = {"prompt": PROMPT, "n": 128, "max_tokens": 3, "skip_special_tokens": False}
        status, whole = await world.post("/v1/completions", body)
        assert status == 200
        assert [choice["index"] for choice in whole["choices"]] == list(range(128))
        text = world.driver.streams._detokenizer
        for choice in whole["choices"]:
            step = text(False)
            said = "".join(step.step(100 + choice["index"]) for _ in range(3)) + step.flush()
            assert choice["text"] == said
        assert whole["usage"]["completion_tokens"] == 3 * 128
        num_prompt = whole["usage"]["prompt_tokens"]
        (group,) = world.driver.engine.snapshot().groups
        assert group.prompt_tokens == num_prompt  # of one request, not of 128
        assert group.block_copies >= (127 if num_prompt % 16 else 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 4])
async def test_chunks_name_their_choice_and_not_their_place(tmp_path: Path, path: str, n: int) -> None:
    async with served(tmp_path) as world:
        ask = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        chunks = await chunks_of(world, path, {**ask, "n": n, "max_tokens": 7})
        texts: dict[int, str] = defaultdict(str)
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        assert texts == {i: text_after(7) for i in range(n)}


async def test_each_sample_has_its_own_stream_and_a_seed_repeats_all_of_them(tmp_path: Path) -> None:
    async with served(tmp_path, choose=by_oracle(VOCAB)) as world:
        body = {"prompt": PROMPT, "n": 5, "max_tokens": 12, "seed": 7, "skip_special_tokens": False, "ignore_eos": True}
        texts = [[c["text"] for c in (await world.post("/v1/completions", body))[1]["choices"]] for _ in range(2)]
        assert texts[0] == texts[1]
        assert len(set(texts[0])) == 5
        other = (await world.post("/v1/completions", {**body, "seed": 8}))[1]["choices"]
        assert [c["text"] for c in other] != texts[0]
        fewer = (await world.post("/v1/completions", {**body, "n": 2}))[1]["choices"]
        assert [c["text"] for c in fewer] == texts[0][:2]


@pytest.mark.parametrize("num_ended", [0, 1])
async def test_leaving_with_four_choices_frees_all_of_them(tmp_path: Path, num_ended: int) -> None:
    def choose(row: Row, stream: int) -> int:
        return 2 if stream < num_ended and len(row.tokens) > row.num_prompt + 1 else 100

    async with served(tmp_path, delay_s=0.01, choose=choose) as world:
        body = {"prompt": PROMPT, "n": 4, "max_tokens": 200, "stream": True}
        response = await world.session.post(world.url + "/v1/completions", json=body)
        seen = b""
        while b'"finish_reason":"stop"' not in seen if num_ended else not seen:
            seen += await response.content.readany()
        (group,) = world.driver.engine.snapshot().groups
        assert group.running_sequences == 4 - num_ended
        assert world.owned_blocks() > 0
        response.close()
        await world.until(world.is_quiet)
        assert world.driver.engine.snapshot().requests == 0


async def answer_of(logprobs: list[list[float]], keep: int) -> list[tuple[int, str]]:
    """Choice number i says its own number, each token with the log probability given."""
    posted: list[Event] = []
    streams = Streams(posted.append, byte_level().detokenizer, Chronicle(lambda: 0.0), Onlookers())
    task = asyncio.create_task(streams.ask([Ask([5], 9, Sampling(), n=len(logprobs), keep=keep)]))
    await asyncio.sleep(0)
    streams.turn_ended()
    answer = await task
    for i, values in enumerate(logprobs):
        (token,) = ids_of(str(i))
        for value in values:
            streams.perform(Emit([1], [i], [token], {0: ((token, value),)}), now=1.0)
        streams.perform(Finished(1, i, FinishReason.LENGTH), now=1.0)
    return [(delta.index, delta.text) for delta in answer.best(await answer.whole())]


@pytest.mark.parametrize(
    ("logprobs", "keep", "best"),
    [
        ([[-3.0], [-1.0], [-2.0]], 1, ["1"]),
        ([[-3.0], [-1.0], [-2.0]], 2, ["1", "2"]),
        ([[-3.0], [-1.0], [-2.0]], 3, ["0", "1", "2"]),  # all are kept: as they were drawn
        ([[-1.5], [-1.0, -1.0], [-2.0]], 1, ["11"]),  # per token, not in all
        ([[-1.0], [-1.0], [-1.0]], 2, ["0", "1"]),
    ],
)
async def test_the_best_are_the_likeliest_per_token(logprobs: list[list[float]], keep: int, best: list[str]) -> None:
    assert await answer_of(logprobs, keep) == list(enumerate(best))


async def test_best_of_draws_more_than_it_returns_and_says_what_it_cost(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        body = {"prompt": ["x", "yy"], "n": 2, "best_of": 5, "max_tokens": 4}
        status, whole = await world.post("/v1/completions", body)
        assert status == 200
        assert [(c["index"], c["text"]) for c in whole["choices"]] == [(i, text_after(4)) for i in range(4)]
        assert all(choice["logprobs"] is None for choice in whole["choices"])
        assert whole["usage"]["completion_tokens"] == 2 * 5 * 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "width", "n"),
    [
        ({"use_beam_search": True, "n": 3}, 3, 3),
        ({"use_beam_search": True, "beam_width": 4, "n": 2}, 4, 2),
        ({"beam_width": 16, "n": 16, "length_penalty": 0.5, "early_stopping": True}, 16, 16),
        ({"beam_width": 2, "length_penalty": -1, "early_stopping": "never", "temperature": 0}, 2, 1),
    ],
)
async def test_beams_come_best_first_with_what_they_scored(
    tmp_path: Path, path: str, fields: dict[str, Any], width: int, n: int
) -> None:
    ask = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with served(tmp_path) as world:
        status, whole = await world.post(path, {**ask, **fields, "max_tokens": 9, "ignore_eos": True})
        assert status == 200, whole
        choices = whole["choices"]
        assert [choice["index"] for choice in choices] == list(range(n))
        scores = [choice["beam_score"] for choice in choices]
        assert scores == sorted(scores, reverse=True)
        assert {choice["finish_reason"] for choice in choices} == {"length"}
        penalty = fields.get("length_penalty", 1.0)
        for choice in choices:
            assert choice["beam_score"] == pytest.approx(choice["cumulative_logprob"] / 9**penalty)
        texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
        assert len(set(texts)) > n // 2  # bytes that are no text look alike
        assert whole["usage"]["completion_tokens"] == 9 * n
        assert world.driver.streams.counts.output_tokens == 9 * n


async def test_a_client_that_leaves_its_beams_leaves_no_block(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.01) as world:
        body = {"prompt": PROMPT, "beam_width": 4, "max_tokens": 150, "ignore_eos": True}
        asked = asyncio.create_task(world.post("/v1/completions", body))
        await world.until(lambda: world.driver.engine.snapshot().groups[0].running_sequences == 4)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await world.until(world.is_quiet)


async def test_wider_than_the_worker_is_refused_with_the_width_that_it_has(tmp_path: Path) -> None:
    async with served(tmp_path, worker={"max_rows": 8}, settings={"max_choices": 16}) as world:
        for fields in ({"n": 9}, {"best_of": 9}, {"beam_width": 9}):
            status, error = await world.post("/v1/completions", {"prompt": "x", **fields})
            assert (status, error["error"]["code"]) == (400, "too_many_choices")
            assert "at most 8" in error["error"]["message"]
        status, error = await world.post("/v1/completions", {"prompt": "x", "n": 17})
        assert (status, error["error"]["param"]) == (400, "n")
        assert "[1, 16]" in error["error"]["message"]
