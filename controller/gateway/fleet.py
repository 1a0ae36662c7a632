"""The roster, watched: each member is asked for its /ready every PROBE_S; what a lost one works on is broken off.

A member that answers slowly, or not at all, holds up no other's probes: or a sound one, asked as seldom, would be lost
by a single probe that went astray.

What this file does not know: who is on the roster and why, what is asked of whom (roster.py).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import aiohttp

from kilburn.controller.gateway.roster import Member, Roster

PROBE_S = 1.0
PATIENCE_S = 2.0  # for the answer to one


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
        self._asked: set[str] = set()  # whose answers are awaited

    @asynccontextmanager
    async def working(self, member: Member) -> AsyncIterator[None]:
        """For as long as a member works on a request. Raises Lost when it is found to be lost."""
        scope = asyncio.timeout(None)
        number = self.begins(member, lambda: scope.reschedule(_now()), _now())
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
        async with asyncio.TaskGroup() as looks:
            while True:
                for member in self.members:
                    if member.address not in self._asked:
                        looks.create_task(self._look(member))
                await asyncio.sleep(PROBE_S)

    async def _look(self, member: Member) -> None:
        self._asked.add(member.address)
        sent_at = _now()
        try:
            async with asyncio.timeout(min(self.lost_s, PATIENCE_S)):
                is_ready = await self._probe(member.address)
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError; what answers may be anything
            self.unanswered(member, sent_at, _now())
        else:
            self.answered(member, is_ready, _now())
        finally:
            self._asked.discard(member.address)
