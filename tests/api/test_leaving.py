"""Clients that leave, workers that die, servers that stop: nothing stays taken, nobody is left waiting."""

import asyncio
import json
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kilburn.controller.app import Running, run_controller, running_controller
from kilburn.controller.choice import Ask
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Stop
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.driver import Driver, drain
from kilburn.controller.registry import InProcessRegistry
from kilburn.controller.salts import Salts
from kilburn.controller.simulate.fake_daemon import FakeDaemon, fake_hello
from kilburn.shared.config import ControllerSettings
from kilburn.shared.keys import SettingError
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason, LawBroken
from tests.api.vocabularies import byte_level, write_folder
from tests.api.world import World, served, text_after

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 200, "messages": [{"role": "user", "content": "hello"}], "prompt": "hello world " * 5}


async def leave(world: World, path: str, body: dict[str, Any], after: str) -> None:
    """Asks over a socket of its own and closes it: `after` is what has been reached by then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rsplit(":", 1)[1]))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    match after:
        case "the request":
            await writer.drain()
        case "the first chunk":
            await reader.readuntil(b"data: ")
        case "the first step":
            await world.until(lambda: world.owned_blocks() > 0)
        case "half of the body":
            pass
    writer.close()


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_a_client_that_leaves_frees_its_blocks_within_a_second(tmp_path: Path, path: str) -> None:
    """Counted in steps of 20 ms, so that a busy machine does not matter: the answer would have taken 200 of them."""
    ways = [(True, "the first chunk"), (True, "the first step"), (False, "the first step"), (False, "the request")]
    async with served(tmp_path, delay_s=0.02) as world:
        for n in (1, 3):
            for stream, after in ways:
                await leave(world, path, {**LONG, "stream": stream, "n": n}, after)
                steps_before = world.daemon.steps
                await world.until(world.is_quiet, within_s=30.0)
                assert world.daemon.steps - steps_before <= 50
                world.driver.engine.validate()
        finished = world.driver.streams.counts.finished
        assert all(number == 0 for reason, number in finished.items() if reason is not FinishReason.CANCELLED)


async def test_leaving_while_waiting_for_blocks_or_for_a_row(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.01, worker={"num_blocks": 16, "max_rows": 2}) as world:
        body = {"prompt": "x", "max_tokens": 150}
        running = [asyncio.ensure_future(world.post(COMPLETION, body)) for _ in range(2)]
        await world.until(lambda: world.driver.engine.snapshot().groups[0].running_sequences == 2)
        for _ in range(3):
            await leave(world, COMPLETION, {**body, "stream": True}, "the request")
        await leave(world, COMPLETION, body, "the request")
        await world.until(lambda: world.driver.engine.snapshot().requests == 2)
        for status, whole in await asyncio.gather(*running):
            assert (status, whole["choices"][0]["text"]) == (200, text_after(150))


async def test_a_worker_that_is_lost_and_comes_back_goes_unnoticed(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.005) as world:
        body = {"prompt": "hello", "max_tokens": 60}
        answers = [asyncio.ensure_future(world.post(COMPLETION, body)) for _ in range(4)]
        await world.until(lambda: world.daemon.steps > 10)
        world.running.worker_ended(world.daemon.hello.name, world.daemon.hello.pid, "killed")
        world.running.worker_ended("nobody", 999_999, "never known")
        for status, whole in await asyncio.gather(*answers):
            assert (status, whole["choices"][0]["text"]) == (200, text_after(60))
        assert world.driver.engine.snapshot().leases_ended == 1


async def test_a_second_worker_of_one_name_waits_until_the_first_is_gone(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.005) as world:
        body = {"prompt": "hello", "max_tokens": 60}
        other = FakeDaemon(world.running.endpoint, replace(world.daemon.hello, boot="another life", pid=1))
        serving = asyncio.create_task(other.run())

        def was_turned_away() -> bool:
            return [note.kind for note in world.driver.noted.latest()].count("name taken") >= 2

        await world.until(was_turned_away, within_s=30.0)
        status, whole = await world.post(COMPLETION, body)
        assert (status, whole["choices"][0]["text"]) == (200, text_after(60))
        assert (world.driver.engine.snapshot().leases_ended, other.steps) == (0, 0)
        answer = asyncio.ensure_future(world.post(COMPLETION, body))
        before = world.daemon.steps
        await world.until(lambda: world.daemon.steps > before)
        world.driver.retire(world.daemon.hello.name)  # the first is told to leave, once its request is at its end
        status, whole = await answer
        assert (status, whole["choices"][0]["text"]) == (200, text_after(60))
        assert (await world.post(COMPLETION, body))[0] == 200
        assert other.steps > 0
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_worker_that_is_rejected_changes_nothing(tmp_path: Path) -> None:
    """Not what the server knows of its model, though it says Hello as any other."""
    async with served(tmp_path) as world:
        known = world.driver.vocab_size, world.driver.model_digest
        other = FakeDaemon(world.running.endpoint, fake_hello("other", model_digest=b"?" * 32, vocab_size=7))
        await asyncio.wait_for(other.run(), 30)
        assert "another model" in other.faults[0]
        assert (world.driver.vocab_size, world.driver.model_digest) == known


async def read_of(world: World, body: dict[str, Any]) -> str:
    async with world.session.post(world.url + COMPLETION, json=body) as response:
        return await response.text()


async def test_a_bad_row_fails_one_request_only(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        with world.held():  # until both have their rows, in this order
            good = asyncio.ensure_future(world.post(COMPLETION, {"prompt": "x", "max_tokens": 40}))
            await world.until(lambda: world.driver.engine.snapshot().requests == 1)
            bad = asyncio.ensure_future(read_of(world, {"prompt": "y", "max_tokens": 40, "stream": True}))
            await world.until(lambda: world.driver.engine.snapshot().requests == 2)
            world.daemon.bad_rows = lambda plan: (1,) if 1 in plan.rows and world.daemon.steps > 9 else ()
        lines = [line for line in (await bad).split("\n") if line.startswith("data: ")]
        first, error, end = json.loads(lines[0][6:]), json.loads(lines[-2][6:]), lines[-1]
        assert text_after(40).startswith(first["choices"][0]["text"])
        assert error["error"]["code"] == "request_failed"
        assert end == "data: [DONE]"
        assert (await good)[1]["choices"][0]["text"] == text_after(40)
        world.daemon.bad_rows = lambda plan: tuple(plan.rows)
        status, whole = await world.post(COMPLETION, {"prompt": "z", "max_tokens": 4})
        assert (status, whole["error"]["code"]) == (500, "request_failed")


async def test_no_worker_is_a_503_in_time_and_health_says_why(tmp_path: Path) -> None:
    write_folder(tmp_path)
    settings = ControllerSettings(
        model=str(tmp_path), port=0, bind="tcp://127.0.0.1:0", recovery_seconds=0.2, served_model_name="toy"
    )
    async with running_controller(settings) as running, aiohttp.ClientSession() as session:
        async with session.get(running.http_address + "/health") as response:
            assert response.status == 503
            assert (await response.json())["reason"] == "no worker is ready"
        for path in (COMPLETION, CHAT):
            for stream in (False, True):
                async with session.post(running.http_address + path, json={**LONG, "stream": stream}) as response:
                    assert response.status == 503
                    assert (await response.json())["error"]["code"] == "no_worker"


async def test_queue_full_is_a_429(tmp_path: Path) -> None:
    async with served(tmp_path, worker={"max_rows": 1}, settings={"max_waiting": 2}) as world:
        body = {"prompt": "x", "max_tokens": 30}
        with world.held():  # one runs, two wait, and all others are told so meanwhile
            asked = [asyncio.ensure_future(world.post(COMPLETION, body))]
            await world.until(lambda: world.owned_blocks() > 0)
            asked += [asyncio.ensure_future(world.post(COMPLETION, body)) for _ in range(11)]
            await world.until(lambda: sum(answer.done() for answer in asked) == 9)
        answers = await asyncio.gather(*asked)
        assert sorted(status for status, _ in answers) == [200] * 3 + [429] * 9
        assert {whole["error"]["code"] for status, whole in answers if status == 429} == {"queue_full"}
        assert all(whole["choices"][0]["text"] == text_after(30) for status, whole in answers if status == 200)
        status, wide = await world.post(COMPLETION, {**body, "n": 2})
        assert (status, wide["error"]["code"]) == (400, "too_many_choices")


async def test_draining_finishes_what_is_here_and_refuses_what_comes(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.01) as world:
        answer = asyncio.ensure_future(world.post(COMPLETION, {"prompt": "x", "max_tokens": 40}))
        await world.until(lambda: world.owned_blocks() > 0)
        draining = asyncio.ensure_future(drain(world.driver, 20.0, asyncio.Event()))
        await world.until(lambda: not world.running.is_ready())
        async with world.session.get(world.url + "/health") as response:
            assert (response.status, (await response.json())["reason"]) == (503, "shutting down")
        status, whole = await world.post(COMPLETION, {"prompt": "x"})
        assert (status, whole["error"]["code"]) == (503, "shutting_down")
        assert (await answer)[1]["choices"][0]["text"] == text_after(40)
        await draining


async def status_of(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with session.post(url, json=body) as response:
        return response.status


async def test_a_signal_drains_and_a_second_one_hurries(tmp_path: Path) -> None:
    write_folder(tmp_path)
    settings = ControllerSettings(model=str(tmp_path), port=0, bind="tcp://127.0.0.1:0", drain_seconds=60.0)
    for num_signals in (1, 2):
        bound: asyncio.Future[Running] = asyncio.get_running_loop().create_future()
        controller = asyncio.ensure_future(run_controller(settings, bound.set_result))
        running = await bound
        worker = asyncio.ensure_future(FakeDaemon(running.endpoint, fake_hello(vocab_size=330), 0.01).run())
        async with aiohttp.ClientSession() as session:
            while not running.is_ready():
                await asyncio.sleep(0.005)

            body = {"prompt": "x", "max_tokens": 60 if num_signals == 1 else 1000, "ignore_eos": True}
            answer = asyncio.ensure_future(status_of(session, running.http_address + COMPLETION, body))
            while not running.driver.streams.num_open:
                await asyncio.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)
            while running.is_ready():
                await asyncio.sleep(0.005)
            if num_signals == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            assert await answer == (200 if num_signals == 1 else 503)
            await controller
            await asyncio.wait_for(worker, 30.0)  # it was told to leave, and left


async def test_a_drain_that_takes_too_long_is_cut_short_with_an_error(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.02) as world:
        answer = asyncio.ensure_future(world.post(COMPLETION, {"prompt": "x", "max_tokens": 200}))
        await world.until(lambda: world.owned_blocks() > 0)
        hurry = asyncio.Event()
        draining = asyncio.ensure_future(drain(world.driver, 60.0, hurry))
        await asyncio.sleep(0.05)
        assert not draining.done()
        hurry.set()
        await draining
        status, whole = await answer
        assert (status, whole["error"]["code"]) == (503, "cut_short")
        assert "shutting down" in whole["error"]["message"]


def lose_a_block(world: World) -> None:
    """A bug, as one might be made: a free block that nobody counts any more."""
    (home,) = world.driver.engine._homes.values()
    home.scheduler.pool._free.pop()


async def test_a_broken_law_is_contained_and_the_second_ends_the_process(tmp_path: Path) -> None:
    async with served(tmp_path, delay_s=0.005) as world:
        for number in (1, 2):
            answers = [
                asyncio.ensure_future(world.post(COMPLETION, {"prompt": "x", "max_tokens": 50})) for _ in range(3)
            ]
            await world.until(lambda: world.owned_blocks() > 2)
            lose_a_block(world)
            for status, whole in await asyncio.gather(*answers):
                assert (status, whole["choices"][0]["text"]) == (200, text_after(50))
            assert world.driver.engine.snapshot().laws_broken == number
            assert world.driver.fatal.done() == (number == 2)
        with pytest.raises(LawBroken):
            world.driver.fatal.result()


async def test_an_engine_that_cannot_go_on_leaves_nobody_waiting() -> None:
    driver = Driver(Engine(EngineSettings()), InProcessRegistry(), byte_level(), Salts(b"k" * 32))
    answer = await driver.streams.ask([Ask([5], 10, Sampling())])
    driver.engine.requests = None  # type: ignore[assignment]  # a bug, as one might be made
    driver.post(Stop(1, 0))
    (delta,) = await answer.whole()
    assert delta.finish is FinishReason.CANCELLED
    assert isinstance(driver.fatal.exception(), AttributeError)
    driver.close()


async def test_an_engine_that_cannot_go_on_ends_the_process_though_its_streams_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(Engine(EngineSettings()), InProcessRegistry(), byte_level(), Salts(b"k" * 32))
    driver.engine.requests = None  # type: ignore[assignment]  # a bug, as one might be made
    monkeypatch.setattr(driver.streams, "cut_short", lambda message: 1 // 0)  # and another
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: faults.append(about))
    driver.post(Stop(1, 0))
    await asyncio.sleep(0)
    assert isinstance(driver.fatal.exception(), AttributeError)
    assert [type(about["exception"]) for about in faults] == [ZeroDivisionError]
    driver.close()


async def test_settings_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        write_folder(tmp_path)
        base = {"model": str(tmp_path), "bind": "tcp://127.0.0.1:0"}
        cases = [
            ({**base, "port": port}, f"--port {port}: cannot listen"),
            ({**base, "port": 0, "model": str(tmp_path / "none")}, "--model: .*tokenizer.json"),
            ({**base, "port": 0, "api_key_file": str(tmp_path / "none")}, "--api-key-file"),
        ]
        for settings, complaint in cases:
            with pytest.raises(SettingError, match=complaint):
                async with running_controller(ControllerSettings(**settings)):
                    pass
