"""A worker's end of the wire: a DEALER that the step thread reads and writes, and a thread that keeps it alive.

    step thread    receive(): waits on the socket itself, so that a plan takes one wake-up to arrive, not two
                   send():    straight into the socket's queue
    pulse thread   every beat_s: sends a Beat with the newest finished step, however long the step computes, takes in
                   what has come meanwhile, and judges silence

A socket may pass between threads under a lock, and all that touches it is done under one. The descriptor that both
wait on is signalled on changes only, and any call on the socket may swallow the signal; so whoever touches the socket
also empties it, into `_inbox`, and the pulse thread rings for the step thread when it finds something there.

Every loss (silence, a closed connection, garbage, a mark reached, a refused key) comes out of `receive` as one
LinkLost, after what arrived before it. The link is then dead until `reconnect`, which takes a new identity, so that
nothing that was meant for the old one can reach the new.

What this file does not know: plans, rows, models. It looks only at Welcome, Gone, Reject and Beat, and at the step of
a result.
"""

import os
import secrets
import select
import threading
import time
from collections import deque
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from kilburn.shared import messages as m
from kilburn.shared.codec import MAX_FRAME_BYTES, decode_from_controller, encode
from kilburn.shared.keys import NAME, SettingError, WorkerKeys, checked_endpoint
from kilburn.shared.types import ProtocolError

