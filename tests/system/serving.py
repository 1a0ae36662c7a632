"""A real `kilburn serve`: two processes, a port, a terminal that is a file."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
from openai import OpenAI

TINY_FLAGS = ("--device=cpu", "--dtype=float32", "--threads=1", "--max-rows=16", "--num-blocks=1024")


class Service:
    """Started by `__enter__`, ready when it returns, gone after `__exit__`."""

    def __init__(self, model: str, folder: Path, *flags: str, ready_s: float = 200.0) -> None:
        self.log_file = folder / "serve.log"
        self.command = [
            sys.executable,
            "-m",
            "kilburn.controller.cli",
            "serve",
            model,
            "--port=0",
            "--exit-with-parent",
            *flags,
        ]
        self._ready_s = ready_s

    def start(self) -> None:
        with self.log_file.open("wb") as log:
            # A session of its own, as a terminal gives: nothing that we are sent reaches it by accident.
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )

    def __enter__(self) -> "Service":
        self.start()
        self.wait_until_ready()
        return self

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: "is ready after" in self.log or self.process.poll() is not None, self._ready_s)
        assert self.process.poll() is None, self.log

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGTERM)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait. Whatever is left is killed, and that is a failure."""
        children = self.children()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end within 90 s of {number.name}\n{self.log}") from None
        left = [pid for pid in children if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"left behind: {left}\n{self.log}"
        return status

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def address(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:\d+", self.log)
        assert found, self.log
        return found[0]

    @property
    def model(self) -> str:
        return str(httpx.get(f"{self.address}/v1/models").json()["data"][0]["id"])

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    def health(self) -> int:
        return httpx.get(f"{self.address}/health", timeout=60).status_code

    def children(self) -> list[int]:
        """Processes that `kilburn serve` started and that run now."""
        return children_of(self.process.pid)

    def owned_blocks(self) -> float:
        """Blocks that some sequence holds now, from /metrics."""
        return self.figure("kilburn_blocks", 'state="owned"', 'tier="device"')

    def figure(self, name: str, *labels: str) -> float:
        """The sum of a figure of /metrics, over whoever has these labels (which come in an order of their own)."""
        text = httpx.get(f"{self.address}/metrics", timeout=60).text
        named = [line for line in text.splitlines() if re.match(rf"{name}[ {{]", line)]
        lines = [line for line in named if all(part in line for part in labels)]
        assert lines, text
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s\n{self.log}"
            time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Processes that a process started and that run now."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(word) for word in words]


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")
