"""A block handed out before its copy has ended, or read before it is back, is found out.

Two ways to look. A real worker plays hot potato: sequences leave and come back through the same few device blocks,
which the next owner writes in the very plan that copies them away. And the streams of a GPU are played by queues that
run in the most hostile order that their events allow. Every sabotage of the order must be found by the same tests.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kilburn.kernels import reference
from kilburn.kernels.triton.streams import beside
from kilburn.shared.messages import StepPlan, StepResult
from kilburn.shared.sampling import Sampling
from kilburn.worker.kv_cache import KVCache
from kilburn.worker.step import Executor
from tests.worker.toy import CPU, Hand, ToyModel, admit, layout, oracle, toy_executor

# --- a real worker


class MovesLast(Executor):
    """What was to move before the forward pass moves after it."""

    late = ("swaps_out", "swaps_in")

    def _run(self, plan: StepPlan, idle_s: float) -> StepResult:
        held = {name: getattr(plan, name) for name in self.late}
        for name in self.late:
            setattr(plan, name, [])
        result = super()._run(plan, idle_s)
        for name, moves in held.items():
            setattr(plan, name, moves)
        self.runner.cache.move(held.get("swaps_out", []), [], held.get("swaps_in", []))
        return result


class OutLast(MovesLast):
    late = ("swaps_out",)


class InLast(MovesLast):
    late = ("swaps_in",)


class OutOneStepLate(Executor):
    """A copy that nobody waits for."""

    pending: list[tuple[int, int]] = []  # noqa: RUF012 -- of the one executor that a test makes

    def _run(self, plan: StepPlan, idle_s: float) -> StepResult:
        plan.swaps_out, self.pending[:] = list(self.pending), plan.swaps_out
        return super()._run(plan, idle_s)


class InFirst(Executor):
    """Swaps in overtake swaps out."""

    def _move(self, plan: StepPlan) -> set[int]:
        self.runner.cache.move([], plan.copies, plan.swaps_in)
        self.runner.cache.move(plan.swaps_out, [], [])
        return set()


class ReusedEarly(Executor):
    """Blocks that are to be copied away belong to their next owner already: he has begun to write them."""

    def _move(self, plan: StepPlan) -> set[int]:
        for device, _ in plan.swaps_out:
            self.runner.cache.pool[device, :, :, :, 0] = torch.nan
        return super()._move(plan)


def play(make: type[Executor], seed: int) -> None:
    """Hot potato. Raises AssertionError where a byte or a token is not what it should be."""
    rng = random.Random(seed)
    model = ToyModel(seed)
    toy = toy_executor(model, block_size=4, num_blocks=4, num_host_blocks=12, max_rows=2)
    executor = make(toy.rows, toy.runner)
    OutOneStepLate.pending.clear()
    hand, cache = Hand(executor), executor.runner.cache
    prompts = [[rng.randrange(61) for _ in range(rng.randint(5, 7))] for _ in range(3)]
    known, computed = [list(prompt) for prompt in prompts], [0, 0, 0]
    host = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    left: list[Tensor | None] = [None, None, None]  # what each held when it left
    place: list[list[int]] = [[], [], []]  # the device blocks of who is there
    holder = None
    for turn in range(12):
        who = (turn + rng.randint(0, 1)) % 3 if holder is None else rng.choice([i for i in range(3) if i != holder])
        out = list(zip(place[holder], host[holder], strict=False)) if holder is not None else []
        expected = cache.pool[place[holder]].clone() if holder is not None else None
        # The same blocks for everybody; who comes back is not filled into those that leave in the same plan.
        is_back = computed[who] > 0
        blocks = (
            rng.sample([b for b in range(4) if not (is_back and b in place[holder or 0])], 2) if is_back else [0, 1]
        )
        place[who] = blocks
        back = list(zip(host[who], blocks, strict=False)) if is_back else []
        start = computed[who]
        result = hand.run(
            {0: len(known[who]) - start},
            (admit(0, known[who], blocks, Sampling(temperature=0.0), start=start, num_prompt=len(prompts[who])),),
            swaps_out=out,
            swaps_in=back,
        )
        computed[who] = len(known[who])
        known[who] += result.tokens
        assert not result.failed
        if expected is not None and holder is not None:
            assert same(cache.host_pool[host[holder][:2]], expected), "what left is not what was there"
            left[holder] = expected
        earlier = left[who]
        if is_back and earlier is not None:
            num_slots = start
            assert same(slots(cache.pool, blocks, num_slots), slots(earlier, [0, 1], num_slots)), "it came back changed"
        holder = who if len(known[who]) < 8 else None
        if holder is None:
            computed[who], known[who], left[who], place[who] = 0, list(prompts[who]), None, []
            check(model, prompts[who], result)
    for prompt, tokens in zip(prompts, known, strict=True):
        assert tokens[len(prompt) :] == oracle(model, prompt, Sampling(temperature=0.0), len(tokens) - len(prompt))


def check(model: ToyModel, prompt: list[int], result: StepResult) -> None:
    """The last token of a sequence that has reached its end."""
    num_made = 8 - len(prompt)
    assert result.tokens[-1] == oracle(model, prompt, Sampling(temperature=0.0), num_made)[-1]


def slots(pool: Tensor, blocks: list[int], num_slots: int) -> Tensor:
    """[num_slots, layers, 2, heads, head_dim]: the first positions that a table of blocks of 4 holds."""
    return pool[blocks].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:num_slots]


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that the poison of what was never written is equal to itself."""
    return bool(torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32)))


