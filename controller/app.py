"""The controller as a process: what its settings ask for is built, bound, and taken down in good order.

    settings -> keys, text, engine -> Driver -> link bound -> REST bound -> Running ... signal -> drain -> all closed

What this file does not know: what happens in between (driver.py, api/).
"""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kilburn.controller.api.asking import Asking
from kilburn.controller.api.malformed import connection_log, hide_software
from kilburn.controller.api.routes import application
from kilburn.controller.api.service import Service
from kilburn.controller.auth import KeyFault, Keyring, read_keys
from kilburn.controller.core.engine import Engine, EngineSettings
from kilburn.controller.core.policy import Preemption
from kilburn.controller.driver import Driver, drain
from kilburn.controller.link import ControllerLink
from kilburn.controller.metrics import Metrics, Sources
from kilburn.controller.page.feed import Feed
from kilburn.controller.page.picture import Picture, Rates, Totals
from kilburn.controller.registry import InProcessRegistry, PrefixRegistry
from kilburn.controller.registry_entries import EntrySigner
from kilburn.controller.registry_redis import RedisRegistry, UrlFault, connector
from kilburn.controller.salts import KeyFileFault, Salts, keyed, read_server_key
from kilburn.controller.telling import Teller
from kilburn.controller.text import Text, TextError, read_folder
from kilburn.controller.tracing import Tracing, exporter_to
from kilburn.shared.config import ControllerSettings
from kilburn.shared.keys import ControllerKeys, SettingError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("kilburn")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_HEADER_BYTES = 8190


@dataclass
class Running:
    """A controller that is bound and serves."""

    http_address: str
    endpoint: str  # where workers connect
    model_name: str
    driver: Driver
    app: web.Application
    feed: Feed

    def is_ready(self) -> bool:
        """What GET /health says."""
        return self.driver.health().unhealthy is None

    def worker_ended(self, pid: int, reason: str) -> None:
        """The process of a worker is known to be gone. One that never said Hello is ignored."""
        self.driver.worker_ended(pid, reason)


def engine_settings(settings: ControllerSettings) -> EngineSettings:
    return EngineSettings(
        depth=settings.depth,
        max_step_tokens=settings.max_step_tokens,
        beat_s=settings.beat_seconds,
        silence_s=settings.silence_seconds,
        step_deadline_s=settings.step_seconds,
        recovery_s=settings.recovery_seconds,
        max_waiting=settings.max_waiting,
        most_pinned=settings.pinned_percent / 100,
        preemption=Preemption(settings.preemption),
        aging_s=settings.aging_seconds,
        prefix_wait_steps=settings.prefix_wait_steps,
        is_fair=settings.fair,
        step_target_s=settings.step_target_ms / 1000,
        max_waiting_tokens=settings.max_waiting_tokens,
        queue_s=settings.queue_seconds,
        request_s=settings.request_seconds,
    )


def _salts(settings: ControllerSettings) -> Salts:
    try:
        key = read_server_key(settings.server_key_file)
    except KeyFileFault as fault:
        raise SettingError(f"--server-key-file: {fault}") from fault
    if not settings.server_key_file and settings.redis:
        log.warning(
            "no server_key_file: this process drew a key of its own, so that no other controller can read what it "
            "publishes in Redis, nor it what they do; write 32 random bytes to a file and give it to all of them"
        )
    return Salts(key)


def _registry(settings: ControllerSettings, salts: Salts, model_name: str) -> PrefixRegistry:
    if not settings.redis:
        return InProcessRegistry()
    try:
        connect = connector(settings.redis)
    except UrlFault as fault:
        raise SettingError(f"--redis: the URL {fault}") from fault
    # Names of one model are no names of another: a tokenizer of its own gives them other tokens.
    files = [Path(settings.model) / name for name in ("tokenizer.json", "config.json")]
    about = [file.read_bytes() if file.exists() else b"" for file in files]
    namespace = keyed(salts.service_key(), b"namespace", model_name.encode(), *about)
    signer = EntrySigner(salts.service_key(), namespace)
    return RedisRegistry(connect, signer, namespace.hex()[:32], secrets.token_hex(8))


def _keyring(settings: ControllerSettings) -> Keyring:
    try:
        keyring = read_keys(settings.api_key_file, os.environ.get("KILBURN_API_KEYS", ""))
    except KeyFault as fault:
        raise SettingError(str(fault)) from fault
    if keyring.is_empty and settings.host not in LOOPBACK:
        raise SettingError(
            f"--host {settings.host}: beyond loopback API keys are needed; set --api-key-file or KILBURN_API_KEYS, "
            "or give --host 127.0.0.1"
        )
    return keyring


def _picture(driver: Driver, model_name: str) -> Picture:
    """What the block map shows now."""
    counts = driver.streams.counts
    totals = Totals(counts.prompt_tokens, counts.cached_tokens, counts.output_tokens)
    now, found = asyncio.get_running_loop().time(), driver.engine.block_map()
    trouble = driver.health(found.snapshot).unhealthy or ""
    return Picture(model_name, now, found, totals, Rates(), driver.noted.latest(), trouble)


