"""The controller's end of the wire: one ROUTER that every rank of every worker connects to.

    frames -> well-formed? -> known peer? -> deliver([Arrived | Left, ...])        one call per turn of the loop
    send(peer, message) -> encode -> ROUTER                                        never blocks, never calls back

A peer is *known* from its Hello until it is over: it left, sent garbage, could not be reached, or was sent Gone or
Reject. Only a known peer can have an effect on the core. What strangers send is counted and dropped, or answered here:
a message of some lease with Gone (its sender outlived a controller), a Hello in another version of the protocol with a
Reject in that version, a Hello too many with Reject.

When any connection ends the socket's monitor says so, but not whose it was; `on_disturbed` has the core send to each,
and what cannot be sent tells. So a process that ends is missed within milliseconds, wherever it ran.

Losses are events (`Left`), delivered in a later turn, once. A frame that cannot be queued at once is a loss: the marks
are far above what a peer that reads can leave unread. ZeroMQ queues fairly between peers and reads no more than a mark
ahead, and a turn takes a bounded number of frames, so that neither a flood nor a slow reader stops the others.

The socket is read off the event loop's own selector. Its descriptor is signalled on changes, not while there is
something to read, and a send may swallow the signal; so each send books another look.

What this file does not know: leases, deadlines, what any message means. It starts no task, and reads a clock only to
say how long it took.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from kilburn.controller.core.events import Arrived, Left
from kilburn.controller.link_watch import HandshakeCounters, LinkWatch
from kilburn.controller.zap import DOMAIN, AllowList
from kilburn.shared import messages as m
from kilburn.shared.codec import MAX_FRAME_BYTES, WrongVersion, decode_from_worker, encode, encode_reject
from kilburn.shared.keys import ControllerKeys, KeyPair, NewKeys, SettingError, checked_endpoint, write_keys
from kilburn.shared.types import ProtocolError

_STRANGER_BYTES = 64 << 10  # a Hello is far smaller
_MAX_IDENTITY_BYTES = 128
_LEARNS_S = 0.01
_NO_LEASE = "no lease here for this peer: say Hello"


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds on what peers can make the controller hold or do."""

    max_peers: int = 1024  # known at once
    mark: int = 64  # frames on their way to or from one peer
    turn: int = 64  # frames read before others get their turn on the loop
    handshake_s: float = 10.0  # a connection that has not greeted by then is closed
    dead_s: float = 15.0  # a connection whose other end answers no ping for so long is closed


@dataclass(slots=True)
class LinkCounters:
    """For metrics. They only grow."""

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    seconds: float = 0.0  # spent on frames: coding them, and the socket
    unsent: int = 0  # frames that could not be queued, each the loss of its peer
    strangers: int = 0  # well-formed messages from peers without a Hello
    garbage: dict[str, int] = field(default_factory=lambda: {"identity": 0, "parts": 0, "malformed": 0, "version": 0})
    handshakes: HandshakeCounters = field(default_factory=HandshakeCounters)


