"""A worker's right to hold blocks and get plans: how it begins, how it is kept, and all the ways in which it ends.

Whatever ends it, requests lose nothing that the client has seen: a new Hello, and they go on where they stopped.
"""

from dataclasses import replace

import pytest

from kilburn.controller.core.engine import NAME_TAKEN
from kilburn.controller.core.events import Arrived, Left, NoteKind, Shutdown, Stuck, Tick
from kilburn.controller.core.lease import MOVES, Lease, LeaseState
from kilburn.controller.core.settings import EngineSettings
from kilburn.shared.messages import Beat, Drain, Gone, Goodbye, Hello, Reject, StepDone, StepFailed, StepPlan, Welcome
from kilburn.shared.types import FinishReason, LawBroken
from tests.core.driver import Hand, settings_of_depth
from tests.core.worker import hello

PROMPT = range(9)
SETTINGS = replace(EngineSettings(), depth=2, beat_s=1.0, silence_s=4.0, step_deadline_s=10.0, recovery_s=60.0)


def messages(hand: Hand, kind: type, peer: bytes = b"w-1") -> list[object]:
    return [send.message for send in hand.log.sent if send.peer == peer and isinstance(send.message, kind)]


def reasons(hand: Hand) -> list[str]:
    return [note.text for note in hand.log.notes if note.kind is NoteKind.LEASE_ENDED]


def at_work(settings: EngineSettings = SETTINGS) -> Hand:
    """Two requests in the middle of their answers, two plans under way."""
    hand = Hand(settings)
    hand.join()
    hand.submit(PROMPT, max_tokens=9)
    hand.submit((5, 5), max_tokens=9, n=2)
    while len(hand.tokens(2, 1)) < 2:
        hand.land()
    assert len(hand.worker().plans) == 2
    return hand


def expect_recovery(hand: Hand, peer: bytes = b"w-2") -> None:
    """The lease is over, nobody has been told anything; a new worker brings every answer to its end."""
    assert not hand.log.finished
    assert hand.engine.snapshot().homeless_requests == 2
    assert not hand.engine.snapshot().groups
    hand.say_hello(hello(), peer)
    hand.run()
    hand.check(1, 2)
    hand.expect_empty(peer)


# --- beginning


def test_welcome_says_what_is_expected() -> None:
    hand = Hand(SETTINGS)
    hand.join()
    assert messages(hand, Welcome) == [Welcome(lease=1, beat_s=1.0, silence_s=4.0, depth=2, step_s=10.0)]
    assert hand.snapshot().state is LeaseState.READY
    assert hand.engine.snapshot().can_produce


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_digest": b"x" * 32}, "another model"),
        ({"rank": 1}, "counted from 0"),
        ({"num_blocks": 0}, "--kv-memory"),
    ],
)
@pytest.mark.parametrize("name", ["w", "other"])
def test_a_worker_that_cannot_serve_here_is_rejected_and_harms_nobody(
    change: dict[str, object], words: str, name: str
) -> None:
    hand = at_work()
    stranger = replace(hello(name=name), **change)  # type: ignore[arg-type]
    hand.say_hello(stranger, b"x-1")
    [reject] = messages(hand, Reject, b"x-1")
    assert isinstance(reject, Reject)
    assert words in reject.reason
    assert not messages(hand, Gone)
    hand.run()
    hand.check(1, 2)


def test_hello_twice_begins_anew() -> None:
    """The same process has forgotten everything, and knows it; so it is not told that it is gone."""
    hand = at_work()
    hand.say_hello(hello(), b"w-1")
    assert [message.lease for message in messages(hand, Welcome)] == [1, 2]  # type: ignore[attr-defined]
    assert not messages(hand, Gone)
    assert hand.worker().seen[0].step == 1
    assert hand.worker().seen[0].lease == 2
    hand.run()
    hand.check(1, 2)
    hand.expect_empty()


def test_a_new_process_takes_over_the_name_of_the_old() -> None:
    hand = at_work()
    old = hand.workers[b"w-1"]
    hand.say_hello(hello(), b"w-2")
    assert messages(hand, Gone) == [Gone(1, "another worker took its name")]
    assert list(hand.workers) == [b"w-2"]
    hand.say(old.run_next(), b"w-1")  # it did not hear yet
    hand.run()
    hand.check(1, 2)
    hand.expect_empty(b"w-2")


FIRST, SECOND = replace(hello(), boot="first"), replace(hello(), boot="second")


def named_first() -> Hand:
    """A worker of the life `first` in the middle of its work, and 1 s later."""
    hand = Hand(SETTINGS)
    hand.say_hello(FIRST, b"w-1")
    hand.submit(PROMPT, max_tokens=9)
    hand.say(Beat(1, 0), b"w-1", after_s=1.0)
    return hand


