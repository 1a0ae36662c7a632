"""The daemon with real sockets: a ROUTER in the test plays the controller, by the protocol's own frames.

Most lives run in a thread around a toy model; the process itself (settings, phases, signals, a parent that dies) is
started as `python -m kilburn.worker` on a tiny real model.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq

from kilburn.kernels.dispatch import Batch, Kernels, kernels_for
from kilburn.shared import messages as m
from kilburn.shared.codec import decode_from_worker, encode
from kilburn.shared.config import SettingsError, WorkerSettings
from kilburn.shared.layout import KVLayout
from kilburn.shared.sampling import Sampling
from kilburn.shared.threads import num_cores, threads_for
from kilburn.worker.daemon import MOVES, Daemon, Patience, State
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.link import WorkerLink
from kilburn.worker.models import weights
from kilburn.worker.models.config import ModelConfig
from kilburn.worker.parallel import Part, Ranks
from kilburn.worker.start import make_ready
from kilburn.worker.watchdog import Watchdog
from tests.worker.tiny_models import make_tiny
from tests.worker.toy import MAX_LEN, VOCAB, ToyModel, admit, layout, oracle, toy_executor

GREEDY = Sampling(temperature=0.0)
SOON = Patience(poll_s=0.02, hello_s=30.0, gone_s=0.5, first_wait_s=0.02, last_wait_s=0.1)
HELLO = m.Hello("worker-0", b"\1" * 32, layout(4), 64, 32, 8, 128, MAX_LEN, VOCAB)
ALONE = Part()


class Controller:
    """The other end, by hand."""

    def __init__(self, port: int = 0) -> None:
        self.context: zmq.Context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 1000
        self.port = port or self.socket.bind_to_random_port("tcp://127.0.0.1")
        if port:
            self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.peer = b""

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def heard(self, timeout_s: float = 60.0) -> m.FromWorker:
        """The next message that is not a Beat."""
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(max(deadline - time.monotonic(), 0) * 1000):
            self.peer, frame = self.socket.recv_multipart()
            message = decode_from_worker(frame)
            if not isinstance(message, m.Beat):
                return message
        raise TimeoutError("the worker says nothing")

    def say(self, message: m.FromController) -> None:
        self.socket.send_multipart([self.peer, encode(message)])

    def welcomed(self, lease: int) -> m.Hello:
        hello = self.heard()
        assert isinstance(hello, m.Hello)
        self.say(m.Welcome(lease, beat_s=0.5, silence_s=60.0, depth=2))
        return hello

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Life:
    """A daemon in a thread."""

    def __init__(self, endpoint: str, part: Part, watchdog: Watchdog | None = None) -> None:
        self.model = ToyModel()
        self.stop = threading.Event()
        self.link = WorkerLink(endpoint, "worker-0")
        executor = toy_executor(self.model)
        executor.runner.ranks = Ranks(part)
        hello = replace(HELLO, rank=part.rank, world=part.world)
        self.daemon = Daemon(hello, executor, self.link, self.stop, SOON, watchdog)
        self.exit_code: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.exit_code = self.daemon.run()
        finally:
            self.link.close()

    def ended(self) -> int | None:
        self.thread.join(30)
        return self.exit_code


@contextmanager
def controlled(part: Part = ALONE, watchdog: Watchdog | None = None) -> Iterator[tuple[Controller, Life]]:
    controller = Controller()
    life = Life(controller.endpoint, part, watchdog)
    try:
        yield controller, life
    finally:
        life.stop.set()
        life.thread.join(30)
        controller.close()


def plan(lease: int, step: int, row: int = 0, count: int = 1, *admits: m.Admit) -> m.StepPlan:
    return m.StepPlan(lease, step, [row], [count], admits=list(admits))


PROMPT = [4, 8, 15, 16]
BORN = admit(0, PROMPT, [0, 1, 2], GREEDY)


def test_plans_sent_ahead_run_in_order_and_feed_themselves() -> None:
    with controlled() as (controller, life):
        assert controller.welcomed(lease=7) == HELLO
        controller.say(plan(7, 1, 0, 4, BORN))
        for step in range(2, 6):
            controller.say(plan(7, step))
        results = [controller.heard() for _ in range(5)]
        assert [(r.lease, r.step) for r in results] == [(7, step) for step in range(1, 6)]
        assert [token for r in results for token in r.tokens] == oracle(life.model, PROMPT, GREEDY, 5)
        assert all(r.timings.forward_s > 0 for r in results)


def test_a_rank_that_meets_nobody_says_so_and_asks_for_another_lease() -> None:
    with controlled(Part(1, 2)) as (controller, _):
        assert controller.welcomed(lease=7).rank == 1
        failed = controller.heard()
        assert isinstance(failed, m.StepFailed)
        assert (failed.lease, failed.step) == (7, 0)
        assert "the ranks did not meet: the controller names no place" in failed.reason
        controller.say(m.Gone(7, failed.reason))
        assert isinstance(controller.heard(), m.Hello)


def test_rank_0_opens_another_place_for_each_lease() -> None:
    with controlled(Part(0, 2)) as (controller, _):
        places = set()
        for lease in (7, 8):
            places.add(controller.welcomed(lease).rendezvous)  # the Welcome names none
            assert isinstance(controller.heard(), m.StepFailed)
            controller.say(m.Gone(lease, "nobody met"))
        assert len(places) == 2
        assert all(place.startswith("127.0.0.1:") for place in places)


def test_a_plan_of_another_lease_is_dropped() -> None:
    with controlled() as (controller, _):
        controller.welcomed(lease=7)
        controller.say(plan(6, 1, 0, 4, BORN))
        controller.say(plan(7, 1, 0, 4, BORN))
        controller.say(plan(7, 2))
        results = [controller.heard(), controller.heard()]
        assert [(result.lease, result.step) for result in results] == [(7, 1), (7, 2)]


def test_gone_drops_the_rows_and_a_new_identity_asks_again() -> None:
    with controlled() as (controller, life):
        controller.welcomed(lease=1)
        controller.say(plan(1, 1, 0, 4, BORN))
        controller.heard()
        first = controller.peer
        controller.say(m.Gone(1, "for a test"))
        controller.welcomed(lease=2)
        assert controller.peer != first
        controller.say(plan(2, 1))
        failed = controller.heard()
        assert isinstance(failed, m.StepFailed)
        assert "never admitted" in failed.reason
        controller.say(m.Gone(2, failed.reason))
        controller.welcomed(lease=3)
        controller.say(plan(3, 1, 0, 4, BORN))
        assert controller.heard().tokens == oracle(life.model, PROMPT, GREEDY, 1)


def test_leases_that_end_at_once_are_asked_for_ever_more_rarely() -> None:
    with controlled() as (controller, life):
        waits = []
        for lease in range(1, 6):
            controller.welcomed(lease)
            waits.append(life.daemon._wait_s)
            controller.say(m.Gone(lease, "another worker took its name"))
        assert waits == [0.02, 0.04, 0.08, 0.1, 0.1]


def test_a_worker_whose_name_another_has_asks_again_under_another_identity() -> None:
    with controlled() as (controller, life):
        for _ in range(3):
            assert isinstance(controller.heard(), m.Hello)
            before = controller.peer
            controller.say(m.Gone(0, "another process has this name"))
        controller.welcomed(lease=9)
        assert controller.peer != before
        controller.say(plan(9, 1, 0, 4, BORN))
        assert controller.heard().tokens == oracle(life.model, PROMPT, GREEDY, 1)


def test_a_steps_deadline_is_the_leases_or_its_plans_if_that_is_later() -> None:
    allowed_s: list[float] = []

    class Noting(Watchdog):
        def limit(self, seconds: float) -> AbstractContextManager[None]:
            allowed_s.append(seconds)
            return super().limit(seconds)

    with controlled(watchdog=Noting(lambda: False)) as (controller, _):
        assert isinstance(controller.heard(), m.Hello)
        controller.say(m.Welcome(7, beat_s=0.5, silence_s=60.0, depth=2, step_s=60.0))
        controller.say(plan(7, 1, 0, 4, BORN))
        controller.say(replace(plan(7, 2), allowed_s=75.0))
        controller.say(plan(7, 3))
        assert [controller.heard().step for _ in range(3)] == [1, 2, 3]
    assert allowed_s == [60.0, 60.0, 75.0, 60.0], "of the meeting, and of each step"


def test_a_gap_in_the_steps_ends_the_lease() -> None:
    with controlled() as (controller, _):
        controller.welcomed(lease=1)
        controller.say(plan(1, 2, 0, 4, BORN))
        assert controller.heard() == m.StepFailed(1, 2, "broken plan: step 2 came where 1 was due")


def test_an_exception_fails_the_step_without_its_traceback_and_the_worker_lives_on() -> None:
    with controlled() as (controller, life):
        life.model.embed = life.model.embed.double()  # the products no longer fit: torch raises in mid-step
        controller.welcomed(lease=1)
        controller.say(plan(1, 1, 0, 4, BORN))
        controller.say(plan(1, 2))  # already on its way; it must not run
        failed = controller.heard()
        assert isinstance(failed, m.StepFailed)
        assert failed.reason.startswith("RuntimeError: ")
        assert "\n" not in failed.reason
        assert ".py" not in failed.reason
        life.model.embed = life.model.embed.float()
        controller.welcomed(lease=2)  # even where no Gone comes
        controller.say(plan(2, 1, 0, 4, BORN))
        assert controller.heard().tokens == oracle(life.model, PROMPT, GREEDY, 1)


def test_a_controller_that_returns_is_joined_again() -> None:
    with controlled() as (controller, life):
        controller.welcomed(lease=1)
        controller.say(plan(1, 1, 0, 4, BORN))
        controller.heard()
        controller.close()
        returned = Controller(controller.port)
        try:
            returned.welcomed(lease=1)
            returned.say(plan(1, 1, 0, 4, BORN))
            assert returned.heard().tokens == oracle(life.model, PROMPT, GREEDY, 1)
        finally:
            life.stop.set()
            life.ended()
            returned.close()


def test_a_rejected_worker_ends_with_one() -> None:
    with controlled() as (controller, life):
        controller.heard()
        controller.say(m.Reject("another model"))
        assert life.ended() == 1


@pytest.mark.parametrize("how", ["drain", "stop"])
def test_a_worker_that_leaves_says_goodbye(how: str) -> None:
    with controlled() as (controller, life):
        controller.welcomed(lease=1)
        controller.say(plan(1, 1, 0, 4, BORN))
        if how == "drain":
            controller.say(m.Drain(1))
        assert controller.heard().step == 1
        if how == "stop":
            life.stop.set()
        assert isinstance(controller.heard(), m.Goodbye)
        assert life.ended() == 0


def test_every_state_has_its_row_and_can_be_left() -> None:
    assert MOVES.keys() == set(State)
    assert [state for state in State if not MOVES[state]] == [State.LEFT]
    assert all(State.LEFT in MOVES[state] for state in State if state is not State.LEFT)


# --- the process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "llama")


def command(folder: Path, endpoint: str, *flags: str) -> list[str]:
    fixed = ["--connect", endpoint, "--device", "cpu", "--threads", "1", "--num-blocks", "40", "--max-rows", "3"]
    return [sys.executable, "-m", "kilburn.worker", str(folder), *fixed, *flags]


def alone_in_the_world(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of a real model, the whole sequence computed anew for each."""
    loaded = weights.load(folder, torch.float32, torch.device("cpu"))
    kernels: Kernels = kernels_for(torch.device("cpu"))
    known = list(prompt)
    for _ in range(num_tokens):
        cache = KVCache(real_layout(loaded.config), 4, 0, torch.device("cpu"), kernels)
        positions = torch.arange(len(known))
        bounds = torch.tensor([0, len(known)], dtype=torch.int32)
        tables = torch.arange(4, dtype=torch.int32)[None]
        batch = Batch(bounds, bounds[1:].clone(), tables, positions, positions.clone(), len(known), len(known))
        with torch.inference_mode():
            hidden = loaded.model.forward(torch.tensor(known), cache.pool, batch, kernels)
            known.append(int(loaded.model.logits(hidden[-1:]).argmax()))
    return known[len(prompt) :]


