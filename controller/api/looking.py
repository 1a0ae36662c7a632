"""A look at all connections of a server now and then, for as long as it serves. Whose time is over others say."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from aiohttp import web

log = logging.getLogger("kilburn.api")
LOOKS = 4  # within the time that is allowed


def looking(patience_s: float, look: Callable[[float], None]) -> Callable[[web.Application], AsyncIterator[None]]:
    """For an application's `cleanup_ctx`. `look` is told the time of the loop; a fault in one look ends no other."""

    async def look_on() -> None:
        while True:
            await asyncio.sleep(patience_s / LOOKS)
            try:
                look(asyncio.get_running_loop().time())
            except Exception:
                log.exception("a look at the connections failed")

    async def while_serving(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.ensure_future(look_on())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    return while_serving
