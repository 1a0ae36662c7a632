"""Chat messages as clients write them become messages as templates expect them.

Content is always a text in the end: null or nothing beside a call of tools is an empty one, text parts are joined by
line breaks. Arguments of calls travel as JSON in a string and templates want them as objects. A field that was not
given is absent, so that `{% if message.tool_calls %}` means what it says.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from kilburn.controller.api.errors import bad_request
from kilburn.controller.api.schema import ChatRequest
from kilburn.controller.template import Message, TemplateRefused
from kilburn.controller.text import ChatOptions, Text

ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
REASONING = ("reasoning_content", "thinking", "reasoning")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def for_template(messages: Sequence[Any], where: str = "messages") -> list[Message]:
    """Raises ApiError that names the message at fault."""
    return [_message(message, f"{where}[{i}]") for i, message in enumerate(messages)]


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise bad_request(where, f"{where} must be an object")
    role = given.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise bad_request(f"{where}.role", f"{where}.role must be a word such as system, user, assistant or tool")
    message: Message = {"role": role}
    calls = given.get("tool_calls")
    if calls is not None and (role != "assistant" or not isinstance(calls, list)):
        raise bad_request(f"{where}.tool_calls", f"{where}.tool_calls must be a list, and is for assistant messages")
    content = given.get("content")
    if content is None and role != "assistant":
        raise bad_request(f"{where}.content", f"{where}.content is missing")
    message["content"] = text_of(content, f"{where}.content")
    if calls:
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id", *REASONING):
        value = given.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise bad_request(f"{where}.{name}", f"{where}.{name} must be a string")
            message[name] = value
    thought = next((message[name] for name in REASONING if name in message), None)
    if thought is not None:  # templates read it under one name or another
        message = {"thinking": thought, **message, "reasoning_content": thought}
    return message


def text_of(content: Any, where: str) -> str:
    """A content as one text. Raises ApiError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(where, f"{where} must be a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise bad_request(f"{where}[{i}]", f"{where}[{i}] must be a text part; this model reads only text")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(where, f"{where} must be an object with function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            read = arguments  # a model wrote it, and it may be broken: the template shows it as it is
        arguments = read if isinstance(read, dict) else arguments
    kept = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": kept}


async def chat_ids(messages: Sequence[Any], options: ChatOptions, text: Text) -> list[int]:
    """Ids of a conversation as clients write it. Raises ApiError."""
    if not text.has_template:
        raise bad_request("messages", "this model has no chat template; use /v1/completions")
    given = for_template(messages)
    if options.continue_final_message and given[-1]["role"] != "assistant":
        raise bad_request("messages", "continue_final_message wants an assistant message at the end")
    try:
        return await text.encode_chat(given, options)
    except TemplateRefused as error:
        raise bad_request("messages", str(error)) from None


async def chat_prompt(wanted: ChatRequest, text: Text) -> list[int]:
    """Ids of what a chat request asks. Raises ApiError."""
    generation = wanted.add_generation_prompt
    options = ChatOptions(
        add_generation_prompt=not wanted.continue_final_message if generation is None else generation,
        continue_final_message=wanted.continue_final_message,
        trusted=wanted.allow_special_tokens,
        extra=tuple((wanted.chat_template_kwargs or {}).items()),
        tools=tuple([tool.given for tool in wanted.tools]),
    )
    return await chat_ids(wanted.messages, options, text)
