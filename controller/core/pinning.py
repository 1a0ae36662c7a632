"""Which named prefixes there are, and that every worker group holds them: prefixes.py says what it is to hold one.

    Pin    -> a pin enters the line of each worker group, or the name is refused
    Hello  -> a pin for each name that there is, of a group that has none of it yet
    Unpin  -> all its pins are let go of

A prefix that one group could not hold is still held by the others; nobody waits for it there.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Listing

from kilburn.controller.core.events import NotPinned, Pin, Refusal, Refused
from kilburn.controller.core.placement import Home
from kilburn.controller.core.prefix_index import Salt
from kilburn.controller.core.prefixes import PinGroup, Prefix, public_run
from kilburn.controller.core.sequence import Group


class Pinning:
    """See the file's head. `most_pinned`: of a pool, by named prefixes."""

    def __init__(self, most_pinned: float) -> None:
        self._most_pinned = most_pinned
        self._prefixes: dict[int, Prefix] = {}
        self._num_pins = 0  # ever; it orders them

    def salt_of(self, salt: bytes, tokens: Listing[int]) -> Salt:
        """A tenant's salt enters where its tokens leave the public prefixes."""
        return Salt(salt, public_run(tokens, self._prefixes.values()))

    def pin(self, pin: Pin, homes: Collection[Home], homeless: Listing[Group]) -> Refused | None:
        """Have every worker group hold a prefix, or none. `homeless`: groups that may yet come to any of them."""
        salt = Salt() if pin.is_public else self.salt_of(pin.salt, pin.tokens)
        prefix = Prefix(pin.prefix_id, pin.tokens, salt, pin.is_public)
        if not pin.tokens:
            return Refused(pin.prefix_id, Refusal.EMPTY, "the prefix has no tokens")
        for home in homes:
            objection = self._pin_on(home, prefix, homeless)
            if objection is not None:
                self.unpin(pin.prefix_id, homes)
                return Refused(pin.prefix_id, *objection)
        self._prefixes[pin.prefix_id] = prefix
        return None

    def restore(self, home: Home, homeless: Listing[Group]) -> list[NotPinned]:
        """A worker group has come, with empty pools. Returns what it cannot hold, and why."""
        refused = []
        for prefix in self._prefixes.values():
            objection = self._pin_on(home, prefix, homeless)
            if objection is not None:
                refused.append(NotPinned(prefix.prefix_id, home.lease.hello.name, objection[1]))
        return refused

    def unpin(self, prefix_id: int, homes: Iterable[Home]) -> None:
        """The name is gone, and what was held by it is not any more."""
        self._prefixes.pop(prefix_id, None)
        for home in homes:
            for pin in home.scheduler.line.all_pins:
                if pin.request_id == prefix_id:
                    home.scheduler.line.cancel(pin)

    def _pin_on(self, home: Home, prefix: Prefix, homeless: Listing[Group]) -> tuple[Refusal, str] | None:
        """Have a worker group compute and hold a prefix; returns why, and the reason in words, where it cannot."""
        self._num_pins += 1
        group = PinGroup(prefix, self._num_pins)
        objection = home.scheduler.objection_to_pin(group, self._most_pinned, homeless)
        if objection is None:
            home.scheduler.line.enqueue(group)
        return objection