def test_another_process_waits_while_the_one_of_its_name_is_heard() -> None:
    hand = named_first()
    for number in range(2, 9):
        hand.say_hello(SECOND, b"w-%d" % number)
        assert messages(hand, Gone, b"w-%d" % number) == [Gone(0, NAME_TAKEN)]
        hand.say(Beat(1, 0), b"w-1", after_s=1.0)
    assert not reasons(hand)
    assert [note.kind for note in hand.log.notes].count(NoteKind.NAME_TAKEN) == 7
    hand.run()
    hand.check(1)


def test_whoever_asks_for_a_name_has_its_owner_asked_whether_it_is_there() -> None:
    hand = named_first()
    num_beats = len(messages(hand, Beat))
    hand.say_hello(SECOND, b"w-2")
    assert len(messages(hand, Beat)) == num_beats + 1
    hand.handle(Left(b"w-1", "cannot be reached"))
    hand.say_hello(SECOND, b"w-3")
    assert hand.engine.leases == {"w": 2}


@pytest.mark.parametrize(
    ("comes", "after_s"),
    [(FIRST, 0.0), (SECOND, 2.0), (SECOND, 4.0)],
    ids=["the same process over another connection", "while the old one is suspect", "after it"],
)
def test_a_name_that_is_not_held_any_more_is_given_at_once(comes: Hello, after_s: float) -> None:
    hand = named_first()
    hand.handle(Tick(), after_s=after_s)
    hand.say_hello(comes, b"w-2")
    assert list(hand.workers) == [b"w-2"]
    assert not messages(hand, Gone, b"w-2")
    hand.run()
    hand.check(1)
    hand.expect_empty(b"w-2")


def test_workers_of_other_names_serve_side_by_side() -> None:
    hand = Hand(SETTINGS)
    hand.say_hello(hello(name="a", max_rows=2), b"a-1")
    hand.say_hello(hello(name="b", max_rows=2), b"b-1")
    requests = range(1, 7)
    hand.handle(*[hand.new_submit((i, i, i), max_tokens=4) for i in requests])
    assert [group.running_requests for group in hand.engine.snapshot().groups] == [2, 2]
    assert [group.waiting_requests for group in hand.engine.snapshot().groups] == [1, 1]
    hand.handle(Left(b"a-1", "died"))
    hand.run()
    hand.check(*requests)


# --- keeping it


def test_beats_go_out_on_time_and_say_the_newest_step() -> None:
    hand = Hand(SETTINGS)
    hand.join()
    hand.submit(PROMPT, max_tokens=9)
    for _ in range(5):
        assert hand.engine.deadline is not None
        hand.handle(Tick(), after_s=hand.engine.deadline - hand.now)
        hand.say(Beat(1, 0))
    assert messages(hand, Beat) == [Beat(1, 2)] * 5
    assert hand.now == 5.0


def test_the_engine_never_asks_to_be_woken_at_once() -> None:
    """A deadline that does not move when it has passed would spin."""
    hand = at_work()
    for _ in range(200):
        deadline = hand.engine.deadline
        if deadline is None:
            break
        assert deadline > hand.now
        hand.handle(Tick(), after_s=deadline - hand.now)
    assert hand.engine.deadline is None
    assert len(hand.log.finished) == 3


def test_half_the_silence_makes_it_suspect_and_a_word_restores_it() -> None:
    hand = at_work()
    hand.handle(Tick(), after_s=1.9)
    assert hand.snapshot().state is LeaseState.READY
    hand.handle(Tick(), after_s=0.1)
    assert hand.snapshot().state is LeaseState.SUSPECT
    late = hand.submit((8,), max_tokens=2)
    assert hand.engine.snapshot().homeless_requests == 1, "no new requests are placed there"
    assert not hand.engine.snapshot().can_produce, "nobody knows whether it still works"
    hand.say(Beat(1, 3))
    assert hand.snapshot().state is LeaseState.READY
    assert hand.engine.snapshot().homeless_requests == 0
    hand.run()
    hand.check(1, 2, late)


def test_a_suspect_lease_keeps_its_plans_coming() -> None:
    hand = at_work()
    num_seen = len(hand.worker().seen)
    hand.handle(Tick(), after_s=2.5)
    hand.land()
    assert len(hand.worker().seen) == num_seen + 1
    assert hand.snapshot().state is LeaseState.READY


# --- losing it


def test_silence_ends_it() -> None:
    hand = at_work()
    hand.handle(Tick(), after_s=3.999)
    assert hand.workers
    hand.handle(Tick(), after_s=0.001)
    assert reasons(hand) == ["lease 1: silent for 4 s"]
    assert hand.log.stuck == [Stuck((b"w-1",), "silent for 4 s")]
    assert len(messages(hand, Gone)) == 1
    expect_recovery(hand)


