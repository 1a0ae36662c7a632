"""How many clients may be connected at once: who is one too many is told so, and nothing of it is kept.

    up to `most`           answered
    beyond                 probes and figures are answered, all else is a 503; then the connection is closed
    SPARE beyond that      closed without a word

A connection takes a descriptor of this process and some memory, and nobody needs a key to have one: without an end to
their number whoever reaches the port can take them all, and with them the files and workers that need one. Whoever is
connected already stays. A client that sends nothing at all is disconnected as any other is (senders.py). With TLS a
connection counts once its handshake is done; asyncio ends one that takes more than a minute.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kilburn.controller.api.errors import TOO_MANY_CONNECTIONS, ApiError, Handler, response

SPARE = 64  # for those who look whether all is well
PROBES = frozenset({"/health", "/live", "/metrics", "/ready"})


class Crowd:
    """Who is connected to one server. `on_refused` is told of each connection that is turned away."""

    def __init__(self, most: int = 0, on_refused: Callable[[], None] = lambda: None) -> None:
        self._most, self._on_refused = most, on_refused
        self._num_connected = 0
        self._beyond: set[RequestHandler] = set()

    def joins(self, connection: RequestHandler) -> None:
        self._num_connected += 1
        if 0 < self._most < self._num_connected:
            self._beyond.add(connection)
            transport = connection.transport
            if self._num_connected > self._most + SPARE and isinstance(transport, asyncio.Transport):
                self._on_refused()
                connection.force_close()
                transport.abort()  # at once: with TLS, closing would wait for an answer

    def leaves(self, connection: RequestHandler) -> None:
        self._num_connected -= 1
        self._beyond.discard(connection)

    def _is_beyond(self, connection: RequestHandler) -> bool:
        if self._num_connected <= self._most:  # others have left since it came
            self._beyond.discard(connection)
        return connection in self._beyond

    def watch_all(self, app: web.Application) -> None:
        """Requests to this application, before anything else looks at them."""

        @web.middleware
        async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not self._is_beyond(request.protocol):
                return await handler(request)
            if request.path in PROBES:
                answer = await handler(request)
            else:
                self._on_refused()
                said = f"{self._most} clients are connected, as many as may be (--max-connections)"
                answer = response(ApiError(503, said, code=TOO_MANY_CONNECTIONS), request)
            answer.force_close()
            return answer

        app.middlewares.insert(0, admit)
