"""Server-sent events: one response, one frame at a time.

An answer that breaks off after its first byte can no longer change its status: the error is an event of its own, and
then the stream ends as any does, so that no reader waits for more.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies: pass each event on at once
}


def frame(data: str, name: str = "") -> str:
    """One event. `data` has no line breaks, as JSON has none."""
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


KEEP_ALIVE = ": keep-alive\n\n"  # a comment: no event of anything, but a byte on the wire
DONE = frame("[DONE]")  # how OpenAI ends a stream


class EventStream:
    """To be opened, written, ended."""

    def __init__(self, request: web.Request, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS | dict(headers))

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def write(self, frames: Iterable[str]) -> None:
        """All of them in one write. Waits while the reader is slow."""
        data = "".join(frames)
        if data:
            await self.response.write(data.encode())

    async def end(self, frames: Iterable[str] = (DONE,)) -> None:
        await self.write(frames)
        await self.response.write_eof()
