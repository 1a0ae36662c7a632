"""Health that tells the truth, and ends that are told: a worker that is stopped, a server that is."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.api.vocabularies import write_folder
from tests.system.serving import TINY_FLAGS, Service
from tests.worker.tiny_models import make_tiny

SHORT = ("--beat-seconds=0.1", "--silence-seconds=3", "--drain-seconds=0.2")
LONG = {"prompt": "The sea of the", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    model = make_tiny(folder / "tiny", "llama", overrides={"max_position_embeddings": 2048})
    with Service(str(model), folder, *TINY_FLAGS, *SHORT) as running:
        yield running


class Streaming(threading.Thread):
    """One long stream; `lines` grows while it runs."""

    def __init__(self, service: Service, **more: Any) -> None:
        super().__init__()
        self._service, self._body, self.lines = service, {**LONG, "stream": True, **more}, list[str]()
        self.start()

    def run(self) -> None:
        url = f"{self._service.address}/v1/completions"
        with httpx.stream("POST", url, json=self._body, timeout=120) as response:
            for line in response.iter_lines():
                self.lines.append(line)

    def text(self) -> str:
        self.join(120)
        assert self.lines[-2:] == ["data: [DONE]", ""], self.lines[-4:]
        chunks = [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def leases_ended(service: Service) -> float:
    text = httpx.get(f"{service.address}/metrics").text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("kilburn_leases_ended_total "))


def test_a_stopped_worker_turns_health_and_going_on_turns_it_back(service: Service) -> None:
    undisturbed = Streaming(service, max_tokens=200).text()
    (worker,) = service.children()
    for stays_stopped in (False, True):
        stream = Streaming(service, max_tokens=200)
        service.wait_for(lambda stream=stream: len(stream.lines) > 10, 60)
        before = leases_ended(service)
        os.kill(worker, signal.SIGSTOP)
        try:
            service.wait_for(lambda: service.health() == 503, 60)  # half of the silence allowed, and no more
            if stays_stopped:  # until its lease has ended, and beyond
                service.wait_for(lambda before=before: leases_ended(service) > before, 60)
                assert httpx.get(f"{service.address}/health").json()["reason"] == "no worker is ready"
            assert httpx.get(f"{service.address}/live").status_code == 200
        finally:
            os.kill(worker, signal.SIGCONT)
        service.wait_for(lambda: service.health() == 200, 60)
        assert stream.text() == undisturbed
    assert service.children() == [worker]


def test_sigterm_drains_and_then_ends_the_rest_with_an_error(service: Service) -> None:
    """The last word of this file's service."""
    service.wait_for(lambda: service.health() == 200, 60)
    whole: list[httpx.Response] = []

    def ask() -> None:
        whole.append(httpx.post(f"{service.address}/v1/completions", json={**LONG, "n": 4}, timeout=60))

    asking = threading.Thread(target=ask)
    stream = Streaming(service)
    asking.start()
    service.wait_for(lambda: len(stream.lines) > 4 and service.owned_blocks() >= 5, 60)
    assert service.end(signal.SIGTERM) == 0
    asking.join(20)
    stream.join(20)
    data = [line for line in stream.lines if line]
    assert data[-1] == "data: [DONE]"
    for error in (json.loads(data[-2][6:])["error"], whole[0].json()["error"]):
        assert (error["code"], error["message"]) == ("cut_short", "the server is shutting down")
    assert whole[0].status_code == 503
    assert "Traceback" not in service.log


# A controller whose engine meets a bug of its own at the first request.
BROKEN = """
import sys
from kilburn.controller import cli
from kilburn.controller.core.engine import Engine

def submit(self, submit, now, effects):
    raise KeyError("a bug, as one might be made")

Engine._submit = submit
sys.exit(cli.main(sys.argv[1:]))
"""


def test_an_engine_that_fails_answers_with_an_error_and_ends_the_process_non_zero(tmp_path: Path) -> None:
    write_folder(tmp_path)
    words = ["controller", str(tmp_path), "--port=0", "--bind=tcp://127.0.0.1:0"]
    with ExitStack() as stack:
        errors = stack.enter_context((tmp_path / "errors").open("w+"))
        broken = subprocess.Popen(
            [sys.executable, "-u", "-c", BROKEN, *words], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        stack.callback(broken.kill)
        assert broken.stdout is not None
        told = re.search(r"REST at (\S+), workers connect to (\S+)", broken.stdout.readline())
        assert told is not None
        fake = [sys.executable, "-m", "kilburn.controller.simulate.fake_daemon", f"--address={told[2]}"]
        stack.callback(subprocess.Popen([*fake, "--vocab-size=330"]).kill)
        asked = httpx.post(f"{told[1]}/v1/completions", json={"prompt": "hello", "max_tokens": 4}, timeout=60)
        assert (asked.status_code, asked.json()["error"]["code"]) == (503, "cut_short")
        assert broken.wait(60) == 1
        errors.seek(0)
        assert "the engine cannot go on" in errors.read()
