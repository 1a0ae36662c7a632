"""`kilburn serve`: a controller in this process, a worker in another, and one terminal to watch them.

    prepare the model -> bind REST and ROUTER -> start the worker -> ready -> ... -> Ctrl-C -> drain -> stop the worker
                         (this process)          (supervised)        |
                                                                     curl works

The worker ends with this process whatever happens to it: by SIGTERM in good order, by the kernel (exit_with_parent) if
this process is killed. A worker that dies is started again, and the engine is told at once: no waiting for silence. One
that is stopped or hangs does not die: it is killed once it is silent, or late, and does not come back.
With --tp N the worker is N processes, each of which is looked after by itself.

With --groups N there are N workers, each with the whole model, looked after one by one: threads and memory, given or
found, are divided among them. One that was told to leave (POST /admin/groups/{name}/drain) is not replaced.
"""

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial

from kilburn.controller.app import Running, run_controller
from kilburn.controller.prepared import prepared_folder, public_name
from kilburn.controller.rank_processes import rank_commands
from kilburn.controller.supervise import Supervisor, WorkerFailed
from kilburn.shared.config import ControllerSettings, ServeSettings, WorkerSettings, narrowed
from kilburn.shared.kinds import Share
from kilburn.shared.model_shape import read_shape

WORKER_GRACE_S = 10.0
READY_POLL_S = 0.02
LAST_ANSWERS_S = 0.1  # for the failed answers to be written
PARENT_POLL_S = 0.5


