"""Server-sent events: one response, one line of data at a time.

An answer that breaks off after its first byte can no longer change its status: the error is an event of its own, and
then the stream ends as any does, so that no reader waits for more.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from aiohttp import web

from kilburn.controller.api.errors import ApiError, encoded

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies: pass each event on at once
}


class EventStream:
    """To be opened, written, ended."""

    def __init__(self, request: web.Request, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS | dict(headers))

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, events: Iterable[str]) -> None:
        """All of them in one write. Waits while the reader is slow."""
        data = "".join([f"data: {event}\n\n" for event in events])
        if data:
            await self.response.write(data.encode())

    async def end(self, error: ApiError | None = None) -> None:
        await self.send([encoded(error), "[DONE]"] if error is not None else ["[DONE]"])
        await self.response.write_eof()
