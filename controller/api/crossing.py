"""Pages of other addresses: which of them a browser may let ask here (CORS). None, unless a setting names them.

A page that is let in still needs a key where there are keys: nothing here speaks of credentials, so a browser sends
none of its own.
"""

from aiohttp import web
from aiohttp.typedefs import Middleware

from kilburn.controller.api.errors import Handler

_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, x-api-key, anthropic-version, X-Request-Id",
    "Access-Control-Max-Age": "600",
}
_SHOWN = "X-Request-Id, Retry-After, Server-Timing, Warning"


class Origins:
    """Those that may ask: `https://chat.example`, or `*` for all."""

    def __init__(self, listed: str) -> None:
        self._listed = {origin.strip().rstrip("/").lower() for origin in listed.split(",") if origin.strip()}

    def allow(self, origin: str | None) -> bool:
        return origin is not None and ("*" in self._listed or origin.lower() in self._listed)

    def sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Lets the page that asked read the answer."""
        if not self._listed:
            return
        response.headers.add("Vary", "Origin")
        if self.allow(origin := request.headers.get("Origin")) and origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _SHOWN

    def middleware(self) -> Middleware:
        """Answers a browser that asks whether it may ask. It sends no key for that, so this stands before the guard."""

        @web.middleware
        async def crossing(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if is_preflight and self.allow(request.headers.get("Origin")):
                return web.Response(status=204, headers=_PREFLIGHT)
            return await handler(request)

        return crossing
