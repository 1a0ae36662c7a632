"""Messages to test the wire with: one of each kind for the golden bytes, and strategies that make any."""

from dataclasses import replace

from hypothesis import strategies as st

from kilburn.shared import messages as m
from kilburn.shared.layout import DTYPE_BYTES, KVLayout
from kilburn.shared.sampling import Candidates, Draws, Sampling
from kilburn.shared.types import Tier

HELLO = m.Hello(
    "w0",
    bytes(range(32)),
    KVLayout(16, 30, 3, 64, "bfloat16", 8),
    1000,
    200,
    256,
    2048,
    8192,
    49152,
    1,
    2,
    4711,
    m.WorkerMemory(538 << 20, 1 << 20, 2 << 20, 3000, 5 << 30),
    "127.0.0.1:4711/00112233445566778899aabbccddeeff",
    "0f1e2d3c4b5a6978",
)
SAMPLING = Sampling(
    0.5,
    40,
    0.9,
    0.05,
    0.1,
    -0.2,
    1.1,
    ((7, -1.5), (9, 2.0)),
    2**64 - 1,
    3,
    (2, 11),
    5,
    Draws(first_stream=1, count=2),
    grammar=bytes(range(100, 132)),
)
SCORED = replace(SAMPLING, choose=Draws(), prompt_logprobs=1, logprobs_are_processed=True)
ADMIT = m.Admit(3, 16, 20, (101, 102, 103, 104), tuple(range(16)), (7, 1), SAMPLING)

FROM_WORKER: dict[str, m.FromWorker] = {
    "hello": HELLO,
    "result": m.StepResult(
        9,
        5,
        [1, 0, 2, 1],
        [11, 12, 13, 14],
        {1: "NaN in the logits"},
        (m.KvLost(0, Tier.HOST, 17, 4),),
        (m.RowLogprobs(2, 2, (12, 12, 13, 5), (-0.5, -0.5, -0.25, float("-inf"))),),
        m.Timings(0.001, 0.002, 0.003, 0.004, 0.0015),
        (m.PromptLogprobs(1, 4, 2, (3, 4, 5, 5), (-2.0, -0.5, -0.25, -0.25), (7, 1)),),
    ),
    "result of decodes": m.StepResult(9, 6, [1, 1, 1], [5, 6, 7]),
    "beat": m.Beat(9, 5),
    "done": m.StepDone(9, 5, bytes(reversed(range(32)))),
    "failed": m.StepFailed(9, 5, "out of memory"),
    "goodbye": m.Goodbye("drained"),
    "prepared": m.Prepared(9, 2),
    "unpreparable": m.Unpreparable(9, 3, "no tokenizer"),
}
FROM_CONTROLLER: dict[str, m.FromController] = {
    "welcome": m.Welcome(9, 0.5, 2.5, 2, "127.0.0.1:4711/00112233445566778899aabbccddeeff", 60.0),
    "reject": m.Reject("another model"),
    "plan": m.StepPlan(
        9, 5, [3, 0, 1], [4, 1, 1], [0, 0, 2], [8, 9, 10], [ADMIT], [(1, 2)], [(3, 4), (5, 6)], [(2, 11)], 75.5
    ),
    "plan of decodes": m.StepPlan(9, 6, [0, 1, 2], [1, 1, 1]),
    "plan of beams": m.StepPlan(
        9, 7, [0], [1], admits=[m.Admit(0, 4, 3, (5,), (), (2,), Sampling(choose=Candidates(6)))]
    ),
    "plan of scores": m.StepPlan(9, 8, [0], [3], admits=[m.Admit(0, 2, 6, (4, 5, 6, 7), (), (2,), SCORED, 3)]),
    "beat": m.Beat(9, 5),
    "drain": m.Drain(9),
    "gone": m.Gone(9, "silence"),
    "prepare": m.Prepare(9, 2, bytes(range(100, 132)), b'start: "a"'),
    "forget": m.Forget(9, bytes(range(100, 132))),
}

NATURALS = st.integers(0, 2**31 - 1)
POSITIVES = st.integers(1, 2**31 - 1)
COUNTERS = st.integers(0, 2**63 - 1)
REALS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
DIGESTS = st.binary(min_size=32, max_size=32)


def lists(of: st.SearchStrategy, most: int = 8) -> st.SearchStrategy:
    return st.lists(of, max_size=most)


def tuples(of: st.SearchStrategy, most: int = 8) -> st.SearchStrategy:
    return lists(of, most).map(tuple)


