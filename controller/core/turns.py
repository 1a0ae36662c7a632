"""Whose turn it is: the groups that wait on one worker group, and the order in which they are admitted.

    named prefixes   first of all, in order of arrival
    returned         were on the rows before: preempted, or their worker was lost
    fresh            never ran

A group's *turn* is fixed when it arrives, and the lower one goes first:

    turn = (time of arrival + priority x aging_s, arrival)

so a level of priority is worth `aging_s` seconds, and whoever waits rises by one level in each of them: the difference
between two who wait never changes, and so neither does their order. Nobody starves: of those who arrive after a group,
only those go before it who arrive within (its priority - theirs) x aging_s. With an aging_s of 0 priorities are strict:
turn = (priority, arrival), and nothing is promised to the low ones.

While a returned group waits, no fresh one of equal or lower priority goes before it, whatever their turns. Turns are
for admission only: who is preempted is decided by place (priority, then arrival), however long anybody has waited.
"""

from bisect import insort
from collections.abc import Iterator

from kilburn.controller.core.prefixes import PinGroup
from kilburn.controller.core.sequence import Group, Place
from kilburn.shared.types import LawBroken


def turn_of(place: Place, now: float, aging_s: float) -> tuple[float, int]:
    """The turn of a group that arrives now."""
    return (now + place.priority * aging_s if aging_s else place.priority, place.arrival)


def _by_turn(group: Group) -> tuple[float, int]:
    return group.turn


class Turns:
    """See the file's head. Who is admitted is removed by whoever admits him."""

    def __init__(self) -> None:
        self.pins: list[Group] = []
        self.returned: list[Group] = []
        self.fresh: list[Group] = []
        self.num_tokens = 0  # of the prompts of those who wait, named prefixes apart

    # --- questions

    def head(self) -> Group | None:
        """Whom to admit next; None where nobody waits."""
        if self.pins:
            return self.pins[0]
        fresh = self.fresh[0] if self.fresh else None
        if fresh is None or not self.returned:
            return self.returned[0] if self.returned else fresh
        back = self.returned[0]
        is_urgent = fresh.place.priority < min(group.place.priority for group in self.returned)
        return fresh if is_urgent and fresh.turn < back.turn else back

    @property
    def num_requests(self) -> int:
        """Named prefixes are no requests."""
        return len(self.returned) + len(self.fresh)

    def __iter__(self) -> Iterator[Group]:
        yield from self.pins
        yield from self.returned
        yield from self.fresh

    def __len__(self) -> int:
        return len(self.pins) + self.num_requests

    def validate(self) -> None:
        """Raises LawBroken."""
        for groups in (self.pins, self.returned, self.fresh):
            if groups != sorted(groups, key=_by_turn):
                raise LawBroken("groups out of order")
        if any(not group.has_started for group in self.returned) or any(group.has_started for group in self.fresh):
            raise LawBroken("a group waits among those of another past")
        if sum(group.num_prompt for group in (*self.returned, *self.fresh)) != self.num_tokens:
            raise LawBroken("the tokens of those who wait do not add up")

    # --- commands

    def add(self, group: Group) -> None:
        insort(self._list_of(group), group, key=_by_turn)
        if not isinstance(group, PinGroup):
            self.num_tokens += group.num_prompt

    def remove(self, group: Group) -> None:
        self._list_of(group).remove(group)
        if not isinstance(group, PinGroup):
            self.num_tokens -= group.num_prompt

    def clear(self) -> None:
        self.pins, self.returned, self.fresh, self.num_tokens = [], [], [], 0

    def _list_of(self, group: Group) -> list[Group]:
        if isinstance(group, PinGroup):
            return self.pins
        return self.returned if group.has_started else self.fresh
