"""What the engine says of sequences becomes what clients read: text, reasons, counts.

    Streams.ask  -> Submit ---> engine ---> Refused | Started | Emit | Finished ---> Streams.perform
                                  ^                                                      |
                                  +--- Stop (its stop string is complete) <--------------+--> Answer -> api

An *answer* is all that one HTTP call waits for: the choices of one prompt or of several (choice.py). What the engine
still says of a sequence whose choice has ended is not listened to.

Nothing here waits for a reader. What a slow one has not taken grows into one longer delta, bounded by the answer
itself, and delays nobody.
What this file does not know: HTTP, JSON, which model, how blocks are kept.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kilburn.controller.choice import Ask, Choice, Delta
from kilburn.controller.core.events import Beam, Cancel, Emit, Event, Finished, Refused, Started, Stop, Submit
from kilburn.controller.detokenize import Detokenizer
from kilburn.shared.types import FinishReason

log = logging.getLogger("kilburn")

TextEffect = Refused | Started | Emit | Finished | Beam


class Answer:
    """All that one call waits for."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.cached_tokens = 0
        self.choices: list[Choice] = []
        self.kept: list[tuple[int, int, int]] = []  # of each prompt: [first, end) of its choices, how many to keep
        self.refused: Refused | None = None
        self.request_ids: list[int] = []
        self.num_open = 0  # choices that go on
        self._news: list[Choice] = []
        self._heard: asyncio.Future[None] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def is_over(self) -> bool:
        """Nothing more will come, and all that came was taken."""
        return (self.num_open == 0 or self.refused is not None) and not self._news

    def tell(self, choice: Choice) -> None:
        """This choice has news."""
        if choice not in self._news:  # few choices: a list is quicker than a set, and keeps the order
            self._news.append(choice)
        self.wake()

    def wake(self) -> None:
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)

    async def deltas(self) -> list[Delta]:
        """What is new, once anything is. [] when the answer is over."""
        while not self._news and not self.is_over:
            self._heard = asyncio.get_running_loop().create_future()
            await self._heard
        news, self._news = self._news, []
        return [choice.take() for choice in news]

    async def whole(self) -> list[Delta]:
        """Each choice as one delta, in order of index, once all have ended."""
        while self.num_open and self.refused is None:
            self._heard = asyncio.get_running_loop().create_future()
            await self._heard
        self._news.clear()
        return [choice.take() for choice in self.choices]

    def best(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Of the whole answer's deltas those that are kept: where more were drawn than asked for, the likeliest.

        Likeliest per token, as OpenAI has it: the sum alone would favour whoever says least.
        """
        best: list[Delta] = []
        for first, end, num_kept in self.kept:
            places = list(range(first, end))
            if num_kept < len(places):
                places.sort(key=lambda place: -self.choices[place].mean_logprob)  # stable: of equals, the first drawn
            best += [deltas[place] for place in places[:num_kept]]
        return [replace(delta, index=index) for index, delta in enumerate(best)]


@dataclass(slots=True)
class _Open:
    """A request that the engine works on."""

    answer: Answer
    choices: list[Choice]
    num_open: int  # choices that go on
    num_prompt: int


@dataclass(slots=True)
class Counts:
    """What went through, since the start. Only ever grows."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: dict[str, int] = field(default_factory=dict)  # by how they ended

    def ended(self, how: str) -> None:
        self.requests[how] = self.requests.get(how, 0) + 1


class Streams:
    """The requests that are under way. `post` hands an event to the engine, in this turn of the loop or the next."""

    def __init__(self, post: Callable[[Event], None], detokenizer: Callable[[bool], Detokenizer]) -> None:
        self._post = post
        self._detokenizer = detokenizer
        self.ids = itertools.count(1)  # of whatever the engine is asked for
        self._open: dict[int, _Open] = {}
        self._unheard: list[asyncio.Future[None]] = []
        self.counts = Counts()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def ask(self, asks: Sequence[Ask]) -> Answer:
        """Hands prompts to the engine and returns when it has heard of them: a refusal at the door is known then."""
        answer = Answer(sum(len(ask.prompt) for ask in asks))
        for ask in asks:
            request_id = next(self.ids)
            first = len(answer.choices)
            choices = [Choice(first + i, ask, self._detokenizer(ask.skip_special)) for i in range(ask.n)]
            answer.choices += choices
            answer.kept.append((first, first + ask.n, ask.n if ask.keep is None else ask.keep))
            answer.request_ids.append(request_id)
            answer.num_open += ask.n
            self._open[request_id] = _Open(answer, choices, ask.n, len(ask.prompt))
            for choice in choices:
                if choice.has_news:
                    answer.tell(choice)
            about = (ask.prompt, ask.max_tokens, ask.sampling, ask.n, ask.priority, ask.salt, ask.beams)
            self._post(Submit(request_id, *about))
        heard = asyncio.get_running_loop().create_future()
        self._unheard.append(heard)
        try:
            await heard
        except asyncio.CancelledError:
            self.leave(answer)
            raise
        return answer

    def turn_ended(self) -> None:
        """The engine has handled every event posted so far."""
        for heard in self._unheard:
            if not heard.done():
                heard.set_result(None)
        self._unheard.clear()

    def leave(self, answer: Answer) -> None:
        """Nobody waits for this answer any more. Frees whatever it still holds; no effect on one that is over."""
        for request_id in answer.request_ids:
            if self._open.pop(request_id, None) is not None:
                self.counts.ended("cancelled")
                self._post(Cancel(request_id))

    def cut_short(self, message: str) -> None:
        """The service stops: ends every answer with an error, and frees what it holds."""
        for request_id, request in list(self._open.items()):
            self._fail(request_id, request, message, FinishReason.CANCELLED)

    def _fail(self, request_id: int, request: _Open, message: str, reason: FinishReason = FinishReason.ERROR) -> None:
        for choice in request.choices:
            if choice.finish is None:
                choice.fail(message, reason)
                self._ended(request_id, request, choice)
        self._post(Cancel(request_id))

    def perform(self, effect: TextEffect) -> None:
        """Fulfils one of the engine's wishes. A fault on the way fails that request, and no other."""
        request = self._open.get(effect.request_id)
        if request is None:
            return  # the client left, or every choice has met its stop string
        try:
            self._tell(effect, request)
        except Exception:
            log.exception("the text of a request could not be made")
            self._fail(effect.request_id, request, "the server could not put this answer into text")

    def _tell(self, effect: TextEffect, request: _Open) -> None:
        if type(effect) is Emit:
            choice = request.choices[effect.index]
            if choice.finish is not None:
                return
            self.counts.output_tokens += 1
            if choice.feed(effect.token, effect.logprobs):
                self._post(Stop(effect.request_id, effect.index))
                self._ended(effect.request_id, request, choice)
            elif choice.has_news:
                request.answer.tell(choice)
        elif type(effect) is Beam:
            choice = request.choices[effect.index]
            self.counts.output_tokens += len(effect.tokens)
            choice.become(effect)
            self._ended(effect.request_id, request, choice)
        elif type(effect) is Finished:
            choice = request.choices[effect.index]
            if choice.finish is None:
                choice.end(effect.reason, effect.message)
                self._ended(effect.request_id, request, choice)
        elif type(effect) is Started:
            request.answer.cached_tokens += effect.cached_tokens
            self.counts.cached_tokens += effect.cached_tokens
            self.counts.prompt_tokens += request.num_prompt
        elif type(effect) is Refused:
            del self._open[effect.request_id]
            self.counts.ended(f"refused: {effect.refusal.value}")
            request.answer.refused = effect
            self.leave(request.answer)  # of several prompts one refused is all refused
            request.answer.wake()

    def _ended(self, request_id: int, request: _Open, choice: Choice) -> None:
        request.num_open -= 1
        request.answer.num_open -= 1
        if request.num_open == 0:
            del self._open[request_id]
            self.counts.ended(choice.finish.value if choice.finish else "")
        request.answer.tell(choice)
