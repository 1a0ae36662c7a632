"""From what is asked to an answer on its way out, in whatever layout: one path for every API that is spoken here.

    asks -> streams.ask -> Answer -> whole: one JSON body   or   stream: events as deltas come

A client that leaves cancels its handler (the server is told to do so), and `finally` gives back what the answer holds,
streaming or not. What this file does not know: what a request or an answer looks like.
"""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from kilburn.controller.answer import Answer
from kilburn.controller.api.asking import chat_ask
from kilburn.controller.api.checks import read_as
from kilburn.controller.api.errors import ApiError, bad_request, failure, refusal, renamed
from kilburn.controller.api.guard import TENANT
from kilburn.controller.api.layout import Layout, to_json
from kilburn.controller.api.messages import chat_ids, chat_prompt
from kilburn.controller.api.metering import charge
from kilburn.controller.api.schema import ChatRequest
from kilburn.controller.api.service import Service
from kilburn.controller.api.sse import KEEP_ALIVE, EventStream
from kilburn.controller.auth import Tenant
from kilburn.controller.calls.reading import CallReader
from kilburn.controller.choice import Ask, Delta, Origin
from kilburn.controller.text import ChatOptions
from kilburn.controller.timings import Timings, timings_of
from kilburn.shared.types import FinishReason

log = logging.getLogger("kilburn.api")
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Answering:
    """What every route that produces text does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat_ask(self, wanted: ChatRequest, tenant: Tenant) -> Ask:
        """Raises ApiError."""
        if wanted.toolbox.may_be_called and self._service.asking.form is None:
            message = "tools: the chat template does not say how this model calls them; start it with --tool-parser"
            raise bad_request("tools", message)
        return await chat_ask(wanted, await self.conversation(wanted), self._service.asking, tenant)

    async def translated(self, body: Any, fields: Mapping[str, str], tenant: Tenant) -> tuple[Ask, CallReader | None]:
        """Of another API's request that became a chat's. `fields`: how that API calls a chat's. Raises ApiError."""
        try:
            chat = read_as(ChatRequest, body, limits=self._service.limits)
            return await self.chat_ask(chat, tenant), self.reader(chat)
        except ApiError as error:
            raise renamed(error, fields) from None

    def reader(self, wanted: ChatRequest) -> CallReader | None:
        """Of the calls in one choice of the answer; None where there are none to read."""
        toolbox, form = wanted.toolbox, self._service.asking.form
        return toolbox.new_reader(form) if form is not None and toolbox.may_be_called else None

    async def conversation(self, wanted: ChatRequest) -> list[int]:
        """The prompt of a chat. Raises ApiError."""
        return await chat_prompt(wanted, self._service.text)

    async def chat_ids(self, messages: Sequence[object], options: ChatOptions) -> list[int]:
        """The prompt of a conversation. Raises ApiError."""
        return await chat_ids(messages, options, self._service.text)

    async def answer(
        self, request: web.Request, asks: Sequence[Ask], layout: Layout, is_stream: bool
    ) -> web.StreamResponse:
        streams = self._service.streams
        origin = _origin(request, layout.id)
        request[REQUEST_ID] = origin.client_id or origin.answer_id
        answer = await streams.ask([replace(ask, origin=origin) for ask in asks])
        try:
            if answer.refused is not None:
                raise refusal(answer.refused)
            charge(request, answer.num_prompt_tokens)
            if is_stream:
                return await self._stream(request, answer, layout)
            deltas = await answer.whole()
            if (broken := _broken(answer, deltas)) is not None:
                raise broken
            answer.timings = self._timings(layout)
            headers = {"Server-Timing": answer.timings.as_header()}
            if answer.is_scored:  # there may be much to tell
                body = await asyncio.to_thread(lambda: to_json(layout.whole(answer, answer.best(deltas))))
            else:
                body = to_json(layout.whole(answer, answer.best(deltas)))
            return web.Response(text=body, content_type="application/json", headers=headers)
        finally:
            charge(request, answer.num_tokens)
            streams.leave(answer)

    def _timings(self, layout: Layout) -> Timings:
        return timings_of(self._service.chronicle.find(layout.id), asyncio.get_running_loop().time())

    async def _stream(self, request: web.Request, answer: Answer, layout: Layout) -> web.StreamResponse:
        events = EventStream(request, _engine_ids(request, answer))
        await events.open()
        try:
            await self._write(events, answer, layout)
        except ApiError as broken:
            if answer.refused is not None and broken.code is not None:
                self._service.streams.counts.refusal(broken.code)  # it has begun to answer: nobody else will
            await events.end(layout.broken(broken))
        except ConnectionError:
            raise  # the client left
        except Exception:
            log.exception("a stream could not go on")
            await events.end(layout.broken(ApiError(500, "internal error", code="internal_error")))
        return events.response

    async def _write(self, events: EventStream, answer: Answer, layout: Layout) -> None:
        """All that an answer says, as it comes. Raises ApiError where it breaks off."""
        await events.write(layout.opening(answer))
        answer.outlet = _Outlet(events, layout)
        while not answer.is_over:
            deltas = await answer.deltas()
            if (broken := _broken(answer, deltas)) is not None:
                raise broken
            if not deltas and not answer.is_over:
                await events.write(KEEP_ALIVE)
            elif any(delta.prompt is not None for delta in deltas):  # there may be much to tell
                await events.write(await asyncio.to_thread(_told, layout, deltas))
            else:
                await events.write(_told(layout, deltas))
        answer.timings = self._timings(layout)
        await events.end(layout.ending(answer))


def _told(layout: Layout, deltas: Sequence[Delta]) -> str:
    return "".join([layout.chunks(delta) for delta in deltas])


class _Outlet:
    """The short way of a stream's text: from the turn that brought it to the socket."""

    def __init__(self, events: EventStream, layout: Layout) -> None:
        self._events, self._layout = events, layout

    @property
    def is_clear(self) -> bool:
        return self._events.is_clear

    def tell(self, deltas: Sequence[Delta]) -> None:
        if frames := _told(self._layout, deltas):
            self._events.send(frames)


def _origin(request: web.Request, answer_id: str) -> Origin:
    """Who asks. What a client calls its request is taken over where it is a plain name."""
    headers, client_id = request.headers, request.headers.get("X-Request-Id", "")
    return Origin(
        answer_id,
        client_id if CLIENT_ID.fullmatch(client_id) else "",
        request[TENANT].name,
        headers.get("traceparent", ""),
        headers.get("tracestate", ""),
    )


def _engine_ids(request: web.Request, answer: Answer) -> dict[str, str]:
    """What the block map calls these requests. For those who may see it: the numbers count everybody's requests."""
    return {"X-Kilburn-Requests": ",".join(map(str, answer.request_ids))} if request[TENANT].is_admin else {}


def _broken(answer: Answer, deltas: Sequence[Delta]) -> ApiError | None:
    """Why an answer can no longer be completed."""
    if answer.refused is not None:
        return refusal(answer.refused)
    for delta in deltas:
        if delta.finish in (FinishReason.ERROR, FinishReason.CANCELLED):
            return failure(delta.message, delta.finish)
        if delta.finish is FinishReason.TIMEOUT and not answer.num_tokens:
            return failure(delta.message, delta.finish)
    return None
