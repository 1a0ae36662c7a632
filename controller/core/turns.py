"""Whose turn it is: the groups that wait on one worker group, and the order in which they are admitted.

    named prefixes   first of all, in order of arrival
    suspects         who may have ended a worker: each is computed alone, and nobody is admitted before (blame.py)
    returned         were on the rows before: preempted, or their worker was lost
    fresh            never ran
    aside            fresh ones, passed over since somebody is computing what they begin with (forming.py)
    preparing        wait for their grammar, returned ones too (grammars.py)

A group's *turn* is fixed when it arrives, and the lower one goes first:

    turn = (time of arrival + priority x aging_s, arrival)

so a level of priority is worth `aging_s` seconds, and whoever waits rises by one level in each of them: the difference
between two who wait never changes, and so neither does their order. Nobody starves: of those who arrive after a group,
only those go before it who arrive within (its priority - theirs) x aging_s. With an aging_s of 0 priorities are strict:
turn = (priority, arrival), and nothing is promised to the low ones.

Whoever is passed over keeps its turn, and is passed over for so many steps in all and no longer: that is the bound on
being overtaken. One that was on the rows before never is.

With shares for tenants (fairness.py), the next fresh one is that of the tenant that was served least.

While a returned group waits, no fresh one of equal or lower priority goes before it, whatever their turns. Turns are
for admission only: who is preempted is decided by place (priority, then arrival), however long anybody has waited.
"""

from bisect import insort
from collections.abc import Iterable, Iterator

from kilburn.controller.core.blame import is_suspect
from kilburn.controller.core.fairness import Fairness
from kilburn.controller.core.forming import is_filling
from kilburn.controller.core.prefixes import PinGroup
from kilburn.controller.core.sequence import Group, Place, Sequence
from kilburn.shared.types import LawBroken


def turn_of(place: Place, now: float, aging_s: float) -> tuple[float, int]:
    """The turn of a group that arrives now."""
    return (now + place.priority * aging_s if aging_s else place.priority, place.arrival)


def _by_turn(group: Group) -> tuple[float, int]:
    return group.turn


