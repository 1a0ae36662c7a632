"""Shares of tenants: of those who wait, the tenant that was served least goes first.

    virtual time of a tenant = tokens served / weight         served: prompt tokens computed for it, and tokens drawn

so that tenants who always have requests waiting get tokens in proportion to their weights, whoever floods the queue. A
tenant that comes back after a pause is not paid for it: its time is set to that of the least served who waits, or of
the one that last ceased to wait. Only the order of admission depends on it; within a tenant requests go by their turns,
so that among those who never ran a priority orders a tenant's own. Between tenants it still says who is preempted, and
whether somebody more urgent goes before one who was.

Source of the rule: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), the virtual token counter.
"""

from collections import Counter

from kilburn.controller.core.sequence import Group


class Fairness:
    """See the file's head. One for all worker groups."""

    def __init__(self) -> None:
        self._times: dict[bytes, float] = {}
        self._waiting: Counter[bytes] = Counter()  # requests in line, by tenant
        self._last = 0.0  # the virtual time of whoever last ceased to wait

    def time_of(self, group: Group) -> float:
        return self._times.get(group.tenant, 0.0)

    def num_waiting(self, tenant: bytes) -> int:
        return self._waiting[tenant]

    def waits(self, group: Group) -> None:
        """A request is in line from now on."""
        if not self._waiting[group.tenant]:
            others = [self._times[tenant] for tenant, count in self._waiting.items() if count]
            floor = min(others, default=self._last)
            self._times[group.tenant] = max(self._times.get(group.tenant, 0.0), floor)
        self._waiting[group.tenant] += 1

    def waits_no_more(self, group: Group) -> None:
        self._waiting[group.tenant] -= 1
        if not self._waiting[group.tenant]:
            del self._waiting[group.tenant]
            self._last = self.time_of(group)

    def charge(self, group: Group, num_tokens: int) -> None:
        self._times[group.tenant] = self.time_of(group) + num_tokens / group.weight

    def settle(self, group: Group) -> None:
        """Charge what a group has drawn since this was last asked."""
        drawn = group.num_drawn_by_ended + sum(sequence.num_generated for sequence in group.live)
        if drawn > group.num_charged:
            self.charge(group, drawn - group.num_charged)
            group.num_charged = drawn
