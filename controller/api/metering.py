"""What a key may use, kept at the door: every POST of a key that has an allowance is metered, whatever it asks for.

The door comes before all work: a request too many costs its headers. Tokens are charged where they are known
(answering.py); a body that never comes is a request under way until it is given up (senders.py).
"""

import asyncio
import math

from aiohttp import web
from aiohttp.typedefs import Middleware

from kilburn.controller.api.errors import ApiError, Handler
from kilburn.controller.api.guard import TENANT
from kilburn.controller.quota import Meter, Meters

METER: web.RequestKey[Meter] = web.RequestKey("meter", Meter)


def metering(meters: Meters) -> Middleware:
    """Comes behind the guard, which says whose request it is."""

    @web.middleware
    async def metered(request: web.Request, handler: Handler) -> web.StreamResponse:
        tenant = request[TENANT]
        if tenant.allowance.is_any or request.method != "POST":
            return await handler(request)
        now = asyncio.get_running_loop().time()
        meter = meters.of(tenant.key_id, tenant.allowance, now)
        if (exceeded := meter.exceeded(now)) is not None:
            after_s = max(math.ceil(exceeded.retry_after_s), 1)
            message = f"this key has used what it may ({exceeded.what}); try again in {after_s} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=after_s)
        meter.begin()
        request[METER] = meter
        try:
            return await handler(request)
        finally:
            meter.end()

    return metered


def charge(request: web.Request, num_tokens: int) -> None:
    if (meter := request.get(METER)) is not None:
        meter.charge(num_tokens)
