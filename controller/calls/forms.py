"""The forms in which models write calls of functions, and the grammars that make them do so.

    Hermes, Qwen   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>      any number, with text around them
    Llama 3        {"name": "f", "parameters": {...}}                                   the whole answer, "; " between
    Mistral        [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]                at the end of the answer

Which one a model was taught is seen in its chat template, which writes the calls of earlier turns the same way.
`reading.py` reads them as they grow. What this file does not know: requests, HTTP, tokens.
"""

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Function:
    """What a model may call. `parameters`: the JSON schema of its arguments."""

    name: str
    parameters: Any


@dataclass(frozen=True, slots=True)
class Form:
    """How calls are written."""

    name: str
    begin: str  # what a call, or a list of calls, begins with; "": the answer's first brace
    end: str  # what ends it
    arguments: str  # the key of a call's arguments
    between: str  # two calls
    is_list: bool = False  # one begin for all calls, in brackets
    is_whole: bool = False  # an answer is calls or text, never both
    optional: str = ""  # may stand before the first call
    id_chars: int = 0  # of a call's id; 0: as OpenAI makes them

    def new_id(self) -> str:
        if self.id_chars:  # templates of this form refuse any other
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self.id_chars))
        return f"call_{secrets.token_hex(12)}"


HERMES = Form("hermes", "<tool_call>", "</tool_call>", "arguments", "\n")
LLAMA3 = Form("llama3", "", "", "parameters", "; ", is_whole=True, optional="<|python_tag|>")
MISTRAL = Form("mistral", "[TOOL_CALLS]", "", "arguments", ", ", is_list=True, id_chars=9)
FORMS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}


def form_of(template: str) -> Form | None:
    """The form that a chat template teaches; None where it knows no tools."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|python_tag|>" in template or '{"name": function name, "parameters": ' in template:
        return LLAMA3
    return None


def grammar_of(form: Form, functions: Sequence[Function], is_parallel: bool) -> str:
    """A grammar (llguidance's dialect of Lark) of answers that are calls and nothing else.

    A literal that is a control token of the tokenizer is that token there.
    """
    rules = []
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{form.arguments}": '
        schema = json.dumps(spaced(function.parameters))
        rules.append(f"call_{i}: {json.dumps(head)} %json {schema} {json.dumps('}')}")
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    more = f" ({json.dumps(form.between)} {{}})*" if is_parallel else ""
    if form.is_list:
        start = f'{json.dumps(form.begin)} "[" call{more.format("call")} "]"'
    elif form.begin:
        rules.append(f'framed: {json.dumps(form.begin)} "\\n" call "\\n" {json.dumps(form.end)}')
        start = f"framed{more.format('framed')}"
    else:
        start = f"call{more.format('call')}"
    return "\n".join([f"start: {start}", *rules])


def spaced(schema: Any) -> Any:
    """The schema with the layout of `json.dumps`.

    Models were taught with it, and free white space would let them write on for ever.
    """
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if not isinstance(schema, dict):
        return schema
    return {**(schema or {"type": "object"}), "x-guidance": layout}
