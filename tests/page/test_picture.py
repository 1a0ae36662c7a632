"""A whole and the changes after it say the same as the engine, whatever happens in between.

The real core is driven by hand, without sockets. Each event is made, written as JSON, read and applied.
"""

import json
import random
from dataclasses import replace

import pytest

from bench.map import measured
from kilburn.controller.api.layout import to_json
from kilburn.controller.core.events import Left
from kilburn.controller.core.policy import Preemption
from kilburn.controller.noted import LoggedNote
from kilburn.controller.page.picture import Picture, Rates, Totals, change, whole
from kilburn.controller.page.reader import FeedBroken, Reader
from tests.core.driver import Hand, settings_of_depth
from tests.page.watching import expect_same


class Onlooker:
    """Two readers of one engine: one follows changes, the other takes wholes."""

    def __init__(self, hand: Hand) -> None:
        self.hand, self.number = hand, 0
        self.follower = Reader()
        self.before = self.picture()
        self.events = [to_json(whole(self.before, 0))]
        self.follower.apply(json.loads(self.events[0]))

    def picture(self) -> Picture:
        notes = [LoggedNote(i, 0.0, n.kind.value, n.text) for i, n in enumerate(self.hand.log.notes, start=1)]
        return Picture("toy", self.hand.now, self.hand.engine.block_map(), Totals(0, 0, 0), Rates(), tuple(notes))

    def look(self) -> None:
        picture, self.number = self.picture(), self.number + 1
        self.events.append(to_json(change(self.before, picture, self.number)))
        self.follower.apply(json.loads(self.events[-1]))
        newcomer = Reader()
        newcomer.apply(json.loads(to_json(whole(picture, self.number))))
        for reader in (self.follower, newcomer):
            expect_same(reader, picture.map)
        assert [note["text"] for note in self.follower.notes] == [note.text for note in picture.notes[-50:]]
        self.before = picture


def onlooker_of(seed: int) -> Onlooker:
    """Who looked on while requests, cancellations, a named prefix and lost workers came as the dice fell."""
    dice = random.Random(seed)
    settings = replace(settings_of_depth(dice.choice((1, 2))), preemption=dice.choice(list(Preemption)))
    hand = Hand(settings)
    onlooker = Onlooker(hand)
    joined = {"num_blocks": dice.choice((12, 200)), "num_host_blocks": dice.choice((0, 10, 130))}
    hand.join(**joined)
    for _ in range(60):
        match dice.randrange(8):
            case 0 | 1:
                first = dice.choice((0, 0, 100, 200))
                hand.submit(
                    range(first, first + dice.randrange(1, 20)), dice.randrange(1, 16), n=dice.choice((1, 1, 3))
                )
            case 2 if hand.log.tokens:
                hand.cancel(dice.choice(list(hand.log.tokens))[0])
            case 3 if dice.random() < 0.2:
                hand.handle(Left(b"w-1", "killed"))
                hand.join(**joined)
            case 4 if not hand.num_pins:
                hand.pin(range(10))
            case _ if hand.scheduler().flights:
                hand.land()
        if dice.random() < 0.7:
            onlooker.look()
    return onlooker


@pytest.mark.parametrize("seed", range(12))
def test_changes_add_up_to_what_the_engine_says(seed: int) -> None:
    onlooker = onlooker_of(seed)
    onlooker.hand.run()
    onlooker.look()
    assert {row["kind"] for row in onlooker.follower.requests.values()} <= {"prefix"}


def test_a_change_is_as_long_as_what_changed() -> None:
    hand = Hand(settings_of_depth(1))
    hand.join(num_blocks=100_000)
    onlooker = Onlooker(hand)
    assert len(to_json(whole(onlooker.before, 0))) > 100_000
    hand.submit(range(9), max_tokens=20)
    event = change(onlooker.before, onlooker.picture(), 1)
    assert [first for first, _ in event["workers"][0]["runs"]] == [0]
    assert len(to_json(event)) < 2000
    onlooker.look()
    still = change(onlooker.before, onlooker.picture(), 2)
    assert (still["workers"][0]["runs"], still["requests"], still["tables"]) == ([], [], [])
    assert onlooker.picture().shows_the_same(onlooker.before)
    hand.run()


@pytest.mark.parametrize(
    "spoil",
    [
        {"number": 7},
        {"workers": [{"lease": 9}]},
        {"ended": [12]},
        {"requests": [[1]]},
        {"tables": [[1, 0, 1, 0, 5, ""]]},
    ],
)
def test_an_event_that_does_not_fit_is_not_believed(spoil: dict[str, object]) -> None:
    hand = Hand(settings_of_depth(1))
    hand.join()
    onlooker = Onlooker(hand)
    event = json.loads(to_json(change(onlooker.before, onlooker.picture(), 1)))
    with pytest.raises(FeedBroken):
        onlooker.follower.apply(event | spoil)


def test_the_bench_measures_what_a_look_costs() -> None:
    figures = measured(num_blocks=400, num_sequences=8, steps=2)
    assert figures["owned"] + figures["cached"] == 400
    assert 0 < figures["change_bytes"] < figures["whole_bytes"]
    assert figures["look_ms"] > 0
