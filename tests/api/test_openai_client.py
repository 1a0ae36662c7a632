"""The client that everybody has: blocking, async, streaming, many at once."""

import asyncio
import threading
from pathlib import Path

import openai
import pytest

from tests.api.world import World, served, text_after

HELLO = [{"role": "user", "content": "hello"}]


def client_of(world: World, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=world.url + "/v1", api_key=key, max_retries=0)


async def test_blocking_client_in_a_thread(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client = openai.OpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0)

        def talk() -> tuple[str | None, str, list[str]]:
            chat = client.chat.completions.create(model="toy", messages=HELLO, max_tokens=8)  # type: ignore[arg-type]
            completion = client.completions.create(model="toy", prompt="hello", max_tokens=8)
            stream = client.completions.create(model="toy", prompt="hello", max_tokens=8, stream=True)
            assert threading.current_thread() is not threading.main_thread()
            return chat.choices[0].message.content, completion.choices[0].text, [c.choices[0].text for c in stream]

        chat, completion, pieces = await asyncio.to_thread(talk)
        assert chat == completion == "".join(pieces) == text_after(8)
        assert [model.id for model in await asyncio.to_thread(lambda: list(client.models.list()))] == ["toy"]
        await asyncio.to_thread(client.close)


async def test_sixty_four_at_once_streaming_and_not(tmp_path: Path) -> None:
    async with served(tmp_path) as world, client_of(world) as client:

        async def whole(num_tokens: int) -> str:
            answer = await client.completions.create(model="toy", prompt=f"hello {num_tokens}", max_tokens=num_tokens)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == num_tokens
            return answer.choices[0].text

        async def streamed(num_tokens: int) -> str:
            stream = await client.chat.completions.create(
                model="toy", messages=HELLO, max_tokens=num_tokens, stream=True, stream_options={"include_usage": True}
            )  # type: ignore[call-overload]
            text, reasons, usage = "", [], None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reasons += [choice.finish_reason] if choice.finish_reason else []
            assert reasons == ["length"]
            assert usage.completion_tokens == num_tokens
            return text

        lengths = [5 + i for i in range(64)]
        texts = await asyncio.gather(*((whole if n % 2 else streamed)(n) for n in lengths))
        assert list(texts) == [text_after(n) for n in lengths]


async def test_logprobs_parse_as_the_clients_types(tmp_path: Path) -> None:
    async with served(tmp_path) as world, client_of(world) as client:
        chat = await client.chat.completions.create(
            model="toy", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
        )  # type: ignore[call-overload]
        content = chat.choices[0].logprobs.content
        assert [len(token.top_logprobs) for token in content] == [2, 2, 2]
        assert "".join(token.token for token in content) == text_after(3)
        completion = await client.completions.create(model="toy", prompt="x", max_tokens=3, logprobs=1)
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens) == text_after(3)


async def test_errors_arrive_as_the_clients_exceptions(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice-0001\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}) as world:
        async with client_of(world, "wrong-key") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="toy", prompt="x")
        async with client_of(world, "sk-alice-0001") as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="toy", prompt="x", temperature=9)
            assert caught.value.param == "temperature"
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="gpt-9", prompt="x")
            assert (await client.completions.create(model="toy", prompt="x", max_tokens=2)).choices[
                0
            ].text == text_after(2)
            world.daemon.bad_rows = lambda plan: tuple(plan.rows)
            stream = await client.completions.create(model="toy", prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="could not compute"):
                async for _ in stream:
                    pass


async def test_a_stream_that_is_closed_by_its_client(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.01) as world, client_of(world) as client:
        stream = await client.completions.create(model="toy", prompt="hello", max_tokens=200, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await world.until(world.is_quiet, within_s=30.0)
        assert world.daemon.steps < 100, "half of the answer was never computed"
