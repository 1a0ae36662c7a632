"""Both links on real sockets: what arrives, what is lost, what strangers and slow readers can do (nothing)."""

import asyncio
import socket
import stat
import threading
from pathlib import Path

import msgpack
import pytest
import zmq

from kilburn.controller.core.events import Arrived, Left
from kilburn.controller.link import ControllerLink, LinkLimits
from kilburn.shared import messages as m
from kilburn.shared.codec import decode_from_controller, encode
from kilburn.shared.keys import SettingError
from kilburn.worker.link import LinkLost, WorkerLink
from tests.wire.samples import FROM_CONTROLLER, FROM_WORKER, HELLO
from tests.wire.sides import controller, hello_frame, received, run, stranger, until, welcomed, worker


def test_every_message_arrives_in_order() -> None:
    async def act() -> None:
        async with controller() as side:
            with worker(side.link.endpoint) as link:
                peer = await welcomed(side, link, beat_s=30.0)
                assert peer == link.identity
                down = [FROM_CONTROLLER[name] for name in ("plan", "plan of decodes", "beat", "drain", "gone")]
                up = [FROM_WORKER[name] for name in ("result", "done", "failed", "goodbye")]
                for message in up:
                    link.send(message)
                await until(lambda: len(side.events) == 1 + len(up))
                assert side.events[1:] == [Arrived(peer, message) for message in up]
                for message in down:
                    side.link.send(peer, message)
                for message in down:
                    if not isinstance(message, m.Beat):  # the link keeps these to itself
                        assert await received(link) == message
                assert link.receive(0) is None

    run(act)


def test_ipc_is_for_its_owner(tmp_path: Path) -> None:
    async def act() -> None:
        async with controller(endpoint=f"ipc://{tmp_path}/link") as side:
            assert stat.S_IMODE((tmp_path / "link").stat().st_mode) == 0o600
            with worker(side.link.endpoint) as link:
                await welcomed(side, link)

    run(act)


def test_beats_go_on_while_a_step_computes() -> None:
    async def act() -> None:
        async with controller() as side:
            with worker(side.link.endpoint) as link:
                await welcomed(side, link)
                link.send(m.StepResult(9, 4, [1], [5]))
                # The step thread now does nothing at all with the link.
                await until(lambda: len(side.messages(m.Beat)) >= 3 and side.messages(m.Beat)[-1].message.step == 4)
                assert {event.message.lease for event in side.messages(m.Beat)} == {9}

    run(act)


def test_no_beats_after_gone() -> None:
    async def act() -> None:
        async with controller() as side:
            with worker(side.link.endpoint) as link:
                peer = await welcomed(side, link)
                side.link.send(peer, m.Gone(9, "enough"))
                assert await received(link) == m.Gone(9, "enough")
                sent = link.counters.frames_out
                await asyncio.sleep(0.2)  # ten beats
                assert link.counters.frames_out == sent
                link.reconnect()
                assert await welcomed(side, link) == link.identity != peer

    run(act)


def test_silence_is_a_loss_once_and_after_what_came_before() -> None:
    async def act() -> None:
        async with controller() as side:
            with worker(side.link.endpoint) as link:
                link.send(HELLO)
                peer = await side.peer()
                # Both at once: the silence begins when they come, however busy this machine is.
                side.link.send(peer, m.Welcome(9, 0.02, 0.3, 2))
                side.link.send(peer, m.Drain(9))
                assert isinstance(await received(link), m.Welcome)
                await asyncio.sleep(0.6)
                assert await received(link) == m.Drain(9)
                lost = await received(link)
                assert isinstance(lost, LinkLost)
                assert "0.3" in lost.reason
                assert link.receive(0) is None
                link.reconnect()
                await welcomed(side, link)

    run(act)


def test_a_controller_that_goes_is_a_loss_and_a_new_one_is_found() -> None:
    async def act() -> None:
        async with controller() as side:
            endpoint = side.link.endpoint
            link_side = worker(endpoint)
            link = link_side.__enter__()
            await welcomed(side, link)
        lost = await received(link)
        assert lost == LinkLost("the connection was closed")
        async with controller(endpoint=endpoint) as again:
            link.reconnect()
            await welcomed(again, link)
            link_side.__exit__(None, None, None)

    run(act)


def test_garbage_of_the_controller_is_a_loss() -> None:
    async def act() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            port = router.bind_to_random_port("tcp://127.0.0.1")
            for frames in ([b"\xc1garbage"], [encode(m.Drain(9)), b"more"], [hello_frame()]):
                with worker(f"tcp://127.0.0.1:{port}") as link:
                    link.send(HELLO)
                    identity, _ = await asyncio.to_thread(router.recv_multipart)
                    router.send_multipart([identity, *frames])
                    assert isinstance(await received(link), LinkLost)

    run(act)


