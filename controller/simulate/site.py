"""One life of a controller in a virtual service: a world whose clients come by gateways, and that may end any moment.

    gateway --ask--> [ Submit --> core --> Emit, Finished, Refused ] --events--> gateway
                            judged as any world is

All that the core says to a request is written down as the events that a controller would stream, so that what a client
got can be compared with what some life of some controller said, and must be a beginning of it. When a life ends, what
was under way in it is void; its workers keep their weights and say Hello to the next.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kilburn.controller.api.errors import encoded, failure, refusal
from kilburn.controller.api.sse import DONE, frame
from kilburn.controller.core.events import Beam, Cancel, Effect, Emit, Finished, Names, Refused
from kilburn.controller.registry import Announcement
from kilburn.controller.simulate.agenda import Action, Agenda
from kilburn.controller.simulate.scenario import MODEL, Errand, Scenario
from kilburn.controller.simulate.virtual import World
from kilburn.shared.types import FinishReason


def event_of(choices: list[dict[str, object]]) -> bytes:
    return frame(json.dumps({"choices": choices})).encode()


OPENING = event_of([{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}])


@dataclass(slots=True)
class Reply:
    """What a life said to one request."""

    open: set[int]  # indices that have not ended
    said: bytearray = field(default_factory=bytearray)
    hear: Callable[[bytes, bool], None] | None = None  # of whoever asked, while it listens: bytes, and if it is all
    refused: str = ""  # the code of its refusal


class Site(World):
    """See the file's head. `next_of_all`: lets one thing happen in the service as a whole."""

    def __init__(self, scenario: Scenario, number: int, life: int, agenda: Agenda, next_of_all: Action) -> None:
        super().__init__(scenario, agenda)
        self.number, self.id = number, f"site{number}.{life}"
        self._next_of_all = next_of_all
        self.replies: dict[int, Reply] = {}
        self.names: Callable[[Names], None] = lambda names: None  # who is told what its blocks are called
        self.ended_s: float | None = None

    @property
    def address(self) -> str:
        return f"http://site{self.number}"

    @property
    def is_alive(self) -> bool:
        return self.ended_s is None

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now could be admitted."""
        return any(not view.is_draining and view.leaves_s is None for view in self.judge.leases.views.values())

    @property
    def announcement(self) -> Announcement:
        seen = self.engine.snapshot()
        sizes = tuple(sorted({group.block_size for group in seen.groups}))
        return Announcement(self.address, seen.requests, MODEL, sizes)

    def begin(self, is_first: bool) -> None:
        """Its worker groups join: at first as the scenario says, later when they find it."""
        scenario = self.scenario
        for hello, join_s in zip(scenario.hellos, scenario.joins_s, strict=True):
            wait_s = max(join_s - self.now, 0.0 if is_first else self.rng.uniform(0.0, scenario.silence_s))
            self.after(wait_s, partial(self.born_ranks, hello))
        if not is_first:
            return
        for wish in scenario.pins:
            self.after(wish.at_s, self.pinning(wish))
        for at_s, group in scenario.upheaval.retires:
            self.after(at_s, partial(self.retires, scenario.hellos[group].name))

    def end(self) -> None:
        """The process is gone, and with it all that was under way."""
        self.ended_s = self.now
        self.inbox.clear()
        for reply in self.replies.values():
            reply.hear = None

    def after(self, seconds: float, action: Action) -> None:
        def unless_gone() -> None:
            if self.is_alive:
                action()

        super().after(seconds, unless_gone)

    def _next(self) -> None:
        self._next_of_all()

    # --- requests

    def ask(self, errand: Errand, hear: Callable[[bytes, bool], None]) -> None:
        submit = errand.submit
        self.errands[submit.request_id] = errand
        self.replies[submit.request_id] = Reply(set(range(submit.n)), hear=hear)
        if self.rng.random() < 0.5:
            self._say(submit.request_id, OPENING)
        self.inbox.append(submit)

    def leave(self, request_id: int) -> None:
        """Whoever asked has closed the connection."""
        reply = self.replies.get(request_id)
        if self.is_alive and reply is not None and reply.hear is not None:
            reply.hear = None
            self.inbox.append(Cancel(request_id))

    def walks_away(self, request_id: int) -> None:
        """Nobody: its clients are the gateways', and leave by them."""

    def fulfil(self, effect: Effect) -> None:
        super().fulfil(effect)
        match effect:
            case Emit():
                for drawn in effect.each():
                    choice = {"index": drawn.index, "text": f" {drawn.token}", "finish_reason": None}
                    self._say(drawn.request_id, event_of([choice]))
            case Beam(request_id, index, tokens, reason=reason):
                text = "".join(f" {token}" for token in tokens)
                self._ended(request_id, index, [{"index": index, "text": text, "finish_reason": reason.value}])
            case Finished(request_id, index, FinishReason.ERROR, message):
                self._fails(request_id, encoded(failure(message)))
            case Finished(request_id, index, reason) if reason is not FinishReason.CANCELLED:
                self._ended(request_id, index, [{"index": index, "text": "", "finish_reason": reason.value}])
            case Refused(request_id) if request_id in self.replies:
                error = refusal(effect)
                self.replies[request_id].refused = error.code or ""
                self._fails(request_id, encoded(error))
            case Names():
                self.names(effect)

    def _ended(self, request_id: int, index: int, choices: list[dict[str, object]]) -> None:
        self._say(request_id, event_of(choices))
        self.replies[request_id].open.discard(index)
        if not self.replies[request_id].open:
            self._say(request_id, DONE.encode(), is_all=True)

    def _fails(self, request_id: int, error: str) -> None:
        reply = self.replies[request_id]
        if reply.open:
            reply.open.clear()
            self._say(request_id, frame(error).encode())
            self._say(request_id, DONE.encode(), is_all=True)

    def _say(self, request_id: int, event: bytes, is_all: bool = False) -> None:
        reply = self.replies[request_id]
        reply.said += event
        if reply.hear is not None:
            reply.hear(event, is_all)
            if is_all:
                reply.hear = None
