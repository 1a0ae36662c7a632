"""A load that makes every figure move: a pool too small, shared prompts, a named prefix, mistakes, and losses.

0 s  nothing         1  prompts that have nothing in common, until the pool turns over
     2  shared and repeated prompts, n > 1, a named prefix, a reader that does not read, refusals
     3  the worker is killed, and another one takes over        4  a law is broken
     5  Redis goes away and comes back; strangers knock         6  everybody leaves

Some clients come by a gateway, which has two controllers to choose from: the watched one, and one that never gives a
whole answer.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import zmq
from aiohttp import web

from bench.ports import free_port
from kilburn.shared.codec import encode
from kilburn.shared.messages import Beat
from tests.system.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
WORDS = ("sea", "hand", "state", "moon", "thing", "reason", "bread", "edge", "river", "stone", "glass", "winter")
QUIET_S = 2.0


class Watched:
    """A controller and its worker, both real processes, and what the test may ask of them."""

    def __init__(self, folder: Path, model: Path, *settings: str) -> None:
        self._folder, self._model = folder, model
        words = [sys.executable, "-m", "tests.system.watched_controller", f"--model={model}", "--port=0"]
        words.append("--least-priority=-1")  # the reader that does not read goes first
        words += ["--bind=tcp://127.0.0.1:0", *settings]
        self._log = (folder / "controller.log").open("wb")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self._log, text=True)
        first = self._line()
        self.url, self.endpoint = str(first["http"]), str(first["workers"])
        self.workers: list[subprocess.Popen[bytes]] = []

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self._folder / "controller.log").read_text()
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._line()

    def start_worker(self, *settings: str) -> None:
        words = [sys.executable, "-m", "kilburn.worker", f"--model={self._model}", f"--connect={self.endpoint}"]
        with (self._folder / f"worker{len(self.workers)}.log").open("wb") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            words += ["--name=w", "--device=cpu", "--dtype=float32", "--threads=1", "--exit-with-parent", *settings]
            self.workers.append(subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=environment))

    def start_gateway(self, *settings: str) -> str:
        """Its address, at which it may not listen yet."""
        port = free_port()
        words = [sys.executable, "-m", "kilburn.controller.cli", "gateway", f"--model={self._model}", f"--port={port}"]
        with (self._folder / "gateway.log").open("wb") as log:
            self.workers.insert(0, subprocess.Popen([*words, *settings], cwd=ROOT, stdout=log, stderr=log))
        return f"http://127.0.0.1:{port}"

    def kill_worker(self) -> None:
        self.workers[-1].send_signal(signal.SIGKILL)
        self.workers[-1].wait(60)

    def close(self) -> None:
        for process in (*self.workers, self.process):
            if process.poll() is None:
                process.terminate()
        for process in (*self.workers, self.process):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self._log.close()


class Fickle:
    """A controller that never gives a whole answer: by turns it refuses for now, and breaks off after a token.

    For every other few probes it is not ready, so that the one which has computed something is asked first.
    """

    def __init__(self) -> None:
        self.port, self._num_asked, self._num_probes = free_port(), 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            self._num_probes += 1
            return web.json_response({}, status=200 if self._num_probes // 3 % 2 else 503)
        self._num_asked += 1
        if self._num_asked % 2:
            return web.json_response({"error": {"code": "no_worker", "message": "not now"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"index":0,"text":"one","finish_reason":null}]}\n\n')
        await asyncio.sleep(0.1)
        if request.transport is not None:
            request.transport.abort()
        return response

    async def listen(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        return runner


class Load:
    """The clients. Every draw comes from one seed."""

    def __init__(
        self, watched: Watched, redis: RedisServer, worker_flags: tuple[str, ...], gateway: str, fickle: Fickle
    ) -> None:
        self._watched, self._redis, self._flags = watched, redis, worker_flags
        self._gateway, self._fickle = gateway, fickle
        self._dice = random.Random(7)
        self._tasks: list[asyncio.Task[None]] = []
        self._known = [f"The {self._text(14)}" for _ in range(6)]

    def _text(self, num_words: int) -> str:
        return " ".join(self._dice.choice(WORDS) for _ in range(num_words))

    async def _post(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], url: str = "") -> int:
        try:
            async with session.post((url or self._watched.url) + path, json=body) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def _repeat(self, session: aiohttp.ClientSession, kind: str, url: str = "") -> None:
        """One client, over and over."""
        while True:
            body: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "stream": True}
            match kind:
                case "unlike":
                    body |= {"prompt": self._text(25), "max_tokens": self._dice.randint(40, 140)}
                case "forks":
                    body |= {"prompt": self._text(9), "n": 3, "max_tokens": 40}
                case "alike":
                    body |= {"prompt": self._dice.choice(self._known), "max_tokens": 20, "stream": False}
                case "named":
                    body |= {"prompt": NAMED + self._text(2)}
                case "short":
                    body |= {"prompt": self._text(2), "max_tokens": 3}
            await self._post(session, "/v1/completions", body, url)
            if url:
                await asyncio.sleep(0.2)  # what the gateway answers at once must not fill the loop

    async def _mistakes(self, session: aiohttp.ClientSession) -> None:
        while True:
            for wrong in ({"n": 64}, {"max_tokens": 100_000}, {"temperature": -1}, {"model": "another"}):
                await self._post(session, "/v1/completions", {"prompt": "The sea", "max_tokens": 4} | wrong)
            await asyncio.sleep(0.5)

    async def _impatient(self, session: aiohttp.ClientSession) -> None:
        """A client that leaves before its answer is there."""
        while True:
            body = {"prompt": self._text(6), "max_tokens": 200, "ignore_eos": True, "stream": True}
            asking = asyncio.ensure_future(self._post(session, "/v1/completions", body))
            await asyncio.sleep(0.7)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _not_reading(self) -> socket.socket:
        """A stream whose reader takes nothing."""
        host, port = self._watched.url.removeprefix("http://").split(":")
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.connect((host, int(port)))
        messages = [{"role": "user", "content": "The sea"}]
        wanted = {"messages": messages, "max_tokens": 250, "logprobs": True, "top_logprobs": 20}
        body = json.dumps(wanted | {"stream": True, "ignore_eos": True, "priority": -1}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        reader.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader

    def _knock(self) -> None:
        """Frames that are no messages, and a message of nobody that we know."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 500)
            dealer.setsockopt(zmq.IDENTITY, b"stranger")
            dealer.connect(self._watched.endpoint)
            dealer.send(b"no message")
            dealer.send(msgpack.packb({"nor": "this"}))
            dealer.send(encode(Beat(1, 1)))

    async def _until(self, holds: Any, within_s: float = 150.0) -> dict[str, Any]:
        async with asyncio.timeout(within_s):
            while not holds(seen := await asyncio.to_thread(self._watched.ask, "snapshot")):
                await asyncio.sleep(0.2)
        return seen

    async def _until_lost(self, session: aiohttp.ClientSession) -> None:
        """The gateway gives up the controller that is no more."""
        async with asyncio.timeout(60):
            while True:
                async with session.get(self._gateway + "/metrics") as answer:
                    if 'kilburn_gateway_controllers{state="lost"} 1.0' in await answer.text():
                        return
                await asyncio.sleep(0.2)

    def _begin(self, coroutine: Any) -> None:
        self._tasks.append(asyncio.ensure_future(coroutine))

    async def play(self) -> None:
        connector, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(connector=connector, timeout=patience) as session:
            fickle = await self._fickle.listen()
            try:
                try:
                    await self._disturb(session)
                finally:
                    await fickle.cleanup()
                await self._until_lost(session)
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._until(lambda s: s["requests"] == 0 and s["groups"] and s["groups"][0]["flights"] == 0)
        await asyncio.sleep(QUIET_S)

    async def _disturb(self, session: aiohttp.ClientSession) -> None:
        await self._until(lambda s: s["groups"])
        await asyncio.sleep(QUIET_S)
        for _ in range(14):
            self._begin(self._repeat(session, "unlike"))
        await self._until(lambda s: s["groups"][0]["evictions"] > 120)
        assert await self._post(session, "/v1/prefixes", {"name": "sea", "text": NAMED}) == 201
        for kind in ("forks", "alike", "alike", "named", "named", "short"):
            self._begin(self._repeat(session, kind))
        for kind in ("named", "alike", "short"):
            self._begin(self._repeat(session, kind, self._gateway))
        self._begin(self._mistakes(session))
        self._begin(self._impatient(session))
        with self._not_reading():
            await self._until(lambda s: s["groups"][0]["host_hits"] > 0 and s["groups"][0]["block_copies"] > 3)
            await asyncio.sleep(3)
            self._redis.client().hset(self._names_at(), "junk", "not signed")
            await asyncio.sleep(1.5)
            self._redis.kill()  # while there are hints to send
            await asyncio.sleep(0.5)
            before = await self._until(lambda s: True)  # a busy machine may have lost a lease already
            self._watched.kill_worker()
            self._knock()
            self._watched.start_worker(*self._flags)
            await self._until(lambda s: s["leases_ended"] > before["leases_ended"])
            await asyncio.sleep(2)
            self._redis.start()
            before = await self._until(lambda s: s["leases_began"] > before["leases_began"] and s["groups"])
            async with asyncio.timeout(150):
                while not (await asyncio.to_thread(self._watched.ask, "break"))["lost"]:  # all blocks are in use
                    await asyncio.sleep(0.02)
            await self._until(lambda s: s["laws_broken"] == 1 and s["leases_began"] > before["leases_began"])

    def _names_at(self) -> str:
        return next(key.decode() for key in self._redis.client().scan_iter("kilburn:names:*"))


NAMED = "You are a sailor, and you speak of nothing but the sea. " * 2
