"""One world's circumstances, drawn from one seed before anything happens.

Everything is small and tight, because faults live at the edges: blocks of 1 to 16 tokens, pools that hold little more
than the largest request, budgets down to one token a step. Everything bad is far more frequent than in life. Prompts
are cut from a few stems, so that prefixes are shared all the time.
"""

from dataclasses import dataclass, replace
from random import Random

from kilburn.controller.core.events import BeamSettings, EarlyStopping, Pin, Submit
from kilburn.controller.core.policy import Preemption
from kilburn.controller.simulate.fake_worker import UNPREPARABLE
from kilburn.controller.simulate.upheaval import Upheaval, draw_upheaval
from kilburn.shared.grammar import Grammar
from kilburn.shared.layout import KVLayout, blocks_for
from kilburn.shared.messages import Hello
from kilburn.shared.sampling import Sampling

MODEL = b"\x07" * 32
FIRST_PREFIX = 1000  # requests have lower numbers


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances, per message or step unless a rate is said. All are zero once the world calms down."""

    lose: float = 0.0  # a message, either way
    late: float = 0.0  # a message comes seconds late
    twice: float = 0.0  # a result is delivered twice
    bad_row: float = 0.0  # a row goes bad in a step
    lost_block: float = 0.0  # a block of a row in a step becomes unreadable
    lost_host: float = 0.0  # per step: a host block that it swaps in is unreadable
    step_fails: float = 0.0
    dies: float = 0.0  # per step: the process ends
    hangs: float = 0.0  # per step: silence for a while
    leaves: float = 0.0  # per step: Goodbye
    disagrees: float = 0.0  # per step of a rank > 0: it confirms another than rank 0 answered


CALM = Faults()


@dataclass(frozen=True, slots=True)
class Errand:
    """A request and what its client will do to it."""

    at_s: float
    submit: Submit
    cancels_s: tuple[float, ...]  # when, counted from the submit
    stops: tuple[tuple[int, int], ...]  # (index, after so many tokens): a stop string is found


@dataclass(frozen=True, slots=True)
class PinErrand:
    """A named prefix and when its name is deleted."""

    at_s: float
    pin: Pin
    unpins_s: tuple[float, ...]  # counted from the pin


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    depth: int
    max_step_tokens: int
    beat_s: float
    silence_s: float
    step_deadline_s: float
    recovery_s: float
    max_waiting: int
    hellos: tuple[Hello, ...]  # one worker group each
    joins_s: tuple[float, ...]
    errands: tuple[Errand, ...]
    pins: tuple[PinErrand, ...]
    most_pinned: float  # of a pool
    preemption: Preemption
    faults: Faults
    calm_s: float  # from here on nothing fails any more
    shutdown_s: float | None  # None: only once everything is answered
    step_s: float  # a step on a worker takes about so long
    link_s: float  # a message under way takes about so long
    move_s: float  # what workers say a block moved takes, and
    compute_s: float  # a position computed
    aging_s: float  # of waiting, for a level of priority
    prefix_wait_steps: int
    is_fair: bool
    step_target_s: float  # 0: any
    max_waiting_tokens: int  # 0: any
    queue_s: float  # how long a request may wait; 0: for ever
    request_s: float  # how long it may take; 0: for ever
    prepare_s: float  # before a grammar is asked for again
    upheaval: Upheaval

    @property
    def vocab_size(self) -> int:
        return self.hellos[0].vocab_size

    @property
    def max_len(self) -> int:
        return self.hellos[0].max_len


def blocks_needed(num_prompt: int, max_tokens: int, n: int, block_size: int) -> int:
    """The most blocks that a group holds at once: what the prompt fills is shared, the rest is each sequence's own."""
    num_cells = num_prompt + max(max_tokens, 1) - 1 if max_tokens else num_prompt - 1
    if n == 1 or max_tokens <= 1:
        return blocks_for(num_cells, block_size)
    shared = num_prompt // block_size
    return shared + n * (blocks_for(num_cells, block_size) - shared)


def fits(submit: Submit, hello: Hello, scenario: Scenario, num_blocks: int) -> bool:
    """Whether a worker group with so many blocks to give could ever run the request."""
    wide = submit.width <= min(hello.max_rows, hello.max_step_tokens, scenario.max_step_tokens)
    need = blocks_needed(len(submit.prompt), submit.max_tokens, submit.width, hello.layout.block_size)
    return wide and len(submit.prompt) + submit.max_tokens <= hello.max_len and need <= num_blocks