def beat_until(hand: Hand, seconds: float) -> None:
    """The worker says that it is there, and nothing else."""
    while hand.workers and hand.now < seconds:
        hand.say(Beat(1, 0), after_s=min(1.0, seconds - hand.now))


def test_progress_and_not_a_pulse_proves_life() -> None:
    hand = at_work()
    step = hand.worker().plans[0].step
    beat_until(hand, 9.5)
    assert hand.workers
    beat_until(hand, 10.0)
    assert reasons(hand) == [f"lease 1: step {step} took over 10 s"]
    assert hand.log.stuck == [Stuck((b"w-1",), f"step {step} took over 10 s")]
    expect_recovery(hand)


def test_a_steps_deadline_runs_from_the_previous_commit_if_that_is_later() -> None:
    """It was sent with another still to run; it may take its time from when that one was through."""
    hand = at_work()
    step = hand.worker().plans[1].step
    beat_until(hand, 8.0)
    hand.land()
    beat_until(hand, 17.5)
    assert hand.workers
    beat_until(hand, 18.0)
    assert reasons(hand) == [f"lease 1: step {step} took over 10 s"]
    expect_recovery(hand)


def test_a_steps_deadline_runs_from_its_sending_if_that_is_later() -> None:
    """After an idle hour the first step has its full time."""
    hand = Hand(SETTINGS)
    hand.join()
    hand.submit((1,), max_tokens=1)
    hand.run()
    beat_until(hand, 3600.0)
    hand.submit(PROMPT, max_tokens=4)
    beat_until(hand, 3609.5)
    assert hand.workers
    beat_until(hand, 3610.0)
    assert reasons(hand) == ["lease 1: step 2 took over 10 s"]


def test_a_result_at_its_very_deadline_is_in_time() -> None:
    hand = at_work()
    beat_until(hand, 9.0)
    hand.now = 10.0
    hand.land()
    assert hand.workers
    hand.run()
    hand.check(1, 2)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Arrived(b"w-1", StepFailed(1, 3, "out of memory")), "a step failed: out of memory"),
        (Arrived(b"w-1", Goodbye("stopped by hand")), "the worker left: stopped by hand"),
        (Arrived(b"w-1", StepDone(1, 3, b"d" * 32)), "rank 0 answers, the others confirm"),
        (Left(b"w-1", "sent garbage"), "sent garbage"),
    ],
)
def test_any_doubt_ends_it(event: Arrived | Left, words: str) -> None:
    hand = at_work()
    hand.handle(event)
    assert words in reasons(hand)[0]
    assert not hand.log.stuck, "it speaks"
    expect_recovery(hand)


def test_a_gap_in_the_steps_ends_it() -> None:
    hand = at_work()
    hand.worker().run_next()  # lost on the way
    hand.land()
    assert "expected" in reasons(hand)[0]
    expect_recovery(hand)


def test_what_an_old_lease_says_is_dropped() -> None:
    """Over the same connection: a result that was on its way when the worker said Hello again."""
    hand = at_work()
    old = hand.workers[b"w-1"]
    hand.say_hello(hello(), b"w-1")
    num_tokens = len(hand.tokens(1))
    for _ in range(2):
        assert hand.say(old.run_next()) == []
    hand.say(StepFailed(1, 3, "of the old life"))
    hand.say(Beat(1, 3))
    assert hand.worker().lease == 2
    assert len(hand.tokens(1)) == num_tokens
    hand.run()
    hand.check(1, 2)


def test_a_beat_of_an_old_lease_proves_nothing() -> None:
    hand = at_work()
    hand.say_hello(hello(), b"w-1")
    for _ in range(4):
        hand.say(Beat(1, 3), after_s=1.0)
    assert reasons(hand)[-1] == "lease 2: silent for 4 s"


def test_who_has_no_lease_is_told_so() -> None:
    hand = Hand(SETTINGS)
    hand.say(Beat(7, 3), b"w-1")
    assert messages(hand, Gone) == [Gone(7, "this lease is over")]
    hand.say(Goodbye("leaving"), b"w-1")
    hand.handle(Left(b"w-1", "unknown"))
    assert len(hand.log.sent) == 1


def test_ten_lives_and_one_answer() -> None:
    """A worker that dies after every few steps; each life begins at step 1 with a higher lease."""
    hand = Hand(SETTINGS)
    requests = [hand.submit(range(i, i + 6), max_tokens=12, n=1 + i % 2) for i in range(4)]
    for life in range(10):
        hand.say_hello(hello(num_blocks=9 + life, block_size=1 + life % 4), b"w-%d" % life)
        assert hand.workers[b"w-%d" % life].lease == life + 1
        for _ in range(3):
            if hand.workers[b"w-%d" % life].plans:
                hand.land(b"w-%d" % life)
        hand.handle(Left(b"w-%d" % life, "died"))
    hand.join()
    hand.run()
    hand.check(*requests)
    hand.expect_empty()


