"""What one request costs, and whom its faults touch."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller.api.messages import for_template
from tests.api.vocabularies import byte_level
from tests.api.world import served

COMPLETION = "/v1/completions"


async def test_a_fault_in_one_row_is_one_requests_fault(tmp_path: Path) -> None:
    """With every sampling field somewhere: nobody else notices."""
    async with served(tmp_path, delay_s=0.002) as world:
        world.daemon.bad_rows = lambda plan: tuple(row for row in plan.rows if row % 2)
        knobs: list[dict[str, Any]] = [
            {"temperature": 0},
            {"top_k": 1, "top_p": 0.1, "min_p": 1.0},
            {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 99},
            {"logit_bias": {"5": 100, "329": -100}, "seed": 2**64 - 1},
            {"stop": ["never"], "stop_token_ids": [0], "min_tokens": 8},
            {"logprobs": 20, "echo": True},
            {"n": 2, "best_of": 3},
            {"ignore_eos": True, "skip_special_tokens": False},
        ]
        bodies = [{"prompt": f"hello {i}", "max_tokens": 8, **knob} for i, knob in enumerate(knobs)]
        answers = await asyncio.gather(*(world.post(COMPLETION, body) for body in bodies))
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 500}, statuses
        assert {told["error"]["code"] for status, told in answers if status == 500} == {"request_failed"}
        world.daemon.bad_rows = lambda plan: ()
        assert (await world.post(COMPLETION, {"prompt": "x", "max_tokens": 3}))[0] == 200


KINDS = {
    "letters": "hello world ",
    "control tokens": "<|im_start|>user\n<|im_end|>",
    "halves of control tokens": "<|im_<|im_start",
    "one letter": "a",
    "blanks": "    \n",
}


@pytest.mark.parametrize("kind", KINDS)
async def test_ten_times_the_text_is_ten_times_the_work(kind: str) -> None:
    """Processor time of this thread and the library's, the least of three; a square would be a hundred times."""
    text = byte_level()

    async def cost_s(length: int) -> float:
        words = (KINDS[kind] * (length // len(KINDS[kind]) + 1))[:length]
        taken: list[float] = []
        for _ in range(3):
            begun = time.process_time()
            await text.encode([words])
            await text.encode_chat(for_template([{"role": "user", "content": words}]))
            taken.append(time.process_time() - begun)
        return min(taken)

    await cost_s(1000)
    assert await cost_s(100_000) < 40 * max(await cost_s(10_000), 0.002)
    text.close()
