"""The forms in which models write calls of functions.

    Hermes, Qwen   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>      any number, with text around them
    Llama 3        {"name": "f", "parameters": {...}}                                   the whole answer, "; " between
    Mistral        [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]                at the end of the answer
    Mistral 11     [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}                    their tokenizer 11 and later

Which one a model was taught is seen in its chat template, which writes the calls of earlier turns the same way.
`reading.py` reads them as they grow, `binding.py` writes grammars of them. What this file does not know: requests.
"""

import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Form:
    """How calls are written."""

    name: str
    begin: str  # what a call, or a list of calls, begins with; "": the answer's first brace
    end: str  # what ends it
    arguments: str  # the key of a call's arguments
    between: str  # two calls
    bare: str = ""  # stands between a name and its arguments, where these are not the parts of one object
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
MISTRAL11 = Form("mistral11", "[TOOL_CALLS]", "", "arguments", "", bare="[ARGS]", id_chars=9)
FORMS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL, MISTRAL11)}
_LISTED = re.compile(r"\[TOOL_CALLS\]\s*\[")


def form_of(template: str, controls: Collection[str] = ()) -> Form | None:
    """The form that a chat template teaches; None where it knows no tools. `controls`: the tokenizer's own tokens."""
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        is_bare = "[ARGS]" in template or ("[ARGS]" in controls and not _LISTED.search(template))
        return MISTRAL11 if is_bare else MISTRAL
    if "<|python_tag|>" in template or '{"name": function name, "parameters": ' in template:
        return LLAMA3
    return None
