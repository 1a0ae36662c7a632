"""The last things that the engine said for an operator: preemptions, leases, broken laws; kept for whoever looks on."""

from collections import deque
from dataclasses import dataclass

from kilburn.controller.core.events import Note

MOST_NOTES = 50


@dataclass(frozen=True, slots=True)
class LoggedNote:
    """A note, and when it was."""

    number: int  # of this process, from 1
    at: float  # on the clock of the loop
    kind: str
    text: str


class Noted:
    """A ring of notes, oldest first."""

    def __init__(self) -> None:
        self._notes: deque[LoggedNote] = deque(maxlen=MOST_NOTES)
        self._number = 0

    def note(self, note: Note, at: float) -> None:
        self._number += 1
        self._notes.append(LoggedNote(self._number, at, note.kind.value, note.text))

    def latest(self) -> tuple[LoggedNote, ...]:
        return tuple(self._notes)
