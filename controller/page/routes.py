"""The block map over HTTP: a few files for everybody, and the feed for those whose key may see everybody's figures.

    GET /             index.html          GET /map/NAME    what it needs: style, scripts, an icon
    GET /map/events   the feed, as server-sent events; for admin keys, where there are keys

The files are read once and hold no figures and no secrets. They ask nothing of any other address, and their headers
say so: a browser would not let them. The page sends its key in a header, which EventSource cannot, so it reads the
feed with fetch.
"""

import hashlib
from contextlib import aclosing
from pathlib import Path

from aiohttp import web

from kilburn.controller.api.errors import ApiError, Handler
from kilburn.controller.api.guard import Access
from kilburn.controller.api.sse import EventStream, frame
from kilburn.controller.page.feed import Feed, TooManyViewers

FOLDER = Path(__file__).parent
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # asked again each time, and then answered from the ETag
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_files() -> dict[str, Path]:
    """Where each file is served: path of the URL -> file."""
    files = {f"/map/{file.name}": file for file in sorted(FOLDER.iterdir()) if file.suffix in TYPES}
    return {"/": files.pop("/map/index.html"), **files}


def _file_handler(file: Path) -> Handler:
    body = file.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"Content-Type": f"{TYPES[file.suffix]}; charset=utf-8", "ETag": etag} | HEADERS

    async def served(request: web.Request) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers)

    return served


class PageRoutes:
    """The handlers, as rows for the table of routes."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def table(self) -> list[tuple[str, str, Handler, Access]]:
        files = [("GET", path, _file_handler(file), Access.OPEN) for path, file in page_files().items()]
        return [*files, ("GET", "/map/events", self.events, Access.ADMIN)]

    async def events(self, request: web.Request) -> web.StreamResponse:
        async with aclosing(self._feed.events()) as events:
            try:
                event = await anext(events)
            except TooManyViewers:
                raise ApiError(503, "too many look on already; close another page", code="too_many_viewers") from None
            except StopAsyncIteration:
                raise ApiError(503, "the server is shutting down", code="shutting_down") from None
            stream = EventStream(request, {"X-Content-Type-Options": "nosniff"})
            await stream.open()
            await stream.write(frame(event))
            async for event in events:
                await stream.write(frame(event))
            await stream.end()
            return stream.response

    async def close(self, app: web.Application) -> None:
        """On shutdown: streams that never end by themselves would hold it up."""
        self._feed.close()
