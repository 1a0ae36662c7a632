"""The gateway's own door: who may come in, what is passed on, what is answered here.

    /v1/..., /tokenize, /detokenize    passed on, with the client's key: controllers have the last word on it
    /docs, /openapi.json               passed on: what is served is what controllers serve
    /health, /ready, /live, /metrics   of the gateway itself

The same guard as a controller's stands here, with the same file of keys, so that a stranger costs no controller
anything and no tokenizing; and so that a gateway without keys answers loopback only.
"""

import asyncio
import time
from dataclasses import dataclass

from aiohttp import web

from kilburn.controller.api.checks import read_json
from kilburn.controller.api.crossing import Origins
from kilburn.controller.api.errors import ApiError, every_error
from kilburn.controller.api.guard import TENANT, Access, Guard
from kilburn.controller.api.malformed import SERVER_NAME
from kilburn.controller.auth import Keyring
from kilburn.controller.gateway.fleet import Fleet
from kilburn.controller.gateway.forward import Forwarder
from kilburn.controller.gateway.metrics import GatewayMetrics
from kilburn.controller.gateway.prompts import Prompts
from kilburn.controller.gateway.roster import Member, State
from kilburn.controller.metrics import CONTENT_TYPE


@dataclass(slots=True)
class Door:
    """The handlers."""

    fleet: Fleet
    forwarder: Forwarder
    prompts: Prompts
    metrics: GatewayMetrics
    is_draining: bool = False

    async def forward(self, request: web.Request) -> web.StreamResponse:
        if self.is_draining:
            raise ApiError(503, "the gateway is shutting down", code="shutting_down")
        body = await request.read()
        return await self.forwarder.answer(request, body, await self._members(request, body))

    async def open_page(self, request: web.Request) -> web.StreamResponse:
        """What anybody may read, of whichever controller has the least to do."""
        return await self.forwarder.answer(request, b"", self.fleet.order(0, {}))

    async def _members(self, request: web.Request, body: bytes) -> list[Member]:
        """Whom to ask, the best first: by prefix and load where there is a prompt, else by load."""
        prompt, counters = None, self.forwarder.counters
        if request.method == "POST":
            prompt = await self.prompts.read(request.path, _json(body), request[TENANT].name)
        if prompt is None:
            counters.by_load += 1
            return self.fleet.order(0, {})
        found = await self.prompts.computed(prompt, self.fleet.kinds)
        members = self.fleet.order(len(prompt.ids), found)
        hit = found.get(members[0].id, 0) if members else 0
        counters.by_prefix += hit > 0
        counters.by_load += hit == 0
        counters.prompt_tokens += len(prompt.ids)
        counters.hit_tokens += hit
        return members

    # --- of the gateway itself

    async def health(self, request: web.Request) -> web.Response:
        """Is anybody there who may produce tokens?"""
        return _told(any(member.state is not State.LOST for member in self.fleet.members), "no controller answers")

    async def ready(self, request: web.Request) -> web.Response:
        if self.is_draining:
            return _told(False, "shutting down")
        return _told(any(member.state is State.READY for member in self.fleet.members), "no controller is ready")

    async def live(self, request: web.Request) -> web.Response:
        return _told(True, "")

    async def figures(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    # ---

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """No new requests; those that are under way may go on for so long, or until `hurry`."""
        self.is_draining = True
        deadline = time.monotonic() + seconds
        while any(member.under_way for member in self.fleet.members):
            if hurry.is_set() or time.monotonic() >= deadline:
                return
            await asyncio.sleep(0.02)


def _json(body: bytes) -> object:
    try:
        return read_json(body)
    except ApiError:
        return None  # the controller will say so


def _told(is_so: bool, reason: str) -> web.Response:
    if is_so:
        return web.json_response({"status": "ok"})
    return web.json_response({"status": "unavailable", "reason": reason}, status=503)


def door_application(door: Door, keyring: Keyring, max_body_bytes: int, origins: Origins) -> web.Application:
    table = [
        ("*", "/v1/{rest:.+}", door.forward, Access.TENANT),
        ("POST", "/tokenize", door.forward, Access.TENANT),
        ("POST", "/detokenize", door.forward, Access.TENANT),
        ("GET", "/openapi.json", door.open_page, Access.OPEN),
        ("GET", "/docs", door.open_page, Access.OPEN),
        ("GET", "/metrics", door.figures, Access.METRICS),
        ("GET", "/health", door.health, Access.OPEN),
        ("GET", "/ready", door.ready, Access.OPEN),
        ("GET", "/live", door.live, Access.OPEN),
    ]
    guard = Guard(keyring, {handler: access for _, _, handler, access in table}, origins)
    middlewares = [origins.middleware(), every_error, guard.middleware()]
    app = web.Application(client_max_size=max_body_bytes, middlewares=middlewares)
    for method, path, handler, _ in table:
        app.router.add_route(method, path, handler)
    app.on_response_prepare.append(_sign)

    async def sign_for_page(request: web.Request, response: web.StreamResponse) -> None:
        origins.sign(request, response)

    app.on_response_prepare.append(sign_for_page)
    return app


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER_NAME
