"""Server-sent events as they pass: whole ones only, and whether anything has been said yet.

    bytes --feed--> whole events            an event ends with an empty line; a part of one is kept until it is whole

So whatever breaks off, the next thing that is written is an event of its own. Events that open an answer (a role, no
text) are not worth telling before there is a token: until then another controller may still take the request.
"""

import json
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from kilburn.controller.api.errors import (
    TOO_MANY_CONNECTIONS,
    ApiError,
    encoded,
    encoded_for_anthropic,
    is_anthropics,
)
from kilburn.controller.api.sse import DONE, frame

END = b"\n\n"
MOST_EVENT_BYTES = 64 << 20  # far beyond any: what a slow reader missed comes in one, bounded by the answer itself
# Kinds of events by which other protocols begin an answer.
OPENINGS = {"message_start", "ping", "response.created", "response.in_progress", "response.queued"}

# Refusals that another controller need not share.
ELSEWHERE = {"queue_full", "no_worker", "shutting_down", "cut_short", TOO_MANY_CONNECTIONS}
_LOST = ApiError(503, "the controller that held this stream is lost; ask again", code="controller_lost")


class TooLong(Exception):
    """What came is no stream of events."""


class EventCutter:
    """Cuts a stream of bytes into events."""

    def __init__(self) -> None:
        self._part = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that are whole now, each with its empty line. Raises TooLong."""
        *whole, self._part = (self._part + data).split(END)
        if len(self._part) > MOST_EVENT_BYTES:
            raise TooLong
        for event in whole:
            yield event + END

    @property
    def is_between(self) -> bool:
        """Whether nothing was begun that is not whole."""
        return not self._part.strip()


def data_of(event: bytes) -> Any:
    """The JSON of an event; None where it has none."""
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            try:
                return json.loads(line[5:])
            except ValueError:
                return None
    return None


def is_opening(event: bytes) -> bool:
    """Whether an event says nothing yet that a client could not be told once more by another controller."""
    match data_of(event):
        case None:
            return b"data:" not in event  # a comment, to keep a connection alive
        case {"choices": [*choices]}:
            return all(_is_empty(choice) for choice in choices) and bool(choices)
        case {"type": str(kind)}:
            return kind in OPENINGS
    return False


def _is_empty(choice: Any) -> bool:
    match choice:
        case {"finish_reason": str()}:
            return False
        case {"delta": {**fields}}:
            return not any(value for name, value in fields.items() if name != "role")
        case {"text": str(text)}:
            return not text
    return False


def is_for_another(event: bytes) -> bool:
    """Whether an event says that this controller cannot answer now, and another one might."""
    match data_of(event):
        case {"error": {"code": str(code)}}:
            return code in ELSEWHERE
        case {"type": "error", "error": {"type": str(kind)}}:  # Anthropic's
            return kind in ("overloaded_error", "rate_limit_error")
        case {"type": "response.failed", "response": {"error": {"code": str(code)}}}:
            return code == "rate_limit_exceeded"
    return False


def broken_off(request: web.Request, last: bytes) -> bytes:
    """What ends a stream whose controller is lost, in the client's protocol. `last`: the event before."""
    if is_anthropics(request):
        return frame(encoded_for_anthropic(_LOST), "error").encode()
    if request.path == "/v1/responses":
        match data_of(last):
            case {"sequence_number": int(number)}:
                following = number + 1
            case _:
                following = 0
        about = {"type": "error", "code": "server_error", "message": _LOST.message, "param": None}
        return frame(json.dumps({**about, "sequence_number": following}), "error").encode()
    return (frame(encoded(_LOST)) + DONE).encode()
