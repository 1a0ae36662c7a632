"""The document says what is there and what is checked; the page shows it and needs nothing of anybody else."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kilburn.controller.api.checks import read_as
from kilburn.controller.api.errors import ApiError
from kilburn.controller.api.openapi import OPERATIONS, document, page, shape
from kilburn.controller.api.schema import CompletionRequest
from kilburn.controller.page.routes import page_files
from tests.api.test_anthropic import REFUSED as ANTHROPICS
from tests.api.test_keys import every_route
from tests.api.test_refusals import CHATS, COMPLETIONS
from tests.api.world import served

HELLO = [{"role": "user", "content": "hello"}]
# What only the whole of a request, or the model, can tell: no schema says it.
BEYOND_SCHEMAS = {"max_tokens", "prompt", "messages"}
# Whose values are looked at for what they mean: a grammar may be none, a search may want other fields.
BY_MEANING = ("beam", "use_beam", "guided_", "structured_outputs", "response_format")


def validator(name: str) -> Any:
    about = document({})
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": about["components"]})


def test_the_document_holds_what_the_checks_hold() -> None:
    """What the schema forbids, the check refuses; what the schema allows, it does not refuse for that field's form."""
    for name, sound, cases in (
        ("CompletionRequest", {"prompt": "x"}, COMPLETIONS),
        ("ChatRequest", {"messages": HELLO}, CHATS),
    ):
        check = validator(name)
        assert check.is_valid(sound)
        num_caught = sum(not check.is_valid(sound | body) for body, _ in cases if body)
        assert num_caught > len(cases) / 3, "most of what has the wrong form is wrong by the document too"
    check = validator("MessagesRequest")
    assert sum(not check.is_valid({"messages": HELLO, "max_tokens": 2} | body) for body, _ in ANTHROPICS) > 8


FORMS = [True, False, 0, 1, -1, 2, 3.5, 1e300, "", "x", "x" * 300, [], [1], ["x"], ["x"] * 70, {}, {"5": 1}, {"x": {}}]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form)[:12])
def test_whatever_the_form_schema_and_check_agree(form: Any) -> None:
    properties = document({})["components"]["schemas"]["CompletionRequest"]["properties"]
    for name, schema in properties.items():
        body = {"prompt": "x", name: form}
        try:
            read_as(CompletionRequest, body)
            is_taken = True
        except ApiError as error:
            is_taken = not (error.param or "").startswith(name)
            if name in BEYOND_SCHEMAS or "wants" in error.message or "only allowed" in error.message:
                continue  # legal by itself
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(form)
        assert is_valid or not is_taken, f"{name}: {form!r} is taken, and no document says so"
        if is_valid and not name.startswith(BY_MEANING):
            assert is_taken, f"{name}: {form!r} is legal by the document, and refused"


def test_settings_narrow_the_document() -> None:
    schemas = document({"max_stops": 3, "max_choices": 5, "max_tools": 2})["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["n"]["maximum"] == 5
    assert schemas["ChatRequest"]["properties"]["stop"]["anyOf"][1]["maxItems"] == 3
    assert schemas["MessagesRequest"]["properties"]["stop_sequences"]["maxItems"] == 3
    assert schemas["ResponsesRequest"]["properties"]["tools"]["maxItems"] == 2


async def test_every_route_is_in_the_document_and_nothing_else_is(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        routes = {(method, path.replace("/toy", "/{model}")) for method, path in every_route(world)}
        shown = {(method, path) for method, path in routes if method != "HEAD" and path not in page_files()}
        patterns = {(method, re.sub(r":[^}]+}", "}", path)) for method, path in shown}
        assert set(OPERATIONS) == patterns
        async with world.session.get(world.url + "/openapi.json") as response:
            about = await response.json()
        assert (about["openapi"], set(about["paths"])) == ("3.1.0", {path for _, path in OPERATIONS})


def test_every_field_has_its_sentence() -> None:
    bodies = {operation.body.__name__ for operation in OPERATIONS.values() if operation.body is not None}
    for name, schema in document({})["components"]["schemas"].items():
        if name in bodies:
            silent = [field for field, about in schema["properties"].items() if not about.get("description")]
            assert not silent, f"{name}: {silent}"


async def test_the_page_asks_nothing_of_anybody_else(tmp_path: Path) -> None:
    async with served(tmp_path) as world, world.session.get(world.url + "/docs") as response:
        html = await response.text()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert not re.search(r"<script|https?:|src=|@import|url\(", html)
        wanted = re.findall(r'href="([^"]+)"', html)
        assert {"/map/docs.css", "/openapi.json"} <= set(wanted)
        for path in wanted:
            async with world.session.get(world.url + path) as other:
                assert other.status == 200
                assert not re.search(r"@import|url\(", await other.text())
    assert "&lt;b&gt;" in page({"info": {"description": "<b>"}, "components": {"schemas": {}}, "paths": {}})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": ["integer", "null"], "minimum": 0, "maximum": 2**31 - 1}, "integer 0 to 2^31-1"),
        ({"type": "number", "exclusiveMinimum": 0.0, "maximum": 100.0}, "number above 0 to 100"),
        ({"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]}, "text up to 9"),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, "list of up to 3: boolean"),
        ({"enum": [False, "never", None]}, "false, never"),
        ({}, "any JSON"),
    ],
)
def test_shapes_in_words(schema: dict[str, Any], words: str) -> None:
    assert shape(schema) == words
