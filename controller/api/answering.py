"""From what is asked to an answer on its way out, in whatever layout: one path for every API that is spoken here.

    asks -> streams.ask -> Answer -> whole: one JSON body   or   stream: events as deltas come

A client that leaves cancels its handler (the server is told to do so), and `finally` gives back what the answer holds,
streaming or not. What this file does not know: what a request or an answer looks like.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from kilburn.controller.api.asking import chat_ask
from kilburn.controller.api.errors import ApiError, failure, refusal
from kilburn.controller.api.guard import TENANT
from kilburn.controller.api.layout import Layout, to_json
from kilburn.controller.api.messages import chat_ids, chat_prompt
from kilburn.controller.api.schema import ChatRequest
from kilburn.controller.api.service import Service
from kilburn.controller.api.sse import EventStream
from kilburn.controller.auth import Tenant
from kilburn.controller.choice import Ask, Delta, Origin
from kilburn.controller.streams import Answer
from kilburn.controller.text import ChatOptions
from kilburn.shared.types import FinishReason

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Answering:
    """What every route that produces text does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat_ask(self, wanted: ChatRequest, tenant: Tenant) -> Ask:
        """Raises ApiError."""
        return await chat_ask(wanted, await self.conversation(wanted), self._service.asking, tenant)

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
            if is_stream:
                return await self._stream(request, answer, layout)
            deltas = await answer.whole()
            if (broken := _broken(answer, deltas)) is not None:
                raise broken
            return web.json_response(layout.whole(answer, answer.best(deltas)), dumps=to_json)
        finally:
            streams.leave(answer)

    async def _stream(self, request: web.Request, answer: Answer, layout: Layout) -> web.StreamResponse:
        events = EventStream(request, _engine_ids(request, answer))
        await events.open()
        await events.write(layout.opening(answer))
        while not answer.is_over:
            deltas = await answer.deltas()
            if (broken := _broken(answer, deltas)) is not None:
                if answer.refused is not None and broken.code is not None:
                    self._service.streams.counts.refusal(broken.code)  # it has begun to answer: nobody else will
                await events.end(layout.broken(broken))
                return events.response
            await events.write([frame for delta in deltas for frame in layout.chunks(delta)])
        await events.end(layout.ending(answer))
        return events.response


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
