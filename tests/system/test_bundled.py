"""The bundled model, as a newcomer meets it: one command, one curl line; and held to calls of functions."""

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from bench.structured_answers import Asked, answers
from kilburn.shared.model_files import BUNDLED_NAME
from tests.system.serving import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # Its first use on a machine converts the model, into the cache of whoever runs the tests.
    flags = ("--device=cpu", "--threads=1", "--kv-memory=256MiB", "--tool-parser=hermes")
    with Service(BUNDLED_NAME, tmp_path_factory.mktemp("bundled"), *flags, ready_s=120) as running:
        yield running


def test_the_curl_line_that_it_prints_works(service: Service) -> None:
    assert "device total" in service.log
    assert "planned as" not in service.log, "its memory is not what `kilburn plan` would have said"
    line = re.search(r"^\s+(curl .*)$", service.log, re.MULTILINE)
    assert line, service.log
    done = subprocess.run(line[1], shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["model"] == BUNDLED_NAME
    (choice,) = answer["choices"]  # drawn by chance, so that what it says is nobody's to say; it may end at once
    assert choice["finish_reason"] in ("stop", "length")
    assert 0 < answer["usage"]["completion_tokens"] <= 64
    assert (choice["finish_reason"] == "length") <= (len(choice["message"]["content"]) > 20)
    capital = service.client().completions.create(
        model=BUNDLED_NAME, prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in capital.choices[0].text


PLACE = {"type": "string", "minLength": 1, "maxLength": 12}
WEATHER = {
    "type": "object",
    "properties": {"place": PLACE, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"place": PLACE}, "required": ["place"], "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
TOOLS: Any = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
ASKED: Any = {
    "model": BUNDLED_NAME,
    "messages": [{"role": "user", "content": "How will the weather in Paris be these three days?"}],
    "temperature": 0,
    "max_tokens": 60,
}


def told(client: OpenAI, **changes: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Why the answer ended, its words and its calls; streamed, and whole the same."""
    whole = client.chat.completions.create(**ASKED, **changes).choices[0]
    words, calls, ended = "", dict[int, list[str]](), ""
    for chunk in client.chat.completions.create(**ASKED, **changes, stream=True):
        (choice,) = chunk.choices
        words, ended = words + (choice.delta.content or ""), choice.finish_reason or ended
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.setdefault(call.index, ["", ""])
            calls[call.index] = [name + (call.function.name or ""), arguments + call.function.arguments]
    found = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert (ended, words, [tuple(call) for call in calls.values()]) == (
        whole.finish_reason,
        whole.message.content or "",
        found,
    )
    return ended, words, found


def test_calls_that_are_asked_for_are_made(service: Service) -> None:
    """The model was never taught to call anything, and its template shows it no function: only grammars do it."""
    client = service.client()
    for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
        ended, words, calls = told(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        assert (ended, words) == ("tool_calls", "")
        ((name, arguments),) = calls
        assert choice == "required" or name == "clock"
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    format = {"type": "json_schema", "json_schema": {"name": "clock", "schema": CLOCK}}
    ended, words, calls = told(
        client, tools=TOOLS, response_format=format, parallel_tool_calls=False
    )  # one or the other, as it likes
    assert bool(words) != bool(calls)
    assert ended == ("tool_calls" if calls else "stop")
    if words:
        jsonschema.validate(json.loads(words), CLOCK)


def test_what_became_of_answers_is_counted(service: Service) -> None:
    schemas = [("said", {"enum": ["yes", "no"]}), ("none", {"not": {}}), ("long", {"type": "string", "minLength": 99})]
    found = asyncio.run(answers(schemas, service.address, Asked(8, num_at_once=3, frequency_penalty=0.5)))
    assert found == {"valid": 1, "refused": 1, "unfinished": 1}
