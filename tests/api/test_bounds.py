"""Every limit that a server may be set to: kept at the limit, refused beyond it, in the client's own shape; and what is
said about fields that nobody reads."""

from pathlib import Path
from typing import Any

from tests.api.world import World, served, text_after

COMPLETION, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
TURN = {"role": "user", "content": "hello"}
SOUND: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "x", "max_tokens": 2},
    CHAT: {"messages": [TURN], "max_tokens": 2},
    MESSAGES: {"messages": [TURN], "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
}
LOW = {
    "max_prompts": 3,
    "max_prompt_tokens": 100,
    "max_messages": 2,
    "max_choices": 4,
    "max_logprobs": 2,
    "max_stops": 2,
    "max_stop_ids": 2,
    "max_logit_bias": 2,
}
AT_LIMIT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # path, what is at a limit, what is beyond
    (COMPLETION, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b", "c", "d"]}),
    (COMPLETION, {"prompt": [[5], [6]]}, {"prompt": [[5], [6], [7], [8]]}),
    (COMPLETION, {"prompt": [70] * 100}, {"prompt": [70] * 101}),
    (COMPLETION, {"n": 4}, {"n": 5}),
    (COMPLETION, {"best_of": 4}, {"best_of": 5}),
    (COMPLETION, {"logprobs": 2}, {"logprobs": 3}),
    (COMPLETION, {"stop": ["~", "|"]}, {"stop": ["~", "|", "#"]}),
    (COMPLETION, {"stop_token_ids": [5, 6]}, {"stop_token_ids": [5, 6, 7]}),
    (COMPLETION, {"logit_bias": {"5": 1, "6": 1}}, {"logit_bias": {"5": 1, "6": 1, "7": 1}}),
    (CHAT, {"messages": [TURN, TURN]}, {"messages": [TURN, TURN, TURN]}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 3}),
    (MESSAGES, {"messages": [TURN, TURN]}, {"messages": [TURN, TURN, TURN]}),
    (MESSAGES, {"stop_sequences": ["~", "|"]}, {"stop_sequences": ["~", "|", "#"]}),
    (MESSAGES, {"messages": [TURN]}, {"messages": [TURN | {"content": "hello " * 100}]}),
    (RESPONSES, {"input": [TURN, TURN]}, {"input": [TURN, TURN, TURN]}),
    (RESPONSES, {"input": [TURN]}, {"input": "hello " * 100}),
]


async def test_every_bound_holds_at_its_limit_and_names_the_field_beyond_it(tmp_path: Path) -> None:
    async with served(tmp_path, settings=LOW) as world:
        for path, at, beyond in AT_LIMIT:
            status, told = await world.post(path, SOUND[path] | at)
            assert status == 200, (at, told)
            status, told = await world.post(path, SOUND[path] | beyond)
            field = next(name for name in reversed(beyond))
            assert (status, field in told["error"]["message"]) == (400, True), (beyond, told)
            assert told.get("type") == ("error" if path == MESSAGES else None)
        assert world.driver.engine.snapshot().requests == 0


async def test_sizes_of_bodies_headers_and_urls(tmp_path: Path) -> None:
    async with served(tmp_path, settings={"max_body": 2048, "max_header": 2048, "max_url": 1024}) as world:
        for path, kind in ((COMPLETION, "invalid_request_error"), (MESSAGES, "request_too_large")):
            body = SOUND[path]
            assert (await world.post(path, body | {"user": "x" * 500, "metadata": {"a": "b"}}))[0] == 200
            status, told = await world.post(path, body | {"user": "x" * 2048})
            assert (status, told["error"]["type"]) == (413, kind)
        assert await answered(world, "/health", {"X-Long": "x" * 1900}) == 200
        assert await answered(world, "/health", {"X-Long": "x" * 2100}) == 400
        assert await answered(world, "/health?" + "x" * 900, {}) == 200
        assert await answered(world, "/health?" + "x" * 1100, {}) == 400
        for headers, query in (({"X-Long": "x" * 2100}, ""), ({}, "?" + "x" * 1100)):
            async with world.session.get(world.url + "/health" + query, headers=headers) as response:
                said = (await response.json())["error"]["message"]
                assert "--max-header" in said and "--max-url" in said  # noqa: PT018


async def answered(world: World, path: str, headers: dict[str, str]) -> int:
    async with world.session.get(world.url + path, headers=headers) as response:
        return response.status


async def test_fields_that_nobody_reads_are_told(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for path, unknown, told in (
            (COMPLETION, {"temprature": 1, "best": None}, "temprature, best"),
            (COMPLETION, {"stream_options": {"include": True}, "stream": True}, "stream_options.include"),
            (CHAT, {"a\r\nSet-Cookie: x": 1, "\u6f22": 2}, "(a strange name), (a strange name)"),
            (MESSAGES, {"cache_control": {}}, "cache_control"),
            (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning"),
        ):
            async with world.session.post(world.url + path, json=SOUND[path] | unknown) as response:
                assert response.status == 200
                await response.read()
                said = f'299 kilburn "fields that are not known here were ignored: {told}"'
                assert response.headers["Warning"] == said
        async with world.session.post(world.url + COMPLETION, json=SOUND[COMPLETION]) as response:
            assert "Warning" not in response.headers
        many = {f"field_{i}": i for i in range(1000)}
        async with world.session.post(world.url + COMPLETION, json=SOUND[COMPLETION] | many) as response:
            assert len(response.headers["Warning"]) < 1000


async def test_two_requests_of_one_id_are_two_requests(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        headers = {"X-Request-Id": "mine"}
        for _ in range(2):
            status, whole = await world.post(COMPLETION, SOUND[COMPLETION], headers=headers)
            assert (status, whole["choices"][0]["text"]) == (200, text_after(2))
        async with world.session.get(world.url + "/debug/requests/mine") as response:
            assert len((await response.json())["requests"]) == 2
