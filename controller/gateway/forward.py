"""One request through the gateway: to a controller, to another if that fails in time, and back.

    body --order--> member --+-- answered                               passed on as it comes
                             +-- refused for now (429, 503), or gone    the next member, while no token was passed on
                             +-- gone after a token was passed on       an error event, and the stream is over

A whole answer has passed on nothing before it is complete, so it may always be tried again; what may be done about a
stream says passage.py. An answer that says that the request itself failed is passed on.

What this file does not know: how members are found and ordered, what a body means.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

from kilburn.controller.api.errors import ApiError
from kilburn.controller.api.senders import PARTS
from kilburn.controller.gateway.events import ELSEWHERE, EventCutter, TooLong, broken_off
from kilburn.controller.gateway.fleet import Fleet, Lost
from kilburn.controller.gateway.passage import Passage
from kilburn.controller.gateway.roster import Member

# What passes through, of a request and of an answer; both ends make the rest of their own.
ASKED = (
    *("Authorization", "Content-Type", "Accept", "User-Agent", "X-Request-Id", "traceparent", "tracestate"),
    *("x-api-key", "anthropic-version", "anthropic-beta", "OpenAI-Beta"),
)
TOLD = (
    *("Content-Type", "Cache-Control", "Retry-After", "X-Request-Id", "X-Kilburn-Requests", "X-Accel-Buffering"),
    *("WWW-Authenticate", "Allow", "Warning", "Server-Timing"),
    *("Content-Security-Policy", "Referrer-Policy", "X-Content-Type-Options"),  # of the page of the API
)


@dataclass(slots=True)
class ForwardCounters:
    """For metrics. They only grow."""

    answered: int = 0  # requests that got a controller's answer, whatever it said
    retried: int = 0  # tries after the first
    unanswered: int = 0  # requests that no controller took
    broken: int = 0  # streams that ended with an error event, as their controller was lost
    stalled: int = 0  # clients that were disconnected because they did not read
    turned_away: int = 0  # connections that were one too many
    incomplete: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))  # requests, by what had come
    by_prefix: int = 0  # requests whose first member was the one for what it has computed of their prompt
    by_load: int = 0  # all others
    hit_tokens: int = 0  # of prompts, by the hints of the controller that was asked first
    prompt_tokens: int = 0

    def stall(self) -> None:
        self.stalled += 1

    def turn_away(self) -> None:
        self.turned_away += 1

    def give_up(self, part: str) -> None:
        self.incomplete[part] += 1


@dataclass(frozen=True, slots=True)
class NotHere:
    """This controller does not answer the request; another may. `answer`: what it said, if anything."""

    answer: web.Response | None


class ReaderLeft(ConnectionError):
    """The client went away while it was written to."""


class _Writer:
    """To the client of a stream. Its headers are those of whoever has the first thing to say."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse()

    async def write(self, events: bytes, upstream: aiohttp.ClientResponse) -> None:
        """Raises ReaderLeft."""
        if not self._response.prepared:
            self._response = web.StreamResponse(status=upstream.status, headers=_told(upstream))
        with _reading():
            if not self._response.prepared:
                await self._response.prepare(self._request)
            if events:
                await self._response.write(events)

    async def end(self, events: bytes = b"") -> web.StreamResponse:
        """Of a stream that has begun. Raises ReaderLeft."""
        with _reading():
            if events:
                await self._response.write(events)
            await self._response.write_eof()
        return self._response


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise ReaderLeft from error


class Forwarder:
    """See the file's head."""

    def __init__(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        self._session, self._fleet = session, fleet
        self.counters = ForwardCounters()

    async def answer(self, request: web.Request, body: bytes, members: Sequence[Member]) -> web.StreamResponse:
        """The answer of the first member that gives one. Raises ApiError where none does."""
        refused: web.Response | None = None
        passage, writer = Passage(members), _Writer(request)
        while (member := passage.next()) is not None:
            self.counters.retried += passage.num_tries > 1
            match await self._try(request, body, member, passage, writer):
                case NotHere(answer):
                    refused = answer or refused
                case response:
                    self.counters.answered += 1
                    return response
        if passage.has_begun:
            self.counters.answered += 1
            self.counters.broken += 1
            return await writer.end(passage.held + broken_off(request, passage.last))
        if refused is not None:
            self.counters.answered += 1
            return refused
        self.counters.unanswered += 1
        raise ApiError(503, "no controller answers; try again later", code="no_controller")

    async def _try(
        self, request: web.Request, body: bytes, member: Member, passage: Passage, writer: _Writer
    ) -> web.StreamResponse | NotHere:
        try:
            async with self._fleet.working(member), self._ask(request, body, member) as upstream:
                if upstream.content_type == "text/event-stream":
                    return await _stream(upstream, passage, writer)
                whole = web.Response(body=await upstream.read(), status=upstream.status, headers=_told(upstream))
        except ReaderLeft:
            raise
        except (aiohttp.ClientError, OSError, Lost, TooLong):
            return NotHere(None)
        return NotHere(whole) if _is_elsewhere(whole) else whole

    def _ask(self, request: web.Request, body: bytes, member: Member) -> "aiohttp.client._RequestContextManager":
        url = URL(member.address + request.rel_url.raw_path_qs, encoded=True)
        headers = {name: request.headers[name] for name in ASKED if name in request.headers}
        return self._session.request(request.method, url, data=body or None, headers=headers, allow_redirects=False)


async def _stream(upstream: aiohttp.ClientResponse, passage: Passage, writer: _Writer) -> web.StreamResponse | NotHere:
    cutter = EventCutter()
    async for data in upstream.content.iter_any():
        events = list(cutter.feed(data))
        told = passage.heard(events)
        if told is None:
            whole = passage.held + b"".join(events) + await upstream.read()
            return NotHere(web.Response(body=whole, status=upstream.status, headers=_told(upstream)))
        if passage.has_begun:
            await writer.write(told, upstream)
    if not cutter.is_between:
        raise aiohttp.ClientPayloadError("the stream ended within an event")
    await writer.write(passage.ended(), upstream)
    return await writer.end()


def _told(upstream: aiohttp.ClientResponse) -> Mapping[str, str]:
    return {name: upstream.headers[name] for name in TOLD if name in upstream.headers}


def _is_elsewhere(answer: web.Response) -> bool:
    """Whether a whole answer is a refusal that another controller need not share."""
    if answer.status not in (429, 503) or not isinstance(answer.body, bytes):
        return False
    try:
        return json.loads(answer.body)["error"]["code"] in ELSEWHERE
    except (ValueError, KeyError, TypeError):
        return True  # Anthropic's has no code; and what stands before a controller says what it likes
