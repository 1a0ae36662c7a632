"""Requests that a machine makes of our own document: legal ones, and ones that break it somewhere.

None is a 5xx, none loses its connection, each answer is one that the document has, and the server is as before.
Which requests is drawn from a fixed seed.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.api.world import served, text_after

EXAMPLES = 6  # of each operation and kind
LEFT_OUT = {"/map/events", "/admin/groups/{name}/drain"}  # a feed has no end; a group that is drained serves nobody


Told = Counter[tuple[str, int]]  # (operation, status): how often


def attack(operation: Any, kind: GenerationMode, session: requests.Session, told: Told) -> None:
    """So many requests of one operation."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=kind))
    def one(case: Any) -> None:
        response = case.call(session=session, timeout=20)
        told[f"{operation.method} {operation.path}", response.status_code] += 1
        checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
        case.validate_response(response, checks=checks)

    one()


def attack_all(url: str, about: dict[str, Any]) -> Told:
    schema = schemathesis.openapi.from_dict(about)
    schema.config.update(base_url=url)
    told: Told = Counter()
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path not in LEFT_OUT:
                kinds = list(GenerationMode) if operation.method == "post" else [GenerationMode.POSITIVE]
                for kind in kinds:
                    attack(operation, kind, session, told)
    return told


async def test_what_the_document_allows_and_what_it_forbids(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        async with world.session.get(world.url + "/openapi.json") as response:
            about = await response.json()
        for schema in about["components"]["schemas"].values():
            for name in {"timeout", "queue_timeout"} & schema.get("properties", {}).keys():
                schema["properties"][name]["exclusiveMinimum"] = 20.0  # with less, a 503 or a 408 may be right
        told = await asyncio.to_thread(attack_all, world.url, about)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
            assert told[f"post {path}", 400] > EXAMPLES / 2, path
        assert sum(count for (_, status), count in told.items() if status == 200) > EXAMPLES
        for (operation, status), _ in told.items():
            assert status < 500, operation
        status, whole = await world.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
        assert (status, whole["choices"][0]["text"]) == (200, text_after(3))
