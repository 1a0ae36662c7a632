"""The requests that no worker group holds: new ones until they are placed, and those whose lease ended.

    Submit, a lease's end, a group that leaves  -->  homeless  --(choose: placement.py)-->  the line of a worker group
                                                        '------- recovery_s later --------> given up, with a word

Tokens are the truth: a request that comes from a lost lease brings its tokens and its place in line, and nothing else.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from kilburn.controller.core.events import Effect, Finished, Refusal, Refused, Turn, Turned
from kilburn.controller.core.home import Home
from kilburn.controller.core.pinning import Pinning
from kilburn.controller.core.placement import choose
from kilburn.controller.core.sequence import Group, State
from kilburn.shared.types import FinishReason


@dataclass(slots=True)
class Stray:
    group: Group
    since: float
    was_displaced: bool = False  # by the end of a lease, or since its worker group leaves


@dataclass(slots=True)
class Homeless:
    """See the file's head."""

    recovery_s: float
    strays: list[Stray] = field(default_factory=list)
    num_displaced: int = 0  # requests that had a worker group, and lost it
    num_recovered: int = 0  # of these, placed again

    @property
    def groups(self) -> list[Group]:
        return [stray.group for stray in self.strays]

    @property
    def deadlines(self) -> list[float]:
        """When each is given up."""
        return [stray.since + self.recovery_s for stray in self.strays]

    def arrived(self, group: Group, now: float) -> None:
        self.strays.append(Stray(group, now))

    def displaced(self, group: Group, now: float) -> None:
        self.strays.append(Stray(group, now, was_displaced=True))
        self.num_displaced += 1

    def drop(self, group: Group) -> None:
        self.strays = [stray for stray in self.strays if stray.group is not group]

    def settle(
        self, homes: Collection[Home], placed: dict[int, Home], pinning: Pinning, now: float, effects: list[Effect]
    ) -> list[Group]:
        """A home for each, in order of their turns, noted in `placed`. Returns who has waited too long for one."""
        given_up: list[Group] = []
        remaining: list[Stray] = []
        for stray in sorted(self.strays, key=lambda stray: stray.group.turn):
            group = stray.group
            home = choose(homes, group)
            if home is not None:
                where = f"lease {home.lease.id} of {home.lease.hello.name}"
                effects.append(Turned(group.request_id, Turn.PLACED, where))
                effects.extend(pinning.used(home, group, self.groups))
                placed[group.request_id] = home
                home.scheduler.line.enqueue(group)
                self.num_recovered += stray.was_displaced
            elif now >= stray.since + self.recovery_s:
                self._give_up(group, effects)
                given_up.append(group)
            else:
                remaining.append(stray)
        self.strays = remaining
        return given_up

    def _give_up(self, group: Group, effects: list[Effect]) -> None:
        message = f"no worker could take the request within {self.recovery_s:g} s"
        if group.has_started:
            effects.extend(Finished(group.request_id, i, FinishReason.ERROR, message) for i in group.indices())
        else:
            effects.append(Refused(group.request_id, Refusal.NO_WORKER, message))
        for sequence in group.live:
            sequence.move(State.FINISHED)
