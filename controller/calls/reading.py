"""Reads the calls of functions in an answer while it grows.

    feed("Let me see.\\n<tool_ca")            Said("Let me see.")
    feed('ll>{"name": "add", "argu')         -
    feed('ments": {"a": 1')                  Called(0, "call_...", "add")  Argued(0, '{"a": 1')
    feed('}}</tool_call>')                   Argued(0, '}')

However the text is cut, what comes out is the same when joined: a piece leaves only when nothing that may follow can
change what it is. What looks like a call and is none (no JSON, or no function of that name) is text, letter by letter.
White space between text and a call belongs to neither.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from kilburn.controller.calls.call import JsonCall, NamedCall
from kilburn.controller.calls.forms import Form


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call begins. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """The arguments of a call go on, as JSON in text."""

    index: int
    text: str


News = Said | Called | Argued


class _Mode(Enum):
    START = auto()  # a form whose answers are calls or text: which is it?
    TEXT = auto()
    LIST = auto()  # of calls: its bracket is due
    CALL = auto()
    AFTER = auto()  # a call: its end, or the next one
    PLAIN = auto()  # text to its end


class CallReader:
    """One answer. See the file's head."""

    def __init__(self, form: Form, names: Collection[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self._mode = _Mode.START if form.is_whole else _Mode.TEXT
        self._held = ""  # not yet decided
        self._marker = ""  # what the last call, or list of them, began with
        self._call: JsonCall | NamedCall | None = None
        self._news: list[News] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[News]:
        """What this piece of the answer makes certain."""
        self._held += text
        while self._held and self._step():
            pass
        return self._taken()

    def end(self) -> list[News]:
        """The answer is over: what was held is what it looks like."""
        call = self._call
        if self._mode is _Mode.CALL and call is not None and not call.is_told:
            self._say("".join(call.raw))
        elif self._mode is _Mode.LIST:
            self._say(self._marker)
        held = self._held
        is_nothing = self.num_calls and (not held.strip() or self._form.end.startswith(held.strip()))
        if not is_nothing:
            self._say(held)
        self._held, self._mode = "", _Mode.PLAIN
        return self._taken()

    def _taken(self) -> list[News]:
        news, self._news = self._news, []
        return news

    def _say(self, text: str) -> None:
        if text:
            self._news.append(Said(text))

    def _step(self) -> bool:
        """Decide what can be decided of what is held. False: more must come."""
        match self._mode:
            case _Mode.START:
                return self._begin()
            case _Mode.TEXT:
                return self._read_text()
            case _Mode.LIST:
                return self._open_list()
            case _Mode.CALL:
                return self._read_call()
            case _Mode.AFTER:
                return self._after_call()
            case _Mode.PLAIN:
                self._say(self._held)
                self._held = ""
                return False

    def _expect_call(self, before: str) -> None:
        kind = NamedCall if self._form.bare else JsonCall
        self._mode, self._call = _Mode.CALL, kind(self._names, before)

    def _begin(self) -> bool:
        optional, seen = self._form.optional, self._held.lstrip()
        if not seen or (optional.startswith(seen) and seen != optional):
            return False
        num_spaces = len(self._held) - len(seen)
        if seen.startswith(optional):
            num_spaces += len(optional)
        elif seen[0] != "{":
            self._mode = _Mode.PLAIN
            return True
        before, self._held = self._held[:num_spaces], self._held[num_spaces:]
        self._expect_call(before)
        return True

    def _read_text(self) -> bool:
        begin, held = self._form.begin, self._held
        at = held.find(begin)
        if at >= 0:
            text = held[:at].rstrip()
            self._say(text)
            self._marker = held[len(text) : at + len(begin)]
            self._held = held[at + len(begin) :]
            if self._form.is_list:
                self._mode = _Mode.LIST
            else:
                self._expect_call(self._marker)
            return True
        most = min(len(begin) - 1, len(held))
        partial = next((length for length in range(most, 0, -1) if held.endswith(begin[:length])), 0)
        certain = held[: len(held) - partial].rstrip()
        self._say(certain)
        self._held = held[len(certain) :]
        return False

    def _open_list(self) -> bool:
        seen = self._held.lstrip()
        if not seen:
            return False
        if seen[0] == "[":
            opened = self._held[: len(self._held) - len(seen) + 1]
            self._held = seen[1:]
            self._expect_call(self._marker + opened)
        else:
            self._say(self._marker)
            self._mode = _Mode.TEXT
        return True

    def _read_call(self) -> bool:
        call = self._call
        if call is None:
            return False
        argued: list[str] = []
        num_read, was_told = 0, call.is_told
        for char in self._held:
            num_read += 1
            argued.append(call.feed(char))
            if call.is_done or call.is_broken:
                break
        self._held = self._held[num_read:]
        if call.is_told:
            if not was_told:
                self._news.append(Called(self.num_calls, self._form.new_id(), call.name or ""))
                self.num_calls += 1
            if text := "".join(argued):
                self._news.append(Argued(self.num_calls - 1, text))
        if call.is_done:
            self._mode = _Mode.AFTER
        elif call.is_broken:
            if not call.is_told:
                self._say("".join(call.raw))
            self._mode = _Mode.PLAIN if self._form.is_whole else _Mode.TEXT
        return True

    def _after_call(self) -> bool:
        form, seen = self._form, self._held.lstrip()
        if not seen:
            return False
        if form.is_list or form.is_whole:
            separator = form.between.strip()
            if seen[0] == separator or (form.is_whole and seen[0] == "{"):
                self._held = seen[1:] if seen[0] == separator else seen
                self._expect_call(form.between if seen[0] == separator else "")
            else:
                self._held = seen[1:] if seen[0] == "]" and form.is_list else self._held
                self._mode = _Mode.TEXT if form.is_list else _Mode.PLAIN
            return True
        if form.end.startswith(seen) and seen != form.end:
            return False
        if seen.startswith(form.end):
            self._held = seen[len(form.end) :]
        self._mode = _Mode.TEXT
        return True
