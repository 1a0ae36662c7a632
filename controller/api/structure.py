"""What a request says of its answer's structure: a JSON schema, a regex, a choice, a grammar, calls of tools.

    response_format                                     OpenAI's: text, json_object, json_schema
    structured_outputs, guided_json, guided_regex ...   vLLM's: json, regex, choice, grammar, json_object
    tools, tool_choice, parallel_tool_calls             OpenAI's

At most one of the first two is given. With tools that may be called the answer is calls, or what the other says;
"required" and a named function leave only calls. Calls that the model need not make follow a grammar where a function
is `strict`, or where there may be one call only. Whether all that can be followed is seen when it is compiled
(grammars.py), not here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kilburn.controller.api.checks import Flag, JsonSchema, Many, Unsupported, Words
from kilburn.controller.api.errors import bad_request
from kilburn.controller.calls.binding import Marks
from kilburn.controller.calls.forms import Form
from kilburn.controller.calls.reading import CallReader
from kilburn.controller.grammars import Wanted

MOST_SOURCE_CHARS = 1 << 20  # a server allows fewer (--max-schema)
MOST_ALTERNATIVES = 1024
ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON schema, as an object or as its text."""

    def read(self, value: Any, where: str) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(Words(MOST_SOURCE_CHARS).read(value, where))
            except (ValueError, RecursionError):
                raise bad_request(where, f"{where} is not JSON") from None
        if not isinstance(value, dict | bool):
            raise bad_request(where, f"{where} must be a JSON schema, which is an object")
        return value

    def schema(self) -> JsonSchema:
        return {"type": ["object", "boolean", "string"], "description": "a JSON schema, or its text"}


