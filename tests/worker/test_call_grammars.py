"""What a model may draw where functions may be called, in every form.

Its marks may be control tokens, tokens of their own that are text (as in Qwen's), or text of several tokens.
"""

import json
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from kilburn.controller.calls.binding import Marks, is_control
from kilburn.controller.calls.forms import FORMS
from kilburn.controller.grammar_check import checked
from kilburn.shared.grammar import Grammar
from kilburn.shared.messages import Prepare, Prepared
from kilburn.worker.grammars import Bound, Grammars

END = 0
CONTROLS = ("<end>", "<think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")
SIGNS = [chr(code) for code in range(32, 127)] + ["\n"]
BYTE_LEVEL = {" ": "\u0120", "\n": "\u010a"}
VOCAB = len(CONTROLS) + len(SIGNS)

SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
FUNCTIONS = [{"name": "add", "parameters": SCHEMA}, {"name": "now", "parameters": {}}]
JSON = {"kind": "json_schema", "schema": {"properties": {"say": {"enum": ["x"]}}, "additionalProperties": False}}
TEXT = {"kind": "text"}
ONE = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "mistral11": '[TOOL_CALLS]add[ARGS]{"a": 1}',
}
TWO = {
    "hermes": ONE["hermes"] + "\n" + ONE["hermes"],
    "llama3": ONE["llama3"] + "; " + ONE["llama3"],
    "mistral": ONE["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral11": ONE["mistral11"] + "[TOOL_CALLS]now[ARGS]{}",
}
WRONG = {form: said.replace('"a": 1', '"a": "') for form, said in ONE.items()}


class Model:
    """A tokenizer of single letters and `added` tokens, the first of them controls; what follows grammars with it."""

    def __init__(self, folder: Path, added: tuple[str, ...], num_controls: int) -> None:
        self.ids = {text: id for id, text in enumerate(added)}
        special = {text: id < num_controls for text, id in self.ids.items()}
        self.controls = {text: id for text, id in self.ids.items() if is_control(text, special[text])}
        fillers = [f"{chr(0x100 + i)}{chr(0x100 + i)}" for i in range(len(CONTROLS) - len(added))]
        self.signs = {sign: len(CONTROLS) + i for i, sign in enumerate(SIGNS)}
        words = [*added, *fillers, *(BYTE_LEVEL.get(sign, sign) for sign in SIGNS)]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        about = {
            "version": "1.0",
            "added_tokens": [
                {"id": id, "content": text, "special": special[text], **flags} for text, id in self.ids.items()
            ],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(words)}, "merges": []},
        }
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(about))
        self.grammars = Grammars(file, VOCAB)

    def row(self, form: str, otherwise: dict[str, Any] | None, is_parallel: bool) -> Bound:
        marks, answers = Marks.of(FORMS[form], self.controls), Queue()
        asked = {"kind": "calls", "form": form, "functions": FUNCTIONS, "is_parallel": is_parallel}
        asked |= {"marks": marks.ids, "others": marks.others, "otherwise": otherwise}
        grammar = Grammar.of(checked(json.loads(json.dumps(asked)))["source"])
        self.grammars.prepare(Prepare(7, 1, grammar.digest, grammar.source), answers.put)
        assert answers.get(timeout=60) == Prepared(7, 1)
        return self.grammars.compiled(grammar.digest).at([], [END])

    def may_say(self, row: Bound, text: str, is_spelled: bool = False) -> bool:
        """Whether the text, and then the end, can be drawn: added tokens as such, unless it is spelled."""
        while text:
            added = next((word for word in self.ids if text.startswith(word) and not is_spelled), None)
            token = self.ids[added] if added else self.signs[text[0]]
            if not self.grammars.masks([row]).allowed[0, token]:
                return False
            row.follow(token)
            text = text[len(added or "x") :]
        return bool(self.grammars.masks([row]).allowed[0, END])


@pytest.fixture(scope="module", params=["control tokens", "tokens of text", "text"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Model:
    added = CONTROLS[:2] if request.param == "text" else CONTROLS
    num_controls = len(CONTROLS) if request.param == "control tokens" else 2
    return Model(tmp_path_factory.mktemp("calls"), added, num_controls)


@pytest.mark.parametrize("form", list(FORMS))
def test_calls_or_what_else_may_be_said(model: Model, form: str) -> None:
    #         calls    text, or calls    JSON, or calls
    table = [
        ("", (False, True, False)),
        ("Let me see.", (False, True, False)),
        ('{"say": "x"}', (False, form != "llama3", True)),
        ('{"say": "y"}', (False, form != "llama3", False)),
        (ONE[form], (True, True, True)),
        (WRONG[form], (False, False, False)),
        ("Hm. " + ONE[form], (False, True, False)),
        ("<think>Hm.<think> " + ONE[form], (False, form != "llama3", False)),
    ]
    for text, expected in table:
        for is_parallel in (True, False):
            found = tuple(model.may_say(model.row(form, other, is_parallel), text) for other in (None, TEXT, JSON))
            assert found == expected, (text, is_parallel)
    for other in (None, TEXT, JSON):
        assert model.may_say(model.row(form, other, True), TWO[form]), other
        assert not model.may_say(model.row(form, other, False), TWO[form]), other
    if form != "llama3":  # whose mark is its brace
        assert model.may_say(model.row(form, TEXT, True), "Hm. " + ONE[form], is_spelled=form == "mistral")
        assert not model.may_say(model.row(form, TEXT, True), WRONG[form], is_spelled=True)
