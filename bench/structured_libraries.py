"""Libraries that make masks of JSON schemas, each tried in the same way: compile, then follow instances token by token.

    llguidance       as this server uses it
    xgrammar         compiled for the vocabulary, free white space off, additional properties as JSON Schema has them
    outlines_core    the schema as a regex, and the regex as an index over the vocabulary

Only those that can be imported are tried; nothing is installed. Each schema is tried in a process of its own, which is
ended when it takes too much of a CPU. Times are a clock's, so look at the medians where others use the machine.
"""

import json
import multiprocessing
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from kilburn.controller.grammar_check import checked
from kilburn.worker.grammars import LIMITS, read_tokenizer

SEPARATORS = (", ", ": ")  # those of json.dumps, in which the instances are written


class Follower(Protocol):
    """Where one answer is in its schema."""

    def mask(self) -> NDArray[np.uint8]:
        """A bit for each token."""

    def follow(self, token: int) -> None: ...

    def may_end(self) -> bool: ...


Compile = Callable[[Any], Callable[[], Follower]]  # of a schema; raises for one that cannot be followed


# --- the libraries


class _OurFollower:
    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher.deep_copy()

    def mask(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint8)

    def follow(self, token: int) -> None:
        self._matcher.consume_token(token)

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())


def ours(tokenizer: LLTokenizer) -> Compile:
    def compiled(schema: Any) -> Callable[[], Follower]:
        verdict = checked({"kind": "json_schema", "schema": schema})
        if "source" not in verdict:
            raise ValueError(verdict["error"])
        matcher = LLMatcher(tokenizer, verdict["source"], log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: _OurFollower(matcher)

    return compiled


def xgrammar(words: list[str], end_id: int) -> Compile:
    import xgrammar as library

    kind = library.VocabType.BYTE_LEVEL
    about = library.TokenizerInfo(words, kind, vocab_size=len(words), stop_token_ids=[end_id])

    class Following:
        def __init__(self, grammar: Any) -> None:
            self._matcher = library.GrammarMatcher(grammar)
            self._bits = np.zeros((1, (len(words) + 31) // 32), np.int32)

        def mask(self) -> NDArray[np.uint8]:
            self._bits[:] = -1  # it is left alone where everything is allowed
            self._matcher.fill_next_token_bitmask(self._bits)
            return self._bits.view(np.uint8)[0]

        def follow(self, token: int) -> None:
            self._matcher.accept_token(token)

        def may_end(self) -> bool:
            return bool(self.mask()[end_id >> 3] >> (end_id & 7) & 1)

    def compiled(schema: Any) -> Callable[[], Follower]:
        compiler = library.GrammarCompiler(about, max_threads=1, cache_enabled=False)
        grammar = compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=SEPARATORS, strict_mode=False
        )
        return lambda: Following(grammar)

    return compiled


def outlines_core(tokens: list[bytes], end_id: int) -> Compile:
    import outlines_core as library
    from outlines_core.json_schema import build_regex_from_schema

    ids: dict[bytes, list[int]] = {}
    for id, token in enumerate(tokens):
        if token and id != end_id:
            ids.setdefault(token, []).append(id)
    vocabulary = library.Vocabulary(end_id, ids)

    class Following:
        def __init__(self, index: Any) -> None:
            self._guide = library.Guide(index)
            self._bits = np.zeros((len(tokens) + 31) // 32, np.int32)

        def mask(self) -> NDArray[np.uint8]:
            self._guide.write_mask_into(self._bits.ctypes.data, len(self._bits), 4)
            return self._bits.view(np.uint8)

        def follow(self, token: int) -> None:
            self._guide.advance(token, return_tokens=False)

        def may_end(self) -> bool:
            return bool(self._guide.is_finished())

    def compiled(schema: Any) -> Callable[[], Follower]:
        index = library.Index(build_regex_from_schema(json.dumps(schema), " ?"), vocabulary)
        return lambda: Following(index)

    return compiled


def library_of(name: str, file: Path, vocab_size: int) -> Compile:
    """`file`: a tokenizer.json. Raises ImportError where the library is not there."""
    tokenizer, end_id = read_tokenizer(file, vocab_size)
    if name == "llguidance":
        return ours(tokenizer)
    about = json.loads(file.read_text(encoding="utf-8"))
    by_id = {id: word for word, id in about["model"]["vocab"].items()}
    by_id |= {token["id"]: token["content"] for token in about["added_tokens"]}
    if name == "xgrammar":
        return xgrammar([by_id.get(id, "") for id in range(vocab_size)], end_id)
    if name == "outlines_core":
        controls = {token["id"] for token in about["added_tokens"] if token["special"]}
        return outlines_core([b"" if id in controls else tokenizer.decode_bytes([id]) for id in by_id], end_id)
    raise ImportError(f"no library {name} is known here")


# --- trying one schema


@dataclass
class Tried:
    """`error`: why it cannot be followed, or that it took too long; empty where it can."""

    error: str = ""
    compile_ms: float = 0.0
    mask_us: list[float] = field(default_factory=list)
    admits: bool = False  # some instance that is valid
    wrong_admitted: int = 0  # instances that are not valid


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


def _admits(one: Follower, tokenizer: LLTokenizer, instance: Any, mask_us: list[float]) -> bool:
    for token in tokenizer.tokenize_str(json.dumps(instance, ensure_ascii=False)):
        began = perf_counter()
        mask = one.mask()
        mask_us.append((perf_counter() - began) * 1e6)
        if not mask[token >> 3] >> (token & 7) & 1:
            return False
        one.follow(token)
    return one.may_end()


def _try(compile: Compile, tokenizer: LLTokenizer, schema: Any, valid: list[Any], wrong: list[Any]) -> Tried:
    began = perf_counter()
    try:
        new = compile(schema)
    except Exception as fault:  # each library has its own kinds
        return Tried(" ".join(str(fault).split()) or type(fault).__name__)
    found = Tried(compile_ms=(perf_counter() - began) * 1e3)

    def is_admitted(instance: Any) -> bool:
        ways = (instance, ordered(instance, schema))
        return any(_admits(new(), tokenizer, way, found.mask_us) for way in ways)

    found.admits = any(is_admitted(instance) for instance in valid)
    found.wrong_admitted = sum(is_admitted(instance) for instance in wrong)
    return found


def tried(
    compile: Compile, tokenizer: LLTokenizer, schema: Any, valid: list[Any], wrong: list[Any], seconds: int
) -> Tried:
    """In a process of its own, which starts with what is loaded here."""
    forked = multiprocessing.get_context("fork")
    hears, says = forked.Pipe(duplex=False)

    def work(says: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        says.send(_try(compile, tokenizer, schema, valid, wrong))

    process = forked.Process(target=work, args=(says,))
    process.start()
    says.close()
    try:
        found = hears.recv()
    except EOFError:
        found = None
    process.join()
    hears.close()
    if found is None:
        is_late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        return Tried(f"takes more than {seconds} s" if is_late else "its process died")
    return found
