"""Worker groups of several ranks: when a lease begins, what ends it for all, and when a step counts."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kilburn.controller.core.engine import Engine
from kilburn.controller.core.events import (
    Arrived,
    Effect,
    Emit,
    Event,
    Finished,
    Left,
    Send,
    Shutdown,
    Stuck,
    Submit,
    Tick,
)
from kilburn.controller.core.lease import LeaseState
from kilburn.controller.core.settings import EngineSettings
from kilburn.controller.simulate.fake_daemon import fake_hello, limits_of
from kilburn.controller.simulate.fake_worker import FakeWorker
from kilburn.controller.simulate.oracle import finish
from kilburn.shared.agreement import step_digest
from kilburn.shared.messages import (
    Beat,
    Drain,
    FromController,
    Gone,
    Goodbye,
    Hello,
    Reject,
    StepDone,
    StepFailed,
    StepPlan,
    StepResult,
    Welcome,
)
from kilburn.shared.sampling import Sampling

SETTINGS = EngineSettings(beat_s=1.0, silence_s=4.0, step_deadline_s=10.0, recovery_s=60.0)
PLACE = "127.0.0.1:4711/" + "a" * 32
SAMPLING = Sampling(temperature=1.0, seed=5)
EXPECTED = list(finish(range(20), SAMPLING, 8, 1, 512)[0].tokens)


def rank_hello(rank: int, world: int = 3, name: str = "w", **change: object) -> Hello:
    found = replace(fake_hello(name, num_blocks=40 + rank, num_host_blocks=9 - rank), rank=rank, world=world)
    return replace(found, rendezvous="" if rank else PLACE, **change)  # type: ignore[arg-type]


def peer(rank: int) -> bytes:
    return b"w-%d" % rank


class Group:
    """Three ranks by hand, and the engine that they serve."""

    def __init__(self) -> None:
        self.engine, self.now = Engine(SETTINGS), 0.0
        self.said: list[Effect] = []
        self.results: dict[tuple[int, int], tuple[StepPlan, StepResult]] = {}
        self.worker: FakeWorker | None = None

    def handle(self, *events: Event) -> list[Effect]:
        self.said = self.engine.handle(events, self.now)
        self.engine.validate()
        for message in self.told(0):
            match message:
                case Welcome(lease):
                    self.worker = FakeWorker(lease, limits_of(rank_hello(0, num_blocks=40, num_host_blocks=7)), 512)
                case StepPlan() if self.worker is not None:
                    self.results[message.lease, message.step] = message, self.worker.run(message)
                case _:
                    pass
        return self.said

    def told(self, rank: int) -> list[FromController]:
        return [effect.message for effect in self.said if isinstance(effect, Send) and effect.peer == peer(rank)]

    def hello(self, *ranks: int) -> None:
        self.handle(*[Arrived(peer(rank), rank_hello(rank)) for rank in ranks])

    def at_work(self) -> "Group":
        self.hello(0, 1, 2)
        self.handle(Submit(1, tuple(range(20)), 8, SAMPLING))
        return self

    def answer(self, step: int, rank: int, lease: int = 1) -> Event:
        plan, result = self.results[lease, step]
        return Arrived(peer(rank), result if rank == 0 else StepDone(lease, step, step_digest(plan, result)))

    def tokens(self) -> list[int]:
        return [token for effect in self.said if isinstance(effect, Emit) for token in effect.tokens]


def test_the_lease_begins_with_the_last_rank_and_all_hear_the_same() -> None:
    group = Group()
    group.hello(2)
    group.hello(0)
    assert group.told(0) == group.told(2) == []
    assert not group.engine.leases
    group.hello(1)
    welcome = Welcome(1, 1.0, 4.0, 2, PLACE, 10.0)
    assert [group.told(rank) for rank in range(3)] == [[welcome]] * 3
    found = group.engine.snapshot().groups[0]
    assert (found.num_blocks, found.num_host_blocks) == (40, 7), "the smallest pools count"
    assert (found.ranks, found.state) == (3, LeaseState.READY)
    group.handle(Submit(1, (1, 2, 3), 4, SAMPLING))
    plans = [[message for message in group.told(rank) if isinstance(message, StepPlan)] for rank in range(3)]
    assert plans[0]
    assert plans[0] == plans[1] == plans[2]
    group.now = 1.0
    group.handle(Tick())
    assert all(Beat(1, len(plans[0])) in group.told(rank) for rank in range(3))


@pytest.mark.parametrize(
    "change",
    [
        {"world": 4},
        {"model_digest": b"x" * 32},
        {"layout": replace(fake_hello().layout, num_kv_heads=2)},
        {"max_rows": 3},
        {"max_step_tokens": 100},
        {"max_len": 99},
        {"vocab_size": 7},
        {"rank": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_rank_that_is_not_like_the_others_is_rejected(change: dict[str, object]) -> None:
    group = Group()
    group.hello(0)
    group.handle(Arrived(peer(1), replace(rank_hello(1), **change)))  # type: ignore[arg-type]
    [reject] = group.told(1)
    assert isinstance(reject, Reject)
    assert next(iter(change)) in reject.reason or "another model" in reject.reason
    group.hello(1, 2)
    assert group.engine.leases == {"w": 1}


@pytest.mark.parametrize(
    "leaves", [Left(peer(0), "died"), Arrived(peer(0), Goodbye("stopped"))], ids=["left", "goodbye"]
)
def test_a_rank_that_leaves_before_the_others_come_is_waited_for_again(leaves: Event) -> None:
    group = Group()
    group.hello(0, 1)
    group.handle(leaves)
    group.hello(2)
    assert not group.engine.leases
    group.hello(0)
    assert group.engine.leases == {"w": 1}


def test_a_rank_that_says_hello_again_counts_once_and_by_its_newest() -> None:
    group = Group()
    group.hello(0, 1, 1, 1)
    group.handle(Arrived(b"w-0-again", replace(rank_hello(0), rendezvous="elsewhere")))
    group.hello(2)
    assert [m.rendezvous for m in group.told(1) if isinstance(m, Welcome)] == ["elsewhere"]
    assert group.told(0) == []


def test_a_step_counts_when_all_ranks_are_in_whoever_is_ahead() -> None:
    group = Group().at_work()
    found: list[int] = []
    for events in (
        [(1, 2), (2, 2)],  # rank 2 is two steps ahead ...
        [(1, 0), (2, 0)],  # ... and rank 0 answers both before rank 1 has confirmed one
    ):
        group.handle(*[group.answer(step, rank) for step, rank in events])
        assert group.tokens() == []
    group.handle(group.answer(1, 1))
    found += group.tokens()
    assert len(found) == 1
    group.handle(group.answer(2, 1), group.answer(2, 1))
    found += group.tokens()
    step = 3
    while (1, step) in group.results:
        group.handle(*[group.answer(step, rank) for rank in (1, 0, 2)])
        found += group.tokens()
        step += 1
    assert found == EXPECTED
    assert group.engine.is_idle


DOUBTS: dict[str, tuple[Callable[[Group], list[Event]], str]] = {
    "a rank dies": (lambda g: [Left(peer(1), "its process was killed")], "killed"),
    "a rank leaves": (lambda g: [Arrived(peer(2), Goodbye("maintenance"))], "left: maintenance"),
    "a rank fails": (lambda g: [Arrived(peer(1), StepFailed(1, 1, "no memory"))], "no memory"),
    "the ranks did not meet": (lambda g: [Arrived(peer(2), StepFailed(1, 0, "the ranks did not meet"))], "not meet"),
    "a rank is somebody new": (lambda g: [Arrived(b"other", rank_hello(1))], "took its name"),
    "a rank says Hello again": (lambda g: [Arrived(peer(1), rank_hello(1))], "said Hello again"),
    "a rank disagrees": (
        lambda g: [g.answer(1, 0), g.answer(1, 2), Arrived(peer(1), StepDone(1, 1, b"?" * 32))],
        "rank 1 disagrees about step 1",
    ),
    "a rank did another step": (
        lambda g: [g.answer(1, 0), g.answer(1, 2), Arrived(peer(1), replace_step(g.answer(2, 1), 1))],
        "rank 1 disagrees about step 1",
    ),
    "a rank leaves out a step": (lambda g: [g.answer(2, 1)], "step 2 answered, expected 1"),
    "a rank runs ahead": (lambda g: [Arrived(peer(1), StepDone(1, 9, b"?" * 32))], "step 9 answered, expected 1"),
    "a second rank answers": (lambda g: [Arrived(peer(1), g.results[1, 1][1])], "rank 0 answers"),
    "rank 0 confirms": (lambda g: [Arrived(peer(0), StepDone(1, 1, b"?" * 32))], "rank 0 answers"),
}


def replace_step(event: Event, step: int) -> StepDone:
    assert isinstance(event, Arrived)
    assert isinstance(event.message, StepDone)
    return replace(event.message, step=step)


@pytest.mark.parametrize("doubt", DOUBTS)
def test_one_rank_ends_the_lease_for_all(doubt: str) -> None:
    group = Group().at_work()
    events, words = DOUBTS[doubt]
    group.handle(*events(group))
    assert not group.engine.leases
    gone = {rank: [m for m in group.told(rank) if isinstance(m, Gone)] for rank in range(3)}
    told = [rank for rank in range(3) if gone[rank]]
    assert set(range(3)) - set(told) <= ({1} if doubt == "a rank says Hello again" else set())
    assert all(words in message.reason for messages in gone.values() for message in messages)
    assert group.tokens() == []
    # All say Hello again, and the request goes on where it was.
    again = [rank for rank in range(3) if "Hello" not in doubt or rank != 1]
    group.handle(*[Arrived(peer(rank), rank_hello(rank)) for rank in again])
    assert group.engine.leases == {"w": 2}
    answer: list[int] = []
    step = 1
    while (2, step) in group.results:
        group.handle(*[group.answer(step, rank, lease=2) for rank in range(3)])
        answer += group.tokens()
        step += 1
    assert answer == EXPECTED


def test_silence_of_one_rank_is_silence_of_all() -> None:
    group = Group().at_work()
    for now in (1.0, 2.0, 3.0, 3.9):
        group.now = now
        group.handle(*[Arrived(peer(rank), Beat(1, 0)) for rank in (0, 2)])
    assert group.engine.snapshot().groups[0].state is LeaseState.SUSPECT
    group.now = 4.0
    group.handle(Tick())
    assert not group.engine.leases
    assert all(Gone(1, "rank 1 was silent for 4 s") in group.told(rank) for rank in range(3))
    assert Stuck((peer(1),), "rank 1 was silent for 4 s") in group.said


def test_a_stranger_does_not_take_the_place_of_a_rank_that_is_heard() -> None:
    group = Group()
    boots = [f"life of rank {rank}" for rank in range(3)]
    group.handle(*[Arrived(peer(rank), rank_hello(rank, boot=boots[rank])) for rank in range(3)])
    for rank in range(3):
        group.handle(Arrived(b"other", rank_hello(rank, boot=boots[rank - 1])))
        assert [e.message.lease for e in group.said if isinstance(e, Send) and isinstance(e.message, Gone)] == [0]
        assert group.engine.leases == {"w": 1}
    group.handle(Arrived(b"other", rank_hello(1, boot=boots[1])))
    assert not group.engine.leases, "it is rank 1 itself, over another connection"


def test_a_late_confirmation_is_the_steps_deadline() -> None:
    group = Group().at_work()
    group.handle(group.answer(1, 0), group.answer(1, 1))
    for now in range(1, 11):
        group.now = float(now)
        group.handle(*[Arrived(peer(rank), Beat(1, 0)) for rank in range(3)])
    assert not group.engine.leases
    assert any(isinstance(m, Gone) and "took over 10 s" in m.reason for m in group.told(0))


def test_what_comes_after_the_end_is_dropped() -> None:
    group = Group().at_work()
    late = [group.answer(1, rank) for rank in range(3)]
    group.handle(Left(peer(2), "died"))
    group.hello(0, 1, 2)
    group.handle(*late)
    assert group.engine.leases == {"w": 2}
    assert group.tokens() == []


def test_all_ranks_are_drained() -> None:
    group = Group()
    group.hello(0, 1, 2)
    group.handle(Shutdown())
    assert all(group.told(rank) == [Drain(1)] for rank in range(3))
    group.handle(*[Arrived(peer(rank), Goodbye("drained")) for rank in range(3)])
    assert not group.engine.leases


def test_one_rank_and_three_live_side_by_side() -> None:
    group = Group()
    group.hello(0, 1, 2)
    group.handle(Arrived(b"alone", fake_hello("alone")))
    assert group.engine.leases == {"w": 1, "alone": 2}
    group.handle(Left(peer(1), "died"))
    assert group.engine.leases == {"alone": 2}
    group.handle(Submit(1, (1, 2, 3), 1, SAMPLING))
    assert [e for e in group.said if isinstance(e, Finished)] == []