def test_digests_are_of_the_blocks_of_the_worker_that_has_them() -> None:
    """A request moves to a worker with smaller blocks; what it computes there is found by the next with its prompt."""
    hand = Hand(SETTINGS)
    hand.say_hello(hello(block_size=4))
    first = hand.submit(PROMPT, max_tokens=6)
    hand.land()
    hand.say_hello(hello(block_size=2))
    hand.run()
    second = hand.submit(PROMPT, max_tokens=6)
    hand.run()
    assert hand.log.started[second].cached_tokens == 8
    hand.check(first, second)


def test_places_in_line_outlive_the_lease() -> None:
    hand = Hand(SETTINGS)
    hand.join()
    for i in range(4):
        hand.submit((i,), max_tokens=5, priority=-i)
    hand.land()
    hand.handle(Left(b"w-1", "died"))
    hand.say_hello(hello(max_rows=1), b"w-2")
    hand.run()
    assert [request for request, _ in hand.log.finished] == [4, 3, 2, 1]
    hand.check(1, 2, 3, 4)


# --- leaving in good order


def test_drain_is_sent_when_nothing_is_left_and_again_with_each_beat() -> None:
    hand = at_work()
    hand.handle(Shutdown())
    assert not messages(hand, Drain)
    hand.run()
    hand.check(1, 2)
    assert messages(hand, Drain) == [Drain(1)]
    assert hand.snapshot().state is LeaseState.DRAINING
    hand.handle(Tick(), Shutdown(), after_s=0.9)
    assert messages(hand, Drain) == [Drain(1)]
    hand.handle(Tick(), after_s=0.1)
    assert messages(hand, Drain) == [Drain(1)] * 2
    hand.say(Goodbye("drained"))
    assert not hand.engine.snapshot().groups
    assert hand.engine.deadline is None


def test_drain_of_an_idle_engine_is_immediate() -> None:
    hand = Hand(SETTINGS)
    hand.join()
    hand.handle(Tick(), after_s=2.5)  # suspect, too
    hand.handle(Shutdown())
    assert messages(hand, Drain) == [Drain(1)]
    hand.say_hello(hello(name="late"), b"late-1")
    assert "shutting down" in messages(hand, Reject, b"late-1")[0].reason  # type: ignore[attr-defined]


def test_a_worker_that_dies_while_closing_may_come_back_to_finish() -> None:
    hand = at_work()
    hand.handle(Shutdown())
    hand.handle(Left(b"w-1", "died"))
    hand.say_hello(hello(), b"w-2")
    hand.run()
    hand.check(1, 2)
    assert messages(hand, Drain, b"w-2") == [Drain(2)]


def test_closing_without_a_worker_ends_in_time() -> None:
    hand = at_work()
    hand.handle(Shutdown(), Left(b"w-1", "died"))
    hand.handle(Tick(), after_s=60.0)
    assert {hand.reason(1), hand.reason(2, 0), hand.reason(2, 1)} == {FinishReason.ERROR}
    assert hand.engine.is_idle


def test_a_lease_that_drains_gets_no_plans() -> None:
    hand = Hand(SETTINGS)
    hand.join()
    hand.handle(Shutdown())
    assert not messages(hand, StepPlan)


# --- the table of moves


@pytest.mark.parametrize("state", list(LeaseState))
def test_only_the_moves_of_the_table_are_made(state: LeaseState) -> None:
    for to in LeaseState:
        lease = Lease(1, [b"w"], hello(), beat_s=1.0, silence_s=4.0, now=0.0)
        lease.state = state
        if to in MOVES[state]:
            lease.move(to)
            assert lease.state is to
        else:
            with pytest.raises(LawBroken, match="no move"):
                lease.move(to)


def test_a_lease_that_is_gone_stays_gone() -> None:
    assert MOVES[LeaseState.GONE] == {}
    assert all(LeaseState.GONE in MOVES[state] for state in set(LeaseState) - {LeaseState.GONE})


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_late_results_land_in_order_however_late(depth: int) -> None:
    """All plans of the flight are sent before the first result is in; the results then come at once."""
    hand = Hand(settings_of_depth(depth))
    hand.join()
    request = hand.submit(PROMPT, max_tokens=12)
    while hand.worker().plans:
        results = [hand.worker().run_next() for _ in range(len(hand.worker().plans))]
        hand.handle(*[Arrived(b"w-1", result) for result in results])
    hand.check(request)
    hand.expect_empty()
