"""The OpenAPI 3.1 document, and the page that shows it.

    OPERATIONS   one row for each route: what it is for, which request it reads
    schema.py, anthropic.py, responses.py   each field: its type, its bounds, its sentence, its check
    answers.py, answers_events.py           what comes back
    limits       the server's settings that bound fields
        -> document -> /openapi.json
                    -> page -> /docs: plain HTML, made here, that loads nothing from anywhere

What a request may hold is written down by the checks that read it, so the two cannot differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from kilburn.controller.api.answers import ANSWERS, OPENAIS, ref
from kilburn.controller.api.answers_events import EVENTS
from kilburn.controller.api.anthropic import CountTokensRequest, MessagesRequest
from kilburn.controller.api.checks import JsonSchema, Limits, schema_of
from kilburn.controller.api.layout import to_json
from kilburn.controller.api.responses import ResponsesRequest
from kilburn.controller.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
    TokenizeRequest,
)
from kilburn.controller.version import version


@dataclass(frozen=True, slots=True)
class Operation:
    """A route, for readers. `answer` and `event` name schemas: of its JSON, and of the events of its streams."""

    about: str
    body: type | None = None
    answer: str = ""
    event: str = ""
    is_open: bool = False
    kind: str = "application/json"
    status: tuple[int, ...] = (200,)  # where all is well


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation("Continues a text.", CompletionRequest, "Completion", "CompletionChunk"),
    ("POST", "/v1/chat/completions"): Operation(
        "A conversation is answered.", ChatRequest, "ChatCompletion", "ChatCompletionChunk"
    ),
    ("POST", "/v1/responses"): Operation(
        "OpenAI's Responses; nothing is stored.", ResponsesRequest, "Response", "ResponseEvent"
    ),
    ("GET", "/v1/responses/{id}"): Operation("Always 404: nothing is stored.", status=()),
    ("DELETE", "/v1/responses/{id}"): Operation("Always 404: nothing is stored.", status=()),
    ("POST", "/v1/messages"): Operation("Anthropic's messages.", MessagesRequest, "Message", "MessageEvent"),
    ("POST", "/v1/messages/count_tokens"): Operation("Counts its tokens.", CountTokensRequest, "TokenCount"),
    ("GET", "/v1/models"): Operation("The model that is served.", answer="ModelList"),
    ("GET", "/v1/models/{model}"): Operation("The same, by its name.", answer="Model"),
    ("POST", "/v1/prefixes"): Operation("Computes a prefix and holds it.", PrefixRequest, "Prefix", status=(200, 201)),
    ("GET", "/v1/prefixes"): Operation("The named prefixes that one may use.", answer="PrefixList"),
    ("GET", "/v1/prefixes/{name}"): Operation("One of them.", answer="Prefix"),
    ("DELETE", "/v1/prefixes/{name}"): Operation("Lets it go.", answer="PrefixDeleted"),
    ("POST", "/tokenize"): Operation("A text, or a conversation, as token ids.", TokenizeRequest, "Tokens"),
    ("POST", "/detokenize"): Operation("Token ids as text.", DetokenizeRequest, "Text"),
    ("GET", "/metrics"): Operation("Figures, for Prometheus.", kind="text/plain"),
    ("GET", "/debug/requests/{id}"): Operation("What happened to a request; for admin keys.", answer="Stories"),
    ("GET", "/admin/groups"): Operation("The groups of workers; for admin keys.", answer="GroupList"),
    ("POST", "/admin/groups/{name}/drain"): Operation(
        "One of them takes no new requests and leaves; for admin keys.", answer="Group", status=(202,)
    ),
    ("GET", "/health"): Operation("Can tokens be produced now?", answer="Probe", is_open=True),
    ("GET", "/ready"): Operation("Would a request be admitted now?", answer="Probe", is_open=True),
    ("GET", "/live"): Operation("Is the process of use?", answer="Probe", is_open=True),
    ("GET", "/map/events"): Operation("The feed of the block map; for admin keys.", kind="text/event-stream"),
    ("GET", "/openapi.json"): Operation("This document.", is_open=True),
    ("GET", "/docs"): Operation("This document as a page.", is_open=True, kind="text/html"),
}


ABOUT = (
    "Language models behind the APIs of OpenAI and of Anthropic. A field that is null is a field that is absent. "
    "Fields that are not listed here are ignored and told in a Warning header."
)


def document(limits: Limits) -> dict[str, Any]:
    bodies = [operation.body for operation in OPERATIONS.values() if operation.body is not None]
    paths: dict[str, Any] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kilburn",
            "version": version(),
            "description": ABOUT,
        },
        "paths": paths,
        "components": {
            "schemas": {body.__name__: schema_of(body, limits) for body in bodies} | ANSWERS | EVENTS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"x-api-key": []}, {}],
    }


def _operation(path: str, operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": operation.about, "responses": _responses(operation)}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        text = {"type": "string", "minLength": 1}
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if operation.is_open:
        found["security"] = []
    return found


def _responses(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.kind: {"schema": ref(operation.answer) if operation.answer else {}}}
    if operation.event:
        content["text/event-stream"] = {"schema": _of_events(operation.event)}
    told = {str(status): {"description": "It is so.", "content": content} for status in operation.status}
    if operation.answer == "Probe":
        told["503"] = {"description": "It is not so.", "content": content}
    error = {"description": "What was wrong.", "content": {"application/json": {"schema": ref("Error")}}}
    return {**told, "default": error}


def _of_events(name: str) -> JsonSchema:
    events: JsonSchema = {"type": "string", "contentMediaType": "text/event-stream"}
    if name not in OPENAIS:
        return events | {"contentSchema": ref(name), "description": f"The data of each event is a {name}."}
    # An error on the way is not one of its chunks.
    about = f"The data of each event is a {name}, or an Error in its place; the last one is [DONE]."
    return events | {"contentSchema": {"anyOf": [ref(name), ref("Error")]}, "description": about}


# --- the page

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page(about: dict[str, Any]) -> str:
    """The document for people: each operation, and the fields of its request."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Kilburn: the API</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="/map/icon.svg" type="image/svg+xml"><link rel="stylesheet" href="/map/docs.css">',
        f"</head><body><header><h1>Kilburn: the API</h1><p>{escape(about['info']['description'])}</p>",
        "<p>A key, where there are any, goes into <code>Authorization: Bearer KEY</code> or ",
        "<code>x-api-key: KEY</code>. ",
        'The same for programs: <a href="/openapi.json">/openapi.json</a> (OpenAPI 3.1).</p></header><main>',
    ]
    schemas = about["components"]["schemas"]
    for path, methods in about["paths"].items():
        for method, operation in methods.items():
            parts.extend(_section(method, path, operation, schemas))
    return "".join([*parts, "</main></body></html>"])


