"""Calls of functions are read out of answers the same way however the text is cut."""

import itertools
import json
import random

import pytest

from kilburn.controller.calls.forms import FORMS, HERMES, LLAMA3, MISTRAL, MISTRAL11, Form, form_of
from kilburn.controller.calls.reading import Argued, Called, CallReader, Said

ARGUMENTS = '{"a": 1, "b": "x}\\"y"}'
CALLED = ("call", 0, "add", ARGUMENTS)


def read(form: Form, pieces: list[str]) -> list[tuple]:
    """What was read, with neighbouring pieces joined."""
    reader, found = CallReader(form, ("add", "now")), []
    for news in [*(news for piece in pieces for news in reader.feed(piece)), *reader.end()]:
        match news:
            case Said(text) if found and found[-1][0] == "text":
                found[-1] = ("text", found[-1][1] + text)
            case Said(text):
                found.append(("text", text))
            case Called(index, id, name):
                assert len(id) == (9 if form in (MISTRAL, MISTRAL11) else 29)
                found.append(("call", index, name, ""))
            case Argued(index, text):
                assert found[-1][:2] == ("call", index)
                found[-1] = (*found[-1][:3], found[-1][3] + text)
    return found


CASES = [
    # form, answer, what is in it
    (HERMES, f'Look:\n<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>\n', ["Look:", CALLED]),
    (
        HERMES,
        f'<tool_call>{{"name":"add","arguments":{ARGUMENTS}}}</tool_call>\n<tool_call>{{"name":"now"}}</tool_call>done',
        [CALLED, ("call", 1, "now", "{}"), "done"],
    ),
    (HERMES, f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "add"}}', [CALLED]),
    (
        HERMES,
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call> more',
        [CALLED, " more"],
    ),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a', [("call", 0, "add", '{"a')]),
    (HERMES, "a <tool_call> b </tool_call> <tool_ c  ", None),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>', None),
    (HERMES, '<tool_call>{"name": "add", "arguments": 5}</tool_call>', None),
    (HERMES, '<tool_call>{"name": "add"', None),
    (HERMES, "x <tool_c", None),
    (LLAMA3, f'{{"name": "add", "parameters": {ARGUMENTS}}}', [CALLED]),
    (
        LLAMA3,
        f' <|python_tag|>{{"type": "function", "name": "add", "parameters": {ARGUMENTS}}}; {{"name": "now"}}',
        [CALLED, ("call", 1, "now", "{}")],
    ),
    (LLAMA3, '{"answer": {"name": "add"}}', None),
    (LLAMA3, 'See {"name": "add"}', None),
    (LLAMA3, "<|python_tag|>print(1)", None),
    (LLAMA3, " <|python", None),
    (
        MISTRAL,
        f'Sure. [TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}, {{"arguments": {{}}, "name": "now"}}] ',
        ["Sure.", CALLED, ("call", 1, "now", "{}")],
    ),
    (MISTRAL, "so [TOOL_CALLS] x", None),
    (MISTRAL, "no [TOOL", None),
    (MISTRAL, "[TOOL_CALLS] ", None),
    (MISTRAL11, f"Sure. [TOOL_CALLS]add[ARGS]{ARGUMENTS}", ["Sure.", CALLED]),
    (
        MISTRAL11,
        f"[TOOL_CALLS]add[CALL_ID]x7[ARGS]{ARGUMENTS}[TOOL_CALLS] now [ARGS] {{}} so",
        [CALLED, ("call", 1, "now", "{}"), "so"],
    ),
    (MISTRAL11, f"[TOOL_CALLS]add{ARGUMENTS}", [CALLED]),
    (MISTRAL11, '[TOOL_CALLS]add[ARGS]{"a', [("call", 0, "add", '{"a')]),
    (MISTRAL11, "[TOOL_CALLS]other[ARGS]{}", None),
    (MISTRAL11, '[TOOL_CALLS][{"name": "add", "arguments": {}}]', None),
    (MISTRAL11, "[TOOL_CALLS]add[ARGS", None),
    (MISTRAL11, "[TOOL_CALLS]add it up[ARGS]{}", None),
]


@pytest.mark.parametrize(("form", "answer", "expected"), CASES)
def test_every_cut_reads_the_same(form: Form, answer: str, expected: list | None) -> None:
    expected = [("text", answer)] if expected is None else [("text", e) if isinstance(e, str) else e for e in expected]
    assert read(form, [answer]) == expected
    assert read(form, list(answer)) == expected
    for at in range(len(answer)):
        assert read(form, [answer[:at], answer[at:]]) == expected
    rng = random.Random(7)
    for _ in range(20):
        cuts = [0, *sorted(rng.sample(range(len(answer)), 3)), len(answer)]
        assert read(form, [answer[a:b] for a, b in itertools.pairwise(cuts)]) == expected


def test_text_leaves_as_soon_as_it_is_certain() -> None:
    reader = CallReader(HERMES, ["add"])
    assert reader.feed("one < two ") == [Said("one < two")]
    assert reader.feed("<tool") == []
    assert reader.feed("box>") == [Said(" <toolbox>")]
    assert reader.feed('<tool_call>{"name": "add", "arguments": {"x": [1, ')[1:] == [Argued(0, '{"x": [1, ')]


def test_the_template_tells_the_form() -> None:
    assert form_of("{% for tool in tools %}...<tool_call>") is HERMES
    assert form_of("{{ '[TOOL_CALLS][' }}") is MISTRAL
    assert form_of('Respond in the format {"name": function name, "parameters": dictionary') is LLAMA3
    assert form_of("{{ message.content }}", ["[TOOL_CALLS]", "[ARGS]"]) is None
    assert form_of("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments }}") is MISTRAL11
    for template, form in (("{{ '[TOOL_CALLS]' + calls }}", MISTRAL11), ("{{ '[TOOL_CALLS] [' + calls }}", MISTRAL)):
        assert form_of(template, ["[TOOL_CALLS]", "[ARGS]"]) is form
        assert form_of(template, ["[TOOL_CALLS]"]) is MISTRAL
    assert set(FORMS) == {"hermes", "llama3", "mistral", "mistral11"}
