"""What is said about bytes that are no HTTP request, and of clients that left: that it was so, and nothing more.

aiohttp's parser quotes the line that it cannot read in its exception, and aiohttp's server logs that exception whole,
at a level that always shows. The line may be `Authorization: Bearer KEY` with a stray byte in it, and whoever reaches
the port can send as many as they like, without a key. So the server is given a log that keeps one line for debugging,
and none of its words. A client that goes away while it is written to is no fault of anybody's either, and not worth a
traceback. Such bytes reach no route, no middleware and no signal: what these hide is hidden here.
"""

import logging

from aiohttp import web, web_response
from aiohttp.http_exceptions import HttpProcessingError

SERVER_NAME = "kilburn"


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


def hide_software() -> None:
    """Answers that no signal goes around, as the one to a malformed request, name neither Python nor aiohttp."""
    web_response.SERVER_SOFTWARE = SERVER_NAME  # type: ignore[attr-defined]  # aiohttp has no setting for it
