"""A pool under more requests than it holds: where its slots go, step by step.

    by_policy   a reservation policy under the least scheduler there is: first come, first served, one token for every
                running sequence in each step; who cannot grow makes the one that came last give everything back
    by_engine   the real engine over a fake worker, which checks every plan

Either yields the pool's slots after each step in which requests wait, from the first time that one has to wait for
memory: until then free slots are idle, and no waste. A mean over steps is a mean over time where steps take equally
long.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Event, Finished, Refused, Send, Submit
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.core.snapshot import GroupSnapshot
from kilburn.controller.simulate.fake_daemon import limits_of
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.controller.simulate.reservations import Held, Reservation, Slots, Want
from kilburn.shared.layout import blocks_for
from kilburn.shared.messages import Hello, StepPlan, Welcome
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import LawBroken

PEER = b"simulated"


def draw_lengths(
    count: int,
    seed: int,
    *,
    mean_prompt: float,
    mean_output: float,
    sigma_prompt: float,
    sigma_output: float,
    most: int,
) -> list[tuple[int, int]]:
    """Log-normal (prompt, output) lengths with these means before they are cut to `most` in all."""
    rng, found = Random(seed), list[tuple[int, int]]()
    for _ in range(count):
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        prompt = mean_prompt * rng.lognormvariate(-(sigma_prompt**2) / 2, sigma_prompt)
        output = mean_output * rng.lognormvariate(-(sigma_output**2) / 2, sigma_output)
        num_prompt = min(max(round(prompt), 1), most - 1)
        found.append((num_prompt, min(max(round(output), 1), most - num_prompt)))
    return found


# --- a policy


class Line:
    """Who runs and who waits, over one policy."""

    def __init__(self, policy: Reservation, wants: Iterable[Want], max_rows: int) -> None:
        self.policy, self.max_rows = policy, max_rows
        self.waiting = deque(wants)
        self.running: list[Held] = []  # in order of arrival
        self.num_preempted = 0
        for want in self.waiting:
            if not policy.can_ever(want):
                raise LawBroken(f"{policy.name} can never hold {want} in {policy.num_slots} slots")

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.max_rows and self.policy.can_reserve(self.waiting[0]):
            self.running.append(self.policy.reserve(self.waiting.popleft()))

    def step(self) -> None:
        """Who is complete leaves, and everybody else has one more token. Those that came first grow first."""
        for held in [held for held in self.running if held.is_complete]:
            self.running.remove(held)
            self.policy.free(held)
        place = 0
        while place < len(self.running):
            if self.policy.can_grow(self.running[place]):
                self.policy.grow(self.running[place])
                place += 1
            else:
                self._preempt()  # perhaps the very one that cannot grow

    def _preempt(self) -> None:
        """The last one gives its memory back and is computed again later, with what it has said as its prompt."""
        held = self.running.pop()
        self.policy.free(held)
        self.num_preempted += 1
        said = held.num_filled - held.want.num_prompt
        want = held.want
        self.waiting.appendleft(Want(held.num_filled, want.num_output - said, want.max_len))


def by_policy(policy: Reservation, wants: Iterable[Want], max_rows: int) -> Iterator[Slots]:
    """See the file's head. Raises LawBroken for a request that the pool can never hold."""
    line = Line(policy, wants, max_rows)
    while line.waiting or line.running:
        line.admit()
        if line.waiting:
            yield policy.slots()
        line.step()


# --- the engine


def by_engine(hello: Hello, lengths: Sequence[tuple[int, int]], seed: int = 0) -> Iterator[GroupSnapshot]:
    """The engine's own figures after each step. All requests are there from the beginning; none shares a prefix."""
    rng = Random(seed)
    engine = Engine(EngineSettings(max_waiting=len(lengths), step_deadline_s=1e9, silence_s=1e9))
    submits: list[Event] = []
    for number, (num_prompt, num_output) in enumerate(lengths):
        prompt = [rng.randrange(5, hello.vocab_size) for _ in range(num_prompt)]
        submits.append(Submit(number, prompt, num_output, Sampling(temperature=1.0, seed=number)))
    worker: FakeWorker | None = None
    longest = blocks_for(max(num_prompt for num_prompt, _ in lengths), hello.layout.block_size)
    is_full = False
    turns: deque[list[Event]] = deque([[Arrived(PEER, hello)], submits])
    while turns:
        for effect in engine.handle(turns.popleft(), now=0.0):
            match effect:
                case Send(message=Welcome(lease)):
                    worker = FakeWorker(lease, limits_of(hello), hello.vocab_size)
                case Send(message=StepPlan() as plan) if worker is not None:
                    turns.append([Arrived(PEER, worker.run(plan))])
                case Finished(message=message) if message:
                    raise LawBroken(f"a request failed: {message}")
                case Refused():
                    raise LawBroken(f"a request was refused: {effect}")
        (group,) = engine.snapshot().groups
        is_full = is_full or group.free_blocks + group.cached_blocks < longest
        if is_full and group.waiting_requests:
            yield group


# --- means


def mean_shares(moments: Iterable[Slots]) -> tuple[dict[str, float], int]:
    """Of the pool, in percent, each kind of slot; and over how many steps. Raises LawBroken where nobody waited."""
    names, sums, steps, total = ("used", "reserved", "internal", "external"), [0, 0, 0, 0], 0, 0
    for moment in moments:
        for i, name in enumerate(names):
            sums[i] += getattr(moment, name)
        steps, total = steps + 1, total + moment.total
    if not steps:
        raise LawBroken("nobody waited: the pool holds all requests at once; give more of them, or fewer slots")
    return {name: 100 * one / total for name, one in zip(names, sums, strict=True)}, steps


def slots_of(group: GroupSnapshot) -> Slots:
    """An engine's pool in the words of a policy. What tables hold beyond their ends is counted as never to be used."""
    owned, total = group.owned_blocks * group.block_size, group.num_blocks * group.block_size
    return Slots(owned - group.tail_slots, 0, group.tail_slots, total - owned)
