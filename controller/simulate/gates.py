"""What stands between clients and an engine where memory is not paged: requests wait until their memory is reserved.

    Open      nobody is held back: blocks on demand, which is the engine's own way
    Reserved  first come, first served, each as soon as its policy (reservations.py) has a piece for every sequence
    Batched   as Reserved, but a batch at a time: nobody joins it, and all leave with the last (request-level batching)

Behind a gate the engine is as ever, over a pool that is never short: the scheduler, the machine and the model are the
same for every policy, and only memory differs. A batch's rows go on until its longest sequence ends, since that is what
padding means; so Batched asks for as much of everybody as of the longest in the batch.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from kilburn.controller.core.events import Submit
from kilburn.controller.simulate.reservations import Held, Reservation, Slots, Want
from kilburn.shared.types import LawBroken

NumFilled = Callable[[int], int]  # request -> slots that hold the KV of a token, a sequence


class Gate(Protocol):
    def arrives(self, submit: Submit) -> None: ...

    def let_in(self, now: float) -> Iterator[Submit]:
        """Those who may go to the engine now."""

    def ended(self, request_id: int) -> None: ...

    def slots(self, num_filled: NumFilled) -> Slots | None:
        """The pool at this moment; None where the engine's own pool is the pool."""

    @property
    def num_held(self) -> int: ...


class Open:
    """Nobody is held back."""

    def __init__(self) -> None:
        self._arrived: list[Submit] = []

    def arrives(self, submit: Submit) -> None:
        self._arrived.append(submit)

    def let_in(self, now: float) -> Iterator[Submit]:
        arrived, self._arrived = self._arrived, []
        yield from arrived

    def ended(self, request_id: int) -> None:
        pass

    def slots(self, num_filled: NumFilled) -> Slots | None:
        return None

    @property
    def num_held(self) -> int:
        return 0


class Reserved:
    """See the file's head."""

    def __init__(self, policy: Reservation, max_len: int, max_rows: int) -> None:
        self.policy, self._max_len, self._max_rows = policy, max_len, max_rows
        self._waiting: deque[Submit] = deque()
        self._held: dict[int, list[Held]] = {}
        self._num_rows = 0

    @property
    def num_held(self) -> int:
        return len(self._waiting)

    def want_of(self, submit: Submit) -> Want:
        return Want(len(submit.prompt), submit.max_tokens, self._max_len)

    def arrives(self, submit: Submit) -> None:
        if not self.policy.can_ever(self.want_of(submit)) or submit.width > self._max_rows:
            raise LawBroken(f"{self.policy.name} can never hold request {submit.request_id} in its pool")
        self._waiting.append(submit)

    def let_in(self, now: float) -> Iterator[Submit]:
        while self._waiting and self._reserve(self._waiting[0]):
            yield self._waiting.popleft()

    def _reserve(self, submit: Submit) -> bool:
        """A piece for every sequence, or nothing."""
        want, held = self.want_of(submit), list[Held]()
        if self._num_rows + submit.width > self._max_rows:
            return False
        while len(held) < submit.width:
            if not self.policy.can_reserve(want):
                for one in held:
                    self.policy.free(one)
                if not self._held:
                    raise LawBroken(f"{self.policy.name} cannot hold request {submit.request_id} even alone")
                return False
            held.append(self.policy.reserve(want))
        self._held[submit.request_id] = held
        self._num_rows += submit.width
        return True

    def ended(self, request_id: int) -> None:
        for held in self._held.pop(request_id, ()):
            self._num_rows -= 1
            self.policy.free(held)

    def slots(self, num_filled: NumFilled) -> Slots | None:
        for request_id, held in self._held.items():
            for one in held:
                one.num_filled = min(num_filled(request_id), one.capacity)
        return self.policy.slots()


class Batched(Reserved):
    """See the file's head. Who ended keeps its memory until all have."""

    def __init__(self, policy: Reservation, max_len: int, max_rows: int) -> None:
        super().__init__(policy, max_len, max_rows)
        self._running: set[int] = set()

    def let_in(self, now: float) -> Iterator[Submit]:
        if self._running:
            return
        batch = list(super().let_in(now))
        longest = max((submit.max_tokens for submit in batch), default=0)
        for submit in batch:
            self._running.add(submit.request_id)
            # Nobody's answer is longer than asked for; what is computed beyond it is padding.
            most = min(longest, self._max_len - len(submit.prompt))
            yield replace(submit, max_tokens=max(most, submit.max_tokens))

    def ended(self, request_id: int) -> None:
        self._running.discard(request_id)
        if not self._running:
            for number in list(self._held):
                super().ended(number)
