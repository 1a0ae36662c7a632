"""`kilburn gateway`: one address before several controllers. Nothing here outlives a request but counts.

    client --> door --> forward --> controller            with retry on another, before the first token
                 \\-- prompts --> registry: who has computed its beginning?
                 \\-- fleet   --> registry and --controllers: who is there, and how busy?

Any number of gateways may stand side by side, and any of them may end at any time: what they know is in Redis or is
found anew within seconds. Without Redis, or while it is down or empty, requests go by load alone.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp

from kilburn.controller.api.crossing import Origins
from kilburn.controller.api.crowds import Crowd
from kilburn.controller.api.readers import Readers
from kilburn.controller.api.senders import Senders
from kilburn.controller.gateway.door import Door, door_application
from kilburn.controller.gateway.fleet import Fleet
from kilburn.controller.gateway.forward import Forwarder
from kilburn.controller.gateway.metrics import GatewayMetrics, GatewaySources
from kilburn.controller.gateway.prompts import Prompts
from kilburn.controller.listening import keyring_for, listen, runner_of, stop_signals, tls_of
from kilburn.controller.registry_opening import registry_for, salts_for
from kilburn.controller.text import TextError, read_folder
from kilburn.shared.config import GatewaySettings
from kilburn.shared.keys import SettingError

log = logging.getLogger("kilburn")
CONNECT_S = 2.0  # for a controller to accept a connection; to answer it may take any time
IDLE_S = 15.0  # after which an unused connection to a controller is closed: before the controller does
LINE_BYTES = 1 << 16
AddrInfo = tuple[int, int, int, str, tuple[object, ...]]  # as socket.getaddrinfo has it


def watched_socket(address: AddrInfo, lost_s: float) -> socket.socket:
    """For a connection to a controller. The kernel asks the other end whether it still knows of it.

    A machine that went without a word and came back within `lost_s` answers probes, and knows nothing of the streams
    that it held: nothing but this would ever break them off.
    """
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", max(int(lost_s), 1)), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not everywhere under this name; there the system's own times hold
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that is bound and serves."""

    http_address: str
    door: Door

    @property
    def fleet(self) -> Fleet:
        return self.door.fleet


@asynccontextmanager
async def running_gateway(settings: GatewaySettings) -> AsyncIterator[RunningGateway]:
    """A gateway for as long as the block lasts. `model` is a folder here. Raises SettingError."""
    keyring = keyring_for(settings.host, settings.api_key_file)
    tls = tls_of(settings.tls_certificate, settings.tls_key)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = Path(settings.model)
    try:
        text = await asyncio.to_thread(read_folder, folder)
    except TextError as error:
        raise SettingError(f"--model: {error}") from error
    salts = salts_for(settings.server_key_file, is_shared=bool(settings.redis))
    registry = registry_for(settings.redis, folder, settings.served_model_name or folder.name, salts)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    lines = partial(watched_socket, lost_s=settings.lost_seconds)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=lines)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LINE_BYTES) as session,
        # Their connections are kept, so that a controller with as many clients as it may have still answers them.
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as probes,
    ):

        async def probe(address: str) -> bool:
            async with probes.get(f"{address}/ready") as response:
                return response.status == 200

        addresses = [url.strip().rstrip("/") for url in settings.controllers.split(",") if url.strip()]
        fleet, prompts = Fleet(addresses, settings.lost_seconds, probe), Prompts(text, salts, registry)
        forwarder = Forwarder(session, fleet)
        metrics = GatewayMetrics(GatewaySources(fleet, forwarder.counters, registry.counters))
        door = Door(fleet, forwarder, prompts, metrics)
        app = door_application(door, keyring, settings.max_body, Origins(settings.cors_origins))
        Readers(settings.stalled_seconds, forwarder.counters.stall).watch_all(app)
        runner = runner_of(app, settings, Crowd(settings.max_connections, forwarder.counters.turn_away))
        Senders(settings.sending_seconds, forwarder.counters.give_up).watch_all(runner)
        registry.listen(prompts.heard)
        registry.watch(lambda announced: fleet.heard(announced, asyncio.get_running_loop().time()))
        try:
            registry.start()
            fleet.start()
            await runner.setup()
            yield RunningGateway(await listen(runner, settings.host, settings.port, tls), door)
        finally:
            await runner.cleanup()
            await fleet.close()
            await registry.close()
            text.close()


async def run_gateway(settings: GatewaySettings, on_running: Callable[[RunningGateway], None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends that."""
    async with running_gateway(settings) as running:
        with stop_signals() as (asked, hurry):
            if on_running is not None:
                on_running(running)
            await asked.wait()
            await running.door.drain(settings.drain_seconds, hurry)
