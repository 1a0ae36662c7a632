"""Several worker groups: who gets a request, how a group leaves, how long a step may take, and who ends workers."""

from dataclasses import replace

import pytest

from kilburn.controller.core.blame import POISON
from kilburn.controller.core.events import Disturbed, Left, NoteKind, Retire, Tick
from kilburn.controller.core.home import Home
from kilburn.controller.core.placement import choose, costs_s
from kilburn.controller.core.sequence import Group, Place
from kilburn.controller.core.settings import EngineSettings
from kilburn.shared.messages import Beat, Drain, Goodbye, StepFailed
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason
from tests.core.driver import Hand
from tests.core.worker import hello

SETTINGS = replace(EngineSettings(), step_deadline_s=10.0, recovery_s=60.0, beat_s=1.0, silence_s=4.0)
PROMPT = tuple(range(40))


def several(*names: str, num_blocks: int = 64, **sizes: int) -> Hand:
    hand = Hand(SETTINGS)
    for name in names:
        hand.say_hello(hello(name=name, num_blocks=num_blocks, **sizes), name.encode())
    return hand


def placed(hand: Hand, request: int) -> str:
    return hand.engine.requests.placed[request].lease.hello.name


def asked(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 8, arrival: int = 1, n: int = 1) -> Group:
    return Group(1000 + arrival, Place(0, arrival), prompt, max_tokens, Sampling(temperature=0.0), n)


def homes(hand: Hand) -> list[Home]:
    return list(hand.engine._homes.values())


# --- placement


def shown(hand: Hand, name: str, token_s: float, step_s: float) -> None:
    """What a group has shown: a step of one decode, and what 100 tokens of a prompt take."""
    pacing = hand.scheduler(name.encode()).pacing
    pacing.learn(1, 0, step_s)
    pacing.learn(0, 100, 100 * token_s)


def test_costs_are_predicted_seconds() -> None:
    hand = several("a", "b")
    shown(hand, "a", 0.001, 0.01)
    shown(hand, "b", 0.01, 0.05)
    assert costs_s(homes(hand), asked()) == pytest.approx([40 * 0.001 + 8 * 0.01, 40 * 0.01 + 8 * 0.05])
    assert choose(homes(hand), asked()) is hand.home(b"a")


def test_a_cached_prefix_goes_before_an_idle_group_as_long_as_it_is_worth_it() -> None:
    hand = several("a", "b")
    first = hand.submit(PROMPT, max_tokens=2)
    where, other = placed(hand, first), {"a": "b", "b": "a"}[placed(hand, first)]
    hand.run()
    for name in "ab":
        shown(hand, name, 0.001, 0.0001)
    for arrival in range(4):
        assert choose(homes(hand), asked(arrival=arrival)) is hand.home(where.encode())
    # So much work waits there that 36 tokens more are quicker computed elsewhere.
    hand.handle(*[hand.new_submit((7, i) * 15, max_tokens=1) for i in range(40)])
    found = costs_s([hand.home(where.encode()), hand.home(other.encode())], asked())
    assert found[0] > 0.0
    assert abs(len(hand.line(b"a").requests) - len(hand.line(b"b").requests)) <= 8, "load is shared"
    hand.run()


def test_a_slow_device_gets_what_it_can_do() -> None:
    hand = several("slow", "fast")
    shown(hand, "slow", 0.004, 0.04)
    shown(hand, "fast", 0.001, 0.01)
    requests = [hand.submit((i, i, i), max_tokens=20) for i in range(10)]
    where = [placed(hand, request) for request in requests]
    assert 0 < where.count("slow") < where.count("fast")


def test_a_small_pool_is_pressure_and_a_full_batch_is_rounds() -> None:
    hand = several("large", "small")
    hand.say_hello(hello(name="small", num_blocks=14), b"small")
    for name in ("large", "small"):
        shown(hand, name, 0.001, 0.001)
    large, small = costs_s([hand.home(b"large"), hand.home(b"small")], asked(max_tokens=16))
    assert small == pytest.approx(large)
    taken = hand.pool(b"small").take(6, 1)
    assert costs_s([hand.home(b"small")], asked(max_tokens=16))[0] == pytest.approx(small + 6 * 4 * 0.001)
    hand.pool(b"small").drop(taken)
    for _ in range(8):
        hand.submit((1,), max_tokens=30)
    one, eight = costs_s([hand.home(b"large")], asked((1,), 8)), costs_s([hand.home(b"large")], asked((1,), 8, n=8))
    assert eight[0] > one[0]


def test_in_doubt_the_emptier_of_two_and_every_pair_gets_its_turn() -> None:
    hand = several(*"abcd")
    requests = [hand.submit((i,), max_tokens=3) for i in range(16)]
    where = [placed(hand, request) for request in requests]
    assert {where.count(name) for name in "abcd"} <= {3, 4, 5}
    hand.run()
    hand.check(*requests)


def test_a_newcomer_is_tried_at_once() -> None:
    hand = several("a")
    shown(hand, "a", 0.001, 0.01)
    requests = [hand.submit((i,) * 9, max_tokens=20) for i in range(8)]
    hand.say_hello(hello(name="new"), b"new")
    late = hand.submit((99,) * 9, max_tokens=4)
    assert placed(hand, late) == "new"
    hand.run()
    hand.check(*requests, late)