def test_too_many_unread_messages_are_a_loss() -> None:
    async def act() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            port = router.bind_to_random_port("tcp://127.0.0.1")
            with worker(f"tcp://127.0.0.1:{port}") as link:
                link.send(HELLO)
                identity, _ = await asyncio.to_thread(router.recv_multipart)
                router.send_multipart([identity, encode(m.Welcome(9, 0.02, 60.0, 2))])
                assert isinstance(await received(link), m.Welcome)
                for step in range(1, 201):
                    router.send_multipart([identity, encode(m.StepPlan(9, step, [0], [1]))])
                await until(lambda: link.counters.frames_in == 1 + 65)  # the step thread reads none of them
                for step in range(1, 65):
                    assert await received(link) == m.StepPlan(9, step, [0], [1])
                assert isinstance(await received(link), LinkLost)
                assert link.receive(0) is None

    run(act)


def test_a_reader_that_stops_is_lost_and_holds_nobody_up() -> None:
    """A mark that is reached ends in Left, not in a hang or a silent drop."""

    async def act() -> None:
        async with controller() as side:
            with stranger(side.link.endpoint, b"slow.1") as slow, worker(side.link.endpoint) as link:
                slow.send(hello_frame())
                stopped = await side.peer()
                reading = await welcomed(side, link)
                plan = m.StepPlan(9, 1, list(range(4096)), [1] * 4096)
                for _ in range(2000):
                    side.link.send(stopped, plan)
                assert not side.lefts  # never within send
                await until(lambda: bool(side.lefts))
                assert [left.peer for left in side.lefts] == [stopped]
                assert "unread" in side.lefts[0].reason
                side.link.send(reading, m.Drain(9))
                assert await received(link) == m.Drain(9)
                assert [left.peer for left in side.lefts] == [stopped]  # once
                assert side.link.counters.unsent > 0

    run(act)


def test_a_peer_that_is_gone_is_left_once() -> None:
    async def act() -> None:
        async with controller() as side:
            with stranger(side.link.endpoint, b"brief.1") as brief:
                brief.send(hello_frame())
                peer = await side.peer()

            def sent_until_lost() -> bool:
                side.link.send(peer, m.Drain(9))
                return bool(side.lefts)

            await until(sent_until_lost)
            side.link.send(peer, m.Gone(9, "left"))
            await asyncio.sleep(0.05)
            assert [left.peer for left in side.lefts] == [peer]
            assert side.link.peers == 0

    run(act)


def test_when_a_connection_ends_the_core_is_told_to_ask_everybody_and_finds_whose_it_was() -> None:
    """Without that nobody would know before the next Beat."""

    async def act() -> None:
        lefts: list[Left] = []
        link = ControllerLink(
            "tcp://127.0.0.1:0",
            lambda events: lefts.extend(event for event in events if isinstance(event, Left)),
            on_disturbed=lambda: [link.send(peer, m.Beat(1, 0)) for peer in (b"here.1", b"gone.1")],
        )
        await link.start()
        try:
            with stranger(link.endpoint, b"here.1") as here:
                with stranger(link.endpoint, b"gone.1") as gone:
                    for socket in (here, gone):
                        socket.send(hello_frame())
                    await until(lambda: link.peers == 2)
                await until(lambda: bool(lefts))
                assert [left.peer for left in lefts] == [b"gone.1"]
                assert decode_from_controller(here.recv()) == m.Beat(1, 0)
        finally:
            await link.close()

    run(act)


def test_strangers_have_no_effect() -> None:
    """Before a Hello nothing reaches the core, and nobody who said none gets a frame but the answer to his own."""

    async def act() -> None:
        async with controller() as side:
            with (
                stranger(side.link.endpoint) as odd,
                stranger(side.link.endpoint, None) as nameless,
                stranger(side.link.endpoint, b"req.1", zmq.REQ) as req,
                worker(side.link.endpoint) as link,
            ):
                await welcomed(side, link)
                for frame in (b"", b"\xc1", b"\x91" * 3000, b"x" * (1 << 20), encode(m.Drain(1))):
                    odd.send(frame)
                odd.send_multipart([hello_frame(), hello_frame()])
                nameless.send(hello_frame())
                req.send(hello_frame())
                odd.send(encode(m.Beat(3, 1)))
                assert decode_from_controller(await asyncio.to_thread(odd.recv)) == m.Gone(
                    3, "no lease here for this peer: say Hello"
                )
                counters = side.link.counters
                await until(lambda: counters.garbage["parts"] == 2 and counters.garbage["identity"] == 1)
                assert counters.garbage["malformed"] == 5
                assert counters.strangers == 1
                assert {event.peer for event in side.events} == {link.identity}
                assert not side.lefts
                odd.send(hello_frame())  # nor is anything held against a peer that now does it well
                await until(lambda: len(side.messages(m.Hello)) == 2)

    run(act)


def test_garbage_of_a_known_peer_is_its_end() -> None:
    async def act() -> None:
        async with controller() as side:
            with stranger(side.link.endpoint, b"bad.1") as bad:
                for number, frame in enumerate((b"\xc1", encode(m.Drain(1)), b"\x92\x07\x03"), start=1):
                    bad.send(hello_frame())
                    bad.send(frame)
                    bad.send(encode(m.Beat(9, 1)))
                    await until(lambda number=number: len(side.lefts) == number)
                    assert isinstance(decode_from_controller(await asyncio.to_thread(bad.recv)), m.Gone)
                assert not side.messages(m.Beat)
                assert [type(event) for event in side.events] == [Arrived, Left] * 3

    run(act)