def _curve_keys(settings: ControllerSettings) -> ControllerKeys | None:
    if not settings.curve_keys:
        return None
    folder = Path(settings.curve_keys)
    return ControllerKeys.read(folder / "controller.key", folder / "workers.allow")


# Settings that figures are read by: bounds, and times that something is given.
TOLD = (
    *("depth", "drain_seconds", "max_step_tokens", "max_waiting", "preemption"),
    *("progress_seconds", "recovery_seconds", "silence_seconds", "step_seconds"),
)


def _told(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _sources(
    settings: ControllerSettings, driver: Driver, link: ControllerLink, registry: PrefixRegistry, model_name: str
) -> Sources:
    return Sources(
        snapshot=driver.engine.snapshot,
        now=asyncio.get_running_loop().time,
        is_serving=lambda snapshot: driver.health(snapshot).unhealthy is None,
        plan_s=lambda: driver.plan_s,
        streams=driver.streams,
        link=link,
        registry=registry.counters,
        about=tuple((name, _told(getattr(settings, name))) for name in TOLD),
        model_name=model_name,
    )


@asynccontextmanager
async def running_controller(
    settings: ControllerSettings, exporter: "SpanExporter | None" = None
) -> AsyncIterator[Running]:
    """A controller for as long as the block lasts. Raises SettingError for what the settings ask and cannot have.

    `exporter`: where spans go, in place of `trace_to`.
    """
    keyring = _keyring(settings)
    # Threads of the tokenizers library would take the cores that a worker on this machine computes with.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        text = await asyncio.to_thread(read_folder, Path(settings.model))
    except TextError as error:
        raise SettingError(f"--model: {error}") from error
    model_name = settings.served_model_name or Path(settings.model).name
    salts = _salts(settings)
    registry = _registry(settings, salts, model_name)
    limits = (settings.max_prefixes, settings.progress_seconds, settings.log_text)
    driver = Driver(Engine(engine_settings(settings)), registry, text, salts, *limits)
    driver.tracing = _tell_stories(settings, driver, text, exporter)
    link = ControllerLink(settings.bind, driver.deliver, keys=_curve_keys(settings))
    driver.send = link.send
    service = Service(
        asking=Asking(text, driver, salts, settings.max_choices, settings.least_priority),
        streams=driver.streams,
        names=driver.names,
        chronicle=driver.chronicle,
        feed=Feed(partial(_picture, driver, model_name), asyncio.get_running_loop().time),
        metrics=Metrics(_sources(settings, driver, link, registry, model_name), settings.vllm_metric_names),
        model_name=model_name,
        created=int(time.time()),
        max_len=driver.max_len,
        health=driver.health,
    )
    app = application(service, keyring, settings.max_body)
    hide_software()
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves frees its blocks
        access_log=None,
        logger=connection_log(),
        max_line_size=MOST_HEADER_BYTES,
        max_field_size=MOST_HEADER_BYTES,
        shutdown_timeout=1.0,
    )
    try:
        registry.start()
        await link.start()
        await runner.setup()
        port = await _listen(runner, settings)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield Running(f"http://{host}:{port}", link.endpoint, model_name, driver, app, service.feed)
    finally:
        await runner.cleanup()
        driver.close()
        await registry.close()
        await link.close()
        if driver.tracing is not None:
            await asyncio.to_thread(driver.tracing.close)
        text.close()


def _tell_stories(
    settings: ControllerSettings, driver: Driver, text: Text, exporter: "SpanExporter | None"
) -> Tracing | None:
    """Whoever wants to know of requests that ended is told: the log always, a collector where there is one."""
    chronicle = driver.chronicle
    chronicle.on_end.append(Teller(chronicle.wall, settings.log_requests, text.decode if settings.log_text else None))
    if exporter is None and settings.trace_to:
        exporter = exporter_to(settings.trace_to)
    if exporter is None:
        return None
    tracing = Tracing(exporter, chronicle.wall, settings.trace_percent, settings.trace_every)
    chronicle.on_end.append(tracing.ended)
    return tracing


async def _listen(runner: web.AppRunner, settings: ControllerSettings) -> int:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise SettingError(
            f"--port {settings.port}: cannot listen on {where} ({error.strerror}); give another --port, or 0 for any"
        ) from error
    port: int = runner.addresses[0][1]
    return port


async def _either(asked: asyncio.Event, fatal: asyncio.Future[None]) -> None:
    """Until a signal asks to stop. Raises what is fatal."""
    stop = asyncio.ensure_future(asked.wait())
    ends: list[asyncio.Future[Any]] = [stop, fatal]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if fatal.done():
        fatal.result()


async def run_controller(settings: ControllerSettings, on_running: Callable[[Running], None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends that. Raises SettingError and LawBroken."""
    loop = asyncio.get_running_loop()
    asked, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if asked.is_set() else asked).set()

    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")  # no effect where it is set up
    log.setLevel(settings.log_level.upper())
    async with running_controller(settings) as running:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            if on_running is not None:
                on_running(running)
            await _either(asked, running.driver.fatal)
            await drain(running.driver, settings.drain_seconds, hurry)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
