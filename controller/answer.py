"""What one HTTP call waits for: the choices of one prompt or of several, and how their news reach its reader.

    a turn of the engine -> choices grow -> pass_on, once a turn
                                              |-- outlet --> written in that very turn, and nobody is woken
                                              '-- wake ----> whoever awaits `deltas` or `whole`

Text takes the short way: a token costs no task's turn. What wants somebody to think (an end, an error, how likely a
prompt was, a reader that does not keep up, a long silence) takes the long one. In both, what is not taken grows into
one longer delta, bounded by the answer itself.
What this file does not know: the engine, HTTP.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kilburn.controller.choice import Choice, Delta
from kilburn.controller.core.events import Refused
from kilburn.controller.timings import Timings


class Outlet(Protocol):
    """Where the text of a stream can go without waiting."""

    @property
    def is_clear(self) -> bool:
        """Whether its reader has taken all that came before."""

    def tell(self, deltas: Sequence[Delta]) -> None: ...


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
        self.is_streamed = False
        self.is_scored = False  # how likely prompts were is a part of it
        self.timings = Timings()  # known at the end
        self.outlet: Outlet | None = None
        self._news: list[Choice] = []
        self._is_plain = True  # the news are text and nothing else
        self._fault: Exception | None = None  # of the outlet
        self._heard: asyncio.Future[None] | None = None
        self._waits_since: float | None = None  # for news, as a stream does

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def is_over(self) -> bool:
        """Nothing more will come, and all that came was taken."""
        return (self.num_open == 0 or self.refused is not None) and not self._news

    # --- news

    def tell(self, choice: Choice, *, is_plain: bool = True) -> None:
        """This choice has news; plain ones are more text."""
        if choice not in self._news:  # few choices: a list is quicker than a set, and keeps the order
            self._news.append(choice)
        if not is_plain:
            self._is_plain = False

    def pass_on(self, now: float) -> None:
        """The turn that brought the news is over."""
        if self._waits_since is None:
            if self.num_open == 0:
                self.wake()
            return
        try:
            if self.outlet is None or not self._is_plain or not self.outlet.is_clear:
                self.wake()
            else:
                news, self._news, self._waits_since = self._news, [], now
                self.outlet.tell([choice.take() for choice in news])
        except Exception as fault:  # for whoever waits, and nobody else
            self._fault = fault
            self.wake()

    def wake(self) -> None:
        """Whoever waits has to look for himself. Until he waits again, all news are his."""
        self._waits_since = None
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)

    def wake_if_silent(self, since: float) -> None:
        """Whoever has waited since then, or longer, may tell its reader that it is still there."""
        if self._waits_since is not None and self._waits_since <= since:
            self.wake()

    # --- for whoever waits

    async def deltas(self) -> list[Delta]:
        """What is new and did not leave by the outlet. [] when the answer is over, or after a long silence."""
        self.is_streamed = True
        if not self._news and not self.is_over:
            loop = asyncio.get_running_loop()
            self._heard, self._waits_since = loop.create_future(), loop.time()
            await self._heard
        if self._fault is not None:
            raise self._fault
        news, self._news, self._is_plain = self._news, [], True
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