PAIRS = lists(st.tuples(NATURALS, NATURALS))
LAYOUTS = st.builds(
    KVLayout,
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.integers(1, 65536),
    st.integers(1, 65536),
    st.sampled_from(sorted(DTYPE_BYTES)),
    NATURALS,
)
SAMPLINGS = st.builds(
    Sampling,
    REALS,
    NATURALS,
    REALS,
    REALS,
    REALS,
    REALS,
    REALS,
    tuples(st.tuples(NATURALS, REALS)),
    st.integers(0, 2**64 - 1),
    NATURALS,
    tuples(NATURALS),
    st.integers(-1, 20),
    st.builds(Draws, NATURALS, POSITIVES) | st.builds(Candidates, POSITIVES),
    st.integers(-1, 20),
    st.booleans(),
    st.just(b"") | DIGESTS,
)
ADMITS = st.builds(
    m.Admit, NATURALS, NATURALS, NATURALS, tuples(NATURALS), tuples(NATURALS), tuples(NATURALS), SAMPLINGS, NATURALS
)


@st.composite
def plans(draw: st.DrawFn) -> m.StepPlan:
    rows = draw(lists(NATURALS))
    counts = draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows)))
    grown = draw(lists(st.tuples(st.integers(0, len(rows) - 1), NATURALS))) if rows else []
    return m.StepPlan(
        draw(COUNTERS),
        draw(COUNTERS),
        rows,
        counts,
        [at for at, _ in grown],
        [block for _, block in grown],
        draw(lists(ADMITS, 3)),
        draw(PAIRS),
        draw(PAIRS),
        draw(PAIRS),
        draw(REALS),
    )


@st.composite
def results(draw: st.DrawFn) -> m.StepResult:
    num_tokens = draw(lists(st.integers(0, 3)))
    tokens = draw(st.lists(NATURALS, min_size=sum(num_tokens), max_size=sum(num_tokens)))
    indices = st.integers(0, len(num_tokens) - 1) if num_tokens else st.nothing()
    logprobs = []
    for index in sorted(draw(st.sets(indices, max_size=3))) if num_tokens else []:
        width = draw(st.integers(1, 4))
        size = width * num_tokens[index]
        ids = draw(st.lists(NATURALS, min_size=size, max_size=size))
        values = draw(st.lists(st.floats(width=32, max_value=0.0, allow_nan=False), min_size=size, max_size=size))
        logprobs.append(m.RowLogprobs(index, width, tuple(ids), tuple(values)))
    scored = []
    for index in sorted(draw(st.sets(indices, max_size=2))) if num_tokens else []:
        width, num_positions = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        size = width * num_positions
        ids = draw(st.lists(NATURALS, min_size=size, max_size=size))
        values = draw(st.lists(st.floats(width=32, max_value=0.0, allow_nan=False), min_size=size, max_size=size))
        ranks = draw(st.lists(POSITIVES, min_size=num_positions, max_size=num_positions))
        scored.append(m.PromptLogprobs(index, draw(POSITIVES), width, tuple(ids), tuple(values), tuple(ranks)))
    lost = st.builds(m.KvLost, indices, st.sampled_from(Tier), NATURALS, COUNTERS)
    return m.StepResult(
        draw(COUNTERS),
        draw(COUNTERS),
        num_tokens,
        tokens,
        draw(st.dictionaries(indices, TEXTS, max_size=3)) if num_tokens else {},
        tuple(draw(lists(lost, 3))) if num_tokens else (),
        tuple(logprobs),
        draw(st.builds(m.Timings, REALS, REALS, REALS, REALS, REALS)),
        tuple(scored),
    )


ANY: dict[type, st.SearchStrategy] = {
    m.Hello: st.builds(
        m.Hello,
        TEXTS,
        DIGESTS,
        LAYOUTS,
        NATURALS,
        NATURALS,
        POSITIVES,
        POSITIVES,
        POSITIVES,
        POSITIVES,
        NATURALS,
        POSITIVES,
        NATURALS,
        st.builds(m.WorkerMemory, COUNTERS, COUNTERS, COUNTERS, COUNTERS, COUNTERS),
        TEXTS,
        TEXTS,
    ),
    m.StepResult: results(),
    m.Beat: st.builds(m.Beat, COUNTERS, COUNTERS),
    m.StepDone: st.builds(m.StepDone, COUNTERS, COUNTERS, DIGESTS),
    m.StepFailed: st.builds(m.StepFailed, COUNTERS, COUNTERS, TEXTS),
    m.Goodbye: st.builds(m.Goodbye, TEXTS),
    m.Prepared: st.builds(m.Prepared, COUNTERS, COUNTERS),
    m.Unpreparable: st.builds(m.Unpreparable, COUNTERS, COUNTERS, TEXTS),
    m.Prepare: st.builds(m.Prepare, COUNTERS, COUNTERS, DIGESTS, st.binary(max_size=64)),
    m.Forget: st.builds(m.Forget, COUNTERS, DIGESTS),
    m.Welcome: st.builds(m.Welcome, COUNTERS, REALS, REALS, POSITIVES, TEXTS, REALS),
    m.Reject: st.builds(m.Reject, TEXTS),
    m.StepPlan: plans(),
    m.Drain: st.builds(m.Drain, COUNTERS),
    m.Gone: st.builds(m.Gone, COUNTERS, TEXTS),
}
