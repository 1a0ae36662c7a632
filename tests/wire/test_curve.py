"""With keys, only a listed worker that knows the controller's key gets through; others get no frame and no effect."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kilburn.controller.link import new_keys
from kilburn.shared import messages as m
from kilburn.shared.keys import ControllerKeys, WorkerKeys
from kilburn.worker.link import LinkLost
from tests.wire.samples import HELLO
from tests.wire.sides import controller, received, run, until, welcomed, worker


@pytest.fixture
def keys(tmp_path: Path) -> tuple[ControllerKeys, WorkerKeys]:
    new_keys(tmp_path / "keys")
    return ControllerKeys.in_folder(tmp_path / "keys"), WorkerKeys.in_folder(tmp_path / "keys", "worker-0")


def strangers(folder: Path, listed: WorkerKeys) -> dict[str, WorkerKeys | None]:
    new_keys(folder)
    other = WorkerKeys.in_folder(folder, "worker-0")
    return {
        "no key": None,
        "a key that is not listed": replace(other, controller=listed.controller),
        "another controller's key": replace(listed, controller=other.controller),
        "a listed public key without its secret": replace(listed, pair=replace(listed.pair, secret=other.pair.secret)),
    }


NAMES = ["no key", "a key that is not listed", "another controller's key", "a listed public key without its secret"]


@pytest.mark.parametrize("name", NAMES)
def test_strangers_get_nothing(keys: tuple[ControllerKeys, WorkerKeys], tmp_path: Path, name: str) -> None:
    ours, listed = keys

    async def act() -> None:
        async with controller(ours) as side:
            with (
                worker(side.link.endpoint, "w1", strangers(tmp_path / "others", listed)[name]) as odd,
                worker(side.link.endpoint, "w0", listed) as link,
            ):
                odd.send(HELLO)
                lost = await received(odd)
                assert isinstance(lost, LinkLost)
                assert "refused" in lost.reason
                # The controller has meanwhile served whom it should, so the stranger's silence is no accident.
                peer = await welcomed(side, link)
                side.link.send(peer, m.Drain(9))
                assert await received(link) == m.Drain(9)
                assert odd.counters.frames_in == 0
                assert {event.peer for event in side.events} == {link.identity}
                assert side.link.counters.strangers == 0
                if name == "a key that is not listed":
                    await until(lambda: side.link.denied > 0)

    run(act)


def test_who_was_refused_before_it_said_anything_hears_why(keys: tuple[ControllerKeys, WorkerKeys]) -> None:
    """A refused socket has no queue any more, and must not look like one whose queue is full."""
    ours, _ = keys

    async def act() -> None:
        async with controller(ours) as side:
            for nth in range(120):  # about every twentieth is refused in the way, and at the time, that this is about
                with worker(side.link.endpoint, "w1", None) as odd:
                    await asyncio.sleep(nth % 40 * 0.0005)
                    odd.send(HELLO)
                    lost = await received(odd)
                    assert isinstance(lost, LinkLost)
                    assert "refused" in lost.reason
                    odd.close(flush_s=0.0)

    run(act)


def test_an_empty_allow_list_admits_nobody(keys: tuple[ControllerKeys, WorkerKeys]) -> None:
    ours, listed = keys

    async def act() -> None:
        async with controller(replace(ours, allowed=frozenset())) as side:
            with worker(side.link.endpoint, "w0", listed) as link:
                link.send(HELLO)
                assert isinstance(await received(link), LinkLost)
                assert not side.events

    run(act)


def test_all_interfaces_with_keys(keys: tuple[ControllerKeys, WorkerKeys]) -> None:
    ours, listed = keys

    async def act() -> None:
        async with controller(ours, endpoint="tcp://*:*") as side:
            port = side.link.endpoint.rpartition(":")[2]
            with worker(f"tcp://localhost:{port}", "w0", listed) as link:
                await welcomed(side, link)

    run(act)


def test_coming_and_going(keys: tuple[ControllerKeys, WorkerKeys], tmp_path: Path) -> None:
    """Workers and strangers connect and leave over and over, in the one context of a controller that works on."""
    ours, listed = keys

    async def act() -> None:
        unlisted = strangers(tmp_path / "others", listed)["a key that is not listed"]
        async with controller(ours) as side:
            with worker(side.link.endpoint, "w0", listed) as steady, worker(side.link.endpoint, "w1", listed) as busy:
                peer = await welcomed(side, steady)
                for step in range(1, 41):
                    await welcomed(side, busy)
                    busy.reconnect()
                    with worker(side.link.endpoint, "w2", unlisted) as odd:
                        odd.send(HELLO)
                        if step % 2:
                            assert isinstance(await received(odd), LinkLost)
                    side.link.send(peer, m.StepPlan(9, step, [0], [1]))
                    assert await received(steady) == m.StepPlan(9, step, [0], [1])
                await asyncio.sleep(0)
                assert not [left for left in side.lefts if left.peer == peer]

    run(act)
