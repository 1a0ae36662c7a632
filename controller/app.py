"""The controller as a process: what its settings ask for is built, bound, and taken down in good order.

    settings -> keys, text, engine -> Driver -> link bound -> REST bound -> Running ... signal -> drain -> all closed

What this file does not know: what happens in between (driver.py, api/).
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kilburn.controller.api.asking import Asking
from kilburn.controller.api.crossing import Origins
from kilburn.controller.api.crowds import Crowd
from kilburn.controller.api.readers import Readers
from kilburn.controller.api.routes import application
from kilburn.controller.api.senders import Senders
from kilburn.controller.api.service import Service
from kilburn.controller.calls.forms import FORMS
from kilburn.controller.collector import rare_collections
from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Disturbed
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.driver import Driver, drain
from kilburn.controller.grammars import Bounds, GrammarDoor
from kilburn.controller.link import ControllerLink
from kilburn.controller.listening import EVERYWHERE, keyring_for, listen, runner_of, stop_signals, tls_of
from kilburn.controller.metrics import Metrics, Sources
from kilburn.controller.page.feed import Feed
from kilburn.controller.page.picture import Picture, Rates, Totals
from kilburn.controller.registry import Announcement, PrefixRegistry
from kilburn.controller.registry_opening import registry_for, salts_for
from kilburn.controller.salts import Salts
from kilburn.controller.streams import Streams
from kilburn.controller.telling import Teller
from kilburn.controller.text import Text, TextError, read_folder
from kilburn.controller.tracing import Tracing, exporter_to
from kilburn.shared.config import ControllerSettings
from kilburn.shared.keys import ControllerKeys, SettingError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("kilburn")


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

    def worker_ended(self, name: str, pid: int, reason: str) -> None:
        """The process of a worker is known to be gone. One that never said Hello is ignored."""
        self.driver.worker_ended(name, pid, reason)


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


def _announce(registry: PrefixRegistry, settings: ControllerSettings, driver: Driver, address: str) -> None:
    """Gateways are told where to reach this controller, where there is an address that others can use."""
    reached_at = settings.advertise.rstrip("/") or ("" if settings.host in EVERYWHERE else address)

    def about() -> Announcement | None:
        seen = driver.engine.snapshot()
        if seen.is_closing:
            return None
        sizes = tuple(sorted({group.block_size for group in seen.groups}))
        return Announcement(reached_at, seen.requests, driver.model_digest, sizes)

    if reached_at:
        registry.announce(about)


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


# Settings that fields of requests may say they are bounded by.
LIMITS = (
    *("max_choices", "max_logit_bias", "max_logprobs", "max_messages", "max_prompts"),
    *("max_schema", "max_stop_ids", "max_stops", "max_tools"),
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
    keyring = keyring_for(settings.host, settings.api_key_file)
    tls = tls_of(settings.tls_certificate, settings.tls_key)
    # Threads of the tokenizers library would take the cores that a worker on this machine computes with.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        text = await asyncio.to_thread(read_folder, Path(settings.model))
    except TextError as error:
        raise SettingError(f"--model: {error}") from error
    model_name = settings.served_model_name or Path(settings.model).name
    salts = salts_for(settings.server_key_file, is_shared=bool(settings.redis))
    registry = registry_for(settings.redis, Path(settings.model), model_name, salts)
    limits = (settings.max_prefixes, settings.progress_seconds, settings.log_text)
    driver = Driver(Engine(engine_settings(settings)), registry, text, salts, *limits)
    driver.tracing = _tell_stories(settings, driver, text, exporter)
    link = ControllerLink(
        settings.bind, driver.deliver, on_disturbed=lambda: driver.post(Disturbed()), keys=_curve_keys(settings)
    )
    driver.send = link.send
    service = Service(
        asking=_asking(settings, text, driver, salts),
        streams=driver.streams,
        names=driver.names,
        chronicle=driver.chronicle,
        feed=Feed(partial(_picture, driver, model_name), asyncio.get_running_loop().time),
        metrics=Metrics(_sources(settings, driver, link, registry, model_name), settings.vllm_metric_names),
        model_name=model_name,
        created=int(time.time()),
        max_len=driver.max_len,
        health=driver.health,
        snapshot=driver.engine.snapshot,
        retire=driver.retire,
        limits={name: getattr(settings, name) for name in LIMITS},
    )
    app = application(service, keyring, settings.max_body, Origins(settings.cors_origins))
    Readers(settings.stalled_seconds, driver.streams.counts.stall).watch_all(app)
    runner = runner_of(app, settings, Crowd(settings.max_connections, driver.streams.counts.turn_away))
    Senders(settings.sending_seconds, driver.streams.counts.give_up).watch_all(runner)
    alive = asyncio.ensure_future(_keep_alive(driver.streams, settings.keep_alive_seconds))
    try:
        registry.start()
        await link.start()
        await runner.setup()
        address = await listen(runner, settings.host, settings.port, tls)
        _announce(registry, settings, driver, address)
        yield Running(address, link.endpoint, model_name, driver, app, service.feed)
    finally:
        alive.cancel()
        await runner.cleanup()
        driver.close()
        await registry.close()
        await link.close()
        if driver.tracing is not None:
            await asyncio.to_thread(driver.tracing.close)
        text.close()
        await service.asking.grammars.close()


def _asking(settings: ControllerSettings, text: Text, driver: Driver, salts: Salts) -> Asking:
    bounds = Bounds(settings.max_schema, settings.max_schema_depth, settings.schema_seconds)
    limits = (
        settings.max_choices,
        settings.least_priority,
        settings.max_prompt_logprobs,
        settings.max_prompt_tokens,
    )
    form = text.call_form if settings.tool_parser == "auto" else FORMS[settings.tool_parser]
    return Asking(text, driver, salts, *limits, GrammarDoor(bounds), form)


async def _keep_alive(streams: Streams, silence_s: float) -> None:
    """Long silences are broken, so that nobody between here and a reader takes its connection for a dead one."""
    while silence_s > 0.0:
        await asyncio.sleep(silence_s / 4)
        streams.keep_alive(silence_s)


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
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")  # no effect where it is set up
    log.setLevel(settings.log_level.upper())
    async with running_controller(settings) as running:
        with rare_collections(), stop_signals() as (asked, hurry):
            if on_running is not None:
                on_running(running)
            await _either(asked, running.driver.fatal)
            await drain(running.driver, settings.drain_seconds, hurry)
