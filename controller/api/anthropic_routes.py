"""Anthropic's messages over HTTP."""

from aiohttp import web

from kilburn.controller.api.answering import Answering
from kilburn.controller.api.anthropic import FIELDS, CountTokensRequest, MessagesRequest, as_chat
from kilburn.controller.api.anthropic_layout import AnthropicLayout
from kilburn.controller.api.checks import read_as
from kilburn.controller.api.errors import ApiError, renamed
from kilburn.controller.api.guard import TENANT
from kilburn.controller.api.layout import to_json
from kilburn.controller.api.schema import ChatRequest
from kilburn.controller.api.service import Service


class AnthropicRoutes:
    """The handlers. Each returns a response or raises ApiError."""

    def __init__(self, service: Service) -> None:
        self._service, self._answering = service, Answering(service)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        wanted = await service.read(MessagesRequest, request)
        service.check_model(wanted.model)
        ask, reader = await self._answering.translated(as_chat(wanted), FIELDS, request[TENANT])
        layout = AnthropicLayout(service.model_name, reader, tells_timings=wanted.timings)
        return await self._answering.answer(request, [ask], layout, wanted.stream)

    async def count_tokens(self, request: web.Request) -> web.Response:
        service = self._service
        wanted = await service.read(CountTokensRequest, request)
        service.check_model(wanted.model)
        body = as_chat(wanted)
        try:
            ids = await self._answering.conversation(read_as(ChatRequest, body))
        except ApiError as error:
            raise renamed(error, FIELDS) from None
        return web.json_response({"input_tokens": len(ids)}, dumps=to_json)
