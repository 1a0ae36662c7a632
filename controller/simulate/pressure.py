"""A load that does not fit its pool, on a virtual clock with a cost model: what the ways of preemption cost.

    a step takes   step_s  +  row_s x rows that go on by one  +  token_s x positions of chunks  +  move_s x blocks moved

each but for a little noise. The worker is the fake one, which reports these seconds as a real one reports its own, and
checks every plan; the engine is the real one. So the same requests can be run under swap, recompute and auto, and under
a bandwidth or a prefill that is throttled, and compared by the clock.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import Arrived, Event, Finished, Note, Refused, Send, Submit
from kilburn.controller.core.policy import Preemption
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.core.snapshot import GroupSnapshot
from kilburn.controller.simulate.fake_daemon import fake_hello, limits_of
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.shared.layout import KVLayout
from kilburn.shared.messages import StepPlan, Timings, Welcome
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason, LawBroken

PEER = b"pressure.0"


@dataclass(frozen=True, slots=True)
class Prices:
    """What things take, in seconds."""

    step_s: float = 0.005
    row_s: float = 0.0001
    token_s: float = 0.0001
    move_s: float = 0.0001
    noise: float = 0.1  # each is off by up to so much of itself

    def timings(self, plan: StepPlan, rng: Random) -> Timings:
        def about(seconds: float) -> float:
            return seconds * rng.uniform(1.0 - self.noise, 1.0 + self.noise)

        num_moved = len(plan.swaps_out) + len(plan.swaps_in)
        num_chunk_tokens = sum(count for count in plan.counts if count > 1)
        num_rows = sum(1 for count in plan.counts if count == 1)
        moves_s = about(self.move_s * num_moved)
        forward_s = about(self.step_s + self.row_s * num_rows) + about(self.token_s * num_chunk_tokens)
        return Timings(apply_s=moves_s, forward_s=forward_s if plan.rows else 0.0, moves_s=moves_s)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of about these lengths, so close together that they cannot all be in the pool at once."""

    num_requests: int = 24
    prompt: tuple[int, int] = (20, 60)
    answer: tuple[int, int] = (30, 60)
    common: int = 0  # tokens with which every prompt begins
    span_s: float = 0.3  # they arrive in
    block_size: int = 4
    num_blocks: int = 90
    num_host_blocks: int = 90
    depth: int = 2
    max_step_tokens: int = 64


@dataclass(slots=True)
class Outcome:
    seconds: float  # until the last answer
    mean_latency_s: float
    snapshot: GroupSnapshot
    notes: list[Note] = field(default_factory=list)

    def cost(self) -> float:
        """Both figures in one, so that neither is bought with the other."""
        return self.seconds + self.mean_latency_s


def draw_requests(load: Load, seed: int) -> list[tuple[float, Submit]]:
    """The requests of a seed, in order of arrival."""
    rng = Random(seed)
    common = [rng.randrange(500) for _ in range(load.common)]
    requests = []
    for number in range(load.num_requests):
        prompt = [*common, *(rng.randrange(500) for _ in range(rng.randint(*load.prompt)))]
        sampling = Sampling(temperature=0.0, seed=number)
        requests.append((rng.uniform(0.0, load.span_s), Submit(number, prompt, rng.randint(*load.answer), sampling)))
    return sorted(requests, key=lambda request: request[0])


def run(load: Load, prices: Callable[[float], Prices] | Prices, preemption: Preemption, seed: int) -> Outcome:
    """All requests of a seed. `prices` may be a function of the time. Raises LawBroken where an answer is missing."""
    price_at = prices if callable(prices) else lambda _: prices
    hello = fake_hello(
        block_size=load.block_size,
        num_blocks=load.num_blocks,
        num_host_blocks=load.num_host_blocks,
        max_step_tokens=load.max_step_tokens,
    )
    # What a block weighs is where the engine's first guess at a copy's time comes from.
    hello = replace(hello, layout=KVLayout(load.block_size, 32, 8, 128, "bfloat16"))  # as of 8 billion parameters
    settings = EngineSettings(
        depth=load.depth, max_waiting=1 << 20, silence_s=1e9, step_deadline_s=1e9, beat_s=1e8, preemption=preemption
    )
    engine, rng, requests = Engine(settings), Random(seed), deque(draw_requests(load, seed))
    began = {submit.request_id: at_s for at_s, submit in requests}
    ended: dict[int, float] = {}
    notes: list[Note] = []
    plans: deque[StepPlan] = deque()
    worker: FakeWorker | None = None
    now, events = 0.0, list[Event]([Arrived(PEER, hello)])
    while events or requests or plans:
        for effect in engine.handle(events, now):
            match effect:
                case Send(message=Welcome(lease)):
                    worker = FakeWorker(lease, limits_of(hello), hello.vocab_size)
                case Send(message=StepPlan() as plan):
                    plans.append(plan)
                case Finished(request_id, reason=FinishReason.LENGTH):
                    ended[request_id] = now
                case Finished() | Refused():
                    raise LawBroken(f"a request that fits was not answered: {effect}")
                case Note():
                    notes.append(effect)
                case _:
                    pass
        events = []
        if plans and worker is not None:
            plan = plans.popleft()
            result = worker.run(plan)
            result.timings = price_at(now).timings(plan, rng)
            now += result.timings.apply_s + result.timings.forward_s
            events.append(Arrived(PEER, result))
        elif requests:
            now = max(now, requests[0][0])
        while requests and requests[0][0] <= now:
            events.append(requests.popleft()[1])
    if len(ended) != load.num_requests:
        raise LawBroken(f"{load.num_requests - len(ended)} requests were never answered")
    latencies = [ended[request] - began[request] for request in ended]
    return Outcome(now, sum(latencies) / len(latencies), engine.snapshot().groups[0], notes)
