"""The door: which routes exist, and who may use each.

Access is a property of the handler that was matched, never of the text of a URL: there is nothing to parse twice and
differently. A handler that is not in the table is closed to everyone but admins, and an address that matches no
handler tells a stranger only that a key is wanted.

Without keys only loopback is served, and only to its own: a page of somewhere else can make its own name point here, or
send a form here, but a browser says by which name it came, and from which page.
"""

from enum import Enum
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from kilburn.controller.api.crossing import Origins
from kilburn.controller.api.errors import ApiError, Handler
from kilburn.controller.auth import ANYONE, Keyring, Role, Tenant

TENANT: web.RequestKey[Tenant] = web.RequestKey("tenant", Tenant)


class Access(Enum):
    OPEN = "open"
    TENANT = "tenant"
    METRICS = "metrics"  # everybody's figures: for operators, and for a key that opens nothing else
    ADMIN = "admin"


_ROLES = {
    Access.TENANT: {Role.USER, Role.ADMIN},
    Access.METRICS: {Role.METRICS, Role.ADMIN},
    Access.ADMIN: {Role.ADMIN},
}


class Guard:
    """Lets through whom the keyring knows. `access` maps handlers to who may use them."""

    def __init__(self, keyring: Keyring, access: dict[Handler, Access], origins: Origins | None = None) -> None:
        self._keyring = keyring
        self._access = access
        self._origins = origins or Origins("")

    def admit(self, request: web.Request) -> Tenant:
        """Who asks. Raises ApiError."""
        access = self._access.get(request.match_info.handler, Access.ADMIN)
        if access is Access.OPEN:
            return ANYONE
        if self._keyring.is_empty:
            if not is_from_here(request, self._origins):
                raise ApiError(
                    403,
                    "without API keys this server answers to loopback names only, and to no page of another address: "
                    "ask http://127.0.0.1, or start it with --api-key-file",
                    code="forbidden",
                )
            return ANYONE
        key = _key(request)
        tenant = self._keyring.tenant_of(key) if key is not None else None
        if tenant is None:
            raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if tenant.role not in _ROLES[access] and request.match_info.http_exception is None:
            raise ApiError(403, _closed(access, tenant), code="forbidden")
        return tenant

    def middleware(self) -> Middleware:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            request[TENANT] = self.admit(request)
            return await handler(request)

        return guarded


def _key(request: web.Request) -> str | None:
    """As OpenAI's clients send it, or else as Anthropic's do."""
    if (given := request.headers.get("Authorization")) is None:
        return request.headers.get("x-api-key")
    scheme, _, key = given.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _closed(access: Access, tenant: Tenant) -> str:
    if tenant.role is Role.METRICS:
        return "this key may read /metrics and nothing else"
    if access is Access.METRICS:
        return "/metrics is for admin keys, and for keys of its own (NAME:KEY:metrics in the file of keys)"
    return "this route is for admin keys"


def is_from_here(request: web.Request, origins: Origins) -> bool:
    """Whether the one who asks said a loopback name, and no browser says that a page of elsewhere had it ask."""
    origin = request.headers.get("Origin", "http://localhost")
    is_ours = is_loopback(origin) or origins.allow(origin)
    return is_ours and is_loopback("//" + request.headers.get("Host", "localhost"))


def is_loopback(url: str) -> bool:
    """Whether the host of a URL, with or without a port, can only mean the machine that it is said on."""
    try:
        name = urlsplit(url).hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False
