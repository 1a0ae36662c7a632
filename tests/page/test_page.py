"""The page in a real browser, on a real controller: what it shows is what the engine says, for eyes, keys and ears.

With SCREENSHOTS=folder in the environment each test leaves pictures there, to be looked at.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kilburn.controller.core.events import Left
from kilburn.controller.simulate.fake_daemon import FakeDaemon, fake_hello
from tests.api.world import VOCAB, World, served, text_after
from tests.page.browser import Page, Screen, opened_page, started_browser
from tests.page.test_picture import onlooker_of

ROOT_KEY, ALICE_KEY = "sk-root-00002", "sk-alice-0001"
DESK = Screen(1360, 900)
DARK = Screen(1360, 900, is_dark=True)
PHONE = Screen(390, 844, 3, is_mobile=True)
SMALLEST = Screen(360, 640, 2, is_mobile=True)
SHOTS = os.environ.get("SCREENSHOTS")
POOLS = {"num_blocks": 600, "num_host_blocks": 64, "max_len": 2048}
LONG = "the quick brown fox jumps over the lazy dog, and hello world again. "


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One process for all tests here; each has a page of its own in it."""
    with started_browser(tmp_path_factory.mktemp("browser")) as address:
        yield address


@asynccontextmanager
async def shown(browser: str, folder: Path, screen: Screen = DESK, **how: Any) -> AsyncIterator[tuple[World, Page]]:
    """A world, and its page in a browser. No fault of the page goes unnoticed."""
    async with served(folder, **{"delay_s": 0.05} | how) as world, opened_page(browser, screen) as page:
        await page.go(world.url)
        yield world, page
        assert page.faults == []


async def keep(page: Page, name: str) -> None:
    if SHOTS:
        await page.picture(Path(SHOTS) / f"{name}.png")


@asynccontextmanager
async def busy(world: World, *bodies: dict[str, Any]) -> AsyncIterator[None]:
    """Requests that run for as long as the block lasts: on their own they would take a minute."""
    tasks = [asyncio.create_task(world.post("/v1/completions", {"max_tokens": 1200} | body)) for body in bodies]
    try:
        await world.until(lambda: len(world.driver.engine.block_map().tables) >= len(bodies))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def number(text: str) -> int:
    return int(text.replace(",", ""))


async def legend(page: Page) -> dict[str, int]:
    rows = await page.ask(
        "[...document.querySelectorAll('.pool')[0].querySelectorAll('.legend tbody tr')]"
        ".map((row) => [row.cells[0].textContent, row.cells[1].textContent])"
    )
    return {words: number(text) for words, text in rows}


async def test_counts_and_colours_are_those_of_the_engine(browser: str, tmp_path: Path) -> None:
    async with shown(browser, tmp_path, worker=POOLS) as (world, page):
        await page.until("document.querySelector('#status').dataset.state === 'good'")
        assert await page.ask("document.querySelectorAll('.canvas').length") == 2
        body = {"prompt": LONG * 3, "n": 3}
        async with busy(world, body, {"prompt": "hello"}):
            await page.until("document.querySelectorAll('#request-rows tr').length === 2")
            await page.until("Number(document.querySelector('#m-output').firstChild.data) > 0")
            for screen in (DARK, DESK):
                await page.show_on(screen)
                unlike = ["not looked at"]
                with suppress(TimeoutError):  # a theme is there before the picture in its colours
                    async with asyncio.timeout(30):
                        while unlike := await unlike_colours(world, page):
                            await asyncio.sleep(0.02)
                assert not unlike
            await keep(page, "busy")
        await page.until("document.querySelector('#request-rows').textContent === 'None at the moment.'")
        group = world.driver.engine.snapshot().groups[0]
        await page.until(f"document.querySelector('.legend tbody tr td').textContent === '{group.free_blocks}'")
        assert await legend(page) == {
            "free": group.free_blocks,
            "cached": group.cached_blocks,
            "owned": 0,
            "of which shared": 0,
            "of which pinned": 0,
            "quarantined": 0,
        }
        assert group.cached_blocks > 0
        assert await page.text("#model") == "toy"
        assert await page.text("#worker-rows th") == "fake"
        assert "lease began" in await page.text("#note-rows")


