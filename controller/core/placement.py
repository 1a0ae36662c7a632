"""Which worker group a request goes to: of those where it fits, the one with the fewest sequences.

What it does not know yet: who has the longest cached prefix.
"""

from collections.abc import Iterable

from kilburn.controller.core.lease import Lease
from kilburn.controller.core.ranks import Agreement
from kilburn.controller.core.scheduler import Scheduler
from kilburn.controller.core.sequence import Group


class Home:
    """A worker group as the engine sees it: its lease, what is scheduled on it, and what its ranks agree upon."""

    __slots__ = ("agreement", "lease", "scheduler")

    def __init__(self, lease: Lease, scheduler: Scheduler) -> None:
        self.lease, self.scheduler = lease, scheduler
        self.agreement = Agreement(len(lease.peers))

    def fits(self, group: Group) -> bool:
        first = group.live[0]
        most = group.most_hit(first.num_prompt)
        shared = self.scheduler.shared_with_pins(first.prompt, group.salt.value, most)
        return self.scheduler.fits(first.num_prompt, first.limit, group.most_wide, shared)


def choose(homes: Iterable[Home], group: Group) -> Home | None:
    """The home for a group, or None where no lease that takes requests has room for it."""
    fitting = [home for home in homes if home.lease.takes_requests and home.fits(group)]
    return min(fitting, key=lambda home: (home.scheduler.line.load, home.lease.id), default=None)
