"""On which worker group a request is put, judged from who is where: never on a crowd while its twin stands idle.

Placement weighs seconds, and what it knows of each group's speed is what that group has shown, give or take half. So
only what no such difference can excuse is a fault: a request with at least as many tokens to draw as to read is put
where CROWD times as many wait or run as there are rows, and another group, alike in all that it announced, has nobody.
"""

from collections.abc import Collection, Mapping

from kilburn.controller.core.events import Turn, Turned
from kilburn.controller.simulate.scenario import Scenario
from kilburn.controller.simulate.witness import Leases, LeaseView, Told, demand

CROWD = 4


class Placing:
    """See the file's head."""

    def __init__(self, scenario: Scenario, leases: Leases) -> None:
        self._leases, self._silence_s = leases, scenario.silence_s
        self._is_plain = not scenario.pins  # named prefixes take room, and spare work, on some groups only
        self._placed: dict[int, int] = {}  # request -> lease

    def turned(self, turned: Turned, requests: Mapping[int, Told], leaving: Collection[int], now: float) -> None:
        """`leaving`: requests that were cancelled in this very turn. Raises WorldBroken."""
        if turned.turn is not Turn.PLACED or turned.request_id not in requests:
            return
        lease = int(turned.text.split()[1])  # "lease 3 of group0"
        there = {id: told for id, told in requests.items() if told.is_live and id not in leaving}
        here, submit = self._leases.views.get(lease), requests[turned.request_id].submit
        self._placed.pop(turned.request_id, None)
        if here is not None and self._is_plain and submit.max_tokens >= len(submit.prompt):
            num_here = self._num_at(here, there)
            for other in self._leases.views.values():
                is_worse = num_here >= CROWD * here.hello.max_rows and not self._num_at(other, there)
                told = f"put where {num_here} are, and lease {other.lease} has nobody"
                demand(not (is_worse and self._is_twin(other, here, now)), told, turned.request_id)
        self._placed[turned.request_id] = lease

    def _num_at(self, view: LeaseView, live: Mapping[int, Told]) -> int:
        return sum(id in live for id, lease in self._placed.items() if lease == view.lease)

    def _is_twin(self, view: LeaseView, of: LeaseView, now: float) -> bool:
        """Whether a group is like another, and takes requests."""
        is_well = view.leaves_s is None and not view.is_draining and now - view.heard_s < self._silence_s / 2
        sizes = [(v.hello.num_blocks, v.hello.max_rows, v.hello.max_step_tokens, v.num_lost) for v in (view, of)]
        return is_well and view is not of and sizes[0] == sizes[1]
