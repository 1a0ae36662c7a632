"""The controllers that a gateway knows, and which of them a request should try, in which order.

    --controllers ----+                             ready, then those that are not, then the lost;
    registry ---------+--> Member --GET /ready-->   among equals by cost = tokens to compute
                              each PROBE_S                               + REQUEST_TOKENS for each request there

A member that answers no probe for `lost_s` is lost: whatever goes on with it is broken off at once, so that clients are
told, rather than wait for a machine that is gone. A process that dies breaks its connections itself, sooner. What the
registry told is remembered while the registry is silent; a member that is lost and that nobody names is forgotten.

Costs are in tokens, since that is what a hit saves. Requests that this gateway has under way with a member are counted
here; those of other gateways come by the member's own word, a second or so old. Among equal costs members take turns.

What this file does not know: what is asked, and how prefixes are named.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

import aiohttp

from kilburn.controller.registry import Announcement

PROBE_S = 1.0
# What a request ahead costs, in tokens to compute: about what a step takes in (the default of --max-step-tokens), so
# that a long prefix outweighs a few requests, and a short one none.
REQUEST_TOKENS = 512


class Lost(Exception):
    """The member answers no more."""


class State(Enum):
    """What the last probes said. In order of preference."""

    READY = 0
    UNREADY = 1  # it answers, and would not admit a request now; or nobody asked it yet
    LOST = 2


@dataclass(eq=False, slots=True)
class Member:
    """One controller."""

    address: str
    is_listed: bool  # by --controllers: never forgotten
    heard_at: float
    id: str = ""  # as the registry calls it; empty until it told
    about: Announcement | None = None
    state: State = State.UNREADY
    under_way: set[asyncio.Timeout] = field(default_factory=set)  # requests of ours that it works on
    num_lost: int = 0  # of these, requests that were broken off

    @property
    def num_requests(self) -> int:
        """At least so many: its own word counts ours too, but may be old."""
        return max(len(self.under_way), self.about.num_requests if self.about is not None else 0)


class Fleet:
    """See the file's head. `probe` asks a member's /ready: True, False, or an error for no answer."""

    def __init__(self, addresses: Iterable[str], lost_s: float, probe: Callable[[str], Awaitable[bool]]) -> None:
        self._lost_s, self._probe = lost_s, probe
        now = asyncio.get_running_loop().time()
        self._members = {address: Member(address, True, now) for address in addresses}
        self._told: frozenset[str] = frozenset()  # addresses that the registry has
        self._turn = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def heard(self, announced: Mapping[str, Announcement]) -> None:
        """From the registry: who is there now, by id."""
        now = asyncio.get_running_loop().time()
        for id, about in announced.items():
            member = self._members.setdefault(about.address, Member(about.address, False, now))
            member.id, member.about = id, about
        self._told = frozenset(about.address for about in announced.values())

    # --- choosing

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

    @asynccontextmanager
    async def working(self, member: Member) -> AsyncIterator[None]:
        """For as long as a member works on a request. Raises Lost when it is found to be lost."""
        scope = asyncio.timeout(None)
        member.under_way.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            raise (Lost(member.address) if scope.expired() else TimeoutError) from None
        finally:
            member.under_way.discard(scope)

    # --- watching

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._watch()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.gather(*(self._look(member) for member in self.members))
            await asyncio.sleep(PROBE_S)

    async def _look(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(min(self._lost_s, 2 * PROBE_S)):
                is_ready = await self._probe(member.address)
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError; what answers may be anything
            if loop.time() - member.heard_at >= self._lost_s or member.state is State.LOST:
                self._lose(member)
            else:
                member.state = State.UNREADY
        else:
            member.heard_at = loop.time()
            member.state = State.READY if is_ready else State.UNREADY

    def _lose(self, member: Member) -> None:
        member.state = State.LOST
        now = asyncio.get_running_loop().time()
        for scope in member.under_way:
            if not scope.expired():
                scope.reschedule(now)
                member.num_lost += 1
        if not member.is_listed and member.address not in self._told and not member.under_way:
            del self._members[member.address]
