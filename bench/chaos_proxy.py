"""A piece of wire that can be cut: a TCP proxy on loopback whose connections break, stall or lag on command.

    one side ----> Wire(port) ----> the other side's port

    cut      every connection that is there now is reset, at both ends
    stalled  nothing passes, in either direction, and nobody is told: a half-open connection, as after a power cut
    lag_s    what comes is passed on so much later, in order

New connections are accepted while stalled too, as a kernel would accept them for a process that is stopped.
"""

import asyncio
import contextlib
import socket
import struct

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset
CHUNK_BYTES = 1 << 16


class Wire:
    """Passes on what comes to `port` to `target_port`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.lag_s = 0.0
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        passing = [asyncio.create_task(self._pass(reader, back)), asyncio.create_task(self._pass(there, writer))]
        self._tasks |= {*passing}
        await asyncio.wait(passing)
        self._tasks -= {*passing}
        self._writers -= {writer, back}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the one end closes, or is cut; then the other is closed alike."""
        try:
            while data := await reader.read(CHUNK_BYTES):
                if self.lag_s:
                    await asyncio.sleep(self.lag_s)
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
            await self._flows.wait()  # that it was closed is not told while nothing passes
            writer.close()
        except OSError:
            writer.transport.abort()
