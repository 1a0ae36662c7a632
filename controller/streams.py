"""What the engine says of sequences becomes what clients read: text, reasons, counts.

    Streams.ask  -> Submit ---> engine ---> Refused | Started | Emit | Finished ---> Streams.perform
                                  ^                                                      |
                                  +--- Stop (its stop string is complete) <--------------+--> Answer -> api

An *answer* is all that one HTTP call waits for: the choices of one prompt or of several (answer.py, choice.py). What
the engine still says of a sequence whose choice has ended is not listened to. What a turn brought is passed on when it
is over, once for each answer; nothing here waits for a reader.
What this file does not know: HTTP, JSON, which model, how blocks are kept.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kilburn.controller.answer import Answer
from kilburn.controller.choice import Ask, Choice
from kilburn.controller.core.events import (
    Beam,
    Cancel,
    Drawn,
    Emit,
    Event,
    Finished,
    PromptScored,
    Refused,
    Started,
    Stop,
    Submit,
)
from kilburn.controller.counts import Counts, Pace
from kilburn.controller.detokenize import Detokenizer
from kilburn.controller.onlookers import Onlookers
from kilburn.controller.scores import PromptScores
from kilburn.controller.story import Chronicle
from kilburn.shared.types import FinishReason

log = logging.getLogger("kilburn")

_OfOne = Refused | Started | PromptScored | Drawn | Finished | Beam
TextEffect = Refused | Started | PromptScored | Emit | Finished | Beam


@dataclass(slots=True)
class _Open:
    """A request that the engine works on."""

    answer: Answer
    choices: list[Choice]
    num_open: int  # choices that go on
    num_prompt: int
    pace: Pace
    prefix: str = ""  # that the choices begin with
    scores: PromptScores | None = None  # of the prompt, until all are there


class Streams:
    """The requests that are under way. `post` hands an event to the engine, in this turn of the loop or the next."""

    def __init__(
        self,
        post: Callable[[Event], None],
        detokenizer: Callable[[bool], Detokenizer],
        chronicle: Chronicle,
        onlookers: Onlookers,
    ) -> None:
        self._post = post
        self._chronicle = chronicle
        self._tell_onlookers = onlookers.tell
        self._detokenizer = detokenizer
        self.ids = itertools.count(1)  # of whatever the engine is asked for
        self._open: dict[int, _Open] = {}
        self._unheard: list[asyncio.Future[None]] = []
        self._answers: set[Answer] = set()  # that somebody waits for
        self._told: dict[Answer, None] = {}  # that have news since the last turn, in order
        self.counts = Counts()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_answers(self) -> int:
        """Answers that somebody waits for."""
        return len(self._answers)

    def outbox_characters(self) -> int:
        """Text of streams that their readers have not taken."""
        streamed = [answer for answer in self._answers if answer.is_streamed]
        return sum(choice.num_held_characters for answer in streamed for choice in answer.choices)

    async def ask(self, asks: Sequence[Ask]) -> Answer:
        """Hands prompts to the engine and returns when it has heard of them: a refusal at the door is known then."""
        answer, now = Answer(sum(len(ask.prompt) for ask in asks)), asyncio.get_running_loop().time()
        self._answers.add(answer)
        for ask in asks:
            request_id = next(self.ids)
            first = len(answer.choices)
            choices = [Choice(first + i, ask, self._detokenizer(ask.skip_special)) for i in range(ask.n)]
            answer.choices += choices
            answer.kept.append((first, first + ask.n, ask.n if ask.keep is None else ask.keep))
            answer.request_ids.append(request_id)
            answer.num_open += ask.n
            pace = Pace(self.counts, ask.n, ask.max_tokens, now)
            request = _Open(answer, choices, ask.n, len(ask.prompt), pace, ask.prefix)
            self._open[request_id] = request
            if ask.is_scored:
                answer.is_scored = True
                echo = self._detokenizer(ask.skip_special) if ask.prefix else None
                request.scores = PromptScores(ask.prompt, echo)
                self._begin_if_scored(request)
            for choice in choices:
                if choice.has_news:
                    self._has_news(answer, choice)
            self._tell_onlookers(self._chronicle.begin, request_id, ask)
            about = (ask.prompt, ask.max_tokens, ask.sampling, ask.n, ask.priority, ask.salt, ask.beams)
            times, whose = (ask.queue_s, ask.request_s), (ask.tenant, ask.weight)
            self._post(Submit(request_id, *about, *times, *whose, ask.grammar))
        heard = asyncio.get_running_loop().create_future()
        self._unheard.append(heard)
        try:
            await heard
        except asyncio.CancelledError:
            self.leave(answer)
            raise
        return answer

    def displaced(self, request_id: int, now: float) -> None:
        """Its worker group is gone, or leaves. The client is to notice no more than a pause."""
        request = self._open.get(request_id)
        if request is not None:
            request.pace.displaced(now)

    def turn_ended(self) -> None:
        """The engine has handled every event posted so far."""
        for heard in self._unheard:
            if not heard.done():
                heard.set_result(None)
        self._unheard.clear()
        told, self._told = self._told, {}
        now = asyncio.get_running_loop().time()
        for answer in told:
            answer.pass_on(now)

    def keep_alive(self, silence_s: float) -> None:
        """Streams that have said nothing for so long get to say that they are there."""
        since = asyncio.get_running_loop().time() - silence_s
        for answer in self._answers:
            answer.wake_if_silent(since)

    def leave(self, answer: Answer) -> None:
        """Nobody waits for this answer any more. Frees whatever it still holds; no effect on one that is over."""
        self._answers.discard(answer)
        self._told.pop(answer, None)
        self._give_up(answer)

    def _give_up(self, answer: Answer) -> None:
        for request_id in answer.request_ids:
            if self._open.pop(request_id, None) is not None:
                self.counts.finished[FinishReason.CANCELLED] += 1
                self._post(Cancel(request_id))

    def cut_short(self, message: str) -> None:
        """The service stops: ends every answer with an error, and frees what it holds."""
        now = asyncio.get_running_loop().time()
        for request_id, request in list(self._open.items()):
            self._fail(request_id, request, message, now, FinishReason.CANCELLED)

    def _fail(
        self, request_id: int, request: _Open, message: str, now: float, reason: FinishReason = FinishReason.ERROR
    ) -> None:
        self._tell_onlookers(self._chronicle.failed, request_id, message, reason)
        for choice in request.choices:
            if choice.finish is None:
                choice.fail(message, reason)
                self._ended(request_id, request, choice, now)
        self._post(Cancel(request_id))

    def perform(self, effect: TextEffect, now: float) -> None:
        """Fulfils one of the engine's wishes. A fault on the way fails its request, and no other.

        `now` is the time of the turn, on the clock of the loop.
        """
        if isinstance(effect, Emit):
            for drawn in effect.each():
                self._perform_one(drawn, now)
        else:
            self._perform_one(effect, now)

    def _perform_one(self, effect: _OfOne, now: float) -> None:
        request = self._open.get(effect.request_id)
        if request is None:
            return  # the client left, or every choice has met its stop string
        try:
            self._tell(effect, request, now)
        except Exception:
            log.exception("the text of a request could not be made")
            self._fail(effect.request_id, request, "the server could not put this answer into text", now)

    def _tell(self, effect: _OfOne, request: _Open, now: float) -> None:
        if type(effect) is Drawn:
            choice = request.choices[effect.index]
            if choice.finish is not None:
                return
            self._tell_onlookers(request.pace.token, effect.index, now)
            if choice.feed(effect.token, effect.logprobs):
                self._post(Stop(effect.request_id, effect.index))
                self._ended(effect.request_id, request, choice, now)
            elif choice.has_news:
                self._has_news(request.answer, choice)
        elif type(effect) is Beam:
            choice = request.choices[effect.index]
            self._tell_onlookers(request.pace.whole, effect.index, len(effect.tokens), now)
            choice.become(effect)
            self._ended(effect.request_id, request, choice, now)
        elif type(effect) is Finished:
            choice = request.choices[effect.index]
            if choice.finish is None:
                choice.end(effect.reason, effect.message)
                self._ended(effect.request_id, request, choice, now)
        elif type(effect) is PromptScored:
            if request.scores is not None:
                request.scores.add(effect)
                self._begin_if_scored(request)
        elif type(effect) is Started:
            request.answer.cached_tokens += effect.cached_tokens
            self._tell_onlookers(request.pace.started, request.num_prompt, effect.cached_tokens, now)
        elif type(effect) is Refused:
            del self._open[effect.request_id]
            request.answer.refused = effect
            self._give_up(request.answer)  # of several prompts one refused is all refused
            request.answer.wake()

    def _has_news(self, answer: Answer, choice: Choice, *, is_plain: bool = True) -> None:
        answer.tell(choice, is_plain=is_plain)
        self._told[answer] = None

    def _begin_if_scored(self, request: _Open) -> None:
        """Once the prompt's log probabilities are all there."""
        if request.scores is not None and request.scores.is_complete:
            for choice in request.choices:
                choice.begin(request.prefix, request.scores)
                self._has_news(request.answer, choice, is_plain=False)
            request.scores = None

    def _ended(self, request_id: int, request: _Open, choice: Choice, now: float) -> None:
        request.num_open -= 1
        request.answer.num_open -= 1
        if request.num_open == 0:
            del self._open[request_id]
            self._tell_onlookers(request.pace.ended, choice.finish or FinishReason.ERROR, now)
        self._has_news(request.answer, choice, is_plain=False)
