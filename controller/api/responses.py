"""OpenAI's Responses as chats: their requests, turned into what /v1/chat/completions would have been asked.

    instructions, input of items  ->  messages       function_call -> assistant     function_call_output -> tool
    tools, tool_choice, text      ->  tools, tool_choice, response_format

Nothing is kept between requests: a client sends the whole conversation each time (`store: false`), and what would need
a memory here is refused by name. Everything is looked at here, under the names that the client wrote.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kilburn.controller.api.checks import Flag, JsonSchema, Many, Real, Tree, Unsupported, Whole, Words, knob, needed
from kilburn.controller.api.errors import bad_request
from kilburn.controller.api.messages import text_of
from kilburn.controller.api.schema import INT32_MAX, MOST_CHARS, MOST_MESSAGES, MOST_TOOLS, Served

FIELDS = {  # of a chat: theirs
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    ".function": "",
}
STATELESS = "nothing is kept here between requests; send the whole conversation as input"


_ITEM = Tree(MOST_CHARS, "object")


@dataclass(frozen=True, slots=True)
class Input:
    """A text, or a list of items."""

    most: int

    def read(self, value: Any, where: str) -> "str | tuple[Any, ...]":
        if isinstance(value, str):
            return Words(MOST_CHARS, least=1).read(value, where)
        if not isinstance(value, list):
            raise bad_request(where, f"{where} must be a string or a list of items")
        return Many(_ITEM, self.most, least=1).read(value, where)

    def schema(self) -> JsonSchema:
        return {"anyOf": [Words(MOST_CHARS, least=1).schema(), Many(_ITEM, self.most, least=1).schema()]}


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(Served):
    input: str | tuple[Any, ...] = needed(
        Input(MOST_MESSAGES), "The user's words, or the conversation so far as items.", limit="max_messages"
    )
    instructions: str = knob(Words(MOST_CHARS), "", "What the system says before all.")
    max_output_tokens: int | None = knob(Whole(1, INT32_MAX), None, "Tokens that the answer may have.")
    temperature: float = knob(Real(0.0, 2.0), 1.0, "0 takes the likeliest token always.")
    top_p: float = knob(Real(0.0, 1.0), 1.0, "Draws among the likeliest tokens that have this much probability.")
    tools: tuple[Any, ...] = knob(Many(_ITEM, MOST_TOOLS), (), "Functions that the model may call.", limit="max_tools")
    tool_choice: Any = knob(Tree(4096), None, "auto, none, required, or a function by its name.")
    parallel_tool_calls: bool | None = knob(Flag(), None, "Several calls in one answer.")
    text: dict[str, Any] | None = knob(Tree(MOST_CHARS, "object"), None, "The form of the answer's text.")
    metadata: dict[str, Any] | None = knob(Tree(16384, "object"), None, "Given back with the answer.")
    user: str = knob(Words(512), "", "Whom the request is for; nothing is done with it.")
    store: None = knob(Unsupported((False,), STATELESS), None)
    previous_response_id: None = knob(Unsupported((), STATELESS), None)
    conversation: None = knob(Unsupported((), STATELESS), None)
    prompt: None = knob(Unsupported((), STATELESS), None)
    background: None = knob(Unsupported((False,), "wait for the answer, or stream it"), None)
    include: None = knob(Unsupported(([],), "leave it out"), None)
    top_logprobs: None = knob(Unsupported((0,), "ask /v1/chat/completions for log probabilities"), None)
    truncation: None = knob(Unsupported(("disabled",), "shorten the input yourself"), None)
    max_tool_calls: None = knob(Unsupported((), "tools run where the client is"), None)


def as_chat(wanted: ResponsesRequest) -> dict[str, Any]:
    """The same as a chat's body. Raises ApiError."""
    messages = [{"role": "system", "content": wanted.instructions}] if wanted.instructions else []
    if isinstance(wanted.input, str):
        messages.append({"role": "user", "content": wanted.input})
    else:
        messages += _joined(turn for i, item in enumerate(wanted.input) for turn in _turns(item, f"input[{i}]"))
    same = ("model", "stream", "priority", "timeout", "queue_timeout", "cache_salt", "temperature", "top_p")
    chat: dict[str, Any] = {name: getattr(wanted, name) for name in same} | {"messages": messages}
    chat["max_completion_tokens"] = wanted.max_output_tokens
    if wanted.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(wanted.tools)]
    if wanted.tool_choice is not None:
        chat["tool_choice"] = _choice(wanted.tool_choice)
    if wanted.parallel_tool_calls is not None and wanted.tools:
        chat["parallel_tool_calls"] = wanted.parallel_tool_calls
    if wanted.text is not None:
        chat["response_format"] = _format(wanted.text)
    return chat


def _turns(item: Any, where: str) -> Iterator[dict[str, Any]]:
    """What an item is in a chat."""
    match item:
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": str(id)}:
            yield {"role": "tool", "tool_call_id": id, "content": _text(item, "output", where)}
        case {"type": "item_reference"}:
            raise bad_request(where, f"{where} refers to an item; {STATELESS}")
        case {"role": "user" | "assistant" | "system" | "developer" as role} if (
            item.get("type", "message") == "message"
        ):
            yield {"role": "system" if role == "developer" else role, "content": _text(item, "content", where)}
        case _:
            message = f"{where} must be a message (role, content), a function_call or a function_call_output"
            raise bad_request(where, message)


def _text(item: dict[str, Any], name: str, where: str) -> str:
    if item.get(name) is None:
        raise bad_request(f"{where}.{name}", f"{where}.{name} is missing")
    return text_of(item[name], f"{where}.{name}")


def _joined(turns: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """An answer's words and its calls are items of their own, and one turn of a chat."""
    joined: list[dict[str, Any]] = []
    for turn in turns:
        if "tool_calls" in turn and joined and joined[-1]["role"] == "assistant":
            joined[-1]["tool_calls"] = joined[-1].get("tool_calls", []) + turn["tool_calls"]
        else:
            joined.append(turn)
    return joined


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise bad_request(f"{where}.type", f'{where}.type must be "function": no tools run on this server')
    named = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": named}


def _choice(choice: Any) -> Any:
    match choice:
        case "auto" | "none" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise bad_request("tool_choice", 'tool_choice must be "auto", "none", "required" or a function by its name')


def _format(text: Any) -> Any:
    given = text.get("format") if isinstance(text, dict) else None
    match given:
        case None:
            return None
        case {"type": "json_schema"}:
            return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}
        case {"type": "text" | "json_object" as kind}:
            return {"type": kind}
    raise bad_request("text.format", "text.format must be an object of type text, json_object or json_schema")