async def unlike_colours(world: World, page: Page) -> list[str]:
    """Of an owned block, a shared and a free one, those without the colour that this theme's style sheet names."""
    unlike = []
    cells = world.driver.engine.block_map().workers[0].device
    owned, shared, free = cells.index(1), cells.index(3), cells.rindex(0)
    for block, name in ((owned, "owned-1"), (shared, "owned-3"), (free, "free")):
        wanted = await page.ask(
            f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim().slice(1)"
        )
        side, columns = await page.ask(
            "(() => { const c = document.querySelector('.base'), k = c.width / c.clientWidth;"
            " return [c.dataset.side / k, Number(c.dataset.columns)]; })()"
        )
        at = ((block % columns + 0.4) * side, (block // columns + 0.4) * side)
        if (found := await page.pixel(".base", *at)) != (*bytes.fromhex(wanted), 255):
            unlike.append(f"{name} is {found}, wanted {wanted}")
    return unlike


APPLIED = """import("/map/feed.js").then((feed) => {
  const known = new feed.Known();
  for (const event of %s) known.apply(event);
  const pools = {}, tables = {}, requests = Object.fromEntries(known.requests);
  for (const [key, pool] of known.pools) pools[key] = [...pool.cells];
  for (const [key, table] of known.tables) tables[key] = [table.lease, table.tier, [...table.blocks]];
  return {pools, tables, requests, notes: known.notes.map((note) => note.text)};
})"""


async def test_what_the_page_makes_of_events_is_what_the_terminal_does(browser: str, tmp_path: Path) -> None:
    async with shown(browser, tmp_path) as (_, page):
        for seed in range(6):
            onlooker = onlooker_of(seed)
            reader = onlooker.follower
            found = await page.ask(APPLIED % f"[{','.join(onlooker.events)}]")
            pools = {f"{lease}/0": list(cells) for lease, cells in reader.cells.items()}
            pools |= {f"{lease}/1": list(cells) for lease, cells in reader.host_cells.items()}
            assert found["pools"] == pools
            assert found["tables"] == {
                f"{r}.{s}": [*where, blocks] for (r, s), (*where, blocks) in reader.tables.items()
            }
            assert found["requests"] == {str(id): row for id, row in reader.requests.items()}
            assert found["notes"] == [note["text"] for note in reader.notes]


async def test_by_keyboard_and_by_ear(browser: str, tmp_path: Path) -> None:
    async with shown(browser, tmp_path, worker={"num_blocks": 200, "max_len": 2048}) as (world, page):
        await page.until("document.querySelector('.canvas')")
        async with busy(world, {"prompt": LONG}):
            table = next(iter(world.driver.engine.block_map().tables.values()))[2]
            assert table[:2] == [0, 1]
            await page.until("document.querySelectorAll('#request-rows .pick').length === 1")
            await page.focus(".canvas")
            assert await page.text("#spoken") == "Block 0: owned. Held by request 1."
            await page.press("ArrowRight")
            assert await page.text("#spoken") == "Block 1: owned. Held by request 1."
            await page.press("End", ctrl=True)
            assert await page.text("#spoken") == "Block 199: free. Nothing is in it."
            await page.press("ArrowRight")
            assert (await page.text("#spoken")).startswith("Block 199:")
            columns = int(await page.ask("document.querySelector('.base').dataset.columns"))
            await page.press("Home", ctrl=True)
            await page.press("ArrowDown")
            assert (await page.text("#spoken")).startswith(f"Block {columns}:")
            await page.press("ArrowUp")
            await page.press("Enter")
            assert await page.text("#spoken") == "Showing the blocks of request 1."
            assert await page.ask("document.querySelector('.pick').getAttribute('aria-pressed')") == "true"
            assert not await page.ask("document.querySelector('.tip').hidden")
            await keep(page, "picked")
            await page.press("Escape")
            assert await page.ask("document.querySelector('.pick').getAttribute('aria-pressed')") == "false"
        await expect_named(page)


async def expect_named(page: Page) -> None:
    """Everything that can be read or used has a role and a name."""
    told = await page.accessible()
    names = {(role, name) for role, name in told}
    (map_name,) = [name for role, name in told if role == "application"]
    assert map_name == "fake, device pool: 200 blocks of 16 tokens, 200 KiB"
    for wanted in (
        ("heading", "Memory"),
        ("heading", "Requests"),
        ("heading", "Workers"),
        ("heading", "Preemptions and leases"),
        ("heading", "Try a chat"),
        ("textbox", "Message"),
        ("spinbutton", "at most"),
        ("button", "Send"),
        ("button", "New"),
        ("log", "Conversation"),
        ("table", "Blocks of fake, device pool by state"),
        ("rowheader", "free"),
        ("columnheader", "Blocks"),
        ("columnheader", "Waits for"),
        ("link", "Skip to the requests"),
    ):
        assert wanted in names, wanted
    for role, name in told:
        if role in ("button", "textbox", "spinbutton", "link", "region", "application", "table"):
            assert name or role == "table", f"a {role} without a name"


@pytest.mark.parametrize(("name", "screen"), [("phone", PHONE), ("smallest", SMALLEST)])
async def test_nothing_is_wider_than_a_phone(browser: str, tmp_path: Path, name: str, screen: Screen) -> None:
    worker = {"num_blocks": 4096, "num_host_blocks": 1024, "max_len": 2048}
    bodies = {"prompt": LONG * 2, "n": 4}, {"prompt": "hello"}
    async with shown(browser, tmp_path, screen, worker=worker) as (world, page), busy(world, *bodies):
        await page.until("document.querySelectorAll('#request-rows tr').length === 2")
        wide = await page.ask("document.documentElement.scrollWidth")
        assert wide == screen.width
        beyond = await page.ask(
            "[...document.querySelectorAll('main *:not(.scroller *):not(.unseen):not(.unseen *)')].filter((e) =>"
            " e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"
        )
        assert beyond == []
        box = await page.ask("(() => { const b = document.querySelector('.base').getBoundingClientRect();"
                             " return [b.left + 3, b.top + 3]; })()")  # fmt: skip
        for kind in ("touchStart", "touchEnd"):
            points = [{"x": box[0], "y": box[1]}] if kind == "touchStart" else []
            await page.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        await page.until("document.querySelector('.tip').textContent.startsWith('Block 0')")
        await keep(page, name)


async def test_a_chat_is_answered_and_its_blocks_are_shown(browser, tmp_path: Path) -> None:
    # Slow until the page was seen to show whose blocks these are, and again until it was stopped.
    async with shown(browser, tmp_path, delay_s=0.5) as (world, page):
        await page.until("document.querySelector('.canvas')")
        await page.focus("#chat-input")
        await page.type("Why is the sky blue?")
        await page.ask("document.querySelector('#chat-tokens').value = 40")
        await page.press("Enter")
        await page.until("document.querySelector('.pick[aria-pressed=true]')")
        await page.until("document.querySelector('th.ours')")
        await keep(page, "chat")
        world.daemon.delay_s = 0.02
        await page.until("document.querySelector('#chat-log .about')")
        assert await page.text("#chat-log .it") == text_after(40)
        assert (await page.text("#chat-log .about")).startswith("request 1: 40 tokens in ")
        await page.until("!document.querySelector('.pick')")
        world.daemon.delay_s = 0.1
        await page.type("And the sea?")
        await page.press("Enter")
        await page.until("document.querySelectorAll('#chat-log .it').length === 2")
        await page.until("document.querySelectorAll('#chat-log .it')[1].textContent.length > 5")
        await page.ask("document.querySelector('#chat-send').click()")  # it says Stop now
        await page.until("document.querySelector('#chat-log').textContent.endsWith('stopped')")
        await world.until(world.is_quiet)


async def test_with_keys_the_page_asks_for_one_and_forgets_it_with_the_tab(browser: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE_KEY}\nroot:{ROOT_KEY}:admin\n")
    async with served(tmp_path, settings={"api_key_file": str(keys)}) as world, opened_page(browser, DESK) as page:
        await page.go(world.url)
        for key, answer in (("wrong-key", "not accepted"), (ALICE_KEY, "shows everybody")):
            await page.until("!document.querySelector('#key').hidden && document.activeElement.id === 'key-input'")
            await page.type(key)
            await page.press("Enter")
            await page.until(
                f"document.querySelector('#key-reason').textContent.includes({answer!r})".replace("\\", "")
            )
        await keep(page, "key")
        assert await page.ask("document.querySelectorAll('.canvas').length") == 0
        await page.type(ROOT_KEY)
        await page.press("Enter")
        await page.until("document.querySelector('.canvas') && document.querySelector('#key').hidden")
        await page.go(world.url)
        await page.until("document.querySelector('.canvas')")  # kept for this tab
        stored = await page.ask("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert (ROOT_KEY in stored[0], stored[1:]) == (True, ["{}", ""])
        refusals = [fault for fault in page.faults if "401" in fault or "403" in fault]  # the browser's own lines
        assert page.faults == refusals


async def test_a_server_that_goes_away_is_missed_and_found_again(browser: str, tmp_path: Path) -> None:
    async with shown(browser, tmp_path) as (world, page):
        await page.until("document.querySelector('.canvas')")
        world.feed.end_all()
        await page.until("document.querySelector('#status').dataset.state === 'bad'")
        await page.until("document.querySelector('#status').dataset.state === 'good'")
        world.daemon.faults.clear()


async def test_workers_come_and_go(browser: str, tmp_path: Path) -> None:
    async with shown(browser, tmp_path) as (world, page):
        await page.until("document.querySelectorAll('.worker .canvas').length === 1")
        second = FakeDaemon(world.running.endpoint, fake_hello("second", vocab_size=VOCAB, max_len=256, num_blocks=100))
        task = asyncio.create_task(second.run())
        try:
            await page.until("document.querySelectorAll('.worker .canvas').length === 2")
            assert (await page.text("#worker-2 h3")).startswith("second · device")
            await page.focus("#worker-2 .canvas")
            await page.press("End", ctrl=True)
            assert await page.text("#spoken") == "Block 99: free. Nothing is in it."
            (peer,) = [home.lease.peer for home in world.driver.engine._homes.values() if home.lease.id == 2]
            world.driver.post(Left(peer, "its process ended"))  # it hears of it, and says Hello again
            await page.until("document.querySelector('#worker-3')")
            assert await page.ask("document.querySelectorAll('.worker .canvas').length") == 2
            assert await page.text("#lease-count") == "3 leases began, 1 ended"
            assert "lease 2: its process ended" in await page.text("#note-rows")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_preemptions_say_why(browser: str, tmp_path: Path) -> None:
    worker = {"num_blocks": 24, "num_host_blocks": 24, "max_len": 256}
    async with shown(browser, tmp_path, delay_s=0.08, worker=worker, settings={"preemption": "swap"}) as (world, page):
        await page.until("document.querySelectorAll('.canvas').length === 2")
        bodies = [{"prompt": f"{i} {LONG * 4}", "max_tokens": 140} for i in range(3)]
        async with busy(world, *bodies):
            await page.until("document.querySelector('#note-rows').textContent.includes('by swap')")
            await page.until("document.querySelector('#request-rows').textContent.includes('swapped')")
            await page.until("Number(document.querySelector('#m-preempted').firstChild.data) > 0")
            assert "as the setting says" in await page.text("#note-rows")
            await keep(page, "preempted")


async def test_a_hundred_thousand_blocks(browser: str, tmp_path: Path) -> None:
    worker = {"num_blocks": 100_000, "max_len": 2048}
    async with shown(browser, tmp_path, worker=worker) as (world, page):
        await page.until("document.querySelector('.canvas')")
        async with busy(world, *({"prompt": LONG * 8 + str(i)} for i in range(8))):
            await page.until("document.querySelectorAll('#request-rows tr').length === 8")
            owned = "document.querySelectorAll('.legend tbody tr')[2].cells[1].textContent"
            before = await page.ask(owned)
            await page.until(f"{owned} !== '{before}'")
            wide, high, shown_wide = await page.ask(
                "(() => { const c = document.querySelector('.base');"
                " return [Number(c.dataset.columns), c.height / Number(c.dataset.side), c.clientWidth]; })()"
            )
            assert wide * high >= 100_000
            assert shown_wide <= 1360
            await keep(page, "many")
