"""Clients that ask and do not read: a connection whose other end has taken nothing for too long is broken off.

    written - still here = taken        taken stays the same, and something is still here: nobody reads

An answer that nobody reads is never done: its handler, its text and its connection would stay for as long as the client
likes. Whoever reads slowly takes something now and then, and may take all the time in the world. Taken is what has
arrived on the other side; what the kernel of this one holds for a connection, which may be megabytes, is still here.
"""

import asyncio
import fcntl
import logging
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from kilburn.controller.api.looking import looking

log = logging.getLogger("kilburn.api")


@dataclass(slots=True)
class _Reading:
    """One connection, as it was when it was last looked at."""

    writer: AbstractStreamWriter
    num_taken: int
    since: float  # nothing was taken


def _still_here(transport: asyncio.Transport) -> int:
    """Bytes that were written and have not arrived: those of the transport's buffer, and of the kernel's (SIOCOUTQ)."""
    if transport.is_closing():  # of one with TLS that is closed nothing else may be asked
        return 0
    num_kept = transport.get_write_buffer_size()
    with suppress(OSError):  # a system whose sockets do not tell
        held = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        num_kept += int.from_bytes(held, sys.byteorder)
    return num_kept


class Readers:
    """Of one server. `on_lost` is told of each client that is given up."""

    def __init__(self, patience_s: float, on_lost: Callable[[], None]) -> None:
        self._patience_s, self._on_lost = patience_s, on_lost
        self._readings: dict[asyncio.Transport, _Reading] = {}

    @property
    def num_waiting(self) -> int:
        """Connections whose clients have not taken all that there is."""
        return sum(_still_here(transport) > 0 for transport in self._readings)

    def watch_all(self, app: web.Application) -> None:
        """Whoever is answered by this server, on whatever route, is watched while it runs."""
        if self._patience_s > 0.0:
            app.on_response_prepare.append(self._answered)
            app.cleanup_ctx.append(looking(self._patience_s, self.look))

    async def _answered(self, request: web.Request, response: web.StreamResponse) -> None:
        if (transport := request.transport) is not None:
            self._readings[transport] = _Reading(request.writer, 0, asyncio.get_running_loop().time())

    def look(self, now: float) -> None:
        """What has become of each since it was last looked at."""
        for transport, reading in list(self._readings.items()):
            num_kept = _still_here(transport)
            num_taken = reading.writer.output_size - num_kept
            if transport.is_closing():
                del self._readings[transport]
            elif num_taken != reading.num_taken or not num_kept:
                reading.num_taken, reading.since = num_taken, now
            elif now - reading.since >= self._patience_s:
                del self._readings[transport]
                log.warning("a client read nothing of its answer for %g s and is disconnected", now - reading.since)
                self._on_lost()
                transport.abort()  # its handler is cancelled, and what its request holds is given back
