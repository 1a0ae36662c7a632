"""Tries a grammar in a process of its own, which may be killed: `python -m kilburn.controller.grammar_check BYTES`.

    stdin   one JSON object a line: what is asked for      stdout   one a line: its source, or what is wrong with it
            {"kind": "json_schema", "schema": {...}}                {"source": "..."}
            {"kind": "regex", "text": "..."}                        {"error": "Unimplemented keys: [...]"}
            {"kind": "choice", "texts": [...]}
            {"kind": "grammar", "text": "..."}           Lark, or GBNF as llama.cpp has it
            {"kind": "calls", "form": "hermes", "functions": [...], "is_parallel": true,
             "marks": {"<tool_call>": 151657}, "others": [[151643, 151656]], "otherwise": null}
                                                         or {"kind": "text"}, or any of the above: what may be instead

What a request asks for is turned here into what workers compile, and compiled once, without a vocabulary. Its memory is
bounded by the system (BYTES of addresses), and its time by whoever waits for the answer.
"""

import json
import resource
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from kilburn.controller.calls.binding import Function, Marks, grammar_of, spaced
from kilburn.controller.calls.forms import FORMS

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# Any other says nothing, by JSON Schema's own word; the library would refuse it.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
OF_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))  # by name
MOST_ERROR_CHARS = 400
NO_SCHEMAS = frozenset(("const", "enum", "default", "examples", "required"))


def source_of(asked: dict[str, Any]) -> str:
    """What workers compile. Raises ValueError."""
    match asked:
        case {"kind": "calls", "otherwise": {"kind": kind} as answer} if kind != "text":
            either = {"lark_grammar": "start: @answer | @calls"}
            named = [{**part_of(answer), "name": "answer"}, {**part_of(asked), "name": "calls"}]
            return json.dumps({"grammars": [either, *named]})
    return json.dumps({"grammars": [part_of(asked)]})


def part_of(asked: dict[str, Any]) -> dict[str, Any]:
    """One of the library's grammars. Raises ValueError."""
    match asked:
        case {"kind": "json_schema", "schema": schema}:
            return {"json_schema": spaced(known(schema))}
        case {"kind": "regex", "text": str(text)}:
            (part,) = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            return {"lark_grammar": part["lark_grammar"]}
        case {"kind": "choice", "texts": list(texts)}:
            return {"lark_grammar": "start: " + " | ".join(json.dumps(text) for text in texts)}
        case {"kind": "grammar", "text": str(text)}:
            return {"lark_grammar": any_to_lark(text)}
        case {"kind": "calls", "form": form, "functions": functions, "is_parallel": is_parallel}:
            made = [Function(function["name"], known(function["parameters"])) for function in functions]
            marks, is_free = Marks(asked["marks"], asked["others"]), asked["otherwise"] == {"kind": "text"}
            lark = grammar_of(FORMS[form], made, marks, is_parallel=is_parallel, is_free=is_free)
            return {"lark_grammar": lark}
    raise ValueError("nothing is asked for")


def known(schema: Any) -> Any:
    """The schema without formats that say nothing, and without the library's own settings."""
    if isinstance(schema, list):
        return [known(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for word, value in schema.items():
        if word == "x-guidance" or (word == "format" and isinstance(value, str) and value not in FORMATS):
            continue
        if word in NO_SCHEMAS:
            kept[word] = value
        elif word in OF_SCHEMAS and isinstance(value, dict):
            kept[word] = {name: known(part) for name, part in value.items()}
        else:
            kept[word] = known(value)
    return kept


def checked(asked: dict[str, Any]) -> dict[str, str]:
    """Its source, or what is wrong with it."""
    try:
        source = source_of(asked)
        error = LLMatcher.validate_grammar(source, limits=LIMITS)
    except MemoryError:
        return {"error": "it takes too much memory to compile; make it simpler"}
    except Exception as fault:  # the library's own kinds are many, and all mean that it cannot be had
        error, source = str(fault) or "it cannot be read", ""
    if not error:
        return {"source": source}
    told = " ".join(error.split())[:MOST_ERROR_CHARS]
    if told.startswith("regex parse error") and asked["kind"] != "regex":
        told = f"pattern: {told}"  # the keyword at fault
    return {"error": told}


def main() -> None:
    most_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(checked(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