# --- leaving


def test_a_group_that_leaves_finishes_its_step_and_gives_its_requests_away() -> None:
    hand = several("a", "b")
    requests = [hand.submit((i, i), max_tokens=12, n=1 + i % 2) for i in range(6)]
    for name in (b"a", b"b") * 2:
        hand.land(name)
    mine = len(hand.line(b"a").requests)
    assert mine
    before = {key: list(tokens) for key, tokens in hand.log.tokens.items()}
    hand.handle(Retire("a"), Retire("a"), Retire("nobody"))
    assert Drain(1) not in [send.message for send in hand.log.sent]
    assert placed(hand, hand.submit((9,), max_tokens=2)) == "b"
    while hand.workers[b"a"].plans:
        hand.land(b"a")
    assert [send.message for send in hand.log.sent if send.peer == b"a"][-1] == Drain(1)
    assert not hand.line(b"a").requests
    assert any(len(hand.log.tokens[key]) > len(tokens) for key, tokens in before.items()), "what was under way counts"
    assert hand.engine.snapshot().requests_displaced == hand.engine.snapshot().requests_recovered == mine
    hand.say(Goodbye("drained"), b"a")
    hand.run()
    hand.check(*requests)
    assert [note.kind for note in hand.log.notes].count(NoteKind.LEASE_LEAVES) == 1
    hand.say_hello(hello(name="a"), b"a-2")
    assert {placed(hand, hand.submit((i,), max_tokens=2)) for i in range(4)} == {"a", "b"}


def test_what_fits_nowhere_else_ends_where_it_is() -> None:
    hand = several("a")
    hand.say_hello(hello(name="small", num_blocks=2), b"small")
    long, short = hand.submit(PROMPT, max_tokens=9), hand.submit((1,), max_tokens=40)
    while not hand.tokens(long):
        hand.land(b"a")
    hand.handle(Retire("a"))
    while long in hand.engine.requests.placed:
        assert hand.engine.snapshot().homeless_requests == 0
        hand.land(b"a")
    hand.run()
    hand.check(long, short)
    assert Drain(1) in [send.message for send in hand.log.sent]


def test_the_only_group_finishes_what_it_has() -> None:
    hand = several("a")
    request = hand.submit(PROMPT, max_tokens=5)
    hand.handle(Retire("a"))
    late = hand.submit((1,), max_tokens=2)
    hand.run()
    hand.check(request)
    assert Drain(1) in [send.message for send in hand.log.sent]
    hand.say_hello(hello(name="b"), b"b")
    hand.run()
    hand.check(late)


def test_a_prefix_is_held_where_it_is_used_and_goes_on_elsewhere() -> None:
    hand = several("a", "b")
    prefix = hand.pin(PROMPT[:9])
    hand.run()
    [first] = hand.log.pinned
    other = "b" if first.group == "a" else "a"
    assert not hand.line(other.encode()).all_pins, "nobody used it there"
    hand.handle(Retire(first.group))
    hand.run()
    assert [told.group for told in hand.log.pinned] == [first.group, other]
    hand.say(Goodbye("drained"), first.group.encode())
    hand.say_hello(hello(name="c"), b"c")
    assert not hand.line(b"c").all_pins
    for name in (other, "c"):
        shown(hand, name, 0.0001, 1.0 if name == other else 0.01)
    request = hand.submit((*PROMPT[:9], 77), max_tokens=2)
    assert placed(hand, request) == "c"
    hand.run()
    assert hand.log.pinned[-1].group == "c"
    assert hand.log.started[request].cached_tokens == 9
    hand.unpin(prefix)
    assert not hand.line(b"c").all_pins


# --- how long a step may take, and how soon a loss is found


@pytest.mark.parametrize(("token_s", "allowed_s"), [(0.0, 10.0), (0.001, 10.0), (0.05, 20.0)])
def test_a_step_may_take_ten_times_what_was_predicted_and_the_floor_at_least(token_s: float, allowed_s: float) -> None:
    hand = several("a")
    hand.scheduler(b"a").pacing.learn(0, 100, 100 * token_s)
    hand.submit(PROMPT, max_tokens=3)
    # The worker's own deadline is the same: the plan says what it may take, where that is more than the Welcome's.
    assert max(SETTINGS.step_deadline_s, hand.workers[b"a"].plans[0].allowed_s) == pytest.approx(allowed_s)
    while hand.now < allowed_s - 0.25:
        hand.say(Beat(1, 0), b"a", after_s=0.25)
    assert hand.workers
    hand.say(Beat(1, 0), b"a", after_s=0.25)
    assert not hand.workers
    assert f"took over {allowed_s:g} s" in hand.log.notes[-1].text


