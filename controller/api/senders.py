"""Clients that do not come to the end of what they ask: after a while they are told so (408) and disconnected.

    nothing  a connection on which nothing was ever sent     is closed when its time is over, without a word
    head     lines before a body, and not their end          has to be complete then, however steadily it comes
    body     less of a body than its head says               STRIDE_BYTES have to come in each such time, or its end

A request that is never complete costs a connection, its buffers and a handler for as long as its sender likes, and a
sender needs next to nothing for it. A head is a few packets, and no honest one takes long. A body may be megabytes and
its line slow: it may take its time, but not a byte a minute. At a minute's time a body of 8 MiB, the largest unless
set, is there after some ten hours, or was given up before.

Bodies are read here, before their handlers begin: so this holds for every route alike. Of a client that is refused for
its key or its address the body is not waited for. What still comes of a request that is answered already is thrown away
for a moment (LINGER_S in listening.py), or the answer would be lost with the connection. Who sends nothing after a
whole request keeps its connection; aiohttp closes it after an hour. A handshake of TLS has asyncio's own minute.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aiohttp import StreamReader, web
from aiohttp.typedefs import Middleware

from kilburn.controller.api.errors import ApiError, Handler
from kilburn.controller.api.looking import looking
from kilburn.controller.api.malformed import Connection

STRIDE_BYTES = 1 << 14
PARTS = ("nothing", "head", "body")  # what a connection had come to when it was given up


@dataclass(slots=True, eq=False)
class _Body:
    """One that is not complete, as it was when it was last looked at."""

    content: StreamReader
    limit: asyncio.Timeout  # of whoever reads it
    since: float  # not STRIDE_BYTES more have come
    num_bytes: int = 0


class Senders:
    """Of one server. `on_given_up` is told of each client that is, and to which of PARTS it had come."""

    def __init__(self, patience_s: float, on_given_up: Callable[[str], None]) -> None:
        self._patience_s, self._on_given_up = patience_s, on_given_up
        self._bodies: set[_Body] = set()

    def watch_all(self, runner: web.AppRunner) -> None:
        """Whoever connects to this server is watched while it runs."""
        if self._patience_s > 0.0:
            runner.app.middlewares.append(self._middleware())  # the innermost: who comes as far as this may ask
            runner.app.cleanup_ctx.append(looking(self._patience_s, partial(self.look, runner)))

    def look(self, runner: web.AppRunner, now: float) -> None:
        """What has become of each since it was last looked at."""
        for connection in runner.server.connections if runner.server is not None else ():
            if isinstance(connection, Connection) and connection.owed_for_s(now) >= self._patience_s:
                self._on_given_up("head" if connection.opening else "nothing")
                connection.give_up(self._told("the end of its headers"))
        for body in self._bodies:
            if (num_bytes := body.content.total_bytes) >= body.num_bytes + STRIDE_BYTES:
                body.num_bytes, body.since = num_bytes, now
            elif now - body.since >= self._patience_s and not body.content.is_eof():
                body.limit.reschedule(0.0)

    def _told(self, missing: str) -> ApiError:
        said = f"the request did not come to {missing} within the time for it here (--sending-seconds)"
        return ApiError(408, said, code="request_incomplete")

    def _middleware(self) -> Middleware:
        @web.middleware
        async def whole(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.content.is_eof() or request.match_info.http_exception is not None:
                return await handler(request)
            now = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(None) as limit:
                    self._bodies.add(body := _Body(request.content, limit, now))
                    try:
                        await request.read()  # which keeps it
                    finally:
                        self._bodies.remove(body)
            except TimeoutError:
                self._on_given_up("body")
                raise self._told("the end of its body") from None
            return await handler(request)

        return whole
