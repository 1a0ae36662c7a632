"""What is said about bytes that are no HTTP request: that they came, and nothing of what they were.

aiohttp's parser quotes the line that it cannot read in its exception, and aiohttp's server logs that exception whole,
at a level that always shows. The line may be `Authorization: Bearer KEY` with a stray byte in it, and whoever reaches
the port can send as many as they like, without a key. So the server is given a log that keeps one line for debugging,
and none of its words. Such bytes reach no route, no middleware and no signal: what these hide is hidden here.
"""

import logging

from aiohttp import web, web_response
from aiohttp.http_exceptions import HttpProcessingError

SERVER_NAME = "kilburn"


class QuotesNothing(logging.Filter):
    """Of a request that could not be read, its kind of fault alone. Everything else passes as it is."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
            return True
        record.msg, record.args = "what came on a connection is no HTTP request: %s", (type(error).__name__,)
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
