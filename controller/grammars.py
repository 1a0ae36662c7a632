"""The door for grammars: what a request asks its answer to look like is tried before it is taken.

    Wanted --key known?--> its verdict
             '--------> a child process (grammar_check.py) compiles it --> Grammar, or what is wrong with it
                         beyond its time or memory: it is killed, and the next one gets a new child

A child works on one grammar at a time, and a few of them side by side, so that one that takes long holds up only some.
Verdicts are kept, bounded in bytes, the least recently used go first: so the same schema sent a thousand times is
compiled once here, and a hundred thousand different ones take no more memory than a few.
What this file does not know: HTTP, and how grammars are written.
"""

import asyncio
import contextlib
import json
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from kilburn.shared.grammar import MOST_SOURCE_BYTES, Grammar

CHILD_BYTES = 1 << 30  # of addresses, of which a child that does nothing has a third
MOST_LINE_BYTES = 4 * MOST_SOURCE_BYTES
ENTRY_BYTES = 400  # of a verdict, beside its text


class GrammarRefused(Exception):
    """It cannot be had, or not within the bounds. Says why, for the client's eyes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer is to look like. `where`: the field of the request; `asked`: as grammar_check.py reads it."""

    where: str
    asked: dict[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Bounds:
    most_bytes: int = 64 << 10  # of what is asked, as JSON
    most_depth: int = 64  # of lists and objects in it
    seconds: float = 2.0  # to compile it
    cache_bytes: int = 8 << 20
    num_children: int = 2


@dataclass(slots=True)
class _Verdict:
    grammar: Grammar | None
    error: str = ""

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.error) + (0 if self.grammar is None else len(self.grammar.source))


class _Child:
    """One process, started when it is first needed."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, asked: str, seconds: float) -> dict[str, str]:
        """Raises GrammarRefused. However this ends, the child is ready for the next, or gone."""
        is_done = False
        try:
            process = await self._started()
            if process.stdin is None or process.stdout is None:
                raise GrammarRefused("it could not be tried")
            process.stdin.write(asked.encode() + b"\n")
            async with asyncio.timeout(seconds):
                await process.stdin.drain()
                line = await process.stdout.readline()
            if not line:
                raise GrammarRefused("it takes too much memory to compile; make it simpler")
            found: dict[str, str] = json.loads(line)
            is_done = True
            return found
        except TimeoutError:  # perhaps since this machine is busy: not kept, as no other loss of a child is
            raise GrammarRefused(f"it takes more than {seconds:g} s to compile; make it simpler") from None
        except (ConnectionError, ValueError):
            raise GrammarRefused("it could not be compiled; make it simpler") from None
        finally:
            if not is_done:
                self.kill()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kilburn.controller.grammar_check", str(CHILD_BYTES)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=MOST_LINE_BYTES,
            )
            # The first word tells that it is there: starting is nobody's grammar's fault.
            await self._process.stdout.readline()  # type: ignore[union-attr]
        return self._process

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def close(self) -> None:
        process = self._process
        self.kill()
        if process is not None:
            await process.wait()


class GrammarDoor:
    """See the file's head."""

    def __init__(self, bounds: Bounds = Bounds()) -> None:
        self.bounds = bounds
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self.cached_bytes = 0
        self._free: asyncio.Queue[_Child] = asyncio.Queue()
        self.children = [_Child() for _ in range(bounds.num_children)]
        for child in self.children:
            self._free.put_nowait(child)

    async def grammar(self, wanted: Wanted) -> Grammar:
        """Raises GrammarRefused."""
        asked = self._written(wanted)
        key = sha256(asked.encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._tried(asked)
            self._keep(key, verdict)
        else:
            self._verdicts.move_to_end(key)
        if verdict.grammar is None:
            raise GrammarRefused(verdict.error)
        return verdict.grammar

    def _written(self, wanted: Wanted) -> str:
        if _is_deeper(wanted.asked, self.bounds.most_depth + 2):  # what was asked lies in an object, and a list
            raise GrammarRefused(f"it is nested more than {self.bounds.most_depth} deep (--max-schema-depth)")
        asked = json.dumps(wanted.asked, ensure_ascii=False)
        if len(asked.encode()) > self.bounds.most_bytes:
            raise GrammarRefused(f"it has more than {self.bounds.most_bytes} bytes (--max-schema)")
        return asked

    async def _tried(self, asked: str) -> _Verdict:
        child = await self._free.get()
        try:
            found = await child.ask(asked, self.bounds.seconds)
        finally:
            self._free.put_nowait(child)
        source = found.get("source")
        if source is None:
            return _Verdict(None, found.get("error", "it cannot be had"))
        if len(source) > MOST_SOURCE_BYTES:
            return _Verdict(None, "it becomes too long; make it simpler")
        return _Verdict(Grammar.of(source))

    def _keep(self, key: bytes, verdict: _Verdict) -> None:
        if key not in self._verdicts:
            self._verdicts[key] = verdict
            self.cached_bytes += verdict.num_bytes
        while self.cached_bytes > self.bounds.cache_bytes:
            _, oldest = self._verdicts.popitem(last=False)
            self.cached_bytes -= oldest.num_bytes

    async def close(self) -> None:
        for child in self.children:
            await child.close()


def _is_deeper(value: Any, most_depth: int) -> bool:
    """Whether lists and objects are nested deeper than that."""
    layer = [value]
    for _ in range(most_depth):
        layer = [part for whole in layer for part in _parts(whole)]
        if not layer:
            return False
    return any(isinstance(value, dict | list) for value in layer)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
