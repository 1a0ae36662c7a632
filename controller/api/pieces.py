"""What a chat's answer says, cut at what it means: words for the user, and calls of tools.

    text, as it comes --Reader--> Said("Let me see. ") CallBegun("call_1", "weather") CallMore('{"city": "Oslo"}')

A call goes on until another piece than CallMore comes, or the answer ends. Layouts are written for pieces; how a model
writes a call is known to the reader of its kind.
"""

from dataclasses import dataclass
from typing import Protocol


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
