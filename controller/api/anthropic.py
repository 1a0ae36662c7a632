"""Anthropic's messages as chats: their requests, turned into what /v1/chat/completions would have been asked.

    system, messages of blocks  ->  messages            text, tool_use -> assistant     tool_result -> tool
    tools, tool_choice          ->  the same, as chat has them
    an assistant's message at the end is gone on with, as theirs is

Everything is looked at here, under the names that the client wrote; what chat still finds wrong afterwards (lengths,
a schema) is told under those names too.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kilburn.controller.api.checks import (
    Entry,
    Flag,
    JsonSchema,
    Many,
    Real,
    Tree,
    Unsupported,
    Whole,
    Words,
    knob,
    needed,
)
from kilburn.controller.api.errors import bad_request
from kilburn.controller.api.messages import text_of
from kilburn.controller.api.schema import (
    INT32_MAX,
    MOST_CHARS,
    MOST_MESSAGES,
    MOST_STOP_CHARS,
    MOST_STOPS,
    MOST_TOOLS,
    Served,
)

FIELDS = {"max_completion_tokens": "max_tokens", ".function.parameters": ".input_schema", ".function": ""}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A text, or blocks of text, as one text."""

    def read(self, value: Any, where: str) -> str:
        return text_of(Tree(MOST_CHARS).read(value, where), where)

    def schema(self) -> JsonSchema:
        blocks = Many(Tree(MOST_CHARS, "object"), MOST_MESSAGES).schema()
        return {"anyOf": [Words(MOST_CHARS).schema(), blocks]}


@dataclass(frozen=True, kw_only=True)
class ToolGiven:
    name: str = needed(Words(128, least=1), "How the model calls it.")
    input_schema: Any = needed(Tree(MOST_CHARS, "object"), "The JSON Schema of its arguments.")
    description: str = knob(Words(MOST_CHARS), "", "What it is for, in words for the model.")
    strict: bool = knob(
        Flag(), False, "Whether its arguments follow the schema where the model may also answer in words."
    )
    type: None = knob(Unsupported(("custom",), "tools run where the client is; there are none here"), None)


@dataclass(frozen=True, kw_only=True)
class CountTokensRequest(Served):
    """What a conversation is, without what is wanted of its answer."""

    messages: tuple[Any, ...] = needed(
        Many(Tree(MOST_CHARS, "object"), MOST_MESSAGES, least=1), "The conversation so far.", limit="max_messages"
    )
    system: str = knob(Blocks(), "", "What the system says before all.")
    tools: tuple[ToolGiven, ...] = knob(
        Many(Entry(ToolGiven), MOST_TOOLS), (), "Functions that the model may call.", limit="max_tools"
    )
    tool_choice: dict[str, Any] | None = knob(Tree(4096, "object"), None, "auto, any, none, or a tool by its name.")
    thinking: None = knob(Unsupported(({"type": "disabled"},), "this model does not think aloud"), None)
    mcp_servers: None = knob(Unsupported(([],), "this server asks no other"), None)
    container: None = knob(Unsupported((), "this server runs nothing"), None)


@dataclass(frozen=True, kw_only=True)
class MessagesRequest(CountTokensRequest):
    max_tokens: int = needed(Whole(1, INT32_MAX), "Tokens that the answer may have.")
    stop_sequences: tuple[str, ...] = knob(
        Many(Words(MOST_STOP_CHARS, least=1), MOST_STOPS), (), "Texts that end the answer.", limit="max_stops"
    )
    temperature: float = knob(Real(0.0, 1.0), 1.0, "0 takes the likeliest token always.")
    top_p: float = knob(Real(0.0, 1.0), 1.0, "Draws among the likeliest tokens that have this much probability.")
    top_k: int = knob(Whole(-1, INT32_MAX), 0, "Draws among so many likeliest tokens; 0 or -1: among all.")
    metadata: dict[str, Any] | None = knob(Tree(16384, "object"), None, "Nothing is done with it.")
    service_tier: str = knob(Words(64), "", "There is one here.")


def as_chat(wanted: CountTokensRequest) -> dict[str, Any]:
    """The same as a chat's body. Raises ApiError."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": wanted.system}] if wanted.system else []
    for i, message in enumerate(wanted.messages):
        messages += _turns(message, f"messages[{i}]")
    chat: dict[str, Any] = {"model": wanted.model, "messages": messages}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat["continue_final_message"] = True
    if wanted.tools:
        chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in wanted.tools]
    if wanted.tool_choice is not None:
        chat |= _choice(wanted.tool_choice)
    if isinstance(wanted, MessagesRequest):
        same = ("stream", "priority", "timeout", "queue_timeout", "cache_salt", "temperature", "top_p", "top_k")
        chat |= {name: getattr(wanted, name) for name in same}
        chat |= {"max_completion_tokens": wanted.max_tokens, "stop": list(wanted.stop_sequences)}
    return chat


def _function(tool: ToolGiven) -> dict[str, Any]:
    """`strict` is there only if it is true: templates write down all that they are given."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return function | ({"strict": True} if tool.strict else {})


def _choice(given: Any) -> dict[str, Any]:
    """tool_choice, and what it says of calls in parallel."""
    kind = given.get("type") if isinstance(given, dict) else None
    match kind:
        case "auto" | "none":
            choice: Any = kind
        case "any":
            choice = "required"
        case "tool" if isinstance(given.get("name"), str):
            choice = {"type": "function", "function": {"name": given["name"]}}
        case _:
            message = 'tool_choice must be an object of type "auto", "any", "none" or "tool" with a name'
            raise bad_request("tool_choice", message)
    single = {"parallel_tool_calls": False} if given.get("disable_parallel_tool_use") is True else {}
    return {"tool_choice": choice} | single


def _turns(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """What one of their messages is in a chat: results of tools are turns of their own there, before other words."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role", f"{where}.role must be user or assistant; system is a field of its own")
    content, where = message.get("content"), f"{where}.content"
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise bad_request(where, f"{where} must be a string or a list of blocks")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at = f"{where}[{i}]"
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(arguments)} if (
                role == "assistant"
            ):
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": id, "type": "function", "function": function})
            case {"type": "tool_result", "tool_use_id": str(id)} if role == "user":
                result = Blocks().read(block.get("content") or "", f"{at}.content")
                yield {"role": "tool", "tool_call_id": id, "content": result}
            case _:
                raise bad_request(at, f"{at} must be a block of text, tool_use (assistant) or tool_result (user)")
    if calls:
        yield {"role": role, "content": "\n".join(texts), "tool_calls": calls}
    elif texts or not any(block.get("type") == "tool_result" for block in content):
        yield {"role": role, "content": "\n".join(texts)}
