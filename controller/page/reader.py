"""The feed from the other end: a whole, and changes applied to it. What the page does in JavaScript, for the terminal.

Raises FeedBroken where an event does not fit what went before; whoever reads then connects anew and is sent a whole.
"""

from base64 import b64decode
from struct import unpack
from typing import Any

Key = tuple[int, int]


class FeedBroken(Exception):
    """The events do not add up."""


class Reader:
    """What is known after the events so far. `latest` is the last event's own figures."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        self.columns: list[str] = []
        self.cells: dict[int, bytearray] = {}  # by lease
        self.host_cells: dict[int, bytearray] = {}
        self.requests: dict[int, dict[str, Any]] = {}
        self.tables: dict[Key, tuple[int, int, list[int]]] = {}  # lease, tier, blocks
        self.notes: list[dict[str, Any]] = []

    def apply(self, event: dict[str, Any]) -> None:
        """Raises FeedBroken."""
        try:
            if event["whole"]:
                self.__init__()  # type: ignore[misc]
                self.columns = event["columns"]
            elif event["number"] != self.latest.get("number", -1) + 1:
                raise FeedBroken(f"event {event['number']} came after {self.latest.get('number')}")
            self._apply(event)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise FeedBroken(f"an event of this feed makes no sense ({type(error).__name__})") from error
        self.latest = event

    def _apply(self, event: dict[str, Any]) -> None:
        self.cells = {w["lease"]: _cells(self.cells, w, "cells", "runs") for w in event["workers"]}
        self.host_cells = {w["lease"]: _cells(self.host_cells, w, "host_cells", "host_runs") for w in event["workers"]}
        for id in event["ended"]:
            del self.requests[id]
        for row in event["requests"]:
            self.requests[row[0]] = dict(zip(self.columns, row, strict=True))
        for request, sequence, lease, tier, num_kept, packed in event["tables"]:
            key = (request, sequence)
            if lease == 0:
                self.tables.pop(key, None)
                continue
            kept = self.tables[key][2][:num_kept] if num_kept else []
            data = b64decode(packed)
            self.tables[key] = (lease, tier, [*kept, *unpack(f"<{len(data) // 4}i", data)])
        for note in self.notes:
            note["ago_s"] += event["at"] - self.latest.get("at", event["at"])
        self.notes = [*self.notes, *event["notes"]][-50:]

    def owners(self, lease: int, tier: int, block: int) -> list[int]:
        """The requests whose tables hold a block."""
        here = (lease, tier)
        return sorted({key[0] for key, (*at, blocks) in self.tables.items() if tuple(at) == here and block in blocks})


def _cells(known: dict[int, bytearray], worker: dict[str, Any], full: str, runs: str) -> bytearray:
    if full in worker:
        return bytearray(b64decode(worker[full]))
    cells = known[worker["lease"]]
    for first, packed in worker[runs]:
        data = b64decode(packed)
        cells[first : first + len(data)] = data
    return cells
