"""A worker's life: load once, then lease after lease, step after step.

                Hello                Welcome(lease)               StepPlan / StepResult
      JOINING ---------> JOINING ------------------> SERVING <------------------------+
         ^  ^                |  Reject                  |   |                         |
         |  +-- unanswered   +---------> LEFT           |   +-------------------------+
         |                               ^  Drain, stop |
         +---- ENDING <------------------|--------------+  a step failed
         |   Gone, or in vain            |              |
         +-------------------------------|--------------+  Gone, link lost

Weights, kernels and pools outlive leases; rows and what the pools hold do not. A plan of another lease is dropped. A
step that fails ends the lease: StepFailed tells the reason, the log has the traceback, and the next Hello begins again
from nothing. Signals and a vanished parent set `stop`, which is looked at between steps.

One of several ranks meets the others when it is welcomed, and confirms steps instead of answering them unless it is
rank 0. What it does in company may never end, and so a watchdog may end this process.

The link beats by itself, so that a long step is not taken for silence. What this file does not know: sockets, models,
what a plan means.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from kilburn.shared.agreement import step_digest
from kilburn.shared.messages import (
    Beat,
    Drain,
    Forget,
    FromController,
    FromWorker,
    Gone,
    Goodbye,
    Hello,
    Prepare,
    Prepared,
    Reject,
    StepDone,
    StepFailed,
    StepPlan,
    StepResult,
    Unpreparable,
    Welcome,
)
from kilburn.shared.types import LawBroken
from kilburn.worker.link import LinkLost
from kilburn.worker.outcomes import PlanBroken
from kilburn.worker.watchdog import Watchdog

log = logging.getLogger("kilburn.worker")


class Link(Protocol):
    """What the daemon wants of `worker.link.WorkerLink`."""

    def send(self, message: FromWorker) -> None: ...

    def send_beside(self, message: FromWorker) -> None: ...

    def receive(self, timeout_s: float | None) -> FromController | LinkLost | None: ...

    def reconnect(self) -> None: ...


class Steps(Protocol):
    """What the daemon wants of `worker.step.Executor`."""

    def place(self) -> str: ...

    def begin(self, rendezvous: str, step_s: float) -> None: ...

    def run(self, plan: StepPlan, idle_s: float = 0.0) -> StepResult: ...

    def prepare(self, asked: Prepare, answer: Callable[[Prepared | Unpreparable], None]) -> None: ...

    def forget(self, forgotten: Forget) -> None: ...

    def clear(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the daemon waits, in seconds."""

    poll_s: float = 0.2  # between looks at `stop`
    hello_s: float = 15.0  # for an answer to Hello, before another
    gone_s: float = 2.0  # for the Gone that follows a StepFailed
    step_s: float = 120.0  # for a step of several ranks, where the controller does not say
    first_wait_s: float = 0.25  # before a new connection; doubled each time in vain ...
    last_wait_s: float = 4.0  # ... up to this; a lease that lasted longer was not in vain


class State(Enum):
    JOINING = "joining"
    SERVING = "serving"
    ENDING = "ending"
    LEFT = "left"


MOVES: dict[State, frozenset[State]] = {
    State.JOINING: frozenset({State.JOINING, State.SERVING, State.LEFT}),
    State.SERVING: frozenset({State.JOINING, State.ENDING, State.LEFT}),
    State.ENDING: frozenset({State.JOINING, State.LEFT}),
    State.LEFT: frozenset(),
}


