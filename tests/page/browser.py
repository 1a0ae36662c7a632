"""A real browser, headless, driven over the DevTools protocol: a websocket of JSON, and nothing in between.

    with started_browser(folder) as address:
        async with opened_page(address, Screen(1280, 800)) as page:
            await page.go(url); await page.until("document.title !== ''"); await page.press("ArrowRight")

Whatever the page writes to its console as an error, throws, or fails to load, is kept in `page.faults`.
"""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in CI
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
# Keys by name: (code of Windows, text that they type)
KEYS = {
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    "Home": (36, ""),
    "End": (35, ""),
    "PageDown": (34, ""),
    "PageUp": (33, ""),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "Enter": (13, "\r"),
}


@dataclass(frozen=True)
class Screen:
    width: int
    height: int
    scale: float = 1.0
    is_mobile: bool = False
    is_dark: bool = False
    is_calm: bool = True  # prefers-reduced-motion
    vision: str = "none"


class Page:
    """One tab."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser, self._session = browser, session
        self.faults: list[str] = []

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.send(method, parameters, self._session)

    async def show_on(self, screen: Screen) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=screen.width,
            height=screen.height,
            deviceScaleFactor=screen.scale,
            mobile=screen.is_mobile,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if screen.is_dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if screen.is_calm else "no-preference"},
        ]
        await self.send("Emulation.setEmulatedMedia", features=features)
        await self.send("Emulation.setEmulatedVisionDeficiency", type=screen.vision)

    async def go(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def ask(self, expression: str) -> Any:
        """The value of an expression, or of what it promises."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    async def until(self, expression: str, within_s: float = 30.0) -> None:
        """Waits until it is true; fails where it does not become so in time."""
        try:
            async with asyncio.timeout(within_s):
                while not await self.ask(f"!!({expression})"):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"never true: {expression}; faults: {self.faults}") from None

    async def text(self, selector: str) -> str:
        return str(await self.ask(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def press(self, key: str, ctrl: bool = False) -> None:
        code, text = KEYS[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 if ctrl else 0}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def focus(self, selector: str) -> None:
        await self.ask(f"document.querySelector({json.dumps(selector)}).focus()")

    async def pixel(self, selector: str, x: float, y: float) -> tuple[int, ...]:
        """The colour of a canvas at a place in CSS pixels."""
        found = await self.ask(
            f"(() => {{ const c = document.querySelector({json.dumps(selector)}), k = c.width / c.clientWidth;"
            " const one = new OffscreenCanvas(1, 1).getContext('2d');"
            f" one.drawImage(c, -Math.floor({x} * k), -Math.floor({y} * k));"
            " return [...one.getImageData(0, 0, 1, 1).data]; })()"
        )
        return tuple(found)

    async def picture(self, file: Path, is_whole: bool = True) -> None:
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    async def accessible(self) -> list[tuple[str, str]]:
        """(role, name) of all that assistive technology is told of."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]

    def heard(self, method: str, about: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.faults.append(str(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.faults.append(f"console.{about['type']}: {about['args']}")
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.faults.append(f"{about['entry']['source']}: {about['entry']['text']} {about['entry'].get('url')}")


class Browser:
    """The process's one socket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def listen(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if answer.cancelled():
                    continue
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]))
                else:
                    answer.set_result(message["result"])
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.heard(message["method"], message["params"])

    async def send(self, method: str, parameters: dict[str, Any], session: str = "") -> dict[str, Any]:
        id, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._answers[id] = answer
        about = {"sessionId": session} if session else {}
        await self._socket.send_json({"id": id, "method": method, "params": parameters, **about})
        async with asyncio.timeout(30):
            return await answer

    async def page(self, screen: Screen, context: str) -> Page:
        target = await self.send("Target.createTarget", {"url": "about:blank", "browserContextId": context})
        attached = await self.send("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            await page.send(f"{domain}.enable")
        await page.show_on(screen)
        return page


@contextmanager
def started_browser(folder: Path) -> Iterator[str]:
    """The process, with a profile of its own, for as long as the block lasts; where its socket is."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program is not None, f"no browser: install one of {', '.join(NAMES)} (apt-get install chromium)"
    profile = folder / "profile"
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (at := profile / "DevToolsActivePort").exists() or len(at.read_text().splitlines()) < 2:
            assert process.poll() is None, "the browser ended at once"
            assert time.monotonic() < deadline, "the browser does not come up"
            time.sleep(0.02)
        port, path = at.read_text().splitlines()
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def opened_page(address: str, screen: Screen) -> AsyncIterator[Page]:
    """A tab of its own, with nothing in its storage, for as long as the block lasts."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        browser = Browser(socket)
        listening = asyncio.create_task(browser.listen())
        try:
            context = (await browser.send("Target.createBrowserContext", {}))["browserContextId"]
            yield await browser.page(screen, context)
            await browser.send("Target.disposeBrowserContext", {"browserContextId": context})
        finally:
            listening.cancel()
