"""`kilburn top`: the block map of a running server in a terminal, or once as plain text.

    GET /map/events --> Reader --> lines of text --> the terminal, drawn anew with each event; or, with --once, stdout

A pool of many blocks is drawn with one character for several of them: what most of them are, and how many tables share
them. Where the output is no terminal there are no colours, and states are told by their characters alone.
"""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kilburn.controller.core.block_map import CELL_PINNED
from kilburn.controller.core.block_pool import CELL_CACHED, CELL_QUARANTINED
from kilburn.controller.page.reader import FeedBroken, Reader
from kilburn.shared.config import TopSettings
from kilburn.shared.keys import SettingError

MAP_ROWS = 8  # of characters, for each pool
AGAIN_S = 1.0
ONCE_EVENTS = 3  # a whole, and what rates need
MOST_EVENT_BYTES = 256 << 20
# (character, style) by state; owned blocks by how many tables share them
MARKS = {
    "free": ("·", "bright_black"),
    "cached": ("░", "blue"),
    "owned": ("▒", "yellow"),
    "shared": ("▓", "bold yellow"),
    "pinned": ("█", "cyan"),
    "quarantined": ("X", "bold magenta"),
}


class TopFailed(Exception):
    """Why there is nothing to show, in words for the user."""


def state_of(cell: int) -> str:
    """What a cell of the block map means (core/block_map.py)."""
    if cell & CELL_PINNED:
        return "pinned"
    match cell:
        case 0:
            return "free"
        case _ if cell == CELL_CACHED:
            return "cached"
        case _ if cell == CELL_QUARANTINED:
            return "quarantined"
        case 1:
            return "owned"
    return "shared"


STATES = [state_of(cell) for cell in range(256)]


# --- reading


def read_key(file: str) -> str:
    if not file:
        return ""
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--key-file: {file} cannot be read ({type(error).__name__})") from error
    if len(lines) != 1:
        raise SettingError(f"--key-file: {file} must hold one API key and nothing else")
    return lines[0]