def test_a_flood_of_garbage_does_not_stop_a_worker() -> None:
    async def act() -> None:
        async with controller() as side:
            with worker(side.link.endpoint) as link:
                peer = await welcomed(side, link)
                stop = threading.Event()
                floods = [threading.Thread(target=flood, args=(side.link.endpoint, n, stop)) for n in range(2)]
                for thread in floods:
                    thread.start()
                try:
                    await until(lambda: side.link.counters.garbage["malformed"] > 500)
                    for step in range(1, 21):
                        side.link.send(peer, m.StepPlan(9, step, [0], [1]))
                        assert await received(link) == m.StepPlan(9, step, [0], [1])
                        link.send(m.StepResult(9, step, [1], [step]))
                        await until(lambda step=step: len(side.messages(m.StepResult)) == step)
                finally:
                    stop.set()
                    for thread in floods:
                        await asyncio.to_thread(thread.join)
                assert {event.peer for event in side.events} == {peer}
                assert not side.lefts

    run(act)


def flood(endpoint: str, number: int, stop: threading.Event) -> None:
    with stranger(endpoint, b"flood.%d" % number) as socket:
        socket.setsockopt(zmq.SNDTIMEO, 50)
        while not stop.is_set():
            try:
                socket.send(b"\xc1" * 200)
            except zmq.Again:
                continue


def test_another_version_is_rejected_in_its_own() -> None:
    async def act() -> None:
        async with controller() as side:
            with stranger(side.link.endpoint, b"old.1") as old:
                old.send(msgpack.packb([0, 1, "a Hello as it was then"]))
                version, tag, reason = msgpack.unpackb(await asyncio.to_thread(old.recv))
                assert (version, tag) == (0, 33)
                assert "version 0" in reason
                assert not side.events

    run(act)


def test_no_more_peers_than_allowed() -> None:
    async def act() -> None:
        async with controller(limits=LinkLimits(max_peers=1)) as side:
            with worker(side.link.endpoint) as first, worker(side.link.endpoint, "w1") as second:
                peer = await welcomed(side, first)
                second.send(HELLO)
                assert isinstance(await received(second), m.Reject)
                side.link.send(peer, m.Gone(9, "room for another"))
                second.reconnect()
                await welcomed(side, second)

    run(act)


def test_nobody_takes_over_an_identity() -> None:
    async def act() -> None:
        async with controller() as side:
            with worker(side.link.endpoint) as link:
                peer = await welcomed(side, link)
                with stranger(side.link.endpoint, link.identity) as thief:
                    thief.send(encode(m.Goodbye("I am the worker")))
                    side.link.send(peer, m.Drain(9))
                    assert await received(link) == m.Drain(9)
                    beats = len(side.messages(m.Beat))
                    await until(lambda: len(side.messages(m.Beat)) > beats + 3)
                    assert not side.messages(m.Goodbye)
                    assert thief.poll(0) == 0

    run(act)


def test_goodbye_leaves_before_the_socket_closes() -> None:
    async def act() -> None:
        async with controller() as side:
            with worker(side.link.endpoint) as link:
                await welcomed(side, link)
                link.send(m.Goodbye("stopped"))
            await until(lambda: len(side.messages(m.Goodbye)) == 1)
            assert side.link.peers == 0

    run(act)


def test_an_address_that_is_taken_is_named() -> None:
    async def act() -> None:
        async with controller() as side:
            with pytest.raises(SettingError, match=f"--bind .*{side.link.endpoint}.*another"):
                async with controller(endpoint=side.link.endpoint):
                    pass
            with worker(side.link.endpoint) as link:  # the first is none the worse for it
                await welcomed(side, link)

    run(act)


def test_closing_twice_and_sending_after() -> None:
    async def act() -> None:
        async with controller() as side:
            with worker(side.link.endpoint) as link:
                peer = await welcomed(side, link)
                link.close()
                link.close()
                await side.link.close()
                await side.link.close()
                side.link.send(peer, m.Drain(9))
                assert side.link.counters.unsent == 1

    run(act)


def test_a_worker_cannot_connect_to_no_port() -> None:
    with pytest.raises(SettingError, match="--connect "):
        WorkerLink("tcp://127.0.0.1:*", "w0")


def test_an_end_before_the_greeting_is_told_as_what_is_known() -> None:
    """Something listens, says nothing, and closes: that may be a refusal, and may be anything else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = WorkerLink(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "w0")
        try:
            listener.accept()[0].close()
            lost = link.receive(10.0)
            assert isinstance(lost, LinkLost)
            assert "ended before both sides had greeted" in lost.reason
            assert "the controller refused" not in lost.reason
        finally:
            link.close()