_MARK = 64  # frames on their way in either direction, and messages in the inbox
_IDLE_PULSE_S = 1.0  # before there is a lease
_SHORTEST_BEAT_S = 0.01
_REFUSED = frozenset(
    {zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.HANDSHAKE_FAILED_PROTOCOL}
)
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | sum(_REFUSED)


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link is of no more use before `reconnect`. The lease, if there was one, is over."""

    reason: str


@dataclass(slots=True)
class WorkerLinkCounters:
    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    unsent: int = 0


@dataclass(slots=True)
class _Pulse:
    """What a Welcome asks for."""

    lease: int
    beat_s: float
    silence_s: float
    next_beat: float
    step: int = 0  # newest finished


class WorkerLink:
    """One thread calls the public methods, unless they say otherwise.

    Raises SettingError for an endpoint that may not be used.
    """

    def __init__(self, endpoint: str, name: str, *, keys: WorkerKeys | None = None) -> None:
        if NAME.fullmatch(name) is None:
            raise SettingError(f"--name {name!r}: use 1 to 64 letters, digits, '.', '_' and '-'")
        self.endpoint = checked_endpoint(endpoint, keys is not None, "--connect")
        self.name = name
        self.counters = WorkerLinkCounters()
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._lock = threading.Lock()
        self._inbox: deque[m.FromController | LinkLost] = deque()
        self._bell_out, self._bell_in = os.pipe()  # rings for the step thread
        self._is_ringing = False
        self._is_closed = False
        self._agenda = threading.Event()  # the pulse thread's times have changed
        with self._lock:
            self._open()
        self._thread = threading.Thread(target=self._keep_alive, name="kilburn-pulse", daemon=True)
        self._thread.start()

    # --- the step thread's

    def send(self, message: m.FromWorker) -> None:
        """Queue a message. If that cannot be done at once the link is lost, which `receive` will say."""
        frame = encode(message)
        with self._lock:
            if self._pulse is not None and isinstance(message, m.StepResult | m.StepDone):
                self._pulse.step = max(self._pulse.step, message.step)
            self._transmit(frame)
            self._take_in(asks_monitor=False)

    def send_beside(self, message: m.FromWorker) -> None:
        """The same from any other thread."""
        frame = encode(message)
        with self._lock:
            if self._is_closed:
                return
            self._transmit(frame)
            self._take_in(asks_monitor=False)
            if self._inbox:
                self._ring()

    def receive(self, timeout_s: float | None) -> m.FromController | LinkLost | None:
        """The next message, LinkLost once when the link is lost, or None after `timeout_s`. None waits for ever."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        asks_monitor = False
        while True:
            with self._lock:
                if not self._inbox:
                    self._take_in(asks_monitor)
                if self._inbox:
                    return self._inbox.popleft()
            remaining_s = None if deadline is None else deadline - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                return None
            ready = self._poller.poll(None if remaining_s is None else remaining_s * 1000)
            asks_monitor = any(descriptor == self._monitor_fd for descriptor, _ in ready)

    def is_over(self) -> bool:
        """Whether it has come in, unread as yet, that the lease is over. For any thread."""
        with self._lock:
            return any(isinstance(message, m.Gone | LinkLost) for message in self._inbox)

    def reconnect(self) -> None:
        """Begin anew under a new identity; whatever was on its way is dropped."""
        with self._lock:
            self._shut(flush_s=0)
            self._inbox.clear()
            self._open()
        self._agenda.set()

    def close(self, flush_s: float = 0.2) -> None:
        """Close, giving what was sent last (a Goodbye) up to `flush_s` to leave. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._shut(flush_s)
        self._agenda.set()
        self._thread.join()
        self._context.term()
        os.close(self._bell_in)
        os.close(self._bell_out)

    # --- under the lock

    def _open(self) -> None:
        self.identity = f"{self.name}.{secrets.token_hex(8)}".encode("ascii")
        self._socket = self._context.socket(zmq.DEALER)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: _MARK,
            zmq.RCVHWM: _MARK,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.HANDSHAKE_IVL: 10_000,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2_000,
            zmq.IPV6: int("[" in self.endpoint or self._keys is not None),
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTING_ID, self.identity)
        if self._keys is not None:
            self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, self._keys.controller)
            self._socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self._keys.pair.public)
            self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.pair.secret)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._is_lost = False
        self._is_connected = False
        self._pulse: _Pulse | None = None
        self._heard = time.monotonic()
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._shut(flush_s=0)
            self._context.term()
            raise SettingError(
                f"--connect {self.endpoint}: {error.strerror}. Name the port of the controller"
            ) from error
        self._poller = select.poll()
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        for descriptor in (int(self._socket.getsockopt(zmq.FD)), self._monitor_fd, self._bell_out):
            self._poller.register(descriptor, select.POLLIN)

    def _shut(self, flush_s: float) -> None:
        self._is_lost = True
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(flush_s * 1000))

    def _transmit(self, frame: bytes) -> None:
        if self._is_lost:
            self.counters.unsent += 1
            return
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.counters.unsent += 1
            if error.errno == zmq.EAGAIN:  # the queue is full; or there is none, as whoever was refused has none
                self._lose(self._ended() or f"{_MARK} frames are waiting to leave")
            else:
                self._lose(str(error.strerror))
            return
        self.counters.frames_out += 1
        self.counters.bytes_out += len(frame)

    def _take_in(self, asks_monitor: bool) -> None:
        """Empty the socket into the inbox. The monitor first: what came before an end is in the socket by then."""
        if self._is_ringing:
            self._is_ringing = False
            os.read(self._bell_out, 1)
        if self._is_lost:
            return
        ended = self._ended() if asks_monitor else None
        while not self._is_lost:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                self._lose(str(error.strerror))
                break
            is_whole = not self._socket.getsockopt(zmq.RCVMORE)
            self._take(frame, is_whole)
        if ended is not None:
            self._lose(ended)

    def _take(self, frame: bytes, is_whole: bool) -> None:
        self._heard = time.monotonic()
        self.counters.frames_in += 1
        self.counters.bytes_in += len(frame)
        if not is_whole:
            return self._lose("the controller sent a message of several parts")
        try:
            message = decode_from_controller(frame)
        except ProtocolError as error:
            return self._lose(f"the controller sent garbage: {error}")
        match message:
            case m.Beat():
                return None
            case m.Welcome(lease, beat_s, silence_s):
                if not (_SHORTEST_BEAT_S <= beat_s < silence_s):
                    return self._lose(f"a Welcome with beat_s = {beat_s}, silence_s = {silence_s}")
                self._pulse = _Pulse(lease, beat_s, silence_s, next_beat=self._heard + beat_s)
                self._agenda.set()
            case m.Gone() | m.Reject():
                self._pulse = None
            case _:
                pass
        if len(self._inbox) >= _MARK:
            return self._lose(f"{_MARK} messages of the controller are waiting unread")
        self._inbox.append(message)
        return None

    def _ended(self) -> str | None:
        """Why the connection ended, if it did."""
        reason = None
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return reason
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._is_connected = True
            elif event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                reason = reason or self._broke_off()
            elif event in _REFUSED:
                reason = f"the controller refused the connection; {self._advice()}"
            elif event == zmq.Event.DISCONNECTED:
                reason = reason or ("the connection was closed" if self._is_connected else self._broke_off())

    def _broke_off(self) -> str:
        # All that is known: who listens there went away or fell silent before both had greeted. Which of these it
        # was the other end does not say.
        return (
            f"the connection to {self.endpoint} ended before both sides had greeted: either what listens there is no "
            f"controller or has just stopped, or it refused us; {self._advice()}"
        )

    def _advice(self) -> str:
        if self._keys is None:
            return "it may want keys: give --curve-keys"
        return f"is {self._keys.pair.public} on its allow list, and is {self._keys.controller} its public key?"

    def _lose(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._pulse = None
            self._inbox.append(LinkLost(reason))

    # --- the pulse thread's

    def _keep_alive(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    return
                self._agenda.clear()
                self._take_in(asks_monitor=True)
                wait_s = self._tend(time.monotonic())
                if self._inbox:
                    self._ring()
            self._agenda.wait(wait_s)

    def _tend(self, now: float) -> float:
        """Beat if it is time, judge silence, and say how long until the next time."""
        pulse = self._pulse
        if pulse is None:
            return _IDLE_PULSE_S
        if now - self._heard >= pulse.silence_s:
            self._lose(f"nothing was heard from the controller for {pulse.silence_s} s")
            return _IDLE_PULSE_S
        if now >= pulse.next_beat:
            pulse.next_beat = now + pulse.beat_s
            self._transmit(encode(m.Beat(pulse.lease, pulse.step)))
        return max(min(pulse.next_beat, self._heard + pulse.silence_s) - now, 0.0)

    def _ring(self) -> None:
        if not self._is_ringing:
            self._is_ringing = True
            os.write(self._bell_in, b"\0")
