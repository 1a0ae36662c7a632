"""What ZeroMQ itself turned away at the controller's door, before there was any frame: it tells of it on a socket.

    unfinished   the connection ended, or its time was over, before both sides had greeted
    protocol     what came was no greeting of ours: another protocol, or another mechanism
    key          CURVE: the key is not on the list

Connections that end later (a peer that went away, a frame beyond the limit) are counted as ended.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import parse_monitor_message

_KINDS = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "unfinished",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "protocol",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "key",
}
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | sum(_KINDS)
_TURN = 256  # events read before others get their turn on the loop


@dataclass(slots=True)
class HandshakeCounters:
    """For metrics. They only grow."""

    failed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KINDS.values(), 0))
    succeeded: int = 0
    ended: int = 0  # connections, greeted or not


class LinkWatch:
    """Counts what a socket's monitor tells, on the running loop. A socket has one monitor, so this is the only one."""

    def __init__(self, socket: "zmq.Socket[bytes]", counters: HandshakeCounters, on_ended: Callable[[], None]) -> None:
        self._counters, self._on_ended = counters, on_ended
        self._socket, self._monitor = socket, socket.get_monitor_socket(_WATCHED)
        self._fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)
        self._read()

    def close(self) -> None:
        """Before the socket is."""
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _read(self) -> None:
        # The descriptor tells of a change, not of a state: only an empty socket ends this.
        for _ in range(_TURN):
            try:
                told = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._note(zmq.Event(told["event"]))
        self._loop.call_soon(self._read)

    def _note(self, event: zmq.Event) -> None:
        if event in _KINDS:
            self._counters.failed[_KINDS[event]] += 1
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._counters.succeeded += 1
        elif event == zmq.Event.DISCONNECTED:
            self._counters.ended += 1
            self._on_ended()
