"""What a chat's answer says, cut at what it means: items, each of them words or the call of a function.

    text, as it comes --calls/reading.py--> Said, Called, Argued --Items--> Begun(item) More(item, text) ... Ended(item)

An item is over before the next begins. Layouts whose answers are lists of such things are written for these steps.
"""

from dataclasses import dataclass

from kilburn.controller.calls.reading import Argued, Called, CallReader, News, Said
from kilburn.shared.types import LawBroken


@dataclass(slots=True)
class Item:
    """`text`: the words, or the arguments of the call as JSON."""

    index: int
    call: Called | None
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
    """One choice's answer. Without a reader nothing in it is a call."""

    def __init__(self, reader: CallReader | None) -> None:
        self._reader = reader
        self._open: Item | None = None
        self.all: list[Item] = []

    @property
    def has_calls(self) -> bool:
        return any(item.call is not None for item in self.all)

    def feed(self, text: str, is_last: bool) -> list[Step]:
        """What happens to the items as the text goes on. An answer has at least one, if of no words."""
        steps: list[Step] = []
        for news in self._read(text, is_last):
            match news:
                case Said(text=words):
                    if self._open is None or self._open.call is not None:
                        self._begin(None, steps)
                    self._more(words, steps)
                case Called():
                    self._begin(news, steps)
                case Argued(text=arguments):
                    self._more(arguments, steps)
        if is_last:
            if not self.all:
                self._begin(None, steps)
            self._end(steps)
        return steps

    def _read(self, text: str, is_last: bool) -> list[News]:
        if self._reader is None:
            return [Said(text)] if text else []
        return self._reader.feed(text) + (self._reader.end() if is_last else [])

    def _begin(self, call: Called | None, steps: list[Step]) -> None:
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
