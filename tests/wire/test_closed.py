"""Whoever is no peer: each way to be none is tried on a controller that serves, counted, and changes nothing there."""

import asyncio
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
import zmq
from hypothesis import given, settings, target
from hypothesis import strategies as st

from kilburn.controller.api import anthropic, responses, schema
from kilburn.controller.core.engine import Engine, EngineSettings
from kilburn.controller.core.events import Arrived, Send
from kilburn.controller.link import LinkCounters, LinkLimits
from kilburn.controller.simulate.fake_daemon import fake_hello
from kilburn.shared import messages as m
from kilburn.shared.codec import decode_from_worker, encode
from kilburn.shared.fields import MAX_FRAME_BYTES
from kilburn.shared.types import ProtocolError
from kilburn.worker.link import WorkerLink
from tests.wire.mutate import SOUND, mutants
from tests.wire.samples import FROM_WORKER
from tests.wire.sides import Controller, controller, hello_frame, received, run, stranger, until, welcomed, worker

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\0"  # ZMTP 3.0; a mechanism, the role and zeros follow
NULL = GREETING + b"NULL".ljust(20, b"\0") + b"\0" * 32
Intrusion = Callable[[str], Iterator[None]]


def bytes_of(*parts: bytes, keep: bool = True) -> Intrusion:
    """A plain connection that says so much, and then nothing, or goes."""

    @contextmanager
    def intrude(endpoint: str) -> Iterator[None]:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as raw:
            for part in parts:
                raw.sendall(part)
            if keep:
                yield
        if not keep:
            yield

    return intrude


def frames_of(*frames: bytes, is_named: bool = True) -> Intrusion:
    """A ZeroMQ peer that sends these. Each has a name of its own, or none."""

    @contextmanager
    def intrude(endpoint: str) -> Iterator[None]:
        with stranger(endpoint, b"odd." + os.urandom(6).hex().encode() if is_named else None) as dealer:
            for frame in frames:
                dealer.send(frame)
            yield

    return intrude


@contextmanager
def with_a_key(endpoint: str) -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        public, secret = zmq.curve_keypair()
        dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = public, secret, public
        dealer.connect(endpoint)
        dealer.send(hello_frame())
        yield


def failed(kind: str) -> Callable[[LinkCounters], int]:
    return lambda counters: counters.handshakes.failed[kind]


def garbage(kind: str) -> Callable[[LinkCounters], int]:
    return lambda counters: counters.garbage[kind]


REPLAYED = [encode(message) for name, message in FROM_WORKER.items() if name not in ("hello", "goodbye")]
# (what, how, where it is counted)
INTRUSIONS: list[tuple[str, Intrusion, Callable[[LinkCounters], int]]] = [
    ("a port scan", bytes_of(keep=False), failed("unfinished")),
    ("silence", bytes_of(), failed("unfinished")),
    ("half a greeting", bytes_of(GREETING[:11]), failed("unfinished")),
    ("a browser", bytes_of(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20), lambda c: sum(c.garbage.values())),
    ("another mechanism", bytes_of(GREETING + b"PLAIN".ljust(20, b"\0") + b"\0" * 32), failed("protocol")),
    ("a greeting, and then junk", bytes_of(NULL, b"\x04\xff" * 99), failed("unfinished")),
    ("a greeting a byte at a time", bytes_of(*(NULL[i : i + 1] for i in range(40))), failed("unfinished")),
    ("keys where there are none", with_a_key, lambda c: sum(c.handshakes.failed.values())),
    ("a frame beyond the limit", frames_of(b"x" * (MAX_FRAME_BYTES + 1)), lambda c: c.handshakes.ended),
    ("more than a stranger may say", frames_of(b"x" * (1 << 20)), garbage("malformed")),
    ("no message", frames_of(b"\xc1" * 99), garbage("malformed")),
    ("an old version", frames_of(msgpack.packb([0, 1, "hello"])), garbage("version")),
    ("a later version", frames_of(msgpack.packb([99, 1, "hello"])), garbage("version")),
    ("no name of its own", frames_of(hello_frame(), is_named=False), garbage("identity")),
    ("the replay of a lease", frames_of(*REPLAYED), lambda c: c.strangers),
]  # fmt: skip


async def steps(side: Controller, link: WorkerLink, peer: bytes, first: int, count: int = 3) -> None:
    """The worker that belongs here goes on as ever."""
    for step in range(first, first + count):
        plan = m.StepPlan(9, step, [0], [1])
        side.link.send(peer, plan)
        assert await received(link) == plan
        link.send(m.StepResult(9, step, [1], [step]))
        done = Arrived(peer, m.StepResult(9, step, [1], [step]))
        await until(lambda done=done: done in side.events)