def draw_scenario(seed: int) -> Scenario:
    """The world of this seed."""
    rng = Random(seed)
    block_size = rng.choice((1, 2, 3, 4, 4, 4, 5, 8, 16))
    max_len = rng.choice((8, 20, 40, 64))
    vocab_size = rng.choice((3, 8, 30))
    is_crowded = rng.random() < 0.35  # many long answers at once, in pools that hold little more than the largest
    stems = [[rng.randrange(vocab_size) for _ in range(max_len)] for _ in range(rng.choice((1, 2, 3)))]
    errands = draw_errands(rng, stems, vocab_size, is_crowded)
    last_s = max(errand.at_s for errand in errands)
    shutdown_s = rng.uniform(0.1, last_s + 1.0) if rng.random() < 0.08 else None
    pins = _draw_pins(rng, stems, vocab_size, shutdown_s) if rng.random() < 0.35 else ()
    depth = rng.choice((1, 2, 2, 3))
    budget = rng.choice((1, 2, 3, 5, 8, 16, 32, 64))
    num_groups = 1 if is_crowded else rng.choice((1, 1, 2, 3))
    sizes = (block_size, max_len, vocab_size)
    hellos = tuple([draw_hello(rng, i, errands, pins, sizes, is_crowded) for i in range(num_groups)])
    companies = Random(seed ^ 0x7A4B)
    if companies.random() < 0.15:  # each worker group is of several ranks
        hellos = tuple([replace(hello, world=companies.choice((2, 2, 3))) for hello in hellos])
    disagrees = companies.choice((0.0, 0.0, 0.02))
    step_s = rng.choice((0.01, 0.03))
    upheaval = draw_upheaval(seed, num_groups, len(errands))
    late, numbers = Random(seed ^ 0x1A7E), range(num_groups, num_groups + len(upheaval.late_joins_s))
    hellos += tuple([draw_hello(late, number, errands, pins, sizes, False) for number in numbers])
    limits = Random(seed ^ 0x11A1)
    if limits.random() < 0.1:
        errands = tuple([_hurried(limits, errand) for errand in errands])
    scorers = Random(seed ^ 0x5C0)
    if scorers.random() < 0.15:
        errands = tuple([_scored(scorers, errand) for errand in errands])
    grammars = Random(seed ^ 0x6AA)
    if grammars.random() < 0.15:
        errands = tuple([_bound(grammars, errand) for errand in errands])
    return Scenario(
        seed=seed,
        depth=depth,
        max_step_tokens=budget,
        beat_s=1.0,
        silence_s=3.0,
        step_deadline_s=rng.choice((1.0, 4.0)),
        recovery_s=rng.choice((2.0, 20.0)),
        max_waiting=rng.choice((3, 100, 100, 100, 100, 100)),
        hellos=hellos,
        joins_s=(
            *[rng.choice((0.0, 0.0, rng.uniform(0, 2.0))) for _ in range(num_groups)],
            *upheaval.late_joins_s,
        ),
        errands=errands,
        pins=pins,
        most_pinned=rng.choice((0.5, 0.5, 0.8)),
        preemption=rng.choice((Preemption.AUTO, Preemption.RECOMPUTE, Preemption.SWAP, Preemption.SWAP)),
        faults=_without_deaths(draw_faults(rng)) if upheaval.poison else replace(draw_faults(rng), disagrees=disagrees),
        calm_s=max(last_s + rng.uniform(0.2, 3.0), upheaval.over_s),
        shutdown_s=shutdown_s,
        step_s=step_s,
        link_s=rng.choice((0.0005, 0.005, 0.03)),
        move_s=rng.choice((1e-6, 1e-4)),
        compute_s=rng.choice((1e-6, 1e-4)),
        aging_s=Random(seed ^ 0xA9E).choice((0.0, 0.02, 0.2, 60.0)),
        step_target_s=Random(seed ^ 0x7A6).choice((0.0, 1e-6, 1e-6, 1e-3)),
        is_fair=Random(seed ^ 0xFA1).random() < 0.15,
        prefix_wait_steps=Random(seed ^ 0xF0).choice((0, 0, 1, 2, 4, 1000)),
        max_waiting_tokens=limits.choice((0,) * 8 + (30, 100)),
        queue_s=limits.choice((0.0,) * 10 + (0.1, 1.0)),
        request_s=limits.choice((0.0,) * 10 + (0.3, 2.0)),
        prepare_s=grammars.choice((0.05, 0.5, 5.0)),
        upheaval=upheaval,
    )


