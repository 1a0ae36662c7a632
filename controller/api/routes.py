"""Every route, and what each makes of its request.

    body -> schema -> ids -> asks, layout -> answering.py

What this file does not know: the engine, keys, how errors look.
"""

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from aiohttp import web

from kilburn.controller.api import openapi
from kilburn.controller.api.answering import REQUEST_ID, Answering
from kilburn.controller.api.anthropic_routes import AnthropicRoutes
from kilburn.controller.api.asking import completion_asks
from kilburn.controller.api.crossing import Origins
from kilburn.controller.api.errors import ApiError, Handler, bad_request, counting, every_error
from kilburn.controller.api.groups import GroupRoutes
from kilburn.controller.api.guard import TENANT, Access, Guard
from kilburn.controller.api.layout import ChatLayout, CompletionLayout, Shown, to_json
from kilburn.controller.api.malformed import SERVER_NAME
from kilburn.controller.api.metering import metering
from kilburn.controller.api.prefixes import PrefixRoutes
from kilburn.controller.api.responses_routes import ResponsesRoutes
from kilburn.controller.api.schema import ChatRequest, Choosing, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kilburn.controller.api.service import Service, warning_of
from kilburn.controller.auth import Keyring
from kilburn.controller.metrics import CONTENT_TYPE
from kilburn.controller.page.routes import PageRoutes
from kilburn.controller.quota import Meters
from kilburn.controller.telling import as_data
from kilburn.controller.text import ChatOptions


def completion_shown(wanted: CompletionRequest) -> Shown:
    echoed = wanted.logprobs if wanted.echo and wanted.logprobs is not None else -1
    return replace(_shown(wanted), logprobs=wanted.logprobs is not None, echoed=echoed)


def chat_shown(wanted: ChatRequest) -> Shown:
    return replace(_shown(wanted), logprobs=wanted.logprobs)


def _shown(wanted: Choosing) -> Shown:
    return Shown(
        usage=wanted.stream_options is not None and wanted.stream_options.include_usage,
        prompt=-1 if wanted.prompt_logprobs is None else wanted.prompt_logprobs,
        timings=wanted.timings,
    )


