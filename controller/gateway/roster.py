"""The controllers that a gateway knows, and which of them a request should try, in which order. Time is an argument.

    --controllers ----+                             ready, then those that are not, then the lost;
    registry ---------+--> Member <-- what it says   among equals by cost = tokens to compute
                                      to probes                              + REQUEST_TOKENS for each request there

A member that answers no probe for `lost_s` is lost: what was under way with it when the last of these was sent is
broken off, so that clients are told, rather than wait for a machine that is gone. What began later may be with a
process that has taken its place since; the next probe tells. A process that dies breaks its connections itself, sooner.
What the registry told is remembered while the registry is silent; a member that is lost, that nobody names and that
works on nothing is forgotten.

Costs are in tokens, since that is what a hit saves. Requests that this gateway has under way with a member are counted
here; those of other gateways come by the member's own word, a second or so old. Among equal costs members take turns.

What this file does not know: clocks and sockets (fleet.py), what is asked, how prefixes are named. The simulator runs
it as it is.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kilburn.controller.registry import Announcement

# What a request ahead costs, in tokens to compute: about what a step takes in (the default of --max-step-tokens), so
# that a long prefix outweighs a few requests, and a short one none.
REQUEST_TOKENS = 512


class State(Enum):
    """What the last probes said. In order of preference."""

    READY = 0
    UNREADY = 1  # it answers, and would not admit a request now; or nobody asked it yet
    LOST = 2


@dataclass(frozen=True, slots=True)
class Work:
    """A request of ours that a member works on."""

    began_at: float
    break_off: Callable[[], None]


@dataclass(eq=False, slots=True)
class Member:
    """One controller."""

    address: str
    is_listed: bool  # by --controllers: never forgotten
    heard_at: float
    id: str = ""  # as the registry calls it; empty until it told
    about: Announcement | None = None
    state: State = State.UNREADY
    under_way: dict[int, Work] = field(default_factory=dict)
    num_lost: int = 0  # of these, requests that were broken off

    @property
    def num_requests(self) -> int:
        """At least so many: its own word counts ours too, but may be old."""
        return max(len(self.under_way), self.about.num_requests if self.about is not None else 0)


class Roster:
    """See the file's head."""

    def __init__(self, addresses: Iterable[str], lost_s: float, now: float) -> None:
        self.lost_s = lost_s
        self._members = {address: Member(address, True, now) for address in addresses}
        self._told: frozenset[str] = frozenset()  # addresses that the registry has
        self._turn, self._numbers = itertools.count(), itertools.count()

    # --- questions

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def kinds(self) -> list[tuple[bytes, int]]:
        """Model digests and block sizes, by which members name their blocks."""
        abouts = [member.about for member in self.members if member.about is not None]
        return sorted(
            {(about.model_digest, size) for about in abouts if about.model_digest for size in about.block_sizes}
        )

    # --- commands

    def heard(self, announced: Mapping[str, Announcement], now: float) -> None:
        """From the registry: who is there now, by id."""
        for id, about in announced.items():
            member = self._members.setdefault(about.address, Member(about.address, False, now))
            member.id, member.about = id, about
        self._told = frozenset(about.address for about in announced.values())

    def order(self, num_tokens: int, found: Mapping[str, int]) -> list[Member]:
        """Whom to ask, the best first. `found`: by member's id, how many leading tokens it may have computed."""
        members = self.members
        if not members:
            return []
        first = next(self._turn) % len(members)
        members = members[first:] + members[:first]

        def cost(member: Member) -> int:
            return num_tokens - found.get(member.id, 0) + REQUEST_TOKENS * member.num_requests

        return sorted(members, key=lambda member: (member.state.value, cost(member)))  # stable

    def begins(self, member: Member, break_off: Callable[[], None], now: float) -> int:
        """A member works on a request; returns the number to end it by. `break_off` is called once if it is lost."""
        number = next(self._numbers)
        member.under_way[number] = Work(now, break_off)
        return number

    def ends(self, member: Member, number: int) -> None:
        member.under_way.pop(number, None)

    def answered(self, member: Member, is_ready: bool, now: float) -> None:
        """A probe."""
        member.heard_at = now
        member.state = State.READY if is_ready else State.UNREADY

    def unanswered(self, member: Member, sent_at: float, now: float) -> None:
        """A probe. A member that is lost stays so until it answers one."""
        if now - member.heard_at < self.lost_s and member.state is not State.LOST:
            member.state = State.UNREADY
            return
        member.state = State.LOST
        broken = {number: work for number, work in member.under_way.items() if work.began_at <= sent_at}
        member.num_lost += len(broken)
        for number, work in broken.items():
            self.ends(member, number)
            work.break_off()
        if not member.is_listed and member.address not in self._told and not member.under_way:
            self._members.pop(member.address, None)
