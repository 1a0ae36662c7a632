"""One moment of the server as an onlooker is sent it: whole the first time, then only what changed.

    look --> Picture --+--> whole(picture)            everything; whoever has missed something is sent this
    look --> Picture --+--> change(before, picture)   cells in runs, rows that differ, tables from where they differ

Both are one JSON object with the same fields. What can be long is packed: cells (block_map.py) as base64 of a byte for
each block, tables as base64 of little-endian int32. Applying every change in order to a whole gives the same as the
next whole would: reader.py and page/feed.js do that, and tests compare them with the engine. Numbers only: request
ids, counts and block numbers, never text or keys.
"""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from struct import pack
from typing import Any

from kilburn.controller.core.block_map import BlockMap, RequestRow, Tables, WorkerMap
from kilburn.controller.core.prefixes import common_run
from kilburn.controller.core.snapshot import GroupSnapshot
from kilburn.controller.noted import LoggedNote

STRETCH = 64  # blocks that are compared, and sent, together
COLUMNS = RequestRow._fields


@dataclass(frozen=True, slots=True)
class Totals:
    """Counted since the start by whoever hands out text."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Over the last seconds. None: not known yet."""

    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    hit_rate: float | None = None  # of the prompts that began


@dataclass(frozen=True, slots=True)
class Picture:
    model: str
    at: float  # on the engine's clock
    map: BlockMap
    totals: Totals
    rates: Rates
    notes: tuple[LoggedNote, ...]  # the last ones, oldest first
    trouble: str = ""  # why no tokens can be produced now, as /health says it

    def shows_the_same(self, other: "Picture") -> bool:
        """Whether only time has passed."""
        ours, theirs = self.map, other.map
        return (
            _without_time(self) == _without_time(other)
            and [(w.device, w.host) for w in ours.workers] == [(w.device, w.host) for w in theirs.workers]
            and (ours.requests, ours.tables) == (theirs.requests, theirs.tables)
        )


def _without_time(picture: Picture) -> list[object]:
    """The figures of an event, and its notes, save those that only say how late it is."""
    figures = [_worker(group, picture.at) | {"heard_s": 0, "beats": 0} for group in picture.map.snapshot.groups]
    return [figures, _always(picture, 0) | {"at": 0}, picture.notes]


def whole(picture: Picture, number: int) -> dict[str, Any]:
    """All of it. `number` counts the events of a feed."""
    found = picture.map
    return {
        "whole": True,
        "columns": COLUMNS,
        **_always(picture, number),
        "workers": [
            _worker(group, picture.at) | {"cells": _packed(worker.device), "host_cells": _packed(worker.host)}
            for group, worker in zip(found.snapshot.groups, found.workers, strict=True)
        ],
        "requests": found.requests,
        "ended": [],
        "tables": [_table(key, entry, 0) for key, entry in found.tables.items()],
        "notes": [_note(note, picture.at) for note in picture.notes],
    }


def change(before: Picture, picture: Picture, number: int) -> dict[str, Any]:
    """What makes `before` into `picture`."""
    found, old = picture.map, before.map
    rows = {row.id: row for row in old.requests}
    present = {row.id for row in found.requests}
    old_workers = {worker.lease: worker for worker in old.workers}
    last_note = before.notes[-1].number if before.notes else 0
    return {
        "whole": False,
        **_always(picture, number),
        "workers": [
            _worker(group, picture.at) | _cells(old_workers.get(worker.lease), worker)
            for group, worker in zip(found.snapshot.groups, found.workers, strict=True)
        ],
        "requests": [row for row in found.requests if rows.get(row.id) != row],
        "ended": [id for id in rows if id not in present],
        "tables": list(_changed_tables(old.tables, found.tables)),
        "notes": [_note(note, picture.at) for note in picture.notes if note.number > last_note],
    }


def _always(picture: Picture, number: int) -> dict[str, Any]:
    snapshot = picture.map.snapshot
    return {
        "number": number,
        "at": round(picture.at, 3),
        "model": picture.model,
        "trouble": picture.trouble,
        "leases_began": snapshot.leases_began,
        "leases_ended": snapshot.leases_ended,
        "laws_broken": snapshot.laws_broken,
        "homeless": snapshot.homeless_requests,
        "totals": asdict(picture.totals),
        "rates": asdict(picture.rates),
    }


def _worker(group: GroupSnapshot, now: float) -> dict[str, Any]:
    return {
        "name": group.name,
        "lease": group.lease,
        "ranks": group.ranks,
        "state": "leaving" if group.is_leaving else group.state.value,
        "heard_s": round(max(now - group.heard_at, 0.0), 2),
        "beats": group.beats_heard,
        "steps": group.steps,
        "flights": group.flights,
        "block_size": group.block_size,
        "bytes_per_block": group.bytes_per_block,
        "running": group.running_requests,
        "waiting": group.waiting_requests,
        "swapped": group.swapped_requests,
        "sequences": group.running_sequences,
        "filled_slots": group.filled_slots,
        "owned_slots": group.owned_slots,
        "shared_refs": group.shared_refs,
        "pinned_blocks": group.pinned_blocks,
        "preempted_by_recompute": group.preempted_by_recompute,
        "preempted_by_swap": group.preempted_by_swap,
        "evictions": group.evictions,
        "num_blocks": group.num_blocks,
        "num_host_blocks": group.num_host_blocks,
    }


def _note(note: LoggedNote, now: float) -> dict[str, Any]:
    return {"number": note.number, "ago_s": round(max(now - note.at, 0.0), 1), "kind": note.kind, "text": note.text}


# --- what is packed


def _packed(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _cells(old: WorkerMap | None, worker: WorkerMap) -> dict[str, Any]:
    if old is None:  # a lease that has just begun
        return {"cells": _packed(worker.device), "host_cells": _packed(worker.host)}
    return {"runs": _runs(old.device, worker.device), "host_runs": _runs(old.host, worker.host)}


def _runs(before: bytes, after: bytes) -> list[tuple[int, str]]:
    """[first block, cells] of each stretch that changed, neighbours joined."""
    if before == after:
        return []
    starts = range(0, len(after), STRETCH)
    changed = [at for at in starts if before[at : at + STRETCH] != after[at : at + STRETCH]]
    runs: list[tuple[int, str]] = []
    first = end = -1
    for at in changed:
        if at != end:
            if end >= 0:
                runs.append((first, _packed(after[first:end])))
            first = at
        end = at + STRETCH
    return [*runs, (first, _packed(after[first:end]))]


def _table(key: tuple[int, int], entry: tuple[int, Any, Sequence[int]], num_kept: int) -> list[Any]:
    """[request, sequence, lease, tier, how many leading blocks stay as they were, the blocks after them]."""
    lease, tier, blocks = entry
    return [*key, lease, tier.value, num_kept, _packed(pack(f"<{len(blocks) - num_kept}i", *blocks[num_kept:]))]


def _changed_tables(old: Tables, new: Tables) -> Iterator[list[Any]]:
    for key, entry in new.items():
        before = old.get(key)
        if before == entry:
            continue
        num_kept = 0 if before is None or before[:2] != entry[:2] else common_run(before[2], entry[2])
        yield _table(key, entry, num_kept)
    for key in old:
        if key not in new:
            yield [*key, 0, 0, 0, ""]  # it holds nothing any more