class ControllerLink:
    """Law: a peer for which Left was delivered has no effect before its next Hello."""

    def __init__(
        self,
        endpoint: str,
        deliver: Callable[[list[Arrived | Left]], None],
        *,
        on_disturbed: Callable[[], None] = lambda: None,
        keys: ControllerKeys | None = None,
        limits: LinkLimits | None = None,
    ) -> None:
        """Raises SettingError for an endpoint that may not be bound. `deliver` runs on the loop of `start`."""
        self.endpoint = checked_endpoint(endpoint, keys is not None, "--bind")
        self.counters = LinkCounters()
        self._deliver, self._on_disturbed = deliver, on_disturbed
        self._keys = keys
        self._limits = limits or LinkLimits()
        self._known: set[bytes] = set()
        self._losses: list[Left] = []
        self._is_booked = False  # a look at the socket is on the loop's agenda
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._allow_list: AllowList | None = None
        self._watch: LinkWatch | None = None
        self._fd: int | None = None
        self._asking: asyncio.TimerHandle | None = None  # a connection ended

    @property
    def peers(self) -> int:
        return len(self._known)

    @property
    def denied(self) -> int:
        """Handshakes refused for their key."""
        return self._allow_list.denied if self._allow_list is not None else 0

    async def start(self) -> None:
        """Bind. Afterwards `endpoint` is where workers connect. Raises SettingError for an address not to be had."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 16)
        if self._keys is not None:
            self._allow_list = AllowList(self._context, self._keys.allowed)
        self._socket = self._context.socket(zmq.ROUTER)
        self._set_options(self._socket)
        self._watch = LinkWatch(self._socket, self.counters.handshakes, self._overheard)
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            await self.close()
            raise SettingError(f"--bind {self.endpoint}: {error.strerror}. Choose another address or port") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.endpoint.startswith("ipc://"):
            os.chmod(self.endpoint.removeprefix("ipc://"), 0o600)  # connecting takes the right to write
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._look)
        self._book()

    def _set_options(self, socket: "zmq.Socket[bytes]") -> None:
        limits = self._limits
        options = {
            zmq.ROUTER_MANDATORY: 1,  # an error instead of silence for a frame that goes nowhere
            zmq.ROUTER_HANDOVER: 0,  # nobody takes over the identity of a peer that is connected
            zmq.LINGER: 0,
            zmq.SNDHWM: limits.mark,
            zmq.RCVHWM: limits.mark,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.HANDSHAKE_IVL: int(limits.handshake_s * 1000),
            zmq.HEARTBEAT_IVL: int(limits.dead_s * 1000 / 3),
            zmq.HEARTBEAT_TIMEOUT: int(limits.dead_s * 1000),
            zmq.IPV6: int("[" in self.endpoint),
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        if self._keys is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.pair.secret)

    async def close(self) -> None:
        """Idempotent. What is still queued is dropped."""
        socket, self._socket = self._socket, None
        if self._asking is not None:
            self._asking.cancel()
        if socket is not None:
            if self._fd is not None:
                self._loop.remove_reader(self._fd)
            if self._watch is not None:
                self._watch.close()
            socket.close()
        if self._allow_list is not None and self._context is not None and not self._context.closed:
            self._allow_list.close()
        if self._context is not None:
            self._context.term()

    # --- outwards

    def send(self, peer: bytes, message: m.FromController) -> None:
        """Queue a message. If that cannot be done at once, the peer is lost: `Left` follows in a later turn."""
        begun = time.perf_counter()
        reason = self._transmit(peer, encode(message))
        self.counters.seconds += time.perf_counter() - begun
        if isinstance(message, m.Gone | m.Reject):
            self._known.discard(peer)
        elif reason is not None and peer in self._known:
            self._known.discard(peer)
            self._losses.append(Left(peer, reason))

    def _transmit(self, peer: bytes, frame: bytes) -> str | None:
        """Queue a frame, or say why not."""
        if self._socket is None:
            self.counters.unsent += 1
            return "the link is closed"
        self._book()
        try:
            self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)  # with a mandatory route, this is what fails
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.counters.unsent += 1
            if error.errno == zmq.EAGAIN:
                return f"{self._limits.mark} frames are waiting for it unread"
            return f"cannot be reached: {error.strerror}"
        self.counters.frames_out += 1
        self.counters.bytes_out += len(frame)
        return None

    # --- inwards

    def _overheard(self) -> None:
        """A connection ended. Asked a little later: the socket learns of it after its monitor."""
        if self._known and self._asking is None:
            self._asking = self._loop.call_later(_LEARNS_S, self._ask)

    def _ask(self) -> None:
        self._asking = None
        self._on_disturbed()

    def _book(self) -> None:
        if not self._is_booked:
            self._is_booked = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Deliver what has come, at most a turn of it."""
        self._is_booked = False
        if self._socket is None:
            return
        events: list[Arrived | Left] = []
        begun = time.perf_counter()
        for _ in range(self._limits.turn):
            try:
                peer = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            frame = self._rest(self._socket)
            event = self._judged(peer, frame)
            if event is not None:
                events.append(event)
        else:
            self._book()  # there may be more, and no signal need come for it
        self.counters.seconds += time.perf_counter() - begun
        events += self._losses
        self._losses.clear()
        if events:
            self._deliver(events)

    def _rest(self, socket: "zmq.Socket[bytes]") -> bytes | None:
        """The frame after the identity; None if there are several."""
        frame = socket.recv(zmq.NOBLOCK)
        num_parts = 1
        self.counters.bytes_in += len(frame)
        while socket.getsockopt(zmq.RCVMORE):
            self.counters.bytes_in += len(socket.recv(zmq.NOBLOCK))
            num_parts += 1
        self.counters.frames_in += num_parts
        return frame if num_parts == 1 else None

    def _judged(self, peer: bytes, frame: bytes | None) -> Arrived | Left | None:
        """What the core is told of a frame, if anything."""
        if len(peer) > _MAX_IDENTITY_BYTES or peer[:1] == b"\0":
            return self._garbage(peer, "identity", "has no proper identity")
        if frame is None:
            return self._garbage(peer, "parts", "sent a message of several parts")
        if peer not in self._known and len(frame) > _STRANGER_BYTES:
            return self._garbage(peer, "malformed", "sent too much without a Hello")
        try:
            message = decode_from_worker(frame)
        except WrongVersion as error:
            if error.is_hello:
                self._transmit(peer, encode_reject(str(error), error.version))
            return self._garbage(peer, "version", f"speaks {error}")
        except ProtocolError as error:
            return self._garbage(peer, "malformed", f"sent garbage: {error}")
        if not self._admitted(peer, message):
            return None
        return Arrived(peer, message)

    def _garbage(self, peer: bytes, kind: str, reason: str) -> Left | None:
        self.counters.garbage[kind] += 1
        if peer not in self._known:
            return None
        self._known.discard(peer)
        return Left(peer, reason)

    def _admitted(self, peer: bytes, message: m.FromWorker) -> bool:
        """Whether a well-formed message is for the core. Strangers are answered here."""
        if peer in self._known:
            if isinstance(message, m.Goodbye):
                self._known.discard(peer)
            return True
        self.counters.strangers += 1
        match message:
            case m.Hello() if len(self._known) < self._limits.max_peers:
                self.counters.strangers -= 1
                self._known.add(peer)
                return True
            case m.Hello():
                reason = f"the controller knows {self._limits.max_peers} peers, as many as it may: start fewer workers"
                self._transmit(peer, encode(m.Reject(reason)))
            case m.Goodbye():
                pass
            case _:
                self._transmit(peer, encode(m.Gone(message.lease, _NO_LEASE)))
        return False


def new_keys(folder: Path, workers: Sequence[str] = ("worker-0",)) -> NewKeys:
    """Make the keys of a controller and its workers. Raises SettingError rather than overwrite a file."""
    return write_keys(folder, _key_pair(), {name: _key_pair() for name in workers})


def _key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))
