"""What every process with a door of HTTP does alike: read its keys, listen, and stop when told to.

Beyond loopback API keys are needed; without them only this machine is answered (api/guard.py).
"""

import asyncio
import logging
import os
import resource
import signal
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from kilburn.controller.api.crowds import SPARE, Crowd
from kilburn.controller.api.malformed import connection_log, speak_for_ourselves
from kilburn.controller.auth import KeyFault, Keyring, read_keys
from kilburn.shared.config import DoorSettings
from kilburn.shared.keys import SettingError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LINGER_S = 10.0  # for the rest of a request that was answered before it was all there
EVERYWHERE = ("0.0.0.0", "::", "")
OTHER_FILES = 256  # descriptors of all that is not a client's connection

log = logging.getLogger("kilburn")


def keyring_for(host: str, api_key_file: str) -> Keyring:
    """The keys that open a door at `host`. Raises SettingError, also where there are none and must be some."""
    try:
        keyring = read_keys(api_key_file, os.environ.get("KILBURN_API_KEYS", ""))
    except KeyFault as fault:
        raise SettingError(str(fault)) from fault
    if keyring.is_empty and host not in LOOPBACK:
        raise SettingError(
            f"--host {host}: beyond loopback API keys are needed; set --api-key-file or KILBURN_API_KEYS, "
            "or give --host 127.0.0.1"
        )
    return keyring


def runner_of(app: web.Application, settings: DoorSettings, crowd: Crowd) -> web.AppRunner:
    speak_for_ourselves()
    have_descriptors(settings.max_connections)
    crowd.watch_all(app)
    return web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves frees what its request holds
        access_log=None,
        logger=connection_log(),
        max_line_size=settings.max_url,
        max_field_size=settings.max_header,
        lingering_time=min(LINGER_S, settings.sending_seconds or LINGER_S),
        shutdown_timeout=1.0,
        crowd=crowd,
    )


def have_descriptors(num_connections: int) -> None:
    """As many as this system lets us, of those that so many connections (0: any number) and all else may take.

    For each client a gateway has another connection, to the controller that answers it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * num_connections + SPARE + OTHER_FILES if num_connections else hard
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning(
            "the system allows %d files, fewer than --max-connections %d may take: give %d, or raise ulimit -Hn",
            hard,
            num_connections,
            max((hard - SPARE - OTHER_FILES) // 2, 1),
        )


def tls_of(certificate: str, key: str) -> ssl.SSLContext | None:
    """What the door speaks; None: plain HTTP. Raises SettingError."""
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        raise SettingError(
            f"--tls-certificate {certificate}: no certificate, or --tls-key {key} is not its key (both in PEM form)"
        ) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingError(f"--tls-certificate {certificate}, --tls-key {key}: cannot be read ({why})") from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is here to be asked for its password")


async def listen(runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None = None) -> str:
    """The address that is listened at. Raises SettingError."""
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    except OSError as error:
        raise SettingError(
            f"--port {port}: cannot listen on {host}:{port} ({error.strerror}); give another --port, or 0 for any"
        ) from error
    scheme = "http" if tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"


@contextmanager
def stop_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """(asked, hurry): set by a first SIGTERM or SIGINT, and by a second."""
    loop, asked, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield asked, hurry
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
