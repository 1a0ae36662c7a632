"""The roster, watched: each member is asked for its /ready every PROBE_S; what a lost one works on is broken off.

What this file does not know: who is on the roster and why, what is asked of whom (roster.py).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import aiohttp

from kilburn.controller.gateway.roster import Member, Roster

PROBE_S = 1.0


class Lost(Exception):
    """The member answers no more."""


def _now() -> float:
    return asyncio.get_running_loop().time()


class Fleet(Roster):
    """See the file's head. `probe` asks a member's /ready: True, False, or an error for no answer."""

    def __init__(self, addresses: Iterable[str], lost_s: float, probe: Callable[[str], Awaitable[bool]]) -> None:
        super().__init__(addresses, lost_s, _now())
        self._probe = probe
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def working(self, member: Member) -> AsyncIterator[None]:
        """For as long as a member works on a request. Raises Lost when it is found to be lost."""
        scope = asyncio.timeout(None)
        number = self.begins(member, lambda: scope.reschedule(_now()))
        try:
            async with scope:
                yield
        except TimeoutError:
            raise (Lost(member.address) if scope.expired() else TimeoutError) from None
        finally:
            self.ends(member, number)

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
        try:
            async with asyncio.timeout(min(self.lost_s, 2 * PROBE_S)):
                is_ready = await self._probe(member.address)
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError; what answers may be anything
            self.unanswered(member, _now())
        else:
            self.answered(member, is_ready, _now())