async def feed_events(url: str, key: str) -> AsyncGenerator[dict[str, Any]]:
    """The events of a server. Raises TopFailed where it will not say any, ends where the connection does."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)
    where = url.rstrip("/") + "/map/events"
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(where, headers=headers) as response:
        if response.status != 200:
            raise TopFailed(_refusal(response.status, await response.text(), bool(key)))
        data = b""
        async for piece in response.content.iter_any():
            *lines, data = (data + piece).split(b"\n\n")
            if len(data) > MOST_EVENT_BYTES:
                raise FeedBroken("an event without an end")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])


def _refusal(status: int, body: str, has_key: bool) -> str:
    match status:
        case 401:
            return "the key was not accepted" if has_key else "the server wants an admin's API key: give --key-file"
        case 403:
            return "this key may ask the model, but not look on: give the key of an admin (TENANT:KEY:admin)"
        case 404:
            return "there is no block map at this address: is it a Kilburn controller, and of this version?"
    with suppress(ValueError, KeyError, TypeError):
        return f"the server answered {status}: {json.loads(body)['error']['message']}"
    return f"the server answered {status}"


# --- drawing


def pool_lines(cells: bytes, width: int) -> list[Text]:
    """A pool as rows of characters, each for as many blocks as it must."""
    if not cells:
        return []
    per = -(-len(cells) // (width * MAP_ROWS))
    marks = [MARKS[_most(cells[at : at + per])] for at in range(0, len(cells), per)]
    rows = []
    for at in range(0, len(marks), width):
        row = Text(no_wrap=True)
        for mark, style in marks[at : at + width]:
            row.append(mark, style)
        rows.append(row)
    if per > 1:
        rows.append(Text(f"one character is {per} blocks: what most of those in use are", "bright_black"))
    return rows


def _most(cells: bytes) -> str:
    """What stands for several blocks: of those that are not free what is most frequent, if it is an eighth of all."""
    counts = Counter([STATES[cell] for cell in cells])
    num_free = counts.pop("free", 0)
    if not counts or 8 * counts.total() < num_free:
        return "free"
    return max(counts, key=lambda state: counts[state])


def pool_counts(cells: bytes) -> Text:
    counts = Counter([STATES[cell] for cell in cells])
    line = Text()
    for state, (mark, style) in MARKS.items():
        if counts[state] or state in ("free", "cached", "owned"):
            line.append(f"{mark} ", style)
            line.append(f"{state} {counts[state]:,}   ")
    return line


def picture(reader: Reader, width: int, most_rows: int) -> RenderableType:
    """All of it. `most_rows`: requests and notes that there is room for."""
    parts: list[RenderableType] = [headline(reader.latest)]
    for worker in reader.latest["workers"]:
        parts += [Text(), worker_line(worker)]
        for tier, cells in (("device", reader.cells), ("host", reader.host_cells)):
            pool = bytes(cells[worker["lease"]])
            if pool:
                parts.append(Text(f"{tier}, {len(pool):,} blocks of {worker['block_size']} tokens", "bold"))
                parts += [*pool_lines(pool, width), pool_counts(pool)]
    if not reader.latest["workers"]:
        parts.append(Text("no worker is here", "bold red"))
    parts += [Text(), request_table(reader, most_rows)]
    notes = list(note_lines(reader, most_rows))
    return Group(*parts, *([Text(), *notes] if notes else []))


def headline(event: dict[str, Any]) -> Text:
    totals, rates, workers = event["totals"], event["rates"], event["workers"]
    hits = totals["cached_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else 0.0
    waiting = event["homeless"] + sum(worker["waiting"] for worker in workers)
    filled, owned = (sum(worker[name] for worker in workers) for name in ("filled_slots", "owned_slots"))
    line = Text(f"{event['model']}  ", "bold")
    line.append(event["trouble"] or "ready", "bold red" if event["trouble"] else "green")
    line.append(
        f"\n{_rate(rates['output_tokens_per_s'])} tokens/s, {_rate(rates['prompt_tokens_per_s'])} prompt tokens/s;"
        f" {sum(worker['running'] for worker in workers)} running, {waiting} waiting;"
        f" prefix hits {hits:.0%}; slots filled {filled / owned if owned else 0.0:.0%}",
        "not bold",
    )
    return line


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def worker_line(worker: dict[str, Any]) -> Text:
    line = Text(f"{worker['name']}  ", "bold")
    ranks = f" of {worker['ranks']} ranks" if worker["ranks"] > 1 else ""
    line.append(worker["state"], "green" if worker["state"] == "ready" else "bold red")
    line.append(
        f"  lease {worker['lease']}{ranks}, heard {worker['heard_s']:.1f} s ago, {worker['beats']:,} beats,"
        f" {worker['steps']:,} steps; preempted {worker['preempted_by_swap']} by swap,"
        f" {worker['preempted_by_recompute']} by recompute",
        "not bold",
    )
    return line


def request_table(reader: Reader, most_rows: int) -> RenderableType:
    rows = sorted(reader.requests.values(), key=_in_line)
    if not rows:
        return Text("no requests", "bright_black")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("request")
    table.add_column("state")
    for name in ("prompt", "generated", "blocks", "cached", "preempted"):
        table.add_column(name, justify="right")
    table.add_column("waits for")
    for row in rows[:most_rows]:
        blocks = f"{row['host_blocks']} on host" if row["host_blocks"] else str(row["blocks"])
        numbers = (row["prompt_tokens"], row["generated_tokens"], blocks, row["cached_tokens"], row["preemptions"])
        name = f"{row['id']}" if row["kind"] == "request" else f"prefix {row['id']}"
        table.add_row(name, row["state"], *map(str, numbers), row["wait"])
    more = len(rows) - most_rows
    return Group(table, Text(f"and {more} more", "bright_black")) if more > 0 else table


def _in_line(row: dict[str, Any]) -> tuple[float, ...]:
    """Who runs, by place; who waits, by turn: first those that ran before; named prefixes last."""
    match row["state"]:
        case "running":
            return 0, row["priority"], row["arrival"]
        case "pinned":
            return 3, 0, row["arrival"]
    return 1 if row["has_started"] else 2, row["turn"], row["arrival"]


def note_lines(reader: Reader, most_rows: int) -> Iterator[Text]:
    for note in reversed(reader.notes[-most_rows:]):
        line = Text(f"{note['ago_s']:7.0f} s ago  ", "bright_black", no_wrap=True, overflow="ellipsis")
        line.append(f"{note['kind']}: ", "bold not dim default")
        yield line.append(note["text"], "default")


# --- running


async def show_once(settings: TopSettings, key: str, console: Console) -> None:
    """What there is, as text, after so many events as rates need."""
    reader, number = Reader(), 0
    async with aclosing(feed_events(settings.url, key)) as events:
        async for event in events:
            reader.apply(event)
            number += 1
            if number == ONCE_EVENTS:
                break
    if not reader.latest:
        raise TopFailed("the server said nothing")
    console.print(picture(reader, min(console.width, 100), 20))


async def show_on(settings: TopSettings, key: str, console: Console) -> None:
    """Until interrupted. A server that goes away is looked for again."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            reader = Reader()
            with suppress(aiohttp.ClientError, TimeoutError, FeedBroken, json.JSONDecodeError):
                async for event in feed_events(settings.url, key):
                    reader.apply(event)
                    live.update(picture(reader, console.width, max(console.height // 4, 3)), refresh=True)
            live.update(Text(f"no connection to {settings.url}; trying again"), refresh=True)
            await asyncio.sleep(AGAIN_S)


def run_top(settings: TopSettings) -> int:
    """Exit status: 0 well, 1 where the server cannot be reached or will not show it."""
    if urlsplit(settings.url).scheme not in ("http", "https") or not urlsplit(settings.url).netloc:
        raise SettingError(f"--url: {settings.url!r} is no address; give one such as http://127.0.0.1:8000")
    key, is_terminal = read_key(settings.key_file), sys.stdout.isatty()
    width = None if is_terminal else int(os.environ.get("COLUMNS", "100"))
    console = Console(width=width, highlight=False, no_color=None if is_terminal else True)
    show = show_on if is_terminal and not settings.once else show_once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been started with Ctrl-C ignored
    try:
        asyncio.run(show(settings, key, console))
    except TopFailed as failure:
        print(f"kilburn top: {failure}", file=sys.stderr)
        return 1
    except (aiohttp.ClientError, TimeoutError, FeedBroken) as error:
        print(f"kilburn top: {settings.url} cannot be read ({error or type(error).__name__})", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0  # whoever reads has seen enough
    return 0