def play_all(make: type[Executor]) -> None:
    for seed in range(20):
        play(make, seed)


@pytest.mark.parametrize("seed", range(20))
def test_what_leaves_and_comes_back_is_what_it_was(seed: int) -> None:
    play(Executor, seed)


@pytest.mark.parametrize("sabotage", [MovesLast, OutLast, InLast, OutOneStepLate, ReusedEarly])
def test_a_worker_that_moves_in_another_order_is_found_out(sabotage: type[Executor]) -> None:
    with pytest.raises(AssertionError):
        play_all(sabotage)


@pytest.mark.parametrize("make", [Executor, InFirst])
def test_a_block_that_leaves_makes_room_for_one_that_comes(make: type[Executor]) -> None:
    """More than the core ever asks for, since it defers such plans; the order of moves is the worker's promise."""
    executor = make(*two_blocks())
    cache = executor.runner.cache
    cache.pool[1], cache.host_pool[0] = 5.0, 7.0
    executor.run(StepPlan(1, 1, [], [], swaps_out=[(1, 3)], swaps_in=[(0, 1)]))
    is_right = bool((cache.host_pool[3] == 5.0).all()) and bool((cache.pool[1] == 7.0).all())
    assert is_right is (make is Executor)


def two_blocks() -> tuple[Any, Any]:
    toy = toy_executor(ToyModel(0), num_blocks=2, num_host_blocks=4, max_rows=1)
    return toy.rows, toy.runner


# --- the streams of a GPU


class Event:
    def __init__(self) -> None:
        self.is_past = False


class Stream:
    """What was asked of it, in order. Nothing has happened yet."""

    def __init__(self, device: object = None) -> None:
        self.asked: deque[Callable[[], object] | tuple[str, Event]] = deque()
        Runtime.streams.append(self)

    def record_event(self) -> Event:
        event = Event()
        self.asked.append(("record", event))
        return event

    def wait_event(self, event: Event) -> None:
        self.asked.append(("wait", event))

    @property
    def can_go_on(self) -> bool:
        head = self.asked[0] if self.asked else None
        return head is not None and not (isinstance(head, tuple) and head[0] == "wait" and not head[1].is_past)

    def go_on(self) -> None:
        match self.asked.popleft():
            case ("record", event):
                event.is_past = True
            case ("wait", _):
                pass
            case work:
                work()


class Runtime:
    """In place of torch.cuda: streams as queues, run in a hostile order when the host waits."""

    streams: list[Stream] = []  # noqa: RUF012 -- made anew by each `fresh`

    @classmethod
    def fresh(cls) -> "Runtime":
        cls.streams = []
        return cls()

    def __init__(self) -> None:
        self.Stream = Stream
        self.computing = self.now_on = Stream()

    def current_stream(self, device: object = None) -> Stream:
        return self.now_on

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now_on = self.now_on, stream
        yield
        self.now_on = before

    def ask(self, work: Callable[[], object]) -> None:
        self.now_on.asked.append(work)

    def wait(self, pick: Callable[[list[Stream]], Stream]) -> None:
        while ready := [stream for stream in self.streams if stream.can_go_on]:
            pick(ready).go_on()
        assert not any(stream.asked for stream in self.streams), "streams wait for each other for ever"


