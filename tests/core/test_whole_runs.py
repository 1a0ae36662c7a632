"""Everything at once: small pools, narrow budgets, groups, priorities, early ends, and all that can go wrong.

Whatever happens, what was said is a prefix of the oracle's answer, and all of it unless somebody ended it. In the end
a large worker comes and everything that is left is finished; nothing remains behind.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.controller.core.events import Left
from kilburn.shared.types import FinishReason
from tests.core.driver import Hand, settings_of_depth
from tests.core.worker import hello

ACTS = ["submit"] * 4 + ["land"] * 10 + ["stop", "cancel", "die", "join", "lose a block", "fail a row"]


def join(hand: Hand, data: st.DataObject) -> None:
    num_blocks, block_size = data.draw(st.integers(3, 12)), data.draw(st.sampled_from([1, 2, 4]))
    hand.join(num_blocks, block_size, max_rows=data.draw(st.integers(2, 5)))


def submit(hand: Hand, data: st.DataObject) -> None:
    start, length = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 10))
    hand.submit(
        range(start, start + length),
        max_tokens=data.draw(st.integers(0, 8)),
        n=data.draw(st.integers(1, 3)),
        priority=data.draw(st.integers(0, 1)),
        salt=data.draw(st.sampled_from([b"", b"s"])),
    )


def act(hand: Hand, data: st.DataObject, stopped: set[tuple[int, int]]) -> None:
    worker = hand.workers.get(b"w-1")
    match data.draw(st.sampled_from(ACTS)):
        case "submit":
            submit(hand, data)
        case "land" if worker and worker.plans:
            hand.land()
        case "stop" if hand.log.tokens:
            choice = data.draw(st.sampled_from(sorted(hand.log.tokens)))
            stopped.add(choice)
            hand.stop(*choice)
        case "cancel" if hand.submits:
            hand.cancel(data.draw(st.sampled_from(sorted(hand.submits))))
        case "die":
            hand.handle(Left(b"w-1", "died"))
        case "join":
            join(hand, data)
        case "lose a block" if worker and worker.cells:
            worker.bad_blocks.add(data.draw(st.sampled_from(sorted({block for block, _ in worker.cells}))))
        case "fail a row" if worker and worker.plans:
            worker.bad_rows.add(data.draw(st.sampled_from(worker.plans[0].rows)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_comes_every_answer_is_the_oracles(data: st.DataObject) -> None:
    hand = Hand(settings_of_depth(data.draw(st.integers(1, 3)), max_step_tokens=data.draw(st.integers(3, 12))))
    join(hand, data)
    stopped: set[tuple[int, int]] = set()
    for _ in range(data.draw(st.integers(1, 50))):
        act(hand, data, stopped)
    hand.say_hello(hello(num_blocks=200))
    hand.run()
    for request, submitted in hand.submits.items():
        if request in hand.log.refused:
            continue
        for index in range(submitted.n):
            said, (tokens, reason) = hand.tokens(request, index), hand.expected(request, index)
            assert said == tokens[: len(said)]
            if request in hand.cancelled or (request, index) in stopped:
                continue
            if hand.reason(request, index) is FinishReason.ERROR:
                assert "not finite" in hand.log.finished[request, index].message
            else:
                assert (said, hand.reason(request, index)) == (tokens, reason)
    hand.expect_empty()
