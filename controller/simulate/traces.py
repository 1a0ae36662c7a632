"""Recorded and published requests, read into one shape: when, how long a prompt, how long an answer.

    Azure CSV          TIMESTAMP,ContextTokens,GeneratedTokens
    lengths CSV        num_prefill_tokens,num_decode_tokens,...          no times
    Mooncake JSONL     {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}
    token JSONL        {"input_toks", "output_toks", "arrival_time_ns", ...}
    ShareGPT JSON(L)   {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}    no times
    Alpaca JSON(L)     {"instruction", "input", "output"}                                                     no times
    answers JSONL      {"L_gt": tokens of the answer, ...}               no times, and no prompts: num_prompt is 0

Plain or gz; the form is told from the content, not from the name. Every fault names its file and line (in a JSON array,
its entry). Rows without a question followed by an answer are left out; lengths of texts are counted as one token per 4
characters, for a trace does not know the tokenizer that it will meet. Models of clients, which are no requests yet, are
read by servegen.py.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

CHARACTERS_PER_TOKEN = 4
MOONCAKE_BLOCK = 512  # tokens that one of its hash ids stands for


class TraceError(ValueError):
    """A trace that cannot be read. The text names file, line, and what was expected."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a trace."""

    at_s: float | None  # since the first request; None where the trace has no times
    num_prompt: int  # 0 where the trace does not say
    num_output: int
    text: str = ""  # the prompt itself, where the trace has it
    prefix_blocks: tuple[int, ...] = ()  # equal leading ids: an equal prefix, of MOONCAKE_BLOCK tokens each
    conversation: int = 0  # whose next question this is, where `before` is not empty
    before: tuple[
        int, ...
    ] = ()  # tokens of what was said in it, asked and answered in turn: with these the prompt begins


def read_trace(path: Path) -> list[Asked]:
    """All requests of a file, in its order; times count from the earliest. Raises TraceError."""
    text = read_text(path)
    found = list(_json_rows(path, text) if text.lstrip()[:1] in ("{", "[") else _csv_rows(path, text))
    if not found:
        raise TraceError(f"{path}: holds no request that could be replayed")
    timed = [asked.at_s for asked in found if asked.at_s is not None]
    start_s = min(timed, default=0.0)
    return [
        Asked(None if a.at_s is None else a.at_s - start_s, a.num_prompt, a.num_output, a.text, a.prefix_blocks)
        for a in found
    ]


def read_text(path: Path) -> str:
    """The text of a file, plain or gz. Raises TraceError."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from error


def read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Every entry of a JSON array or of JSON lines, and where it stands. Raises TraceError."""
    yield from _json_entries(path, read_text(path))


def _tokens(value: Any, name: str, where: str, least: int = 1) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number < least or isinstance(value, bool):
        raise TraceError(f"{where}: {name} is {value!r}, expected a whole number of at least {least}")
    return number


def _csv_rows(path: Path, text: str) -> Iterator[Asked]:
    lines = csv.DictReader(text.splitlines())
    header = set(lines.fieldnames or ())
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= header:
        prompt, output, time = "ContextTokens", "GeneratedTokens", "TIMESTAMP"
    elif {"num_prefill_tokens", "num_decode_tokens"} <= header:
        prompt, output, time = "num_prefill_tokens", "num_decode_tokens", ""
    else:
        raise TraceError(
            f"{path}:1: unknown columns; expected TIMESTAMP,ContextTokens,GeneratedTokens "
            "or num_prefill_tokens,num_decode_tokens"
        )
    for row in lines:
        where = f"{path}:{lines.line_num}"
        at_s = _timestamp(row[time], where) if time else None
        # A row of the Azure trace may have generated nothing; a request always asks for one token.
        yield Asked(at_s, _tokens(row[prompt], prompt, where), max(_tokens(row[output], output, where, least=0), 1))


def _timestamp(value: str | None, where: str) -> float:
    whole, dot, fraction = (value or "").partition(".")
    try:
        # The trace has seven decimals, Python reads six.
        return datetime.fromisoformat(f"{whole}{dot}{fraction[:6]}" if dot else whole).timestamp()
    except ValueError as error:
        raise TraceError(f"{where}: TIMESTAMP is {value!r}, expected 2023-11-16 18:15:46.6805900") from error


def _json_rows(path: Path, text: str) -> Iterator[Asked]:
    for where, entry in _json_entries(path, text):
        if not isinstance(entry, dict):
            raise TraceError(f"{where}: expected an object, found {type(entry).__name__}")
        for key, read in FORMS.items():
            if key in entry:
                asked = read(entry, where)
                break
        else:
            raise TraceError(f"{where}: expected one of {', '.join(FORMS)} among the keys")
        if asked is not None:
            yield asked


def _json_entries(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as error:
            raise TraceError(f"{path}:{error.lineno}: not JSON ({error.msg})") from error
        yield from ((f"{path}: entry {index}", entry) for index, entry in enumerate(entries, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{path}:{number}: not JSON ({error.msg})") from error


def _seconds(value: Any, name: str, per_s: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TraceError(f"{where}: {name} is {value!r}, expected a number")
    return value / per_s


def _mooncake(entry: dict[str, Any], where: str) -> Asked:
    blocks = entry.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
        raise TraceError(f"{where}: hash_ids is no list of whole numbers")
    return Asked(
        _seconds(entry.get("timestamp"), "timestamp", 1e3, where),
        _tokens(entry["input_length"], "input_length", where),
        max(_tokens(entry.get("output_length"), "output_length", where, least=0), 1),
        prefix_blocks=tuple(blocks),
    )


def _token_request(entry: dict[str, Any], where: str) -> Asked:
    return Asked(
        _seconds(entry.get("arrival_time_ns"), "arrival_time_ns", 1e9, where),
        _tokens(entry["input_toks"], "input_toks", where),
        _tokens(entry.get("output_toks"), "output_toks", where),
    )


def _sharegpt(entry: dict[str, Any], where: str) -> Asked | None:
    turns = entry["conversations"]
    if not isinstance(turns, list) or not all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in turns):
        raise TraceError(f"{where}: conversations is no list of turns with a text in `value`")
    for asked, answered in pairwise(turns):
        is_pair = asked.get("from") in ("human", "user") and answered.get("from") in ("gpt", "assistant")
        if is_pair and asked["value"].strip() and answered["value"].strip():
            return Asked(None, _estimate(asked["value"]), _estimate(answered["value"]), asked["value"])
    return None


def _instruction(entry: dict[str, Any], where: str) -> Asked | None:
    parts = [entry["instruction"], entry.get("input", ""), entry.get("output", "")]
    if not all(isinstance(part, str) for part in parts):
        raise TraceError(f"{where}: instruction, input and output must be texts")
    asked, given, answered = parts
    if not asked.strip() or not answered.strip():
        return None
    prompt = f"{asked}\n{given}" if given else asked
    return Asked(None, _estimate(prompt), _estimate(answered), prompt)


def _answer(entry: dict[str, Any], where: str) -> Asked:
    return Asked(None, 0, max(_tokens(entry["L_gt"], "L_gt", where, least=0), 1))


def _estimate(text: str) -> int:
    return max(len(text) // CHARACTERS_PER_TOKEN, 1)


# The key that tells a form from the others, and its reader.
FORMS: dict[str, Callable[[dict[str, Any], str], Asked | None]] = {
    "conversations": _sharegpt,
    "input_length": _mooncake,
    "input_toks": _token_request,
    "instruction": _instruction,
    "L_gt": _answer,
}