@pytest.mark.parametrize(("token_s", "busy_s"), [(0.0, 0.0), (0.05, 16.0)])
def test_who_falls_silent_in_a_step_may_be_busy_with_it(token_s: float, busy_s: float) -> None:
    """Twenty seconds are allowed for it and four of silence are over: sixteen until it can say that it is there."""
    hand = several("a")
    hand.scheduler(b"a").pacing.learn(0, 100, 100 * token_s)
    hand.submit(PROMPT, max_tokens=3)
    hand.handle(Tick(), after_s=SETTINGS.silence_s)
    assert [(said.peers, said.busy_s) for said in hand.log.stuck] == [((b"a",), pytest.approx(busy_s))]


def test_one_hiccup_allows_no_step_more_than_an_hour() -> None:
    hand = several("a")
    hand.scheduler(b"a").pacing.learn(0, 100, 1e6)
    hand.submit(PROMPT, max_tokens=3)
    assert hand.workers[b"a"].plans[0].allowed_s == 3600.0


def test_a_connection_that_ended_makes_the_core_ask_everybody() -> None:
    hand = several("a", "b")
    num_sent = len(hand.log.sent)
    hand.handle(Disturbed(), after_s=0.3)
    assert [send.peer for send in hand.log.sent[num_sent:] if isinstance(send.message, Beat)] == [b"a", b"b"]


def test_a_slow_group_slows_nobody() -> None:
    """One answers nothing at all; the other's requests come to their ends all the same."""
    hand = several("stuck", "well")
    requests = [hand.submit((i, i), max_tokens=6) for i in range(8)]
    mine = [request for request in requests if placed(hand, request) == "well"]
    assert 0 < len(mine) < 8
    while hand.workers[b"well"].plans:
        hand.land(b"well")
    hand.check(*mine)
    late = hand.submit((50,), max_tokens=2)
    assert placed(hand, late) == "well"


# --- who ends workers


def poisoned(num_others: int, is_by_failure: bool = False) -> tuple[Hand, int, list[int], int]:
    """A request that ends whoever computes it, among others; until it is recognized. Returns also how many it took."""
    hand = several("w")
    guilty = hand.submit((666, 1), max_tokens=6)
    others = [hand.submit((i, i), max_tokens=9) for i in range(num_others)]
    life = deaths = 0
    peer = b"w"
    while not hand.engine.is_idle:
        plan = hand.workers[peer].plans[0]
        rows = {row for home in homes(hand) for g in home.scheduler.line.running if g.request_id == guilty
                for row in [s.row for s in g.live]}  # fmt: skip
        if not rows & set(plan.rows):
            hand.land(peer)
            continue
        deaths, life = deaths + 1, life + 1
        event = Left(peer, "died")
        hand.say(StepFailed(plan.lease, plan.step, "boom"), peer) if is_by_failure else hand.handle(event)
        peer = b"w-%d" % life
        hand.say_hello(hello(name="w"), peer)
    return hand, guilty, others, deaths


@pytest.mark.parametrize("is_by_failure", [False, True])
@pytest.mark.parametrize("num_others", [0, 1, 6])
def test_a_poisonous_request_fails_by_itself(num_others: int, is_by_failure: bool) -> None:
    hand, guilty, others, deaths = poisoned(num_others, is_by_failure)
    assert deaths == 3, "twice in the blast, and once alone"
    assert hand.log.finished[guilty, 0].message == POISON
    assert hand.reason(guilty) is FinishReason.ERROR
    hand.check(*others)
    assert hand.engine.snapshot().poison_requests == 1
    assert [note.kind for note in hand.log.notes].count(NoteKind.POISON) == 1


def test_suspects_are_computed_one_at_a_time_and_the_innocent_go_on_together() -> None:
    hand = several("w")
    submits = [hand.new_submit((i, i), max_tokens=5) for i in range(3)]
    requests = [submit.request_id for submit in submits]
    hand.handle(*submits)
    for life in range(2):
        hand.handle(Left(b"w" if not life else b"w-0", "died"))
        hand.say_hello(hello(name="w"), b"w-%d" % life)
    widths = []
    while any(not hand.tokens(request) for request in requests):
        widths.append(len(hand.workers[b"w-1"].plans[0].rows))
        hand.land(b"w-1")
    assert set(widths) == {1}
    hand.run()
    hand.check(*requests)
    assert max(len(plan.rows) for plan in hand.workers[b"w-1"].seen) == 3


def test_whoever_goes_on_between_two_losses_is_no_suspect() -> None:
    hand = several("w")
    request, peer = hand.submit((1, 2), max_tokens=12), b"w"
    for life in range(8):
        while len(hand.tokens(request)) <= life:
            hand.land(peer)
        hand.handle(Left(peer, "died"))
        peer = b"w-%d" % life
        hand.say_hello(hello(name="w"), peer)
        assert hand.engine._homes[peer].scheduler.probe is None
    hand.run()
    hand.check(request)


def test_a_worker_that_leaves_of_its_own_will_blames_nobody() -> None:
    hand = several("w")
    request, peer = hand.submit((1, 2), max_tokens=4), b"w"
    for life in range(4):
        hand.say(Goodbye("restarted"), peer)
        peer = b"w-%d" % life
        hand.say_hello(hello(name="w"), peer)
    hand.handle(Tick())
    hand.run()
    hand.check(request)