def test_every_way_to_be_no_peer_is_counted_and_changes_nothing() -> None:
    async def act() -> None:
        async with controller(limits=LinkLimits(handshake_s=0.3)) as side:
            with worker(side.link.endpoint) as link:
                peer, step = await welcomed(side, link), 1
                open_before = len(list(Path("/proc/self/fd").iterdir()))
                for what, intrude, counted in INTRUSIONS:
                    before = counted(side.link.counters)
                    with intrude(side.link.endpoint):
                        await steps(side, link, peer, step)
                        await until(lambda counted=counted, before=before: counted(side.link.counters) > before)
                    step += 3
                    assert {event.peer for event in side.events} == {peer}, what
                assert not side.lefts
                assert side.link.peers == 1
                await until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= open_before)

    run(act)


def test_many_that_never_greet_are_closed_in_time_and_leave_nothing() -> None:
    """Slow peers: a few hundred connections that take as long as they may, again and again."""

    async def act() -> None:
        async with controller(limits=LinkLimits(handshake_s=0.2)) as side:
            port = int(side.link.endpoint.rpartition(":")[2])
            with worker(side.link.endpoint) as link:
                peer = await welcomed(side, link)
                open_before = len(list(Path("/proc/self/fd").iterdir()))
                for turn in range(3):
                    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
                    await steps(side, link, peer, 1 + 3 * turn)
                    for one in slow:
                        one.close()
                failures = side.link.counters.handshakes.failed
                await until(lambda: failures["unfinished"] >= 600)
                await until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= open_before)
                assert {event.peer for event in side.events} == {peer}

    run(act)


def test_mutated_frames_over_the_wire() -> None:
    """A stranger's never reach the core; those of a peer end its lease at the first, or are messages."""

    async def act() -> None:
        async with controller() as side:
            with worker(side.link.endpoint) as link, stranger(side.link.endpoint, b"odd") as odd:
                peer = await welcomed(side, link)
                counters, tried = side.link.counters, 0
                for frame in mutants(3000, seed=5):
                    odd.send(frame)
                    tried += 1
                    if tried % 100 == 0:
                        await asyncio.sleep(0)
                # A mutant that is a Hello still makes its sender a peer, which the next garbage ends again.
                odd.send(b"\xc1" * 3)
                await until(lambda: sum(counters.garbage.values()) + counters.strangers > tried * 0.9)
                await steps(side, link, peer, 1)
                assert peer not in {left.peer for left in side.lefts}

    run(act)


def test_messages_of_a_lease_that_is_over_have_no_effect_and_are_counted() -> None:
    """A half-open connection may deliver what was meant for an earlier life."""
    engine = Engine(EngineSettings())
    sent = [effect for effect in engine.handle([Arrived(b"w.1", fake_hello())], 0.0) if isinstance(effect, Send)]
    lease = next(effect.message.lease for effect in sent if isinstance(effect.message, m.Welcome))
    old = [m.Beat(lease + 7, 1), m.StepResult(lease + 7, 1, [1], [5]), m.StepFailed(lease + 7, 1, "x")]
    before = engine.leases
    effects = engine.handle([Arrived(b"w.1", message) for message in old], 0.1)
    assert effects == []
    assert (engine.leases, engine.snapshot().stale_messages) == (before, len(old))
    engine.validate()


def test_no_client_names_an_address_and_sockets_are_few() -> None:
    """What is connected to comes from settings, or from the signed word of a controller, and never from a request."""
    for module in (schema, anthropic, responses):
        for cls in vars(module).values():
            if dataclasses.is_dataclass(cls):
                names = {word for field in dataclasses.fields(cls) for word in field.name.split("_")}
                assert not names & {"url", "uri", "host", "address", "endpoint", "webhook", "callback"}, cls

    async def act() -> None:
        async with controller() as side:
            assert side.link._context is not None
            assert side.link._context.get(zmq.MAX_SOCKETS) <= 16  # the ROUTER, its monitor, and who answers for keys

    run(act)


# --- any bytes at all, towards those that get furthest


ANY_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=24),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_a_message_with_any_value_in_any_place_is_a_message_or_refused(data: st.DataObject) -> None:
    """Hypothesis is led to frames whose fault lies as far behind as it can: those that pass the most checks."""
    raw = msgpack.unpackb(data.draw(st.sampled_from(SOUND)), strict_map_key=False)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(ANY_VALUE)
    try:
        message = decode_from_worker(msgpack.packb(raw))
    except ProtocolError:
        target(float(at), label="how far behind the fault is")
    else:
        target(float(len(raw)), label="how far behind the fault is")
        assert decode_from_worker(encode(message)) == message


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(frame=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_from_worker(frame)