class Phases:
    """What happened so far and how long it took, for the terminal."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()

    def note(self, text: str) -> None:
        """A message of no phase."""
        print(f"kilburn serve: {text}", file=sys.stderr, flush=True)

    def done(self, phase: str, what: str) -> None:
        now = time.monotonic()
        print(f"  {phase:<12}{what:<58}{now - self._last:>7.1f} s", flush=True)
        self._last = now

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._begun


def curl_line(address: str, model_name: str, needs_key: bool) -> str:
    """A request that can be pasted into a shell."""
    body = {"model": model_name, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}
    quoted = json.dumps(body).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    return f"curl -s {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"


def worker_name(settings: ServeSettings, number: int) -> str:
    return settings.name if settings.name and settings.groups == 1 else f"{settings.name or 'worker'}-{number}"


def worker_settings(settings: ServeSettings, endpoint: str, number: int = 0) -> WorkerSettings:
    """Of one of the workers: its share of what was given."""
    n, pool = settings.groups, settings.host_pool
    return replace(
        narrowed(settings, WorkerSettings),
        connect=settings.connect or endpoint,
        name=worker_name(settings, number),
        sharers=settings.sharers * n,
        threads=max(settings.threads // n, 1) if settings.threads else 0,
        kv_memory=settings.kv_memory // n,
        num_blocks=max(settings.num_blocks // n, 1) if settings.num_blocks else 0,
        host_pool=Share(pool.fraction / n) if isinstance(pool, Share) else pool // n,
    )


class Serving:
    """One run: the two processes and what is said about them."""

    def __init__(self, settings: ServeSettings, phases: Phases) -> None:
        self._settings, self._phases = settings, phases
        self._supervisors: list[Supervisor] = []
        self._of_worker: dict[str, list[Supervisor]] = {}
        self._given_up: set[str] = set()  # workers that cannot be kept alive
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Until a signal has been obeyed. Raises WorkerFailed if no worker can be kept alive."""
        controller = asyncio.create_task(
            run_controller(replace(narrowed(self._settings, ControllerSettings), bind=self._bind()), self._start)
        )
        if self._settings.exit_with_parent:
            self._tasks.append(asyncio.create_task(self._leave_with_parent(os.getppid())))
        try:
            await asyncio.wait({controller, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            await controller
        finally:
            controller.cancel()
            await asyncio.gather(*[supervisor.stop(WORKER_GRACE_S) for supervisor in self._supervisors])
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(controller, *self._tasks, return_exceptions=True)

    def _bind(self) -> str:
        return self._settings.bind or "tcp://127.0.0.1:0"

    def _start(self, running: Running) -> None:
        """REST and ROUTER are bound: the workers may come."""
        self._phases.done("controller", f"{running.http_address}, pid {os.getpid()}")
        running.driver.processes.on_stuck = self._end_stuck
        for number in range(self._settings.groups):
            self._start_worker(worker_settings(self._settings, running.endpoint, number), running)
        self._tasks.append(asyncio.create_task(self._announce(running)))

    def _start_worker(self, worker: WorkerSettings, running: Running) -> None:
        """A process and a supervisor for each of its ranks."""
        for command in rank_commands(worker):
            supervisor = Supervisor(
                command,
                os.environ,
                on_end=partial(running.worker_ended, worker.name),
                say=self._phases.note,
                # A worker that was drained leaves by itself, and shall not be replaced.
                is_wanted=partial(_is_wanted, running, worker.name),
            )
            self._supervisors.append(supervisor)
            self._of_worker.setdefault(worker.name, []).append(supervisor)
            self._tasks.append(asyncio.create_task(self._supervise(supervisor, worker.name, running)))

    def _end_stuck(self, name: str, pid: int, reason: str) -> None:
        """A process of a worker neither speaks nor ends. One that was not started here is for others to end."""
        for supervisor in self._of_worker.get(name, []):
            if supervisor.pid == pid:
                supervisor.kill(reason)

    async def _supervise(self, supervisor: Supervisor, name: str, running: Running) -> None:
        try:
            await supervisor.run()
        except WorkerFailed as error:
            self._given_up.add(name)
            if len(self._given_up) < self._settings.groups:
                self._phases.note(f"{error}; going on without it")
                return
            running.driver.streams.cut_short("no worker can be kept alive, and the server stops")
            await asyncio.sleep(LAST_ANSWERS_S)
            if not self._failed.done():  # several ranks may fail alike
                self._failed.set_exception(error)

    async def _leave_with_parent(self, parent: int) -> None:
        """Stop in good order once the process that started this one is gone: a child is then given another parent."""
        while os.getppid() == parent:
            await asyncio.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    async def _announce(self, running: Running) -> None:
        """The first time that tokens can be produced."""
        while not running.is_ready():
            await asyncio.sleep(READY_POLL_S)
        pids = ", ".join(str(supervisor.pid) for supervisor in self._supervisors)
        self._phases.done("worker", f"loaded and warm, pid {pids}")
        needs_key = bool(self._settings.api_key_file or os.environ.get("KILBURN_API_KEYS"))
        print(f"\n{running.model_name} is ready after {self._phases.total_s:.1f} s. Try:\n")
        print(f"  {curl_line(running.http_address, running.model_name, needs_key)}\n")
        print("Ctrl-C stops controller and worker.", flush=True)


def _is_wanted(running: Running, name: str) -> bool:
    return not running.driver.engine.snapshot().is_closing and name not in running.driver.retired


def run_serve(settings: ServeSettings) -> int:
    """Serve until told to stop. Exit status: 0 after a signal, 1 if no worker can be kept alive."""
    phases = Phases()
    print(f"kilburn serve {settings.model}", flush=True)
    folder = prepared_folder(settings.model, settings.revision)
    if settings.tp > 1:
        read_shape(folder, "float32", settings.tp)  # refuses a split that does not divide the model
    phases.done("model", str(folder))
    name = settings.served_model_name or public_name(settings.model)
    settings = replace(settings, model=str(folder), served_model_name=name)

    async def run() -> None:
        await Serving(settings, phases).run()

    try:
        asyncio.run(run())
    except WorkerFailed as error:
        phases.note(str(error))
        return 1
    print("kilburn serve: stopped", flush=True)
    return 0
