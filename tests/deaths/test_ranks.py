"""`kilburn serve --tp N`: ranks that die, hang and come back, and clients who notice nothing of it."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from kilburn.shared.model_files import BUNDLED_NAME
from tests.system.serving import TINY_FLAGS, Service, is_alive
from tests.worker.tiny_models import make_tiny

ASKED: dict[str, Any] = {"prompt": "The sea and the state of the moon", "ignore_eos": True}
GREEDY: dict[str, Any] = {**ASKED, "temperature": 0}
DRAWN: dict[str, Any] = {**ASKED, "temperature": 0.9, "seed": 11}
NUM_TOKENS = 200
TWO = ("--tp=2", "--step-seconds=3", "--max-len=512", "--beat-seconds=0.2", "--silence-seconds=2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(str(tiny), tmp_path_factory.mktemp("two"), *TINY_FLAGS, *TWO) as service:
        yield service


@pytest.fixture(scope="module")
def expected(service: Service) -> tuple[str, str]:
    """What is said where nothing happens."""
    return told(service, GREEDY, NUM_TOKENS), told(service, DRAWN, NUM_TOKENS)


def told(service: Service, body: dict[str, Any], max_tokens: int) -> str:
    return (
        service.client().completions.create(model=service.model, max_tokens=max_tokens, **split(body)).choices[0].text
    )


def split(body: dict[str, Any]) -> dict[str, Any]:
    """The client's own words, and ours in its extra body."""
    extra = {"ignore_eos": body["ignore_eos"]}
    return {name: value for name, value in body.items() if name not in extra} | {"extra_body": extra}


class Stream:
    """A stream that is read in a thread of its own."""

    def __init__(self, service: Service, body: dict[str, Any], max_tokens: int) -> None:
        self.parts: list[str] = []
        self.begun = threading.Event()
        words = {**split(body), "max_tokens": max_tokens, "model": service.model}
        self._stream = service.client().completions.create(stream=True, **words)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._stream:
                self.parts.append(chunk.choices[0].text)
                self.begun.set()
        except Exception as error:
            self._failure = error
            self.begun.set()

    def text(self) -> str:
        self._thread.join(90)
        assert self._failure is None, self._failure
        return "".join(self.parts)


def leases_ended(service: Service) -> int:
    text = httpx.get(f"{service.address}/metrics", timeout=60).text
    found = re.search(r"^kilburn_leases_ended_total (\d+)", text, re.MULTILINE)
    assert found, text
    return int(float(found[1]))


def ranks(service: Service) -> list[int]:
    """The processes of both ranks, in order."""
    found = {}
    for pid in service.children():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        given = [word for word in words if word.startswith(b"--rank=")]
        if given:
            found[int(given[0].removeprefix(b"--rank="))] = pid
    return [found[rank] for rank in sorted(found)]


def top(service: Service) -> list[str]:
    return [sys.executable, "-m", "kilburn.controller.cli", "top", service.address, "--once"]


def test_two_ranks_answer_and_are_shown(service: Service) -> None:
    assert len(ranks(service)) == 2
    assert told(service, GREEDY, 24)
    assert "2 ranks" in service.log
    assert re.search(r'kilburn_group_info\{.*ranks="2".*\} 1', httpx.get(f"{service.address}/metrics", timeout=60).text)
    assert "of 2 ranks" in subprocess.run(top(service), capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_in_a_collective_is_not_noticed(
    killed: int, service: Service, expected: tuple[str, str]
) -> None:
    """The other rank stands still meanwhile: whoever is killed waits for it, in a collective."""
    ended, pids = leases_ended(service), ranks(service)
    streams = [Stream(service, body, NUM_TOKENS) for body in (GREEDY, DRAWN)]
    for stream in streams:
        stream.begun.wait(90)
    os.kill(pids[1 - killed], signal.SIGSTOP)
    try:
        os.kill(pids[killed], signal.SIGKILL)
    finally:
        os.kill(pids[1 - killed], signal.SIGCONT)
    assert tuple(stream.text() for stream in streams) == expected
    assert leases_ended(service) > ended
    assert ranks(service)[1 - killed] == pids[1 - killed], "the other rank keeps its weights"
    assert service.owned_blocks() == 0


def test_a_rank_that_is_stopped_is_killed_and_another_takes_its_place(
    service: Service, expected: tuple[str, str]
) -> None:
    """The other one is stuck in a collective meanwhile, and either hears that the pair is broken, or ends itself."""
    ended, pids = leases_ended(service), ranks(service)
    stream = Stream(service, GREEDY, NUM_TOKENS)
    stream.begun.wait(90)
    os.kill(pids[1], signal.SIGSTOP)
    assert stream.text() == expected[0]
    assert leases_ended(service) > ended
    assert not is_alive(pids[1])
    assert "did not come back within 7 s (rank 1 was silent for 2 s), and was killed" in service.log
    assert len(ranks(service)) == 2
    assert service.health() == 200


def test_the_bundled_model_on_three_ranks(tmp_path: Path) -> None:
    flags = ("--device=cpu", "--tp=3", "--kv-memory=64MiB", "--max-len=256", "--max-rows=4")
    with Service(BUNDLED_NAME, tmp_path, *flags, ready_s=120) as service:
        assert "planned as" not in service.log, "its memory is not what `kilburn plan --tp 3` would have said"
        assert "Paris" in told(service, {**GREEDY, "prompt": "The capital of France is"}, 4)


REFUSALS = [
    (("--tp=3",), "--tp 3: does not divide 4 heads, 2 KV heads"),
    (("--tp=2", "--collectives=192.0.2.1"), "--insecure-collectives"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSALS, ids=["split", "collectives"])
def test_what_cannot_be_is_refused_at_the_start(flags: tuple[str, ...], words: str, tiny: Path) -> None:
    command = [sys.executable, "-m", "kilburn.controller.cli", "serve", str(tiny), "--port=0", *TINY_FLAGS, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert words in done.stderr + done.stdout
