"""How much of JSON Schema can be followed, what a mask costs, and what becomes of a model's answers under one.

    python bench/structured.py SCHEMAS.jsonl                        coverage and costs, with the bundled model's tokens
    python bench/structured.py SCHEMAS.jsonl --suite FOLDER         and JSON-Schema-Test-Suite's valid instances
    python bench/structured.py SCHEMAS.jsonl --server http://127.0.0.1:8000 [--answers 40]
    python bench/structured.py --schemas 100000                     the door's memory, over so many different schemas

SCHEMAS.jsonl is a sample of JSONSchemaBench: a row has `name`, `schema`, and `tests` with `valid` and `data`.

    compiles   the door takes it and the worker's library compiles it
    admits     some known-valid instance, written by `json.dumps` with its properties in the schema's order, is allowed
               token by token, and its end too
    finished   the answer ended by itself within --max-tokens; of these `jsonschema` says which are valid
"""

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from kilburn.controller.grammar_check import checked
from kilburn.controller.grammars import GrammarDoor, Wanted
from kilburn.controller.prepared import prepared_folder
from kilburn.shared.model_files import BUNDLED_NAME
from kilburn.worker.grammars import LIMITS, read_tokenizer

ASKED = "Answer with one short JSON document that follows this JSON schema, and nothing else:\n{}"


@dataclass(frozen=True)
class Row:
    name: str
    schema: Any
    valid: list[Any]


def rows_of(file: Path) -> list[Row]:
    read = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Row(row["name"], row["schema"], [t["data"] for t in row["tests"] if t["valid"]]) for row in read]


