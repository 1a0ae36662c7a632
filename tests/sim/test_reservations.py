"""The buddy allocator's laws, the accounts of every reservation policy, and what paging wastes beside them."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from kilburn.controller.simulate.buddy import Buddy, Piece, length_for
from kilburn.controller.simulate.fake_daemon import fake_hello
from kilburn.controller.simulate.reservations import Held, Max, Oracle, Paged, Pow2, Reservation, Slots, Want
from kilburn.controller.simulate.saturated import Line, by_engine, by_policy, draw_lengths, mean_shares, slots_of
from kilburn.shared.types import LawBroken

POLICIES: dict[str, Callable[[int], Reservation]] = {
    "max": Max,
    "pow2": Pow2,
    "oracle": Oracle,
    "paged": lambda num_slots: Paged(num_slots, 16),
    "paged by one": lambda num_slots: Paged(num_slots, 1),
}


def sharegpt_like(count: int, most: int = 2048) -> list[tuple[int, int]]:
    """Prompts of 161 tokens and answers of 338 in the mean, as the paper has them of ShareGPT."""
    return draw_lengths(count, 7, mean_prompt=161, mean_output=338, sigma_prompt=1.0, sigma_output=1.0, most=most)


# --- the allocator


class BuddyWorld(RuleBasedStateMachine):
    """Against a model that knows only which slots are whose."""

    pieces = Bundle("pieces")

    def __init__(self) -> None:
        super().__init__()
        self.buddy = Buddy(53)  # arenas of 32, 16, 4 and 1
        self.owner: dict[int, Piece] = {}

    @rule(target=pieces, num_slots=st.integers(1, 40))
    def take(self, num_slots: int) -> Piece | None:
        before = self.buddy.num_free
        if not self.buddy.can_take(num_slots):
            with pytest.raises(LawBroken):
                self.buddy.take(num_slots)
            assert self.buddy.num_free == before
            return None
        piece = self.buddy.take(num_slots)
        assert num_slots <= piece.length == length_for(num_slots) < 2 * num_slots
        assert piece.start % piece.length == 0
        assert piece.end <= 53
        assert not self.owner.keys() & set(range(piece.start, piece.end))
        self.owner |= dict.fromkeys(range(piece.start, piece.end), piece)
        return piece

    @rule(piece=consumes(pieces))
    def give_back(self, piece: Piece | None) -> None:
        if piece is None:
            return
        self.buddy.give_back(piece)
        for slot in range(piece.start, piece.end):
            del self.owner[slot]
        with pytest.raises(LawBroken):
            self.buddy.give_back(piece)

    @invariant()
    def laws_hold(self) -> None:
        self.buddy.validate()
        assert self.buddy.num_free + len(self.owner) == 53
        # Merged as far as can be: whatever aligned, wholly free piece there is can be taken.
        for length in (1, 2, 4, 8, 16, 32):
            starts = range(0, 53 - length + 1, length)
            is_there = any(self.owner.keys().isdisjoint(range(start, start + length)) for start in starts)
            assert self.buddy.can_take(length) == is_there, length


def test_pieces_neither_overlap_nor_stay_split() -> None:
    run_state_machine_as_test(BuddyWorld, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def test_a_buddy_takes_the_lowest_and_the_least_split() -> None:
    buddy = Buddy(24)  # [0, 16) and [16, 24)
    assert buddy.take(5) == Piece(16, 8)
    assert buddy.take(3) == Piece(0, 4)
    assert buddy.take(4) == Piece(4, 4)
    assert buddy.take(9 - 4) == Piece(8, 8)
    assert (buddy.num_free, buddy.largest_free) == (0, 0)
    buddy.give_back(Piece(4, 4))
    assert buddy.largest_free == 4
    buddy.give_back(Piece(0, 4))
    assert buddy.largest_free == 8
    buddy.give_back(Piece(8, 8))
    assert buddy.largest_free == 16


# --- accounts


def test_one_sequence_under_each_policy() -> None:
    want = Want(num_prompt=20, num_output=25, max_len=128)  # 44 slots in the end
    found = {}
    for name, make in POLICIES.items():
        policy = make(256)
        policy.reserve(want)
        found[name] = policy.slots()
    assert found == {
        "max": Slots(20, 24, 84, 128),
        "pow2": Slots(20, 24, 8, 204),  # 20 + 32 kept; the buddy's 64 less those 52 are nobody's
        "oracle": Slots(20, 24, 0, 212),
        "paged": Slots(20, 12, 0, 224),
        "paged by one": Slots(20, 0, 0, 236),
    }
    paged = Paged(256, 16)
    held = paged.reserve(Want(num_prompt=30, num_output=9, max_len=128))
    while not held.is_complete:
        paged.grow(held)
    assert paged.slots() == Slots(38, 0, 10, 208)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_slot_is_one_of_four(name: str, data: st.DataObject) -> None:
    policy = POLICIES[name](300)
    alive: list[Held] = []
    for _ in range(data.draw(st.integers(1, 40))):
        before = policy.slots()
        match data.draw(st.sampled_from(["reserve", "grow", "grow", "grow", "free"])):
            case "reserve":
                num_prompt = data.draw(st.integers(1, 60))
                want = Want(num_prompt, data.draw(st.integers(1, 64)), max_len=128)
                if policy.can_reserve(want):
                    assert policy.can_ever(want)
                    alive.append(policy.reserve(want))
                    assert policy.slots().used == before.used + num_prompt
                else:
                    with pytest.raises(LawBroken):
                        policy.reserve(want)
                    assert policy.slots() == before
            case "grow" if alive:
                held = data.draw(st.sampled_from(alive))
                if held.is_complete:
                    continue
                if policy.can_grow(held):
                    policy.grow(held)
                    assert policy.slots().used == before.used + 1
                else:
                    assert name.startswith("paged"), "what is reserved is there"
            case "free" if alive:
                policy.free(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        now = policy.slots()
        assert now.total == 300
        assert min(now.used, now.reserved, now.internal, now.external) >= 0
        assert now.used == sum(held.num_filled for held in alive)
    for held in alive:
        policy.free(held)
    assert policy.slots() == Slots(0, 0, 0, 300)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_stands_for_the_pool_serves_everybody_to_the_end(name: str) -> None:
    wants = [Want(a, b, 256) for a, b in sharegpt_like(60, most=256)]
    policy = POLICIES[name](1024)
    line = Line(policy, wants, max_rows=64)
    filled = 0
    while line.waiting or line.running:
        line.admit()
        before = {id(held): held for held in line.running}
        line.step()
        ended = [held for key, held in before.items() if key not in {id(held) for held in line.running}]
        filled += sum(held.want.num_slots for held in ended if held.is_complete)
    # A preempted one comes again with what it said as its prompt, and ends where it would have.
    assert filled == sum(want.num_slots for want in wants)
    assert policy.slots() == Slots(0, 0, 0, 1024)
    assert (line.num_preempted > 0) == name.startswith("paged")


def test_what_can_never_fit_is_said_at_the_door() -> None:
    with pytest.raises(LawBroken, match="can never hold"):
        Line(Max(100), [Want(1, 1, 128)], 4)
    with pytest.raises(LawBroken, match="nobody waited"):
        mean_shares(by_policy(Paged(10_000, 16), [Want(1, 1, 128)], 4))


# --- what it comes to


def test_the_order_of_the_papers_figure_2() -> None:
    wants = [Want(a, b, 2048) for a, b in sharegpt_like(300)]
    shares = {name: mean_shares(by_policy(make(15_700), wants, 256))[0] for name, make in POLICIES.items()}
    used = {name: share["used"] for name, share in shares.items()}
    assert used["max"] < used["pow2"] < used["oracle"] < used["paged"] <= used["paged by one"]
    assert shares["max"]["internal"] > 40  # what nobody will ever use
    assert shares["oracle"]["internal"] == 0  # it knows
    assert shares["pow2"]["external"] > shares["max"]["external"]  # pieces of many sizes do not fit together
    for share in shares.values():
        assert sum(share.values()) == pytest.approx(100)


def test_the_engine_wastes_less_than_four_percent_on_conversations() -> None:
    """The tail of every table is at most a block; on lengths as of ShareGPT that is little, in the mean over time."""
    hello = fake_hello(block_size=16, num_blocks=384, max_rows=64, max_step_tokens=1024, max_len=1024, vocab_size=1000)
    lengths = sharegpt_like(60, most=1024)
    groups = list(by_engine(hello, lengths))
    assert len(groups) > 300
    mean = sum(group.tail_waste for group in groups) / len(groups)
    assert 0 < mean < 0.04
    # Half a block a sequence, of what a sequence has in the mean over time.
    sequences = sum(group.running_sequences for group in groups)
    unused = sum(group.tail_slots for group in groups) / sequences
    assert 6.0 < unused < 9.0
    shares, _ = mean_shares(map(slots_of, groups))
    assert shares["used"] > 80
    # The same lengths in blocks of one slot waste nothing.
    fine = fake_hello(block_size=1, num_blocks=6144, max_rows=64, max_step_tokens=1024, max_len=1024, vocab_size=1000)
    assert all(group.tail_slots == 0 for group in by_engine(fine, lengths[:24]))
