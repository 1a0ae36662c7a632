"""OpenAI's Responses over HTTP."""

from aiohttp import web

from kilburn.controller.api.answering import Answering
from kilburn.controller.api.errors import ApiError
from kilburn.controller.api.guard import TENANT
from kilburn.controller.api.responses import FIELDS, ResponsesRequest, as_chat
from kilburn.controller.api.responses_layout import ResponsesLayout
from kilburn.controller.api.service import Service


class ResponsesRoutes:
    """The handlers. Each returns a response or raises ApiError."""

    def __init__(self, service: Service) -> None:
        self._service, self._answering = service, Answering(service)

    async def create(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        wanted = await service.read(ResponsesRequest, request)
        service.check_model(wanted.model)
        ask, reader = await self._answering.translated(as_chat(wanted), FIELDS, request[TENANT])
        layout = ResponsesLayout(service.model_name, wanted, reader)
        return await self._answering.answer(request, [ask], layout, wanted.stream)

    async def stored(self, request: web.Request) -> web.Response:
        raise ApiError(404, "responses are not stored here; keep what you were answered", code="response_not_found")
