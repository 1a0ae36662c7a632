"""Every route, and what happens between a request and its answer.

    body -> schema -> ids -> streams.ask -> Answer -> whole: one JSON body   or   stream: events as deltas come

A client that leaves cancels its handler (the server is told to do so), and `finally` gives back what the answer holds,
streaming or not. What this file does not know: the engine, keys, how errors look.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from aiohttp import web

from kilburn.controller.api.asking import Asking, chat_ask, completion_asks
from kilburn.controller.api.checks import read_as, read_json
from kilburn.controller.api.errors import ApiError, Handler, bad_request, counting, every_error, failure, refusal
from kilburn.controller.api.guard import TENANT, Access, Guard
from kilburn.controller.api.layout import ChatLayout, CompletionLayout, Layout, to_json
from kilburn.controller.api.malformed import SERVER_NAME
from kilburn.controller.api.messages import for_template
from kilburn.controller.api.prefixes import PrefixRoutes
from kilburn.controller.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kilburn.controller.api.sse import EventStream
from kilburn.controller.auth import Keyring
from kilburn.controller.choice import Ask, Delta, Origin
from kilburn.controller.health import Health
from kilburn.controller.metrics import CONTENT_TYPE, Metrics
from kilburn.controller.named import NamedPrefixes
from kilburn.controller.page.feed import Feed
from kilburn.controller.page.routes import PageRoutes
from kilburn.controller.story import Chronicle
from kilburn.controller.streams import Answer, Streams
from kilburn.controller.telling import as_data
from kilburn.controller.template import TemplateRefused
from kilburn.controller.text import ChatOptions, Text
from kilburn.shared.types import FinishReason

T = TypeVar("T")
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(frozen=True, slots=True)
class Service:
    """All that the routes stand on."""

    asking: Asking
    streams: Streams
    names: NamedPrefixes
    chronicle: Chronicle
    metrics: Metrics
    feed: Feed
    model_name: str
    created: int  # when this service began, in seconds
    max_len: Callable[[], int | None]
    health: Callable[[], Health]

    @property
    def text(self) -> Text:
        return self.asking.text


class Routes:
    """The handlers. Each returns a response or raises ApiError."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # --- answers

    async def completions(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        wanted = await self._read(CompletionRequest, request)
        self._check_model(wanted.model)
        asks = await completion_asks(wanted, service.asking, request[TENANT])
        with_usage = wanted.stream_options is not None and wanted.stream_options.include_usage
        layout = CompletionLayout(service.text, service.model_name, wanted.logprobs is not None, with_usage)
        return await self._answer(request, asks, layout, wanted.stream, with_usage)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        wanted = await self._read(ChatRequest, request)
        self._check_model(wanted.model)
        generation = wanted.add_generation_prompt
        options = ChatOptions(
            add_generation_prompt=not wanted.continue_final_message if generation is None else generation,
            continue_final_message=wanted.continue_final_message,
            trusted=wanted.allow_special_tokens,
            extra=tuple((wanted.chat_template_kwargs or {}).items()),
        )
        ids = await self._chat_ids(wanted.messages, options)
        asks = [await chat_ask(wanted, ids, service.asking, request[TENANT])]
        with_usage = wanted.stream_options is not None and wanted.stream_options.include_usage
        layout = ChatLayout(service.text, service.model_name, wanted.logprobs, with_usage)
        return await self._answer(request, asks, layout, wanted.stream, with_usage)

    async def _chat_ids(self, messages: Sequence[object], options: ChatOptions) -> list[int]:
        text = self._service.text
        if not text.has_template:
            raise bad_request("messages", "this model has no chat template; use /v1/completions")
        given = for_template(messages)
        if options.continue_final_message and given[-1]["role"] != "assistant":
            raise bad_request("messages", "continue_final_message wants an assistant message at the end")
        try:
            return await text.encode_chat(given, options)
        except TemplateRefused as error:
            raise bad_request("messages", str(error)) from None

    async def _answer(
        self, request: web.Request, asks: Sequence[Ask], layout: Layout, is_stream: bool, with_usage: bool
    ) -> web.StreamResponse:
        streams = self._service.streams
        origin = _origin(request, layout.id)
        request[REQUEST_ID] = origin.client_id or origin.answer_id
        answer = await streams.ask([replace(ask, origin=origin) for ask in asks])
        try:
            if answer.refused is not None:
                raise refusal(answer.refused)
            if is_stream:
                return await self._stream(request, answer, layout, with_usage)
            deltas = await answer.whole()
            if (broken := _broken(answer, deltas)) is not None:
                raise broken
            return web.json_response(layout.whole(answer, answer.best(deltas)), dumps=to_json)
        finally:
            streams.leave(answer)

    async def _stream(
        self, request: web.Request, answer: Answer, layout: Layout, with_usage: bool
    ) -> web.StreamResponse:
        events = EventStream(request, _engine_ids(request, answer))
        await events.open()
        await events.send(layout.opening(len(answer.choices)))
        while not answer.is_over:
            deltas = await answer.deltas()
            if (broken := _broken(answer, deltas)) is not None:
                if answer.refused is not None and broken.code is not None:
                    self._service.streams.counts.refusal(broken.code)  # it has begun to answer: nobody else will
                await events.end(broken)
                return events.response
            await events.send([chunk for delta in deltas for chunk in layout.chunks(delta)])
        if with_usage:
            await events.send([layout.usage_chunk(answer)])
        await events.end()
        return events.response

    # --- about the model

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model()]}, dumps=to_json)

    async def model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return web.json_response(self._model(), dumps=to_json)

    def _model(self) -> dict[str, object]:
        service = self._service
        about = {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "kilburn"}
        return {**about, "max_model_len": service.max_len()}

    async def tokenize(self, request: web.Request) -> web.Response:
        service = self._service
        wanted = await self._read(TokenizeRequest, request)
        self._check_model(wanted.model)
        if wanted.messages is not None:
            options = ChatOptions(
                add_generation_prompt=wanted.add_generation_prompt and not wanted.continue_final_message,
                continue_final_message=wanted.continue_final_message,
                trusted=wanted.allow_special_tokens,
            )
            ids = await self._chat_ids(wanted.messages, options)
        else:
            add_special = wanted.add_special_tokens is not False
            (ids,) = await service.text.encode(
                [wanted.prompt or ""], add_special=add_special, trusted=wanted.allow_special_tokens
            )
        names = [service.text.token_text(id) for id in ids] if wanted.return_token_strs else None
        about = {"count": len(ids), "max_model_len": service.max_len(), "tokens": ids, "token_strs": names}
        return web.json_response(about, dumps=to_json)

    async def detokenize(self, request: web.Request) -> web.Response:
        service = self._service
        wanted = await self._read(DetokenizeRequest, request)
        self._check_model(wanted.model)
        beyond = [id for id in wanted.tokens if id >= service.asking.capacity.vocab_size]
        if beyond:
            raise bad_request("tokens", f"tokens: this model has no token {beyond[0]}")
        return web.json_response({"prompt": service.text.decode(wanted.tokens)}, dumps=to_json)

    # --- about the service

    async def health(self, request: web.Request) -> web.Response:
        """Can tokens be produced now?"""
        return _told(self._service.health().unhealthy)

    async def ready(self, request: web.Request) -> web.Response:
        """Would a request be admitted now?"""
        return _told(self._service.health().unready)

    async def live(self, request: web.Request) -> web.Response:
        """Is there any use in leaving this process alone? An answer at all means that its loop turns."""
        return _told(self._service.health().dead)

    async def debug_request(self, request: web.Request) -> web.Response:
        """What happened to the requests of one call. No text of anybody's."""
        chronicle = self._service.chronicle
        records = chronicle.find(request.match_info["id"])
        if not records:
            message = "no request of that id is open, or among the last that ended"
            raise ApiError(404, message, param="id", code="request_not_found")
        return web.json_response({"requests": [as_data(record, chronicle.wall) for record in records]}, dumps=to_json)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    # ---

    async def _read(self, cls: type[T], request: web.Request) -> T:
        return read_as(cls, read_json(await request.read()))

    def _check_model(self, name: str) -> None:
        ours = self._service.model_name
        if name and name != ours:
            raise ApiError(
                404, f"this server has no model of that name; it serves {ours}", param="model", code="model_not_found"
            )


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