def _section(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    heading = f'<span class="method {method}">{method.upper()}</span> <code>{escape(path)}</code>'
    said = f"{heading} <span>{escape(operation['summary'])}</span>"
    if "requestBody" not in operation:
        yield f'<p class="plain">{said}</p>'
        return
    ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = schemas[ref.rsplit("/", 1)[1]]
    yield f"<details><summary>{said}</summary>"
    yield "<table><thead><tr><th>field</th><th>type</th><th></th></tr></thead><tbody>"
    must = schema.get("required", [])
    offered = sorted(schema["properties"].items(), key=lambda item: bool(item[1].get("deprecated")))  # stable
    for name, field in offered:
        mark = '<span class="must" title="must be there">*</span>' if name in must else ""
        kind = ' class="off"' if field.get("deprecated") else ""
        yield f"<tr{kind}><td><code>{escape(name)}</code>{mark}</td><td>{escape(shape(field))}</td>"
        yield f"<td>{escape(field.get('description', ''))}</td></tr>"
    yield "</tbody></table></details>"


def shape(schema: JsonSchema) -> str:
    """A schema in a few words: `integer 1 to 128`, `text up to 256, or list of up to 16`."""
    match schema:
        case {"deprecated": True}:
            return "not supported"
        case {"enum": list(words)}:
            return ", ".join(to_json(word).strip('"') for word in words if word is not None)
        case {"anyOf": list(kinds)}:
            return ", or ".join(shape(kind) for kind in kinds if kind != {"type": "null"})
    kinds = schema.get("type", "any JSON")
    kind = kinds if isinstance(kinds, str) else next(one for one in kinds if one != "null")
    match kind:
        case "integer" | "number":
            least = schema.get("minimum", schema.get("exclusiveMinimum"))
            above = "above " if "exclusiveMinimum" in schema else ""
            return f"{kind} {above}{_number(least)} to {_number(schema['maximum'])}"
        case "string":
            return f"text up to {_number(schema['maxLength'])}" if "maxLength" in schema else "text"
        case "array":
            return f"list of up to {_number(schema['maxItems'])}: {shape(schema['items'])}"
        case "object" if "maxProperties" in schema:
            return f"object of up to {_number(schema['maxProperties'])}"
        case "object" if "properties" in schema:
            return "object: " + ", ".join(schema["properties"])
    return str(kind)


def _number(value: Any) -> str:
    """Powers of two that are limits, not amounts, in the way that people write them."""
    if isinstance(value, int) and abs(value) > 1 << 20:
        sign, whole = ("-" if value < 0 else ""), abs(value)
        exact = whole.bit_length() - 1
        if whole == 1 << exact:
            return f"{sign}2^{exact}"
        if whole + 1 == 1 << whole.bit_length():
            return f"{sign}2^{whole.bit_length()}-1"
    return f"{value:g}" if isinstance(value, float) else str(value)
