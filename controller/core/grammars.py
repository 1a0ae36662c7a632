"""The grammars that a worker group has compiled, or was asked to, for the requests that are bound by them.

    needed --Prepare--> asked --Prepared--> ready                  whoever needs it stands in line
                        ^  |  \\--Unpreparable--> nobody gets it    whoever needs it is refused
                        |  |
                        '--'  no answer for so long: asked again, MOST_ASKED times in all, then as if Unpreparable

    nobody needs it any more --Forget-->

A request that waits for a grammar is among those who wait (turns.py), out of the line, at a turn that it keeps. So no
step waits for a compile, and no other request does. A grammar is kept while anybody here needs it, so that whoever is
preempted comes back without asking. Each Prepare has a number and an answer is to a number: one that is late, to a
Prepare that was repeated or whose grammar was forgotten, says nothing.

What this file does not know: what a grammar says.
"""

from dataclasses import dataclass, field
from math import inf

from kilburn.controller.core.sequence import Group
from kilburn.shared.grammar import Grammar
from kilburn.shared.messages import Forget, Prepare
from kilburn.shared.types import LawBroken

MOST_ASKED = 3


@dataclass(slots=True)
class _Held:
    """One grammar that somebody here needs."""

    grammar: Grammar
    users: dict[int, None] = field(default_factory=dict)  # requests
    is_ready: bool = False
    numbers: set[int] = field(default_factory=set)  # of the Prepares that may be answered
    ask_again_at: float | None = None  # None: it was not asked for yet


class Grammars:
    """See the file's head. `speak` says what is to be sent."""

    def __init__(self, lease: int, patience_s: float) -> None:
        self._lease, self._patience_s = lease, patience_s
        self._held: dict[bytes, _Held] = {}
        self._unneeded: list[bytes] = []
        self._num_asked = 0
        self.num_prepared = self.num_failed = 0

    # --- questions

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def deadline(self) -> float:
        """When the worker is to be asked again."""
        times = [held.ask_again_at for held in self._held.values() if held.ask_again_at is not None]
        return min(times, default=inf)

    def validate(self, groups: list[Group]) -> None:
        """`groups`: all that are here. Raises LawBroken."""
        bound = {group.request_id: group for group in groups if group.grammar is not None}
        users = {request_id: held for held in self._held.values() for request_id in held.users}
        if users.keys() != bound.keys():
            raise LawBroken("a grammar is held for nobody, or not for those who need it")
        if any(group.is_preparing == users[request_id].is_ready for request_id, group in bound.items()):
            raise LawBroken("a group waits for a grammar that is ready, or does not for one that is not")

    # --- commands

    def join(self, group: Group) -> bool:
        """The group is here and needs its grammar from now on. True: it is ready, or there is none."""
        grammar = group.grammar
        if grammar is None:
            return True
        held = self._held.get(grammar.digest)
        if held is None:
            held = self._held[grammar.digest] = _Held(grammar)
        held.users[group.request_id] = None
        return held.is_ready

    def leave(self, group: Group) -> None:
        """The group has ended."""
        if group.grammar is None:
            return
        held = self._held[group.grammar.digest]
        held.users.pop(group.request_id, None)
        if not held.users:
            del self._held[group.grammar.digest]
            if held.numbers:
                self._unneeded.append(group.grammar.digest)

    def answered(self, number: int, is_prepared: bool) -> bytes | None:
        """A Prepare was answered. Returns the digest of the grammar that is ready now, or that nobody gets."""
        for digest, held in self._held.items():
            if number in held.numbers and not held.is_ready:
                held.is_ready, held.ask_again_at = is_prepared, None
                held.numbers = {number}
                self.num_prepared += is_prepared
                self.num_failed += not is_prepared
                return digest
        return None

    def overdue(self, now: float) -> list[bytes]:
        """Grammars that were asked for as often as they may be, in vain."""
        late = [
            digest
            for digest, held in self._held.items()
            if len(held.numbers) >= MOST_ASKED and held.ask_again_at is not None and now >= held.ask_again_at
        ]
        for digest in late:
            self._held[digest].ask_again_at = None
            self.num_failed += 1
        return late

    def speak(self, now: float) -> list[Prepare | Forget]:
        """What the worker is to be told now."""
        words: list[Prepare | Forget] = []
        for digest in self._unneeded:
            if digest not in self._held:
                words.append(Forget(self._lease, digest))
        self._unneeded.clear()
        for digest, held in self._held.items():
            is_due = not held.numbers or (held.ask_again_at is not None and now >= held.ask_again_at)
            if is_due and not held.is_ready:
                self._num_asked += 1
                held.numbers.add(self._num_asked)
                held.ask_again_at = now + self._patience_s
                words.append(Prepare(self._lease, self._num_asked, digest, held.grammar.source))
        return words
