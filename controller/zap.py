"""Whom CURVE lets in: the answer to ZeroMQ's question whether a key that a peer has proved is on the allow-list.

The question comes over a socket of fixed name inside the context (ZAP, RFC 27), once per handshake, and is answered on
the event loop. The handler must be bound before the link binds and outlive it: without one, CURVE admits every key.
"""

import asyncio
from collections.abc import Iterable

import zmq
from zmq.utils import z85

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
DOMAIN = b"kilburn"


class AllowList:
    """Answers for `allowed`, public keys in Z85. Anything but a listed CURVE key is denied and counted."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allowed: Iterable[str]) -> None:
        self._allowed = frozenset([z85.decode(key.encode("ascii")) for key in allowed])
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._answer_all)
        self.denied = 0

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close()

    def _answer_all(self) -> None:
        # The descriptor tells of a change, not of a state: only an empty socket ends the turn.
        while True:
            try:
                question = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(question), zmq.NOBLOCK)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        match question:
            case [version, request, domain, _, _, b"CURVE", key] if (
                version == _VERSION and domain == DOMAIN and key in self._allowed
            ):
                return [_VERSION, request, b"200", b"OK", z85.encode(key), b""]
        self.denied += 1
        request = question[1] if len(question) > 1 else b""
        return [_VERSION, request, b"400", b"not on the allow list", b"", b""]
