"""What is said about bytes that are no HTTP request, and of clients that left: that it was so, and nothing more.

Whoever sent such bytes is told in the API's own shape (OpenAI's: which address was meant is not known), and not in the
parser's words, which quote them.

aiohttp's parser quotes the line that it cannot read in its exception, and aiohttp's server logs that exception whole,
at a level that always shows. The line may be `Authorization: Bearer KEY` with a stray byte in it, and whoever reaches
the port can send as many as they like, without a key. So the server is given a log that keeps one line for debugging,
and none of its words. A client that goes away while it is written to is no fault of anybody's either, and not worth a
traceback. Such bytes reach no route, no middleware and no signal: what these hide is hidden here.

Bytes that never become a request are of this kind too. A connection owes a head, the lines before a body: from its
first moment on, and after a request again from the next byte on.

    connected ---- owes ----> head complete: a request ---- owes nothing ----> a byte ---- owes ----> head complete ...

A byte counts once the request before it is answered; one that came earlier is heard of with the next.
How long it may is for others to say (senders.py); here is known since when it does.
"""

import asyncio
import logging
import re
from contextlib import suppress
from typing import Any

from aiohttp import web, web_response, web_server
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from kilburn.controller.api.crowds import Crowd
from kilburn.controller.api.errors import ApiError, encoded, encoded_for_anthropic

SERVER_NAME = "kilburn"
OPENING_BYTES = 1024  # of a head that is not complete: enough to tell whose client sends it
_ANTHROPICS = re.compile(rb"\S+ /v1/messages|[^\0]*\nanthropic-version:", re.IGNORECASE)


class QuotesNothing(logging.Filter):
    """Of a request that could not be read, or be answered to the end, its kind of fault alone. All else passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        match record.exc_info[1] if record.exc_info else None:
            case HttpProcessingError() | web.RequestPayloadError() as error:
                record.msg, record.args = "what came on a connection is no HTTP request: %s", (type(error).__name__,)
            case ConnectionError():
                record.msg, record.args = "a client left while it was written to", ()
            case _:
                return True
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


_FILTER = QuotesNothing()


def connection_log() -> logging.Logger:
    """For the HTTP server to log to."""
    log = logging.getLogger("kilburn.http")
    log.addFilter(_FILTER)  # a second time does nothing
    return log


class Connection(RequestHandler):
    """As the server's own, but for what it says of a request that it could not read, and that it knows what it owes.

    It is one of a crowd. All other settings are aiohttp's.
    """

    __slots__ = ("_crowd", "_owing_since", "opening")

    def __init__(self, manager: web.Server, *, crowd: Crowd | None = None, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._crowd = crowd or Crowd()  # of a server that is not ours there may be any number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.opening = b""  # of a head that is not complete
        self._owing_since: float | None = self._loop.time()  # a head; None: nothing is owed
        super().connection_made(transport)
        self._crowd.joins(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._crowd.leaves(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._request_count and (self._waiter is None or self._waiter.done()):  # none is waited for: there is one
            self.opening, self._owing_since = b"", None
        elif data:
            self.opening = (self.opening + data)[:OPENING_BYTES]
            if self._owing_since is None:
                self._owing_since = self._loop.time()

    def owed_for_s(self, now: float) -> float:
        return 0.0 if self._owing_since is None or self.transport is None else now - self._owing_since

    def give_up(self, error: ApiError) -> None:
        """On a head that is owed. Who sent some of it is told; who sent nothing asked nothing."""
        if self.opening and self.transport is not None:
            is_anthropics = _ANTHROPICS.match(self.opening) is not None
            body = (encoded_for_anthropic(error) if is_anthropics else encoded(error)).encode()
            head = (
                f"HTTP/1.1 {error.status} Request Timeout\r\nServer: {SERVER_NAME}\r\nConnection: close\r\n"
                f"Content-Type: application/json; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            if self.transport.can_write_eof():
                with suppress(OSError):  # it left in this very moment
                    self.transport.write_eof()
            self.close()  # to what still comes: were the connection closed now, it would be reset, and the answer lost
            self._owing_since = None
            self._loop.call_later(self._lingering_time, self.force_close)
        else:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs it; raises where an answer has begun
        said = "this is no HTTP request that can be read" if status < 500 else "internal error"
        if isinstance(exc, LineTooLong):
            said = "a header, or the first line with its URL, is longer than is taken here (--max-header, --max-url)"
        error = ApiError(status, said, code="malformed_request" if status < 500 else "internal_error")
        answer = web.Response(text=encoded(error), status=status, content_type="application/json")
        answer.force_close()
        return answer


def speak_for_ourselves() -> None:
    """What no route, middleware or signal goes around is said in our shape, and names neither Python nor aiohttp."""
    # aiohttp has a setting for neither.
    web_response.SERVER_SOFTWARE = SERVER_NAME  # type: ignore[attr-defined]
    web_server.RequestHandler = Connection  # type: ignore[attr-defined]