class Turns:
    """See the file's head. Who is admitted is removed by whoever admits him."""

    def __init__(self, fairness: Fairness | None = None) -> None:
        self._fairness = fairness
        self.pins: list[Group] = []
        self.returned: list[Group] = []
        self.fresh: list[Group] = []
        self.aside: list[Group] = []
        self.preparing: list[Group] = []
        self.num_tokens = 0  # of the prompts of those who wait, named prefixes apart

    # --- questions

    def head(self) -> Group | None:
        """Whom to admit next; None where nobody waits."""
        if self.pins:
            return self.pins[0]
        if self.suspect is not None:
            return self.suspect
        fresh = self._next_fresh()
        if fresh is None or not self.returned:
            return self.returned[0] if self.returned else fresh
        back = self.returned[0]
        is_urgent = fresh.place.priority < min(group.place.priority for group in self.returned)
        return fresh if is_urgent and fresh.turn < back.turn else back

    @property
    def suspect(self) -> Group | None:
        """Who is to be computed alone, before anybody else is admitted."""
        return next((group for group in self.returned if is_suspect(group)), None)

    def _next_fresh(self) -> Group | None:
        if not self.fresh:
            return None
        # Of equals the first, which is that of the lowest turn.
        return self.fresh[0] if self._fairness is None else min(self.fresh, key=self._fairness.time_of)

    @property
    def has_shares(self) -> bool:
        """Whether turns depend on what tenants were served."""
        return self._fairness is not None

    @property
    def num_requests(self) -> int:
        """Named prefixes are no requests."""
        return len(self.returned) + len(self.fresh) + len(self.aside) + len(self.preparing)

    def __iter__(self) -> Iterator[Group]:
        yield from self.pins
        yield from self.returned
        yield from self.fresh
        yield from self.aside
        yield from self.preparing

    def __len__(self) -> int:
        return len(self.pins) + self.num_requests

    def validate(self) -> None:
        """Raises LawBroken."""
        if any(group.awaits is None for group in self.aside):
            raise LawBroken("a group was passed over for nothing")
        if any(group.awaits is not None for group in (*self.pins, *self.returned, *self.fresh)):
            raise LawBroken("a group is in line and yet passed over")
        if any(not group.is_preparing for group in self.preparing):
            raise LawBroken("a group waits for a grammar that it does not want")
        for groups in (self.pins, self.returned, self.fresh, self.preparing):
            if groups != sorted(groups, key=_by_turn):
                raise LawBroken("groups out of order")
        if any(not group.has_started for group in self.returned) or any(
            group.has_started for group in (*self.fresh, *self.aside)
        ):
            raise LawBroken("a group waits among those of another past")
        if sum(group.num_prompt for group in self if not isinstance(group, PinGroup)) != self.num_tokens:
            raise LawBroken("the tokens of those who wait do not add up")

    # --- commands

    def add(self, group: Group) -> None:
        insort(self._list_of(group), group, key=_by_turn)
        if not isinstance(group, PinGroup):
            self.num_tokens += group.num_prompt
            if self._fairness is not None:
                self._fairness.settle(group)
                self._fairness.waits(group)

    def remove(self, group: Group) -> None:
        self._list_of(group).remove(group)
        group.awaits = None
        if not isinstance(group, PinGroup):
            self.num_tokens -= group.num_prompt
            if self._fairness is not None:
                self._fairness.waits_no_more(group)

    def prepared(self, group: Group) -> None:
        """Its grammar is there: it stands in line, at the turn that it had."""
        self.remove(group)
        group.is_preparing = False
        self.add(group)

    def served(self, group: Group, num_tokens: int = 0) -> None:
        """Tokens were computed for a group, and whatever it has drawn."""
        if self._fairness is not None and not isinstance(group, PinGroup):
            self._fairness.charge(group, num_tokens)
            self._fairness.settle(group)

    def settle(self, groups: Iterable[Group]) -> None:
        """Bring the shares of tenants up to date with those who run."""
        if self._fairness is not None and self.fresh:
            for group in groups:
                self.served(group)

    def set_aside(self, group: Group, filler: Sequence, end: int, until_step: int) -> None:
        """Pass over a fresh group until the filler has computed its positions up to `end`, or the step is reached."""
        self.fresh.remove(group)
        group.awaits = (filler, end)
        if group.until_step is None:  # it is passed over for so many steps in all
            group.until_step = until_step
        self.aside.append(group)

    def release(self, step: int) -> None:
        """Those who have waited long enough, or for nothing, are in line again, each at its turn."""
        still: dict[tuple[Sequence, int], bool] = {}  # hundreds may wait for one filler, which is asked once
        aside, back = list[Group](), list[Group]()
        for group in self.aside:
            if group.awaits is None or group.until_step is None:
                raise LawBroken("a group was passed over for nothing")
            if group.awaits not in still:
                still[group.awaits] = is_filling(*group.awaits)
            if step >= group.until_step or not still[group.awaits]:
                group.awaits = None
                back.append(group)
            else:
                aside.append(group)
        if back:
            self.aside, self.fresh = aside, sorted(self.fresh + back, key=_by_turn)

    def may_set_aside(self, group: Group, step: int) -> bool:
        """Whether a group is one that may be passed over."""
        has_patience = group.until_step is None or step < group.until_step
        return has_patience and self._list_of(group) is self.fresh

    def clear(self) -> None:
        for group in self:
            group.awaits = group.until_step = None
            group.is_preparing = False
            if self._fairness is not None and not isinstance(group, PinGroup):
                self._fairness.waits_no_more(group)
        self.pins, self.returned, self.fresh, self.aside, self.preparing = [], [], [], [], []
        self.num_tokens = 0

    def _list_of(self, group: Group) -> list[Group]:
        if isinstance(group, PinGroup):
            return self.pins
        if group.is_preparing:
            return self.preparing
        if group.awaits is not None:
            return self.aside
        return self.returned if group.has_started else self.fresh