@dataclass(frozen=True, slots=True)
class Format:
    """OpenAI's response_format. Becomes a schema, or None where any text will do."""

    def read(self, value: Any, where: str) -> Any:
        match value:
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return ANY_OBJECT
            case {"type": "json_schema", "json_schema": {"schema": schema}}:
                return Schema().read(schema, f"{where}.json_schema.schema")
            case {"type": "json_schema"}:
                where = f"{where}.json_schema"
                raise bad_request(where, f"{where} must be an object with a name and a schema")
        raise bad_request(where, f"{where} must be an object of type text, json_object or json_schema")

    def schema(self) -> JsonSchema:
        plain = {"properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]}
        about = {"properties": {"schema": Schema().schema()}, "required": ["schema"], "type": "object"}
        bound = {
            "properties": {"type": {"const": "json_schema"}, "json_schema": about},
            "required": ["type", "json_schema"],
        }
        return {"type": "object", "anyOf": [plain, bound]}


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """vLLM's object: one of json, regex, choice, grammar, json_object. Becomes (its name, what it says)."""

    def read(self, value: Any, where: str) -> tuple[str, Any] | None:
        if not isinstance(value, dict):
            raise bad_request(where, f"{where} must be an object")
        given = {name: part for name, part in value.items() if part is not None and part is not False}
        for name in ("disable_fallback", "disable_any_whitespace"):  # nothing else is done here
            given.pop(name, None)
        for name in given.keys() - {"json", "json_object", "regex", "choice", "grammar"}:
            Unsupported((), "give json, regex, choice or grammar").read(given[name], f"{where}.{name}")
        if not given:
            return None
        if len(given) > 1:
            raise bad_request(where, f"{where} must have one of json, json_object, regex, choice and grammar")
        ((name, said),) = given.items()
        return name, CHECKS[name].read(said, f"{where}.{name}")

    def schema(self) -> JsonSchema:
        return {"type": "object", "properties": {name: check.schema() for name, check in CHECKS.items()}}


CHECKS: dict[str, Any] = {
    "json": Schema(),
    "json_object": Flag(),
    "regex": Words(MOST_SOURCE_CHARS, least=1),
    "choice": Many(Words(MOST_SOURCE_CHARS, least=1), MOST_ALTERNATIVES, least=1),
    "grammar": Words(MOST_SOURCE_CHARS, least=1),
}


def asked_of(name: str, said: Any) -> dict[str, Any]:
    """As grammar_check.py reads it."""
    match name:
        case "json":
            return {"kind": "json_schema", "schema": said}
        case "json_object":
            return {"kind": "json_schema", "schema": ANY_OBJECT}
        case "choice":
            return {"kind": "choice", "texts": list(said)}
        case _:
            return {"kind": name, "text": said}


def bound_by(given: Sequence[tuple[str, str, Any]]) -> Wanted | None:
    """`given`: (field, name, what it says), None where it says nothing. Raises ApiError for two of them."""
    said = [(where, asked_of(name, value)) for where, name, value in given if value is not None]
    if len(said) > 1:
        raise bad_request(said[1][0], f"{said[1][0]} and {said[0][0]} exclude each other; give one of them")
    return Wanted(*said[0]) if said else None


# --- tools


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `given`: as the client wrote it, for the template."""

    name: str
    parameters: Any
    given: dict[str, Any]
    is_strict: bool = False  # its arguments follow `parameters`, even where the model need not call


@dataclass(frozen=True, slots=True)
class ToolCheck:
    def read(self, value: Any, where: str) -> Tool:
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict) or value.get("type", "function") != "function":
            raise bad_request(where, f'{where} must be an object of type "function" with a function')
        name = Words(64, least=1).read(function.get("name"), f"{where}.function.name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise bad_request(f"{where}.function.parameters", f"{where}.function.parameters must be a JSON schema")
        given = {key: part for key, part in function.items() if part is not None}
        is_strict = Flag().read(given.get("strict", False), f"{where}.function.strict")
        given = {"type": "function", "function": given}
        return Tool(name, NO_ARGUMENTS if parameters is None else parameters, given, is_strict)

    def schema(self) -> JsonSchema:
        about = {
            "name": Words(64, least=1).schema(),
            "description": {"type": "string"},
            "parameters": {"type": "object"},
            "strict": Flag().schema(),
        }
        function = {"type": "object", "properties": about, "required": ["name"]}
        properties = {"type": {"const": "function"}, "function": function}
        return {"type": "object", "properties": properties, "required": ["function"]}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """none, auto, required, or the name of a function."""

    kind: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolChoiceCheck:
    def read(self, value: Any, where: str) -> ToolChoice:
        match value:
            case "none" | "auto" | "required":
                return ToolChoice(value)
            case {"type": "function", "function": {"name": str(name)}}:
                return ToolChoice("named", name)
        message = f'{where} must be "none", "auto", "required" or an object of type "function" with a function\'s name'
        raise bad_request(where, message)

    def schema(self) -> JsonSchema:
        function = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        named = {
            "type": "object",
            "properties": {"type": {"const": "function"}, "function": function},
            "required": ["type", "function"],
        }
        return {"anyOf": [{"enum": ["none", "auto", "required"]}, named]}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request, and what it says of their use."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice("auto")
    is_parallel: bool = True

    @classmethod
    def of(cls, tools: tuple[Tool, ...], choice: ToolChoice | None, is_parallel: bool) -> "Toolbox":
        """Raises ApiError."""
        names = [tool.name for tool in tools]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise bad_request(f"tools[{i}].function.name", f"tools[{i}].function.name: {name} is there already")
        if choice is not None and not tools and choice.kind != "none":
            raise bad_request("tool_choice", "tool_choice wants tools")
        if choice is not None and choice.kind == "named" and choice.name not in names:
            raise bad_request("tool_choice", "tool_choice names a function that is not among the tools")
        return cls(tools, choice or ToolChoice("auto"), is_parallel)

    @property
    def may_be_called(self) -> bool:
        return bool(self.tools) and self.choice.kind != "none"

    @property
    def must_be_called(self) -> bool:
        return self.may_be_called and self.choice.kind != "auto"

    @property
    def is_bound(self) -> bool:
        """Whether its calls follow a grammar, in an answer that need not call."""
        return self.may_be_called and (not self.is_parallel or any(tool.is_strict for tool in self.tools))

    def wanted(self, form: Form, controls: Mapping[str, int], answer: Wanted | None) -> Wanted | None:
        """What an answer looks like. `answer`: where it is not calls; `controls`: the model's, with their ids."""
        if not self.may_be_called:
            return answer
        if not (self.must_be_called or self.is_bound or answer is not None):
            return None
        allowed = [tool for tool in self.tools if self.choice.kind != "named" or tool.name == self.choice.name]
        marks = Marks.of(form, controls)
        otherwise = {"kind": "text"} if answer is None else answer.asked
        asked = {
            "kind": "calls",
            "form": form.name,
            "functions": [{"name": tool.name, "parameters": self._followed(tool)} for tool in allowed],
            "is_parallel": self.is_parallel and self.choice.kind != "named",
            "marks": dict(marks.ids),
            "others": list(marks.others),
            "otherwise": None if self.must_be_called else otherwise,
        }
        return Wanted("tools", asked)

    def _followed(self, tool: Tool) -> Any:
        """The schema that its arguments follow: its own where they have to, and any object where the model chose."""
        return tool.parameters if self.must_be_called or tool.is_strict else ANY_OBJECT

    def new_reader(self, form: Form) -> CallReader:
        """Of the calls in one choice of the answer."""
        return CallReader(form, [tool.name for tool in self.tools])
