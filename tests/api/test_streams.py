"""Streams without sockets: effects in, deltas and events out."""

import asyncio
from collections.abc import Sequence

import pytest

from kilburn.controller.answer import Answer
from kilburn.controller.choice import Ask, Delta
from kilburn.controller.core.events import Cancel, Emit, Event, Finished, Refusal, Refused, Started, Stop, Submit
from kilburn.controller.onlookers import Onlookers
from kilburn.controller.story import Chronicle
from kilburn.controller.streams import Streams, TextEffect
from kilburn.shared.sampling import Sampling
from kilburn.shared.types import FinishReason
from tests.api.vocabularies import byte_level
from tests.api.world import EOS, ids_of

TEXT = byte_level()
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


class Bench:
    """Streams whose engine is the test."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.streams = Streams(self.events.append, TEXT.detokenizer, Chronicle(lambda: 0.0), Onlookers())

    async def ask(self, *asks: Ask) -> Answer:
        asking = asyncio.ensure_future(self.streams.ask(asks))
        await asyncio.sleep(0)
        self.streams.turn_ended()
        return await asking

    def perform(self, effect: TextEffect) -> None:
        self.streams.perform(effect, asyncio.get_running_loop().time())

    def say(self, request_id: int, text: str, index: int = 0) -> None:
        for id in ids_of(text):
            self.perform(Emit([request_id], [index], [id]))
        self.streams.turn_ended()

    def finish(self, request_id: int, reason: FinishReason, index: int = 0) -> None:
        self.perform(Finished(request_id, index, reason))
        self.streams.turn_ended()


def ask(stops: Sequence[str] = (), n: int = 1, **sampling: object) -> Ask:
    return Ask([5], 100, Sampling(stop_ids=(EOS,), **sampling), n=n, stops=tuple(stops))  # type: ignore[arg-type]


async def test_a_reader_that_comes_late_gets_one_delta() -> None:
    bench = Bench()
    answer = await bench.ask(ask())
    (submit,) = bench.events
    assert isinstance(submit, Submit)
    for _ in range(50):
        bench.say(submit.request_id, "hello world ")
    (delta,) = await answer.deltas()
    assert delta == Delta(0, "hello world " * 50, [], None)
    bench.say(submit.request_id, "x")
    bench.finish(submit.request_id, LENGTH)
    assert await answer.deltas() == [Delta(0, "x", [], LENGTH)]
    assert answer.is_over
    assert await answer.deltas() == []
    assert bench.streams.num_open == 0


async def test_the_outbox_is_what_readers_of_streams_have_not_taken() -> None:
    bench = Bench()
    streamed, whole = await bench.ask(ask()), await bench.ask(ask())
    bench.say(1, "x")
    await streamed.deltas()
    assert (bench.streams.num_answers, bench.streams.outbox_characters()) == (2, 0)
    bench.say(1, "hello world")
    bench.say(2, "hello world")  # nobody could take that before its end
    assert bench.streams.outbox_characters() == len("hello world")
    bench.finish(1, LENGTH)
    assert bench.streams.outbox_characters() == len("hello world"), "over, and still to be read"
    await streamed.deltas()
    assert bench.streams.outbox_characters() == 0
    for answer in (streamed, whole):
        bench.streams.leave(answer)
    assert bench.streams.num_answers == 0


async def test_a_reader_that_waits_is_woken() -> None:
    bench = Bench()
    answer = await bench.ask(ask())
    waiting = asyncio.ensure_future(answer.deltas())
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.say(1, "x")
    assert [delta.text for delta in await waiting] == ["x"]
    whole = asyncio.ensure_future(answer.whole())
    await asyncio.sleep(0)
    bench.finish(1, STOP)
    assert await whole == [Delta(0, "", [], STOP)]


async def test_after_its_stop_string_a_sequence_is_not_listened_to() -> None:
    bench = Bench()
    answer = await bench.ask(ask(["stop"], n=2))
    bench.say(1, "so stop it")
    assert bench.events[1:] == [Stop(1, 0)], "at once, and once"
    num_tokens = answer.choices[0].num_tokens
    bench.say(1, "more")
    bench.finish(1, LENGTH)
    assert await answer.deltas() == [Delta(0, "so ", [], STOP, stop="stop")]
    assert answer.choices[0].num_tokens == num_tokens < len(ids_of("so stop it"))
    assert not answer.is_over, "its sister goes on"
    bench.say(1, "fine", index=1)
    bench.finish(1, LENGTH, index=1)
    assert await answer.deltas() == [Delta(1, "fine", [], LENGTH)]
    assert answer.is_over
    finished = bench.streams.counts.finished
    assert {reason: number for reason, number in finished.items() if number} == {LENGTH: 1}


async def test_a_stop_string_in_the_last_letters() -> None:
    """The engine ends the sequence in the same turn: the reason is the text's, and no Stop is needed any more."""
    bench = Bench()
    answer = await bench.ask(ask(["\ufffd"]))
    half = ids_of("\U0001f600")[:2]
    for id in (*ids_of("ab"), *half):
        bench.perform(Emit([1], [0], [id]))
    bench.finish(1, LENGTH)
    assert await answer.deltas() == [Delta(0, "ab", [], STOP, stop="\ufffd")]