def suite_of(folder: Path) -> list[Row]:
    """Cases of JSON-Schema-Test-Suite that have a valid instance."""
    rows = []
    for file in sorted(folder.glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            valid = [test["data"] for test in case["tests"] if test["valid"]]
            if valid:
                rows.append(Row(f"{file.stem}: {case['description']}", case["schema"], valid))
    return rows


# --- coverage and costs


@dataclass
class Found:
    num: int = 0
    compiles: int = 0
    admits: int = 0
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    closed: list[str] = field(default_factory=list)  # that compile and admit none of their instances


def ordered(value: Any, schema: Any) -> Any:
    """The instance with its properties in the schema's order, which is that of a grammar."""
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [ordered(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties") if isinstance(schema, dict) else None
    known = known if isinstance(known, dict) else {}
    names = [name for name in known if name in value] + [name for name in value if name not in known]
    return {name: ordered(value[name], known.get(name)) for name in names}


def admits(matcher: LLMatcher, tokenizer: LLTokenizer, instance: Any, mask_us: list[float]) -> bool:
    one = matcher.deep_copy()
    for token in tokenizer.tokenize_str(json.dumps(instance, ensure_ascii=False)):
        began = perf_counter()
        mask = one.compute_bitmask()
        mask_us.append((perf_counter() - began) * 1e6)
        if not mask[token >> 3] >> (token & 7) & 1:
            return False
        one.consume_token(token)
    return bool(one.is_accepting())


def covered(rows: list[Row], tokenizer: LLTokenizer) -> Found:
    found = Found(num=len(rows))
    for row in rows:
        began = perf_counter()
        verdict = checked({"kind": "json_schema", "schema": row.schema})
        if "source" not in verdict:
            found.reasons[verdict["error"][:70]] += 1
            continue
        matcher = LLMatcher(tokenizer, verdict["source"], log_level=0, limits=LIMITS)
        if matcher.is_error():
            found.reasons[matcher.get_error()[:70]] += 1
            continue
        found.compile_ms.append((perf_counter() - began) * 1e3)
        found.compiles += 1
        instances = [*row.valid, *(ordered(instance, row.schema) for instance in row.valid)]
        if any(admits(matcher, tokenizer, instance, found.mask_us) for instance in instances):
            found.admits += 1
        else:
            found.closed.append(row.name)
    return found


def tell(title: str, found: Found) -> None:
    print(f"{title}: {found.num} schemas")
    print(f"  compile               {found.compiles}  {found.compiles / found.num:.1%}")
    print(f"  admit an instance     {found.admits}  {found.admits / max(found.compiles, 1):.1%} of these")
    for name, values, unit in (("compile", found.compile_ms, "ms"), ("mask", found.mask_us, "us")):
        if values:
            p50, p99, most = np.percentile(values, [50, 99, 100])
            print(f"  {name:<10} {unit}         p50 {p50:.1f}   p99 {p99:.1f}   most {most:.1f}   of {len(values)}")
    for reason, number in found.reasons.most_common(12):
        print(f"  refused {number:>3}  {reason}")
    for name in found.closed[:12]:
        print(f"  admits none of its instances: {name}")


# --- answers of a model


async def answers(rows: list[Row], server: str, max_tokens: int, num_at_once: int) -> Counter[str]:
    found: Counter[str] = Counter()
    turns = asyncio.Semaphore(num_at_once)

    async def ask(session: aiohttp.ClientSession, row: Row) -> None:
        text = ASKED.format(json.dumps(row.schema))
        given = {"name": "asked", "schema": row.schema, "strict": True}
        body = {
            "messages": [{"role": "user", "content": text}],
            "response_format": {"type": "json_schema", "json_schema": given},
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        async with turns, session.post(server + "/v1/chat/completions", json=body) as response:
            answer = await response.json()
        outcome = outcome_of(row, response.status, answer)
        found[outcome.partition(":")[0]] += 1
        print(f"  {row.name[:60]:<60} {outcome[:100]}", flush=True)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*[ask(session, row) for row in rows])
    return found


def outcome_of(row: Row, status: int, answer: Any) -> str:
    if status != 200:
        return f"refused: {answer['error']['message']}"
    (choice,) = answer["choices"]
    if choice["finish_reason"] != "stop":
        return f"unfinished: {answer['usage']['completion_tokens']} tokens"
    try:
        jsonschema.validate(json.loads(choice["message"]["content"]), row.schema)
    except (ValueError, jsonschema.ValidationError) as fault:
        return f"invalid: {str(fault).splitlines()[0]}"
    return f"valid: {answer['usage']['completion_tokens']} tokens"


# --- the door's memory


async def door(num_schemas: int) -> None:
    one = GrammarDoor()

    def rss_mib() -> list[int]:
        children = [child.pid for child in one.children if child.pid is not None]
        size = os.sysconf("SC_PAGE_SIZE")
        return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * size >> 20 for pid in (os.getpid(), *children)]

    began = perf_counter()
    for i in range(num_schemas + 1):
        word = {"type": "string", "pattern": f"^a{i}+$"}
        schema = {"type": "object", "properties": {f"p{i}": word}, "required": [f"p{i}"]}
        await one.grammar(Wanted("schema", {"kind": "json_schema", "schema": schema}))
        if i % max(num_schemas // 10, 1) == 0:
            print(
                f"{i:>8,} schemas  {rss_mib()} MiB (the door, its children)  cache {one.cached_bytes:,} bytes",
                flush=True,
            )
    print(f"{(perf_counter() - began) / (num_schemas + 1) * 1e3:.2f} ms each")
    await one.close()


def sampled(rows: list[Row], number: int) -> Iterator[Row]:
    step = max(len(rows) / number, 1.0) if number else 1.0
    yield from (rows[int(i * step)] for i in range(min(number or len(rows), len(rows))))


def main() -> None:
    parser = argparse.ArgumentParser(prog="structured", description="Structured output, measured.")
    parser.add_argument("file", type=Path, nargs="?", help="a sample of JSONSchemaBench")
    parser.add_argument("--suite", type=Path, help="a folder of JSON-Schema-Test-Suite, as draft2020-12")
    parser.add_argument("--server", default="", help="ask the model that is served here")
    parser.add_argument("--answers", type=int, default=0, help="of so many schemas, at even steps; 0: of all")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--schemas", type=int, default=0, help="try the door with so many")
    options = parser.parse_args()
    if options.schemas:
        asyncio.run(door(options.schemas))
        return
    if options.file is None:
        parser.error("give a file of schemas, or --schemas")
    rows = rows_of(options.file)
    if options.server:
        wanted = list(sampled(rows, options.answers))
        found = asyncio.run(answers(wanted, options.server, options.max_tokens, options.concurrency))
        num_asked = len(wanted) - found["refused"]
        finished = found["valid"] + found["invalid"]
        print(f"{len(wanted)} of {len(rows)} schemas: {dict(found)}")
        print(f"finished within {options.max_tokens} tokens: {finished / max(num_asked, 1):.1%} of those not refused")
        return
    folder = prepared_folder(BUNDLED_NAME, "")
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer, _ = read_tokenizer(folder / "tokenizer.json", vocab_size)
    tell(options.file.name, covered(rows, tokenizer))
    if options.suite is not None:
        tell(options.suite.name, covered(suite_of(options.suite), tokenizer))


if __name__ == "__main__":
    main()
