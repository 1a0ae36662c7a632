"""Whoever only looks on never disturbs those whom it looks at.

    what serves -- tell(chronicle.note, effect, now) --> counts, records, spans
                <-- always returns ---------------------    a fault there ends here

A fault in counting or recording would otherwise fail the request that it counts, or end the process. The first fault of
each kind is logged whole; more of the same are only counted, since they would come with every token.
"""

import logging
from collections.abc import Callable
from typing import TypeVarTuple

log = logging.getLogger("kilburn")
Told = TypeVarTuple("Told")


class Onlookers:
    """The one door through which serving calls what it does not depend on."""

    def __init__(self) -> None:
        self.faults: dict[tuple[str, type[Exception]], int] = {}  # by who was told, and what went wrong

    def tell(self, onlooker: Callable[[*Told], None], *about: *Told) -> None:
        """Called for every token: keep it small."""
        try:
            onlooker(*about)
        except Exception as error:
            self._note(getattr(onlooker, "__qualname__", type(onlooker).__name__), error)

    def _note(self, whose: str, error: Exception) -> None:
        kind = (whose, type(error))
        self.faults[kind] = self.faults.get(kind, 0) + 1
        if self.faults[kind] == 1:
            log.error(
                "%s failed; serving goes on without it, and more faults of this kind are not logged",
                whose,
                exc_info=error,
            )
