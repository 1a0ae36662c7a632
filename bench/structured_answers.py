"""What becomes of a model's answers under a schema: asked over HTTP of the model that is served, many at once.

refused       the server cannot follow the schema, and says why
unfinished    the answer was cut at max_tokens
valid         it ended by itself, is JSON, and `jsonschema` takes it          invalid: the same, and it does not
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import jsonschema

ASKED = "Answer with one short JSON document that follows this JSON schema, and nothing else:\n{}"
READY_S = 300.0


@dataclass(frozen=True)
class Asked:
    """How it is asked."""

    max_tokens: int
    num_at_once: int
    frequency_penalty: float


@contextlib.contextmanager
def serving(model: str, flags: Sequence[str]) -> Iterator[str]:
    """`kilburn serve` with this model, until the end of the block. Gives its address."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "serve.log"
        command = [
            sys.executable,
            "-m",
            "kilburn.controller.cli",
            "serve",
            model,
            "--port=0",
            "--exit-with-parent",
            *flags,
        ]
        with file.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"}
            )
        try:
            deadline = time.monotonic() + READY_S
            while "is ready after" not in (said := file.read_text(errors="replace")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the model is not served:\n{said}")
                time.sleep(0.1)
            yield re.search(r"http://127\.0\.0\.1:\d+", said)[0]  # type: ignore[index]  # it is ready, so it is there
        finally:
            process.terminate()
            process.wait(60)


async def answers(schemas: Sequence[tuple[str, Any]], server: str, asked: Asked) -> Counter[str]:
    """How many came to what. `schemas`: with their names."""
    found: Counter[str] = Counter()
    turns = asyncio.Semaphore(asked.num_at_once)

    async def ask(session: aiohttp.ClientSession, name: str, schema: Any) -> None:
        body = {
            "messages": [{"role": "user", "content": ASKED.format(json.dumps(schema))}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "asked", "schema": schema, "strict": True},
            },
            "temperature": 0,
            "frequency_penalty": asked.frequency_penalty,
            "max_tokens": asked.max_tokens,
        }
        async with turns, session.post(server + "/v1/chat/completions", json=body) as response:
            answer = await response.json()
        outcome = outcome_of(schema, response.status, answer)
        found[outcome.partition(":")[0]] += 1
        print(f"  {name[:60]:<60} {outcome[:100]}", flush=True)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*[ask(session, name, schema) for name, schema in schemas])
    return found


def outcome_of(schema: Any, status: int, answer: Any) -> str:
    if status != 200:
        return f"refused: {answer['error']['message']}"
    (choice,) = answer["choices"]
    if choice["finish_reason"] != "stop":
        return f"unfinished: {answer['usage']['completion_tokens']} tokens"
    try:
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    except (ValueError, jsonschema.ValidationError) as fault:
        return f"invalid: {str(fault).splitlines()[0]}"
    return f"valid: {answer['usage']['completion_tokens']} tokens"


def tell_answers(found: Counter[str], num_schemas: int, asked: Asked) -> None:
    num_asked = sum(found.values())
    finished, taken = found["valid"] + found["invalid"], num_asked - found["refused"]
    told = ", ".join(f"{found[kind]} {kind}" for kind in ("valid", "invalid", "unfinished", "refused"))
    how = f"temperature 0, frequency_penalty {asked.frequency_penalty:g}"
    print(f"{num_asked} of {num_schemas} schemas, {how}: {told}")
    print(f"finished within {asked.max_tokens} tokens: {finished / max(taken, 1):.1%} of those not refused")
    print(f"valid under jsonschema: {found['valid'] / max(finished, 1):.1%} of those finished")
