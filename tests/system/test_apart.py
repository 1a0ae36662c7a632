"""Controller and worker started apart, with a tap on the line between them.

What a client was told must have come over that line: the frames are captured, and the tokens of the captured results
are the tokens of the answer. With CURVE the same line carries nothing that can be read.
"""

import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2 as httpx

from kilburn.shared import messages as m
from kilburn.shared.codec import decode_from_controller, decode_from_worker
from tests.system.serving import TINY_FLAGS
from tests.worker.tiny_models import make_tiny

PROMPT = list(range(40, 60))
PACKED = struct.pack(f"<{len(PROMPT)}i", *PROMPT)  # as the prompt stands in a plan
NUM_NEW = 12
CLI = (sys.executable, "-m", "kilburn.controller.cli")
GREETING_BYTES = 64  # of ZMTP 3: signature, version, mechanism, and room
COMMAND, LONG, MORE = 4, 2, 1


class Tap:
    """A TCP line to `port` that keeps what passes, per direction: of the newest connection, should there be several."""

    def __init__(self, port: int) -> None:
        self._far_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.to_controller, self.to_worker = bytearray(), bytearray()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._far_port))
                self.to_controller, self.to_worker = bytearray(), bytearray()
                for source, sink, kept in ((near, far, self.to_controller), (far, near, self.to_worker)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=(source, sink, kept), daemon=True))
                    self._threads[-1].start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


def frames(kept: bytes) -> Iterator[bytes]:
    """The whole frames of one direction of a ZMTP line; its commands are left out."""
    at = GREETING_BYTES
    while at + 9 <= len(kept) or (at + 2 <= len(kept) and not kept[at] & LONG):
        flags, head = kept[at], 9 if kept[at] & LONG else 2
        end = at + head + int.from_bytes(kept[at + 1 : at + head], "big")
        if end > len(kept):
            return
        if not flags & COMMAND:
            assert not flags & MORE, "a message has one frame"
            yield kept[at + head : end]
        at = end


@contextmanager
def started(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*CLI, *words],
            stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            try:
                assert process.wait(30) == 0, log.read_text()
            finally:
                process.kill()


def wait_for(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def answer(address: str, log: Path) -> str:
    """To PROMPT, once tokens can be produced."""
    wait_for(lambda: httpx.get(f"{address}/health").status_code == 200, log)
    body = {"prompt": PROMPT, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    return str(httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])


def text_of(tokens: list[int], address: str) -> str:
    return str(httpx.post(f"{address}/detokenize", json={"tokens": tokens}).json()["prompt"])


@contextmanager
def apart(folder: Path, keys: list[str], num_ranks: int = 1) -> Iterator[tuple[str, Tap]]:
    """The address of a controller whose worker is connected through a tap."""
    model = str(make_tiny(folder / "tiny", "llama"))
    with ExitStack() as stack:
        log = folder / "controller.log"
        words = ["controller", model, "--port=0", "--bind=tcp://127.0.0.1:0", *keys]
        controller = stack.enter_context(started(log, *words))
        told = re.compile(r"REST at (\S+), workers connect to tcp://127\.0\.0\.1:(\d+)\n")
        wait_for(lambda: told.search(log.read_text()) is not None, log)  # it is bound
        address, wire = told.findall(log.read_text())[0]
        tap = Tap(int(wire))
        stack.callback(tap.close)
        words = ["worker", model, f"--connect=tcp://127.0.0.1:{tap.port}", "--name=far", *TINY_FLAGS, *keys]
        words.append(f"--tp={num_ranks}")
        worker = stack.enter_context(started(folder / "worker.log", *words))
        assert controller.pid != worker.pid
        yield address, tap


def test_what_a_client_is_told_came_over_the_line(tmp_path: Path) -> None:
    with apart(tmp_path, []) as (address, tap):
        text = answer(address, tmp_path / "worker.log")
        to_worker = [decode_from_controller(frame) for frame in frames(bytes(tap.to_worker))]
        to_controller = [decode_from_worker(frame) for frame in frames(bytes(tap.to_controller))]
        plans = [message for message in to_worker if isinstance(message, m.StepPlan)]
        results = [message for message in to_controller if isinstance(message, m.StepResult)]
        hellos = [message for message in to_controller if isinstance(message, m.Hello)]
        drawn = [token for result in results for token in result.tokens]
        assert [list(admit.tokens) for plan in plans for admit in plan.admits] == [PROMPT]
        assert [plan.step for plan in plans] == [result.step for result in results] == list(range(1, NUM_NEW + 1))
        assert len(drawn) == NUM_NEW
        assert text_of(drawn, address) == text
        assert [hello.name for hello in hellos] == ["far"]
        assert PACKED in tap.to_worker


def test_with_keys_the_line_tells_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    made = subprocess.run([*CLI, "keys", "new", str(folder), "far"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    # Two ranks, each with a line and with the keys of its group.
    with apart(tmp_path, [f"--curve-keys={folder}"], num_ranks=2) as (address, tap):
        assert answer(address, tmp_path / "worker.log")
        for kept in (bytes(tap.to_worker), bytes(tap.to_controller)):
            assert b"CURVE" in kept[:GREETING_BYTES]
            sealed = list(frames(kept))
            assert len(sealed) >= NUM_NEW
            assert all(frame.startswith(b"\x07MESSAGE") for frame in sealed)
            assert PACKED not in kept
