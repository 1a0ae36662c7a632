"""Grammars of answers with calls (llguidance's dialect of Lark), by the form that the model was taught.

    calls                start: "<tool_call>" one ...               the answer has to call
    text, or calls       start: said TEXT | said opened one ...     as the model likes, but calls follow their schemas
    answer, or calls     start: @answer | @calls                    in the format that was asked for, or calls

What a call begins with is a control token of some models and plain text for others. A grammar without a vocabulary
cannot tell, so `Marks` brings the ids of those that are. Text before a call may spell it too, since `reading.py` reads
it there. Other control tokens may stand in text, as they could without a grammar.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kilburn.controller.calls.forms import Form

MOST_RANGES = 64  # of control tokens in text; a vocabulary has them side by side
ANY_TEXT = "(?s:.*)"
# Text of a form whose calls are told by their first letter: it begins like none.
NO_CALL = r"\s*(([^\s{<]|<[^|])(?s:.*)|<)?"


@dataclass(frozen=True, slots=True)
class Function:
    """What a model may call. `parameters`: the JSON schema of its arguments."""

    name: str
    parameters: Any


@dataclass(frozen=True, slots=True)
class Marks:
    """Control tokens of the model. `ids`: of the texts of a form; `others`: ranges of ids, first and last."""

    ids: Mapping[str, int]
    others: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, form: Form, controls: Mapping[str, int]) -> "Marks":
        texts = [text for text in (form.begin, form.bare, form.end) if text in controls]
        others: list[tuple[int, int]] = []
        for id in sorted(id for text, id in controls.items() if text not in texts):
            if others and others[-1][1] == id - 1:
                others[-1] = others[-1][0], id
            else:
                others.append((id, id))
        return cls({text: controls[text] for text in texts}, others[:MOST_RANGES])

    def written(self, text: str) -> str:
        """One of the form's texts in a rule."""
        return f"<[{self.ids[text]}]>" if text in self.ids else json.dumps(text)


def is_control(text: str, is_special: bool) -> bool:
    """Whether the library takes an added token for a control token: a grammar has it by its id, and never by its text.

    Qwen's <tool_call>, which its tokenizer calls text, is one.
    """
    return is_special or (text.startswith("<") and text.endswith(">"))


def grammar_of(form: Form, functions: Sequence[Function], marks: Marks, *, is_parallel: bool, is_free: bool) -> str:
    """`is_free`: text may stand before the calls, or instead of them."""
    rules = [f"call_{i}: {_call(form, function, i, marks)}" for i, function in enumerate(functions)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    between, end = json.dumps(form.between), marks.written(form.end)
    if form.is_list:
        rules.append(f'one: "[" call ({between} call)* "]"' if is_parallel else 'one: "[" call "]"')
    else:
        rules.append(f'one: "\\n" call "\\n" {end}' if form.end else "one: call")
    begin = marks.written(form.begin) if form.begin else ""
    more = f"({between if form.between else ''} {begin} one)*" if is_parallel and not form.is_list else ""
    if not is_free:
        return "\n".join([f"start: {begin} one {more}", *rules])
    if form.is_whole:
        return "\n".join([f"start: TEXT | one {more}", f"TEXT: /{NO_CALL}/", *rules])
    return "\n".join([f"start: said TEXT | said opened one {more}", *_opening(form, marks), *rules])


def _opening(form: Form, marks: Marks) -> list[str]:
    """Text, and what ends it where a call begins."""
    ranges = ",".join(f"{first}-{last}" for first, last in marks.others)
    spelled = json.dumps(form.begin)
    return [
        f"said: (TEXT <[{ranges}]>)*" if ranges else 'said: ""',
        f"opened: spelled | TEXT {marks.written(form.begin)}" if form.begin in marks.ids else "opened: spelled",
        f"spelled[lazy]: TEXT {spelled}",
        f"TEXT: /{ANY_TEXT}/",
    ]


def _call(form: Form, function: Function, number: int, marks: Marks) -> str:
    parameters = function.parameters
    if form.bare:
        return f"{json.dumps(function.name)} {marks.written(form.bare)} %json {json.dumps(spaced(parameters))}"
    if isinstance(parameters, dict):
        # What it refers to lies in itself, not in the object that it becomes a part of.
        parameters = {"$id": f"urn:call:{number}", **(parameters or {"type": "object"})}
    whole = {
        "type": "object",
        "properties": {"name": {"const": function.name}, form.arguments: parameters},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }
    return f"%json {json.dumps(spaced(whole))}"


def spaced(schema: Any) -> Any:
    """The schema with the layout of `json.dumps`.

    Models were taught with it, and free white space would let them write on for ever.
    """
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if not isinstance(schema, dict):
        return schema
    return {**(schema or {"type": "object"}), "x-guidance": layout}