def real_layout(config: ModelConfig) -> KVLayout:
    return KVLayout(16, config.num_layers, config.num_kv_heads, config.head_dim, "float32")


def test_the_process_serves_a_real_model_until_sigterm(folder: Path) -> None:
    controller = Controller()
    process = subprocess.Popen(command(folder, controller.endpoint), stderr=subprocess.PIPE, text=True)
    try:
        hello = controller.welcomed(lease=1)
        assert (hello.num_blocks, hello.max_rows, hello.vocab_size, hello.pid) == (40, 3, 320, process.pid)
        prompt = [50, 60, 70, 80, 90]
        controller.say(plan(1, 1, 2, 5, admit(2, prompt, [30, 11], GREEDY)))
        for step in range(2, 8):
            controller.say(plan(1, step, 2))
        tokens = [token for _ in range(7) for token in controller.heard().tokens]
        assert tokens == alone_in_the_world(folder, prompt, 7)
        process.send_signal(signal.SIGTERM)
        assert isinstance(controller.heard(), m.Goodbye)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
        for phase in ("importing", "loading", "warming up", "pools"):
            assert f"phase {phase} " in said
        assert "KV per token" in said
    finally:
        process.kill()
        process.wait()
        controller.close()


def test_a_process_ends_with_its_parent(folder: Path) -> None:
    controller = Controller()
    # The shell is the parent; it is killed and cannot tell its child.
    words = " ".join(command(folder, controller.endpoint, "--exit-with-parent"))
    shell = subprocess.Popen(["sh", "-c", f"{words} & wait"], stderr=subprocess.DEVNULL)
    pid = 0
    try:
        pid = controller.welcomed(lease=1).pid
        assert pid != shell.pid
        shell.kill()
        shell.wait()
        assert isinstance(controller.heard(), m.Goodbye)
        pid = 0
    finally:
        shell.kill()
        if pid:
            os.kill(pid, signal.SIGKILL)
        controller.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--name", "a b"], ["name", "letters, digits"]),
        (["--connect", "tcp://192.0.2.1:5557"], ["connect", "keys"]),
        (["--num-blocks", "2000000000"], ["--num-blocks", "or less"]),
    ],
)
def test_a_process_whose_settings_need_a_change_ends_with_two(folder: Path, flags: list[str], words: list[str]) -> None:
    result = subprocess.run(
        command(folder, "tcp://127.0.0.1:9", *flags), stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert result.returncode == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_len": 100000}, ["--max-len", "512 or less"]),
        ({"kv_memory": 1 << 50}, ["--kv-memory", "MiB or less"]),
        ({"kv_memory": 100}, ["--kv-memory", "holds no block"]),
        ({"host_pool": 1 << 50}, ["--host-pool", "MiB or less"]),
        ({"device": "cuda"}, ["--device", "give cpu or auto"]),
    ],
)
def test_a_setting_that_cannot_be_met_is_named(folder: Path, changes: dict, words: list[str]) -> None:
    if "device" in changes and torch.cuda.is_available():
        changes, words = {"max_len": 513}, ["--max-len"]
    with pytest.raises(SettingsError) as caught:
        make_ready(replace(WorkerSettings(model=str(folder), name="w", device="cpu"), **changes))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_pool_that_nobody_sized_serves_every_row_at_full_length(folder: Path) -> None:
    settings = WorkerSettings(model=str(folder), name="w", device="cpu", max_rows=4, max_len=100, host_pool=1 << 20)
    ready = make_ready(settings)
    assert ready.hello.num_blocks == 4 * 7  # this model is small: memory is not what bounds it
    assert ready.hello.num_host_blocks == (1 << 20) // ready.hello.layout.bytes_per_block
    assert ready.ledger.num_blocks == ready.executor.runner.cache.num_blocks == 28


def test_a_worker_that_is_ready_on_a_cpu_has_loaded_no_compiler_but_that_of_its_kernels(folder: Path) -> None:
    """torch's own, and what it brings, would be seconds of every start, and a hundred megabytes."""
    code = (
        "import sys; from kilburn.shared.config import WorkerSettings; from kilburn.worker.start import make_ready\n"
        f"make_ready(WorkerSettings(model={str(folder)!r}, name='w', device='cpu'))\n"
        "heavy = ('torch._dynamo', 'torch._inductor', 'sympy', 'triton', 'transformers')\n"
        "print('loaded:', *(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "loaded:" in done.stdout.splitlines()


def test_threads_are_as_set_or_leave_a_core_to_the_controller() -> None:
    assert threads_for(5) == 5
    assert threads_for(0) == (num_cores() - 1 if num_cores() > 2 else num_cores())