def draw_hello(
    rng: Random,
    number: int,
    errands: tuple[Errand, ...],
    pins: tuple[PinErrand, ...],
    sizes: tuple[int, int, int],
    is_crowded: bool,
) -> Hello:
    block_size, max_len, vocab_size = sizes
    needs = sorted(
        blocks_needed(len(e.submit.prompt), e.submit.max_tokens, e.submit.width, block_size)
        for e in errands
        if len(e.submit.prompt) + e.submit.max_tokens <= max_len
    ) or [1]
    largest = max(needs[-1], 1)
    ample = (largest + rng.randint(0, largest), 3 * largest, needs[len(needs) // 2])
    num_blocks = rng.choice((largest, largest + 1) if is_crowded else (largest, *ample))
    if pins and rng.random() < 0.8:  # mostly they can be held beside the largest
        num_blocks += sum(blocks_for(len(errand.pin.tokens), block_size) for errand in pins)
    return Hello(
        name=f"group{number}",
        model_digest=MODEL,
        layout=KVLayout(block_size, 1, 1, 8, "float32"),
        num_blocks=max(num_blocks, 1),
        num_host_blocks=rng.choice((0, 3, 10, 40, 40) if is_crowded else (0, 0, 3, 10, 40)),
        max_rows=rng.choice((4, 8, 16) if is_crowded else (1, 2, 4, 4, 8, 16)),
        max_step_tokens=rng.choice((4, 16, 64)),
        max_len=max_len,
        vocab_size=vocab_size,
    )


def resized(rng: Random, hello: Hello) -> Hello:
    """The same group after a restart, now and then with another pool."""
    if rng.random() < 0.7:
        return hello
    return replace(hello, num_blocks=max(1, hello.num_blocks + rng.randint(-1, 2)))


def _draw_pins(rng: Random, stems: list[list[int]], vocab_size: int, shutdown_s: float | None) -> tuple[PinErrand, ...]:
    """Prefixes that prompts cut from the same stems begin with, or leave somewhere; no two are alike."""
    drawn: dict[tuple[int, ...], PinErrand] = {}
    for number in range(rng.choice((1, 1, 2, 3))):
        stem = rng.choice(stems)
        tokens = tuple(stem[: rng.randint(1, max(len(stem) * 2 // 3, 1))])
        if rng.random() < 0.3:
            tokens += (rng.randrange(vocab_size),)
        tokens = tokens if rng.random() < 0.97 else ()
        is_public = rng.random() < 0.5
        salt = b"" if is_public else rng.choice((b"", b"tenant", b"other"))
        at_s = rng.choice((0.0, 0.0, rng.uniform(0, 1.0)))
        if shutdown_s is not None:  # rather while the last workers leave
            at_s = max(shutdown_s - rng.uniform(0, 0.03), 0.0)
        unpins = (rng.uniform(0, 1.5),) if rng.random() < 0.25 else ()
        drawn[tokens] = PinErrand(at_s, Pin(FIRST_PREFIX + number, tokens, salt, is_public), unpins)
    return tuple(drawn.values())


def draw_errands(
    rng: Random, stems: list[list[int]], vocab_size: int, is_crowded: bool, first: int = 1
) -> tuple[Errand, ...]:
    """`first`: the number of the first request."""
    max_len = len(stems[0])
    span_s = rng.choice((0.05, 0.2) if is_crowded else (0.05, 0.5, 2.0))
    sociable = rng.random() < (0.6 if is_crowded else 0.4)  # several samples a request
    impatient = rng.choice((0.0, 0.0, 0.1) if is_crowded else (0.0, 0.0, 0.15, 0.5))
    lengths = (5, 8, 13, 21, max_len) if is_crowded else (0, 1, 2, 3, 5, 8, 13, 21, max_len)
    beamy = rng.choice((0.0, 0.0, 0.3, 0.8)) if vocab_size >= 8 else 0.0
    errands = []
    for number in range(first, first + rng.choice((4, 7, 10) if is_crowded else (1, 3, 6, 9, 14))):
        stem = rng.choice(stems)
        num_stem = rng.randint(0, int(max_len * rng.choice((0.2, 0.4, 0.8))))
        tail = [rng.randrange(vocab_size) for _ in range(rng.choice((0, 0, 1, 2, 5)))]
        prompt = (stem[:num_stem] + tail) or stem[:1]
        max_tokens = rng.choice(lengths)
        if rng.random() < 0.9:  # most of them fit
            prompt = prompt[: max_len - 1]
            max_tokens = min(max_tokens, max_len - len(prompt))
        n = rng.choice((2, 2, 3, 4)) if sociable and rng.random() < 0.6 else 1
        sampling = _draw_sampling(rng, number, vocab_size)
        beams = None
        if rng.random() < beamy:
            beams, sampling = _draw_beams(rng, sampling, vocab_size)
            n, max_tokens = rng.randint(1, beams.width), min(max(max_tokens, 1), 21)
        priority = rng.choice((0,) * 8 + (-1, 1))
        salt = rng.choice((b"",) * 6 + (b"tenant", b"tenant", b"other"))
        submit = Submit(
            request_id=number,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling,
            n=n,
            priority=priority,
            salt=salt,
            beams=beams,
            tenant=salt,
        )
        at_s = rng.uniform(0, span_s)
        cancels: tuple[float, ...] = (rng.choice((0.0, rng.uniform(0, 1.0))),) if rng.random() < impatient else ()
        if cancels and rng.random() < 0.5:
            cancels += (cancels[0] + rng.choice((0.0, 0.05)),)
        stops = ((rng.randrange(n), rng.randint(1, 6)),) if rng.random() < 0.15 else ()
        errands.append(Errand(at_s, submit, cancels, stops))
    return tuple(errands)


def _hurried(rng: Random, errand: Errand) -> Errand:
    """Perhaps with limits of its own."""
    queue_s, request_s = rng.choice((None, 0.05, 0.5)), rng.choice((None, 0.2, 5.0))
    return replace(errand, submit=replace(errand.submit, queue_s=queue_s, request_s=request_s))


def _scored(rng: Random, errand: Errand) -> Errand:
    """Perhaps its prompt is to be scored."""
    if errand.submit.beams is not None or rng.random() < 0.4:
        return errand
    sampling = replace(errand.submit.sampling, prompt_logprobs=rng.choice((0, 2)))
    return replace(errand, submit=replace(errand.submit, sampling=sampling))


def _bound(rng: Random, errand: Errand) -> Errand:
    """Perhaps by a grammar. Beams know none."""
    if errand.submit.beams is not None or rng.random() < 0.4:
        return errand
    grammar = Grammar.of(rng.choice(("one", "one", "another", "third", UNPREPARABLE.decode())))
    sampling = replace(errand.submit.sampling, grammar=grammar.digest)
    return replace(errand, submit=replace(errand.submit, sampling=sampling, grammar=grammar))


def _draw_beams(rng: Random, sampling: Sampling, vocab_size: int) -> tuple[BeamSettings, Sampling]:
    """A search, and its sampling: beams know no penalties, and nothing is reported beside the candidates."""
    sampling = replace(sampling, presence_penalty=0.0, min_tokens=0, logprobs=-1)
    widest = vocab_size // (1 + max(1, len(sampling.stop_ids)))  # so that there are candidates enough
    width = min(rng.choice((1, 2, 2, 3, 4, 8)), widest)
    length_penalty = rng.choice((1.0, 1.0, 0.0, 2.0, -1.0, 0.6))
    return BeamSettings(width, length_penalty, rng.choice(tuple(EarlyStopping))), sampling


def _draw_sampling(rng: Random, number: int, vocab_size: int) -> Sampling:
    stops = rng.choice(((), (), (0,), (1, 2)))
    return Sampling(
        temperature=0.0 if rng.random() < 0.1 else 1.0,
        # unique, so that the judge can tell whose row it is
        seed=(number << 32) + rng.randrange(1 << 32),
        presence_penalty=0.5 if rng.random() < 0.15 else 0.0,
        min_tokens=rng.choice((0, 0, 0, 2)),
        stop_ids=stops if len(stops) < vocab_size else (),
        logprobs=rng.choice((-1,) * 8 + (0, 2)),
    )


def _without_deaths(faults: Faults) -> Faults:
    """Nothing that ends a lease."""
    return Faults(bad_row=faults.bad_row, lost_block=faults.lost_block, lost_host=faults.lost_host)


def draw_faults(rng: Random) -> Faults:
    def some(rate: float, chance: float = 0.25) -> float:
        return rate * rng.uniform(0.2, 1.0) if rng.random() < chance else 0.0

    if rng.random() < 0.35:
        return Faults()
    return Faults(
        lose=some(0.03),
        late=some(0.05),
        twice=some(0.1),
        bad_row=some(0.08, 0.35),
        lost_block=some(0.3, 0.35),
        lost_host=some(0.7, 0.4),
        step_fails=some(0.03),
        dies=some(0.04),
        hangs=some(0.03),
        leaves=some(0.03),
    )
