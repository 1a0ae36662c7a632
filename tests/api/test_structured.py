"""What answers are to look like: asked for in every way, tried in a child that may be killed, refused by name."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from kilburn.controller import grammars
from kilburn.controller.calls.forms import FORMS
from kilburn.controller.grammar_check import checked
from kilburn.controller.grammars import Bounds, GrammarDoor, GrammarRefused, Wanted
from tests.api.vocabularies import CHATML
from tests.api.world import ids_of, served, text_after

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": OBJECT}}
NOW = {"type": "function", "function": {"name": "now"}}
HELLO = [{"role": "user", "content": "hello"}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHATML


def schema(asked: Any) -> Wanted:
    return Wanted("response_format", {"kind": "json_schema", "schema": asked})


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


WAYS = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT, "strict": True}}},
    {"structured_outputs": {"json": OBJECT}},
    {"structured_outputs": {"json_object": True, "regex": None, "disable_any_whitespace": False}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}},
    {"guided_json": json.dumps(OBJECT)},
    {"guided_regex": "[a-z]{2,5}"},
    {"guided_choice": ["yes", "no"]},
    {"guided_grammar": 'start: "a" | "b" start'},
]


async def test_every_way_to_ask_reaches_the_worker(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for way in WAYS:
            status, answer = await world.post("/v1/completions", {"prompt": "x", "max_tokens": 4, **way})
            assert (status, answer["choices"][0]["text"]) == (200, text_after(4)), way
        group = world.driver.engine.snapshot().groups[0]
        assert group.grammars_prepared >= 9  # some ways say the same
        plain = [{"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"response_format": None}]
        for way in plain:
            status, _ = await world.post("/v1/completions", {"prompt": "x", "max_tokens": 4, **way})
            assert status == 200
        assert world.driver.engine.snapshot().groups[0].grammars_prepared == group.grammars_prepared
        assert world.daemon._worker.grammars == set()  # whoever needed them is gone


REFUSED = [
    ({"not": {}}, "not"),
    ({"type": "string", "pattern": "(?<=a)b"}, "pattern"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"if": {"type": "string"}}, '"if"'),
    ({"$ref": "http://169.254.169.254/x"}, "retriev"),
    ({"type": "bogus"}, "bogus"),
    (False, "false"),
]


async def test_what_cannot_be_followed_is_named(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        for asked, word in REFUSED:
            status, error = await world.post("/v1/completions", {"prompt": "x", "guided_json": asked})
            about = error["error"]
            assert (status, about["param"], about["code"]) == (400, "guided_json", "unsupported_grammar")
            assert word in about["message"], about
        status, _ = await world.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert status == 200


async def test_hostile_grammars_cost_little_and_leave_the_door_open() -> None:
    door = GrammarDoor(Bounds(most_bytes=20_000, most_depth=20, seconds=10.0))
    deep: Any = {"type": "string"}
    for _ in range(30):
        deep = {"anyOf": [deep]}
    wide = {"allOf": [{"oneOf": [{"const": i} for i in range(40)]} for _ in range(6)]}
    for asked in (schema(deep), schema({"enum": ["x" * 30_000]}), schema(wide)):
        with pytest.raises(GrammarRefused):
            await door.grammar(asked)
    for text in ("(a+)+b", "(a{1,1000}){1,1000}", "((a|b|c)*d){0,500}"):
        assert (await door.grammar(Wanted("guided_regex", {"kind": "regex", "text": text}))).digest
    recursive = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}}
    assert (await door.grammar(schema(recursive))).digest
    await door.close()


async def test_a_child_that_takes_too_long_or_dies_is_replaced() -> None:
    door = GrammarDoor(Bounds(seconds=20.0, num_children=1))
    await door.grammar(Wanted("x", {"kind": "regex", "text": "a"}))
    (child,) = door.children
    first = child._process
    assert first is not None
    first.kill()
    with pytest.raises(GrammarRefused):
        await door.grammar(Wanted("x", {"kind": "regex", "text": "b"}))
    asking = asyncio.ensure_future(door.grammar(Wanted("x", {"kind": "regex", "text": "c"})))
    await asyncio.sleep(0)
    asking.cancel()  # whoever asked left
    await asyncio.gather(asking, return_exceptions=True)
    assert (await door.grammar(Wanted("x", {"kind": "regex", "text": "b"}))).digest
    assert child._process is not first
    door.bounds = Bounds(seconds=1e-9, num_children=1)
    with pytest.raises(GrammarRefused, match="more than"):
        await door.grammar(Wanted("x", {"kind": "regex", "text": "d"}))
    door.bounds = Bounds(num_children=1)
    assert (await door.grammar(Wanted("x", {"kind": "regex", "text": "d"}))).digest  # it was not kept against it
    await door.close()


async def test_a_child_that_takes_too_much_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(num_texts: int) -> Wanted:
        return Wanted("guided_choice", {"kind": "choice", "texts": [f"text {i}" for i in range(num_texts)]})

    bounds = Bounds(seconds=60.0, num_children=1, most_bytes=1 << 20)
    roomy = GrammarDoor(bounds)
    await roomy.grammar(choice(2))
    addresses = int(Path(f"/proc/{roomy.children[0].pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    assert (await roomy.grammar(choice(5000))).digest
    await roomy.close()
    monkeypatch.setattr(grammars, "CHILD_BYTES", addresses + (4 << 20))
    tight = GrammarDoor(bounds)
    with pytest.raises(GrammarRefused, match="too much memory"):
        await tight.grammar(choice(5000))
    assert (await tight.grammar(choice(2))).digest
    await tight.close()


async def test_two_thousand_schemas_leave_memory_as_it_was() -> None:
    """`bench/structured.py --schemas 100000` for more."""
    door = GrammarDoor(Bounds(cache_bytes=200_000, seconds=20.0))

    async def ask(first: int, end: int) -> list[int]:
        for i in range(first, end):
            await door.grammar(schema({**OBJECT, "properties": {"a": {"type": "string", "pattern": f"^a{i}+$"}}}))
        children = [child.pid for child in door.children if child.pid is not None]
        return [rss_bytes(pid) for pid in (os.getpid(), *children)]

    early = await ask(0, 300)
    late = await ask(300, 2000)
    assert door.cached_bytes <= 200_000
    assert len(door._verdicts) >= 100  # a lower bound: something is kept
    assert all(after - before < 8 << 20 for before, after in zip(early, late, strict=True))
    await door.close()


def test_formats_that_say_nothing_are_no_fault() -> None:
    asked = {
        "kind": "json_schema",
        "schema": {"properties": {"format": {"format": "path"}}, "x-guidance": {"lenient": True}},
    }
    source = json.loads(checked(asked)["source"])["grammars"][0]["json_schema"]
    assert source["properties"] == {"format": {}}
    assert source["x-guidance"].keys() == {"whitespace_flexible", "item_separator", "key_separator"}
    assert checked({"kind": "json_schema", "schema": {"enum": [{"format": "path"}]}})["source"].count("path") == 1


# --- tools


CALL = '{"name": "weather", "%s": {"a": 12}}'
SPOKEN = {
    "hermes": "hello.\n<tool_call>\n"
    + CALL % "arguments"
    + "\n</tool_call>\n<tool_call>"
    + '{"name": "now"}</tool_call>',
    "llama3": CALL % "parameters" + '; {"name": "now", "parameters": {}}',
    "mistral": "hello. [TOOL_CALLS] [" + CALL % "arguments" + ', {"name": "now", "arguments": {}}]',
    "mistral11": 'hello.[TOOL_CALLS]weather[ARGS]{"a": 12}[TOOL_CALLS]now[ARGS]{}',
}


@pytest.mark.parametrize("form", list(FORMS))
async def test_calls_are_told_as_openai_tells_them(tmp_path: Path, form: str) -> None:
    script = [*ids_of(SPOKEN[form]), 2]
    async with served(tmp_path, script=script, settings={"tool_parser": form}) as world:
        client = AsyncOpenAI(base_url=world.url + "/v1", api_key="none", max_retries=0)
        wanted: dict[str, Any] = {"model": "toy", "messages": HELLO, "tools": [WEATHER, NOW], "max_tokens": 150}
        whole = (await client.chat.completions.create(**wanted)).choices[0]
        assert whole.finish_reason == "tool_calls"
        calls = whole.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("weather", {"a": 12}),
            ("now", {}),
        ]
        assert whole.message.content == (None if form == "llama3" else "hello.")
        content, names, arguments, finishes = "", dict[int, str](), dict[int, str](), []
        async for chunk in await client.chat.completions.create(**wanted, stream=True):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.index not in names:
                    assert (call.type, call.function.arguments, bool(call.id)) == ("function", "", True)
                    names[call.index], arguments[call.index] = call.function.name, ""
                else:
                    assert (call.id, call.function.name) == (None, None)
                    arguments[call.index] += call.function.arguments
            finishes += [choice.finish_reason] if choice.finish_reason else []
        assert finishes == ["tool_calls"]
        assert content == (whole.message.content or "")
        assert [names[i] for i in sorted(names)] == ["weather", "now"]
        assert [arguments[i] for i in sorted(arguments)] == [call.function.arguments for call in calls]
        none = (await client.chat.completions.create(**wanted, tool_choice="none")).choices[0]
        await client.close()
        assert (none.finish_reason, none.message.tool_calls) == ("stop", None)
        assert none.message.content == SPOKEN[form]


async def test_a_forced_call_is_a_grammar_and_a_turn_of_a_tool_is_rendered(tmp_path: Path) -> None:
    script = [*ids_of("<tool_call>\n" + CALL % "arguments" + "\n</tool_call>"), 2]
    async with served(tmp_path, script=script) as world:
        body: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER, NOW], "max_tokens": 100}
        status, error = await world.post("/v1/chat/completions", body)
        assert (status, error["error"]["param"]) == (400, "tools")  # its template knows none
    (tmp_path / "chat_template.jinja").write_text(WITH_TOOLS)
    async with served(tmp_path, script=script, worker={"max_len": 2048}) as world:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            status, answer = await world.post("/v1/chat/completions", {**body, "tool_choice": choice})
            (said,) = answer["choices"]
            assert (status, said["finish_reason"]) == (200, "tool_calls")
            (call,) = said["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"a": 12}'}
        assert world.driver.engine.snapshot().groups[0].grammars_prepared == 2
        turns = [*HELLO, said["message"], {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
        status, _ = await world.post("/v1/chat/completions", {**body, "messages": turns})
        assert status == 200
        _, with_tools = await world.post("/v1/chat/completions", body)
        _, without = await world.post("/v1/chat/completions", {**body, "tools": None})
        assert with_tools["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"] + 20
        bad = [
            ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
            ({"tools": [NOW, NOW]}, "tools[1].function.name"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
            ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
            ({"parallel_tool_calls": False, "ignore_eos": True}, "ignore_eos"),
        ]
        unsupported: dict[str, Any] = {"name": "f", "parameters": {"not": {}}}
        loose, strict = ({"type": "function", "function": unsupported | {"strict": on}} for on in (False, True))
        bad += [({"tools": [loose], "tool_choice": "required"}, "tools"), ({"tools": [strict]}, "tools")]
        for change, param in bad:
            status, error = await world.post("/v1/chat/completions", {**body, **change})
            assert (status, error["error"]["param"]) == (400, param), change
        for is_strict, expected in ((False, 200), (True, 400)):  # Anthropic's own word for it
            tool = {"name": "f", "input_schema": {"not": {}}, "strict": is_strict}
            asked = {"messages": HELLO, "tools": [tool], "max_tokens": 2}
            assert (await world.post("/v1/messages", asked))[0] == expected, is_strict
        num_bound = world.driver.engine.snapshot().groups[0].grammars_prepared
        format = {"response_format": {"type": "json_object"}}
        for change, binds in (
            (format, 1),
            ({"parallel_tool_calls": False, "tools": [loose]}, 1),
            ({"tools": [loose]}, 0),
        ):
            status, _ = await world.post("/v1/chat/completions", {**body, **change})
            num_bound += binds
            assert (status, world.driver.engine.snapshot().groups[0].grammars_prepared) == (200, num_bound), change
