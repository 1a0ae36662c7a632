"""Server-sent events: one response, one frame at a time.

An answer that breaks off after its first byte can no longer change its status: the error is an event of its own, and
then the stream ends as any does, so that no reader waits for more.

Frames are written in one of two ways: `write` waits while the reader is slow; `send`, for the token of every step,
waits for nobody and costs no more than the socket does.
"""

from collections.abc import Mapping
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
        self._request, self._transport, self._writer = request, request.transport, request.writer
        self._is_chunked = False
        self.response = web.StreamResponse(headers=_HEADERS | dict(headers))

    async def open(self) -> None:
        await self.response.prepare(self._request)
        self._is_chunked = "Transfer-Encoding" in self.response.headers  # HTTP/1.0 ends with the connection

    @property
    def is_clear(self) -> bool:
        """Whether the reader has taken all that was written, or a buffer of the kernel's has."""
        transport = self._transport  # of one with TLS that is closed nothing but that may be asked
        return transport is not None and not transport.is_closing() and not transport.get_write_buffer_size()

    def send(self, frames: str) -> None:
        """Writes at once what is not empty. Only while `is_clear`, and while nobody waits in `write`."""
        if self._transport is None:
            raise ConnectionResetError("the client left")
        data = frames.encode()
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._writer.output_size += len(data)
        self._transport.write(data)

    async def write(self, frames: str) -> None:
        """Waits while the reader is slow."""
        if frames:
            await self.response.write(frames.encode())

    async def end(self, frames: str = DONE) -> None:
        await self.write(frames)
        await self.response.write_eof()