class Routes:
    """The handlers. Each returns a response or raises ApiError."""

    def __init__(self, service: Service) -> None:
        self._service, self._answering = service, Answering(service)
        about = openapi.document(service.limits)
        self._openapi, self._docs = to_json(about), openapi.page(about)

    # --- answers

    async def completions(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        wanted = await service.read(CompletionRequest, request)
        service.check_model(wanted.model)
        asks = await completion_asks(wanted, service.asking, request[TENANT])
        layout = CompletionLayout(service.text, service.model_name, completion_shown(wanted))
        return await self._answering.answer(request, asks, layout, wanted.stream)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        wanted = await service.read(ChatRequest, request)
        service.check_model(wanted.model)
        asks = [await self._answering.chat_ask(wanted, request[TENANT])]
        form = service.asking.form
        reader = partial(wanted.toolbox.new_reader, form) if form is not None and wanted.toolbox.may_be_called else None
        layout = ChatLayout(service.text, service.model_name, chat_shown(wanted), reader)
        return await self._answering.answer(request, asks, layout, wanted.stream)

    # --- about the model

    async def models(self, request: web.Request) -> web.Response:
        name = self._service.model_name
        page = {"has_more": False, "first_id": name, "last_id": name}  # Anthropic's clients read these
        return web.json_response({"object": "list", "data": [self._model()], **page}, dumps=to_json)

    async def model(self, request: web.Request) -> web.Response:
        self._service.check_model(request.match_info["model"])
        return web.json_response(self._model(), dumps=to_json)

    def _model(self) -> dict[str, object]:
        service = self._service
        about = {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "kilburn"}
        created_at = datetime.fromtimestamp(service.created, UTC).isoformat()
        anthropics = {"type": "model", "display_name": service.model_name, "created_at": created_at}
        return {**about, "max_model_len": service.max_len(), **anthropics}

    async def tokenize(self, request: web.Request) -> web.Response:
        service = self._service
        wanted = await service.read(TokenizeRequest, request)
        service.check_model(wanted.model)
        if wanted.messages is not None:
            options = ChatOptions(
                add_generation_prompt=wanted.add_generation_prompt and not wanted.continue_final_message,
                continue_final_message=wanted.continue_final_message,
                trusted=wanted.allow_special_tokens,
            )
            ids = await self._answering.chat_ids(wanted.messages, options)
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
        wanted = await service.read(DetokenizeRequest, request)
        service.check_model(wanted.model)
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

    async def openapi(self, request: web.Request) -> web.Response:
        return web.Response(text=self._openapi, content_type="application/json")

    async def docs(self, request: web.Request) -> web.Response:
        return web.Response(text=self._docs, content_type="text/html", headers=openapi.HEADERS)


def _told(reason: str | None) -> web.Response:
    if reason is None:
        return web.json_response({"status": "ok"})
    return web.json_response({"status": "unavailable", "reason": reason}, status=503)


def application(service: Service, keyring: Keyring, max_body_bytes: int, origins: Origins) -> web.Application:
    """All routes behind the guard. Served with handler_cancellation, or blocks of clients that left stay taken."""
    routes = Routes(service)
    anthropic = AnthropicRoutes(service)
    responses = ResponsesRoutes(service)
    groups, prefixes = GroupRoutes(service), PrefixRoutes(service)
    page = PageRoutes(service.feed)
    table: list[tuple[str, str, Handler, Access]] = [
        ("POST", "/v1/completions", routes.completions, Access.TENANT),
        ("POST", "/v1/chat/completions", routes.chat_completions, Access.TENANT),
        ("POST", "/v1/responses", responses.create, Access.TENANT),
        ("GET", "/v1/responses/{id}", responses.stored, Access.TENANT),
        ("DELETE", "/v1/responses/{id}", responses.stored, Access.TENANT),
        ("POST", "/v1/messages", anthropic.messages, Access.TENANT),
        ("POST", "/v1/messages/count_tokens", anthropic.count_tokens, Access.TENANT),
        ("GET", "/v1/models", routes.models, Access.TENANT),
        ("GET", "/v1/models/{model:.+}", routes.model, Access.TENANT),
        ("POST", "/v1/prefixes", prefixes.create, Access.TENANT),
        ("GET", "/v1/prefixes", prefixes.listed, Access.TENANT),
        ("GET", "/v1/prefixes/{name}", prefixes.show, Access.TENANT),
        ("DELETE", "/v1/prefixes/{name}", prefixes.delete, Access.TENANT),
        ("POST", "/tokenize", routes.tokenize, Access.TENANT),
        ("POST", "/detokenize", routes.detokenize, Access.TENANT),
        ("GET", "/openapi.json", routes.openapi, Access.OPEN),
        ("GET", "/docs", routes.docs, Access.OPEN),
        ("GET", "/metrics", routes.metrics, Access.METRICS),
        ("GET", "/debug/requests/{id}", routes.debug_request, Access.ADMIN),
        ("GET", "/admin/groups", groups.listed, Access.ADMIN),
        ("POST", "/admin/groups/{name}/drain", groups.drain, Access.ADMIN),
        ("GET", "/health", routes.health, Access.OPEN),
        ("GET", "/ready", routes.ready, Access.OPEN),
        ("GET", "/live", routes.live, Access.OPEN),
        *page.table(),
    ]
    guard = Guard(keyring, {handler: access for _, _, handler, access in table}, origins)
    counted = counting(service.streams.counts.refusal)
    middlewares = [origins.middleware(), every_error, counted, guard.middleware(), metering(Meters())]
    app = web.Application(client_max_size=max_body_bytes, middlewares=middlewares)
    for method, path, handler, _ in table:
        app.router.add_route(method, path, handler)
    app.on_response_prepare.append(_sign)

    async def sign_for_page(request: web.Request, response: web.StreamResponse) -> None:
        origins.sign(request, response)

    app.on_response_prepare.append(sign_for_page)
    app.on_shutdown.append(page.close)
    return app


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER_NAME  # not which versions of what are at work here
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    if (warning := warning_of(request)) is not None:
        response.headers["Warning"] = warning
