"""What a chat's answer says, cut at what it means: words for the user, and calls of tools.

    text, as it comes --Reader--> Said("Let me see. ") CallBegun("call_1", "weather") CallMore('{"city": "Oslo"}')

A call goes on until another piece than CallMore comes, or the answer ends. Layouts are written for pieces, or for the
items that `Items` makes of them; how a model writes a call is known to the reader of its kind.
"""

from dataclasses import dataclass
from typing import Protocol

from kilburn.shared.types import LawBroken


@dataclass(frozen=True, slots=True)
class Said:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallMore:
    """The next characters of the call's arguments, a JSON object."""

    arguments: str


Piece = Said | CallBegun | CallMore


class Reader(Protocol):
    """Of one choice's text."""

    def feed(self, text: str, is_last: bool) -> list[Piece]:
        """What more is known. All of a text at once says the same as any cutting of it."""
        ...


class PlainReader:
    """Where no tools are offered nothing is a call."""

    def feed(self, text: str, is_last: bool) -> list[Piece]:
        return [Said(text)] if text else []


# --- pieces put together


@dataclass(slots=True)
class Item:
    """A stretch of an answer that is one thing: words, or one call. `text`: the words, or the call's arguments."""

    index: int
    call: CallBegun | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    item: Item


@dataclass(frozen=True, slots=True)
class More:
    item: Item
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    item: Item


Step = Begun | More | Ended


class Items:
    """One choice's answer as items, each of which is over before the next begins."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._open: Item | None = None
        self.all: list[Item] = []

    @property
    def has_calls(self) -> bool:
        return any(item.call is not None for item in self.all)

    def feed(self, text: str, is_last: bool) -> list[Step]:
        """What happens to the items as the text goes on. An answer has at least one, if of no words."""
        steps: list[Step] = []
        for piece in self._reader.feed(text, is_last):
            match piece:
                case Said(text=words):
                    if self._open is None or self._open.call is not None:
                        self._begin(None, steps)
                    self._more(words, steps)
                case CallBegun():
                    self._begin(piece, steps)
                case CallMore(arguments=arguments):
                    self._more(arguments, steps)
        if is_last:
            if not self.all:
                self._begin(None, steps)
            self._end(steps)
        return steps

    def _begin(self, call: CallBegun | None, steps: list[Step]) -> None:
        self._end(steps)
        self._open = Item(len(self.all), call)
        self.all.append(self._open)
        steps.append(Begun(self._open))

    def _more(self, text: str, steps: list[Step]) -> None:
        if self._open is None:
            raise LawBroken("arguments of no call")
        self._open.text += text
        steps.append(More(self._open, text))

    def _end(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(Ended(self._open))
        self._open = None
