"""One call of a function, read character by character.

    JsonCall     {"name": "add", "arguments": {"a": 1}}       the keys in any order
    NamedCall    add[ARGS]{"a": 1}                            the name bare before its arguments

`feed` tells what each character adds to the arguments; they go out as they come once the name is known (`is_told`).
Until then all that was read is kept (`raw`), since it may turn out to be no call but text.
"""

import json
import re
from collections.abc import Collection
from enum import Enum, auto

ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _At(Enum):
    """Where in a call's object its reader is."""

    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER = auto()
    DONE = auto()
    BROKEN = auto()


class _Value:
    """The raw text of one JSON value, character by character."""

    def __init__(self, first: str) -> None:
        self.first = first
        self._depth = int(first in "{[")
        self._in_string = first == '"'
        self._is_escaped = False

    def takes(self, char: str) -> bool:
        """False where the value, a number or a word, has ended before this character."""
        return not (self.first not in '{["' and char in f",}}]{_SPACE}")

    def ends_with(self, char: str) -> bool:
        """The value goes on by this character. True: it ends with it."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
            return False
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return self.first in "{[" and self._depth == 0


class JsonCall:
    """The object of one call, character by character. `raw`: all of it, until the call is told."""

    def __init__(self, names: Collection[str], before: str) -> None:
        self._names, self._at = names, _At.START
        self.raw = [before]
        self.name: str | None = None
        self.is_told = False
        self._key, self._value, self._text = "", _Value("0"), list[str]()
        self._early: str | None = None  # arguments that came before the name

    @property
    def is_done(self) -> bool:
        return self._at is _At.DONE

    @property
    def is_broken(self) -> bool:
        return self._at is _At.BROKEN

    def feed(self, char: str) -> str:
        """Goes on by a character. Returns what it adds to the arguments."""
        if not self.is_told:
            self.raw.append(char)
        match self._at:
            case _At.VALUE if self._text:
                return self._go_on(char)
            case _ if char in _SPACE and not (self._at is _At.KEY and self._text):
                return ""
            case _At.START:
                self._at = _At.KEY if char == "{" else _At.BROKEN
            case _At.KEY:
                return self._go_on_key(char)
            case _At.COLON:
                self._at = _At.VALUE if char == ":" else _At.BROKEN
            case _At.VALUE:
                return self._begin_value(char)
            case _:
                return self._after(char)
        return ""

    def _go_on_key(self, char: str) -> str:
        if not self._text:
            if char == "}":
                return self._end()
            self._value = _Value(char)
            self._at = _At.KEY if char == '"' else _At.BROKEN
            self._text = [char]
            return ""
        self._text.append(char)
        if self._value.ends_with(char):
            self._key, self._text = _string("".join(self._text)) or "", []
            self._at = _At.COLON
        return ""

    def _begin_value(self, char: str) -> str:
        if char in ",}]:":
            self._at = _At.BROKEN
            return ""
        self._value, self._text = _Value(char), [char]
        if self._streams:
            self.is_told = True
            return char
        return ""

    @property
    def _streams(self) -> bool:
        """Whether this value goes out as it comes."""
        return self._key in ARGUMENT_KEYS and self.name is not None and self._value.first == "{"

    def _go_on(self, char: str) -> str:
        if not self._value.takes(char):
            self._end_value()
            return "" if self.is_broken else self._after(char)
        self._text.append(char)
        streams = self._streams
        if self._value.ends_with(char):
            self._end_value()
        return char if streams else ""

    def _end_value(self) -> None:
        text, streamed = "".join(self._text), self._streams
        self._text, self._at = [], _At.AFTER
        if self._key == "name":
            name = _string(text)
            if name not in self._names or self.is_told:
                self._at = _At.BROKEN
            self.name = name
        elif self._key in ARGUMENT_KEYS and not streamed:
            written = _string(text) if text[0] == '"' else text  # some models write the object into a string
            if written is None or not written.lstrip().startswith("{"):
                self._at = _At.BROKEN
            self._early = written

    def _after(self, char: str) -> str:
        if char == "}":
            return self._end()
        self._at = _At.KEY if char == "," and self._at is _At.AFTER else _At.BROKEN
        return ""

    def _end(self) -> str:
        if self.is_told:
            self._at = _At.DONE
            return ""
        if self.name is None:
            self._at = _At.BROKEN
            return ""
        self._at, self.is_told = _At.DONE, True
        return self._early or "{}"


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


_HEAD = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?\Z")
_MOST_HEAD_CHARS = 256  # a name has 64 at most


class NamedCall:
    """A name, and its arguments behind it. Some models write an id of their own between them: it is passed over."""

    def __init__(self, names: Collection[str], before: str) -> None:
        self._names = names
        self.raw = [before]
        self.name: str | None = None
        self.is_told = self.is_done = self.is_broken = False
        self._head, self._arguments = "", _Value("{")

    def feed(self, char: str) -> str:
        """Goes on by a character. Returns what it adds to the arguments."""
        if self.is_told:
            self.is_done = self._arguments.ends_with(char)
            return char
        self.raw.append(char)
        if char != "{":
            self._head += char
            head = self._head.lstrip()
            begins = any(name.startswith(head) or head.startswith(name) for name in self._names)
            self.is_broken = not begins or len(head) > _MOST_HEAD_CHARS
            return ""
        found = _HEAD.match(self._head)
        self.name = found[1] if found else None
        self.is_told = self.name in self._names
        self.is_broken = not self.is_told
        return char if self.is_told else ""
