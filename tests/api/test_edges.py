"""What one request costs, and whom its faults touch."""

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kilburn.controller.api.messages import for_template
from kilburn.controller.text import ChatOptions, Text
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


class Work:
    """What is done in this thread: lines of Python, and characters that the tokenizer is given."""

    def __init__(self, text: Text) -> None:
        self.num_lines = self.num_chars = 0
        self._text, self._tokenizer = text, text._marked

    def __enter__(self) -> "Work":
        self._text._marked = self  # type: ignore[assignment]
        sys.settrace(self._called)
        return self

    def __exit__(self, *about: object) -> None:
        sys.settrace(None)
        self._text._marked = self._tokenizer

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def _called(self, frame: FrameType, event: str, about: object) -> Any:
        self.num_lines += event == "line"
        return self._called


@pytest.mark.parametrize("kind", KINDS)
def test_ten_times_the_text_is_ten_times_the_work(kind: str) -> None:
    """Counted, and not timed; a square would be a hundred times. What the tokenizer does inside is not counted."""
    text = byte_level()

    def work(length: int) -> tuple[int, int]:
        words = (KINDS[kind] * (length // len(KINDS[kind]) + 1))[:length]
        with Work(text) as done:
            text._encode([words], True, False)
            text._encode_chat(text._template, for_template([{"role": "user", "content": words}]), ChatOptions())  # type: ignore[arg-type]
        return done.num_lines, done.num_chars

    once, ten_times = work(2_000), work(20_000)
    assert once[1] >= 2_000
    for few, many in zip(once, ten_times, strict=True):
        assert many < 11 * few, (once, ten_times)
    text.close()