class Daemon:
    """Serves one controller until told to stop. `run` returns the process's exit code."""

    def __init__(
        self,
        hello: Hello,
        steps: Steps,
        link: Link,
        stop: threading.Event,
        patience: Patience = Patience(),
        watchdog: Watchdog | None = None,
    ) -> None:
        self.hello, self.steps, self.link, self.stop, self.patience = hello, steps, link, stop, patience
        self.watchdog = watchdog
        self.state = State.JOINING
        self.exit_code = 0
        self.lease = 0
        self.next_step = 1
        self._deadline = 0.0  # of an answer, where one is awaited
        self._step_s = patience.step_s
        self._wait_s = patience.first_wait_s
        self._leased_at = 0.0
        self._waiting_since = 0.0

    def run(self) -> int:
        self._say_hello()
        while self.state is not State.LEFT:
            if self.stop.is_set():
                self._leave("the worker was told to stop")
                break
            message = self.link.receive(self.patience.poll_s)
            if message is not None:
                self._heard(message)
            elif self.state in (State.JOINING, State.ENDING) and time.monotonic() >= self._deadline:
                self._join_again("the controller does not answer")
        return self.exit_code

    # --- what may come

    def _heard(self, message: FromController | LinkLost) -> None:
        match message:
            case StepPlan():
                self._plan(message)
            case Welcome() if self.state is State.JOINING:
                self._begin(message)
            case Welcome(lease):
                self._join_again(f"a Welcome to lease {lease} that nobody asked for")
            case Reject(reason):
                log.error("the controller rejects this worker: %s", reason)
                self.exit_code = 1
                self._move(State.LEFT)
            case Gone(lease) if self.state is State.SERVING and lease != self.lease:
                pass  # of an earlier life
            case Gone(0, reason):
                self._join_again(f"no lease yet: {reason}")
            case Gone(_, reason):
                self._join_again(f"the lease is over: {reason}")
            case LinkLost(reason):
                self._join_again(f"the link is lost: {reason}")
            case Drain(lease):
                # Plans come in order and each is finished when the next is read: nothing is under way.
                if lease == self.lease and self.state is State.SERVING:
                    self._leave("drained")
            case Prepare(lease) if lease == self.lease and self.state is State.SERVING:
                self.steps.prepare(message, self.link.send_beside)
            case Forget(lease) if lease == self.lease and self.state is State.SERVING:
                self.steps.forget(message)
            case Prepare() | Forget() | Beat():
                pass

    def _begin(self, welcome: Welcome) -> None:
        self._move(State.SERVING)
        self.lease, self.next_step, self._leased_at = welcome.lease, 1, time.monotonic()
        self._step_s = welcome.step_s or self.patience.step_s
        try:
            with self._limited(self._step_s):
                self.steps.begin(welcome.rendezvous, self._step_s)
        except Exception as error:
            log.error("the ranks did not meet for lease %d: %s", welcome.lease, error)
            self._fail(0, f"the ranks did not meet: {_first_line(error)}")
            return
        self._waiting_since = time.perf_counter()
        log.info("lease %d begins", welcome.lease)

    def _limited(self, seconds: float) -> AbstractContextManager[None]:
        return nullcontext() if self.watchdog is None else self.watchdog.limit(seconds)

    def _plan(self, plan: StepPlan) -> None:
        if self.state is not State.SERVING or plan.lease != self.lease:
            log.debug("dropped plan %d of lease %d", plan.step, plan.lease)
            return
        idle_s = time.perf_counter() - self._waiting_since
        try:
            if plan.step != self.next_step:
                raise PlanBroken(f"step {plan.step} came where {self.next_step} was due")
            with self._limited(max(self._step_s, plan.allowed_s)):
                result = self.steps.run(plan, idle_s)
        except PlanBroken as error:
            log.error("plan %d of lease %d is broken: %s", plan.step, plan.lease, error)
            self._fail(plan.step, f"broken plan: {error}")
        except Exception as error:
            log.exception("step %d of lease %d failed", plan.step, plan.lease)
            self._fail(plan.step, f"{type(error).__name__}: {_first_line(error)}")
        else:
            is_answer = self.hello.rank == 0
            self.link.send(result if is_answer else StepDone(plan.lease, plan.step, step_digest(plan, result)))
            self.next_step += 1
        self._waiting_since = time.perf_counter()

    # --- moves

    def _move(self, to: State) -> None:
        if to not in MOVES[self.state]:
            raise LawBroken(f"no move {self.state.value} -> {to.value}")
        self.state = to

    def _say_hello(self) -> None:
        self.link.send(self.hello if self.hello.world == 1 else replace(self.hello, rendezvous=self.steps.place()))
        self._deadline = time.monotonic() + self.patience.hello_s

    def _fail(self, step: int, reason: str) -> None:
        self.steps.clear()
        self.link.send(StepFailed(self.lease, step, reason))
        self._move(State.ENDING)
        self._deadline = time.monotonic() + self.patience.gone_s

    def _join_again(self, why: str) -> None:
        log.warning("%s; joining again", why)
        self.steps.clear()
        self._move(State.JOINING)
        # A lease that ends as soon as it began (ranks that do not meet, two workers of one name) is one in vain, too.
        if self._leased_at and time.monotonic() - self._leased_at > self.patience.last_wait_s:
            self._wait_s = self.patience.first_wait_s
        self._leased_at = 0.0
        self.stop.wait(self._wait_s)
        self._wait_s = min(2 * self._wait_s, self.patience.last_wait_s)
        self.link.reconnect()
        self._say_hello()

    def _leave(self, why: str) -> None:
        log.info("leaving: %s", why)
        self.link.send(Goodbye(why))
        self._move(State.LEFT)


def _first_line(error: Exception) -> str:
    """Whatever else an error says is for this machine's log."""
    return str(error).partition("\n")[0]


def watch_parent(stop: threading.Event, poll_s: float = 0.5, grace_s: float = 5.0) -> None:
    """Set `stop` when the process that started this one is gone, and `grace_s` later end this one whatever it does.

    A child whose parent ended is given another parent; that is how it learns.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        stop.set()
        time.sleep(grace_s)  # a worker that heeds `stop` is gone by then, and this thread with it
        os._exit(1)

    threading.Thread(target=watch, name="kilburn-parent", daemon=True).start()