Aside = Callable[[], AbstractContextManager[object]]


class AskedFor:
    """The kernels of a cache whose work is only asked for."""

    def __init__(self, runtime: Runtime, aside: Aside) -> None:
        self._runtime, self._aside = runtime, aside

    def swap_blocks(self, source_pool: Tensor, destination_pool: Tensor, pairs: Tensor) -> None:
        with self._aside():
            self._runtime.ask(partial(reference.swap_blocks, source_pool, destination_pool, pairs))

    def copy_blocks(self, pool: Tensor, pairs: Tensor) -> None:
        self._runtime.ask(partial(reference.copy_blocks, pool, pairs))


def never_waits_for_what_computes(runtime: Runtime) -> Aside:
    stream = runtime.Stream(CPU)

    @contextmanager
    def aside() -> Iterator[None]:
        with runtime.stream(stream):
            yield
        runtime.now_on.wait_event(stream.record_event())

    return aside


def nobody_waits_for_the_copy(runtime: Runtime) -> Aside:
    stream = runtime.Stream(CPU)

    @contextmanager
    def aside() -> Iterator[None]:
        stream.wait_event(runtime.now_on.record_event())
        with runtime.stream(stream):
            yield

    return aside


def a_stream_for_each(runtime: Runtime) -> Aside:
    """Copies wait for what computes, and it for the last of them only: the others overtake each other."""

    @contextmanager
    def aside() -> Iterator[None]:
        stream = runtime.Stream(CPU)
        stream.wait_event(runtime.now_on.record_event())
        with runtime.stream(stream):
            yield

    return aside


PICKS: dict[str, Callable[[random.Random], Callable[[list[Stream]], Stream]]] = {
    "by chance": lambda rng: rng.choice,
    "what computes first": lambda rng: lambda ready: ready[0],
    "what is aside first": lambda rng: lambda ready: ready[-1],
}


def story(make: Callable[[Runtime], Aside], pick: str, seed: int) -> None:
    """Plans of a few steps are asked for at once. Raises AssertionError where a block is not what it should be."""
    rng = random.Random(seed)
    runtime = Runtime.fresh()
    kernels: Any = AskedFor(runtime, make(runtime))
    cache = KVCache(layout(4), 4, 4, CPU, kernels)
    device: list[float] = [0.0] * 4  # what each block holds once all that was asked for is done
    host: list[float] = [0.0] * 4
    seen: list[tuple[Tensor, float]] = []

    def write(block: int, value: float) -> None:
        device[block] = value
        runtime.ask(lambda: cache.pool[block].fill_(value))

    def read(block: int) -> None:
        held = torch.full_like(cache.pool[block], torch.nan)
        seen.append((held, device[block]))
        runtime.ask(lambda: held.copy_(cache.pool[block]))

    for step in range(12):
        written, other, third = rng.sample(range(4), 3)
        spot, source = rng.sample(range(4), 2)
        write(written, float(100 + step))
        host[spot], device[other], device[third] = device[written], device[written], host[source]
        cache.move([(written, spot)], [(written, other)], [(source, third)])
        write(written, float(1000 + step))  # handed out again at once
        read(third)
        read(other)
        if rng.random() < 0.3:
            runtime.wait(PICKS[pick](rng))
    runtime.wait(PICKS[pick](rng))
    assert all(bool((held == value).all()) for held, value in seen), "a block was read before it was there"
    assert [float(block.max()) for block in cache.pool] == device
    assert [float(block.max()) for block in cache.host_pool] == host


def tell_all(make: Callable[[Runtime], Aside]) -> None:
    for pick in PICKS:
        for seed in range(30):
            story(make, pick, seed)


def ours(runtime: Runtime) -> Aside:
    return beside(CPU, runtime)


@pytest.mark.parametrize("pick", PICKS)
def test_events_keep_the_order_whatever_the_streams_do(pick: str) -> None:
    for seed in range(30):
        story(ours, pick, seed)


@pytest.mark.parametrize(
    "sabotage", [never_waits_for_what_computes, nobody_waits_for_the_copy, a_stream_for_each], ids=lambda s: s.__name__
)
def test_an_event_left_out_is_found_out(sabotage: Callable[[Runtime], Aside]) -> None:
    with pytest.raises(AssertionError):
        tell_all(sabotage)
