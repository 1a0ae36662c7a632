"""How much of JSON Schema can be followed, what a mask costs, and what becomes of a model's answers under one.

    python bench/structured.py SCHEMAS.jsonl                        coverage and costs, with the bundled model's tokens
    python bench/structured.py SCHEMAS.jsonl --against xgrammar,outlines_core       beside other libraries, where there
    python bench/structured.py SCHEMAS.jsonl --suite FOLDER         and JSON-Schema-Test-Suite's instances
    python bench/structured.py SCHEMAS.jsonl --answers              what the bundled model answers under each schema
    python bench/structured.py --schemas 100000                     the door's memory, over so many different schemas

SCHEMAS.jsonl is a sample of JSONSchemaBench: a row has `name`, `schema`, and `tests` with `valid` and `data`.

    compiles   the door takes it and the worker's library compiles it
    admits     some known-valid instance, written by `json.dumps` with its properties in the schema's order, is allowed
               token by token, and its end too
    wrongly    an instance that is not valid is allowed: the library passes over what it does not know
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.structured_answers import Asked, answers, serving, tell_answers
from bench.structured_libraries import Tried, library_of, tried
from kilburn.controller.grammars import GrammarDoor, Wanted
from kilburn.controller.prepared import prepared_folder
from kilburn.shared.model_files import BUNDLED_NAME
from kilburn.worker.grammars import read_tokenizer


@dataclass(frozen=True)
class Row:
    name: str
    schema: Any
    valid: list[Any]
    wrong: list[Any]


def rows_of(file: Path) -> list[Row]:
    read = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row_of(row["name"], row) for row in read]


def row_of(name: str, given: Any) -> Row:
    valid, wrong = ([test["data"] for test in given["tests"] if test["valid"] is valid] for valid in (True, False))
    return Row(name, given["schema"], valid, wrong)


def suite_of(folder: Path) -> list[Row]:
    """Cases of JSON-Schema-Test-Suite that have a valid instance."""
    rows = []
    for file in sorted(folder.glob("*.json")):
        cases = json.loads(file.read_text(encoding="utf-8"))
        rows += [row_of(f"{file.stem}: {case['description']}", case) for case in cases]
    return [row for row in rows if row.valid]


# --- coverage and costs


def covered(rows: list[Row], name: str, file: Path, vocab_size: int, seconds: int) -> list[Tried]:
    """Of one library. Raises ImportError where it is not there."""
    compile, (tokenizer, _) = library_of(name, file, vocab_size), read_tokenizer(file, vocab_size)
    return [tried(compile, tokenizer, row.schema, row.valid, row.wrong, seconds) for row in rows]


def tell(title: str, rows: list[Row], by_library: dict[str, list[Tried]]) -> None:
    """A column for each library."""
    print(f"{title}: {len(rows)} schemas, {sum(len(row.wrong) for row in rows)} instances that are not valid")
    columns = {name: told(rows, found) for name, found in by_library.items()}
    print(" " * 36 + "".join(f"{name:>24}" for name in columns))
    for line in next(iter(columns.values())):
        print(f"  {line:<34}" + "".join(f"{column[line]:>24}" for column in columns.values()))
    for name, found in by_library.items():
        for reason, number in Counter(one.error[:90] for one in found if one.error).most_common(12):
            print(f"  {name} cannot {number:>3}  {reason}")
        closed = [row.name for row, one in zip(rows, found, strict=True) if not (one.error or one.admits)]
        for row_name in closed[:12]:
            print(f"  {name} admits none of its instances: {row_name}")


def told(rows: list[Row], found: list[Tried]) -> dict[str, str]:
    compiled = [one for one in found if not one.error]
    admitting = [one for one in compiled if one.admits]
    num_wrong = sum(len(row.wrong) for row, one in zip(rows, found, strict=True) if not one.error)
    wrong = sum(one.wrong_admitted for one in compiled)
    exact = [one for one in admitting if not one.wrong_admitted]
    column = {
        "compile": f"{len(compiled)}  {len(compiled) / len(rows):.1%}",
        "admit a valid instance": f"{len(admitting)}  {len(admitting) / max(len(compiled), 1):.1%}",
        "instances wrongly admitted": f"{wrong} of {num_wrong}",
        "admit a valid and no wrong one": f"{len(exact)}  {len(exact) / len(rows):.1%}",
    }
    spans = (
        ("compile, ms", [one.compile_ms for one in compiled]),
        ("mask, us", [us for o in compiled for us in o.mask_us]),
    )
    for name, values in spans:
        for label, share in (("p50", 50), ("p99", 99), ("most", 100)):
            column[f"{name} {label}"] = f"{np.percentile(values or [np.nan], share):,.1f}"
    return column


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


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="structured", description="Structured output, measured.")
    parser.add_argument("file", type=Path, nargs="?", help="a sample of JSONSchemaBench")
    parser.add_argument("--suite", type=Path, help="a folder of JSON-Schema-Test-Suite, as draft2020-12")
    parser.add_argument("--against", default="", help="other libraries beside ours: xgrammar,outlines_core")
    parser.add_argument(
        "--seconds", type=int, default=5, help="of a CPU, that a library may take for one schema and its instances"
    )
    parser.add_argument(
        "--answers", type=int, nargs="?", const=0, help="ask a model for so many; without a number: all"
    )
    parser.add_argument("--server", default="", help="where it is served; else the bundled model is served for it")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.5,
        help="of the requests; without one a small model loops in a string",
    )
    parser.add_argument("--schemas", type=int, default=0, help="try the door with so many")
    options = parser.parse_args(words)
    if options.file is None and not options.schemas:
        parser.error("give a file of schemas, or --schemas")
    return options


def ask(rows: list[Row], options: argparse.Namespace) -> None:
    wanted = [(row.name, row.schema) for row in sampled(rows, options.answers or 0)]
    asked = Asked(options.max_tokens, options.concurrency, options.frequency_penalty)
    flags = ("--device=cpu", f"--max-rows={options.concurrency}", "--kv-memory=4GiB")
    address = contextlib.nullcontext(options.server) if options.server else serving(BUNDLED_NAME, flags)
    with address as server:
        tell_answers(asyncio.run(answers(wanted, server, asked)), len(rows), asked)


def measure(title: str, rows: list[Row], options: argparse.Namespace) -> None:
    folder = prepared_folder(BUNDLED_NAME, "")
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    found: dict[str, list[Tried]] = {}
    for name in ("llguidance", *filter(None, options.against.split(","))):
        try:
            found[name] = covered(rows, name, folder / "tokenizer.json", vocab_size, options.seconds)
        except ImportError as missing:
            print(f"{name}: not here ({missing})")
    tell(title, rows, found)


def main(words: Sequence[str] | None = None) -> None:
    options = options_of(words)
    if options.schemas:
        asyncio.run(door(options.schemas))
        return
    rows = rows_of(options.file)
    if options.server or options.answers is not None:
        ask(rows, options)
        return
    measure(options.file.name, rows, options)
    if options.suite is not None:
        measure(options.suite.name, suite_of(options.suite), options)


if __name__ == "__main__":
    main()