@pytest.mark.parametrize("when", ["before a word", "between words", "after the stop string of one", "after the end"])
async def test_leaving_cancels_what_is_still_open(when: str) -> None:
    bench = Bench()
    answer = await bench.ask(ask(["stop"], n=2), ask())
    if when != "before a word":
        bench.say(1, "one two")
    if when == "after the stop string of one":
        bench.say(1, "stop")
    if when == "after the end":
        for request_id, index in ((1, 0), (1, 1), (2, 0)):
            bench.finish(request_id, LENGTH, index)
    bench.events.clear()
    bench.streams.leave(answer)
    bench.streams.leave(answer)
    assert bench.events == ([] if when == "after the end" else [Cancel(1), Cancel(2)])
    assert bench.streams.num_open == 0
    bench.say(1, "late")
    bench.finish(1, FinishReason.CANCELLED)
    bench.say(99, "never known")


async def test_a_client_that_leaves_before_the_engine_heard_of_it() -> None:
    bench = Bench()
    asking = asyncio.ensure_future(bench.streams.ask([ask()]))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert bench.events[1:] == [Cancel(1)]
    bench.streams.turn_ended()


async def test_one_refused_prompt_refuses_all() -> None:
    bench = Bench()
    answer = await bench.ask(ask(), ask(), ask())
    refused = Refused(2, Refusal.QUEUE_FULL, "full")
    waiting = asyncio.ensure_future(answer.deltas())
    await asyncio.sleep(0)
    bench.perform(refused)
    assert await waiting == []
    assert answer.refused == refused
    assert answer.is_over
    assert bench.events[3:] == [Cancel(1), Cancel(3)]
    assert bench.streams.num_open == 0


async def test_cached_tokens_and_counts() -> None:
    bench = Bench()
    answer = await bench.ask(ask(), Ask([1, 2, 3], 5, Sampling()))
    bench.perform(Started(1, 0))
    bench.perform(Started(2, 2))
    bench.say(2, "ab")
    assert (answer.cached_tokens, answer.num_prompt_tokens, answer.num_tokens) == (2, 4, len(ids_of("ab")))
    counts = bench.streams.counts
    assert (counts.prompt_tokens, counts.cached_tokens, counts.output_tokens) == (4, 2, len(ids_of("ab")))


async def test_failing_all_ends_every_answer_with_an_error() -> None:
    bench = Bench()
    first, second = await bench.ask(ask(n=2)), await bench.ask(ask())
    bench.say(1, "ab", index=1)
    bench.streams.cut_short("broken")
    assert [(d.index, d.text, d.finish, d.message) for d in await first.whole()] == [
        (0, "", FinishReason.CANCELLED, "broken"),
        (1, "ab", FinishReason.CANCELLED, "broken"),
    ]
    assert [d.finish for d in await second.deltas()] == [FinishReason.CANCELLED]
    assert bench.streams.num_open == 0
    assert bench.events[-2:] == [Cancel(1), Cancel(2)]


async def test_a_fault_in_one_text_fails_that_request_only() -> None:
    bench = Bench()
    first, second = await bench.ask(ask()), await bench.ask(ask())
    bench.say(1, "ab")
    bench.perform(Emit([1], [0], [-5]))  # no id that any tokenizer takes
    bench.say(2, "fine")
    bench.finish(2, LENGTH)
    (broken,) = await first.whole()
    assert (broken.finish, broken.text) == (FinishReason.ERROR, "ab")
    assert bench.events[-1] == Cancel(1)
    assert await second.whole() == [Delta(0, "fine", [], LENGTH)]


class Shelf:
    """An outlet that keeps what it is told."""

    def __init__(self) -> None:
        self.is_clear = True
        self.texts: list[str] = []

    def tell(self, deltas: Sequence[Delta]) -> None:
        if deltas[0].text == "bad":
            raise KeyError("what cannot be told")
        self.texts += [delta.text for delta in deltas]


async def test_text_takes_the_short_way_and_all_else_wakes_whoever_waits() -> None:
    bench, shelf = Bench(), Shelf()
    answer = await bench.ask(ask(n=2))
    answer.outlet = shelf
    bench.say(1, "early ")  # nobody waits yet: it is kept for whoever comes
    assert [delta.text for delta in await answer.deltas()] == ["early "]
    waiting = asyncio.ensure_future(answer.deltas())
    await asyncio.sleep(0)
    for _ in range(3):
        bench.say(1, "on ")
        await asyncio.sleep(0)
    assert not waiting.done()
    shelf.is_clear = False
    bench.say(1, "slow ")
    bench.say(1, "reader ")  # those who were woken own all that comes before they wait again
    shelf.is_clear = True
    bench.say(1, "here ", index=1)
    assert [(d.index, d.text) for d in await waiting] == [(0, "slow reader "), (1, "here ")]
    waiting = asyncio.ensure_future(answer.deltas())
    await asyncio.sleep(0)
    bench.finish(1, LENGTH)
    assert await waiting == [Delta(0, "", [], LENGTH)]
    waiting = asyncio.ensure_future(answer.deltas())
    await asyncio.sleep(0)
    bench.say(1, "still ", index=1)
    assert shelf.texts == ["on "] * 3 + ["still "]
    bench.say(1, "bad", index=1)
    with pytest.raises(KeyError):
        await waiting
    bench.streams.leave(answer)