def _told(reason: str | None) -> web.Response:
    if reason is None:
        return web.json_response({"status": "ok"})
    return web.json_response({"status": "unavailable", "reason": reason}, status=503)


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


def application(service: Service, keyring: Keyring, max_body_bytes: int) -> web.Application:
    """All routes behind the guard. Served with handler_cancellation, or blocks of clients that left stay taken."""
    routes = Routes(service)
    prefixes = PrefixRoutes(service.text, service.names, service.model_name)
    page = PageRoutes(service.feed)
    table: list[tuple[str, str, Handler, Access]] = [
        ("POST", "/v1/completions", routes.completions, Access.TENANT),
        ("POST", "/v1/chat/completions", routes.chat_completions, Access.TENANT),
        ("GET", "/v1/models", routes.models, Access.TENANT),
        ("GET", "/v1/models/{model:.+}", routes.model, Access.TENANT),
        ("POST", "/v1/prefixes", prefixes.create, Access.TENANT),
        ("GET", "/v1/prefixes", prefixes.listed, Access.TENANT),
        ("GET", "/v1/prefixes/{name}", prefixes.show, Access.TENANT),
        ("DELETE", "/v1/prefixes/{name}", prefixes.delete, Access.TENANT),
        ("POST", "/tokenize", routes.tokenize, Access.TENANT),
        ("POST", "/detokenize", routes.detokenize, Access.TENANT),
        ("GET", "/metrics", routes.metrics, Access.METRICS),
        ("GET", "/debug/requests/{id}", routes.debug_request, Access.ADMIN),
        ("GET", "/health", routes.health, Access.OPEN),
        ("GET", "/ready", routes.ready, Access.OPEN),
        ("GET", "/live", routes.live, Access.OPEN),
        *page.table(),
    ]
    guard = Guard(keyring, {handler: access for _, _, handler, access in table})
    middlewares = [every_error, counting(service.streams.counts.refusal), guard.middleware()]
    app = web.Application(client_max_size=max_body_bytes, middlewares=middlewares)
    for method, path, handler, _ in table:
        app.router.add_route(method, path, handler)
    app.on_response_prepare.append(_sign)
    app.on_shutdown.append(page.close)
    return app


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER_NAME  # not which versions of what are at work here
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
