"""Which named prefixes there are, and on which worker groups they are held: prefixes.py says what it is to hold one.

    Pin            -> a pin on one worker group, or the name is refused
    first use      -> a request that begins with it is placed on a group without it: a pin there, ahead of the request
    a group leaves -> whatever nobody holds any more is pinned on one of those that are left, or on the next to come
    Unpin          -> all its pins are let go of

So a group holds what its own requests begin with. A pin is tried once in each lease: where it did not fit, or could not
be computed, nobody waits for it.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Listing

from kilburn.controller.core.events import NotPinned, Pin, Refusal, Refused
from kilburn.controller.core.home import Home
from kilburn.controller.core.prefix_index import Salt
from kilburn.controller.core.prefixes import PinGroup, Prefix, common_run, public_run
from kilburn.controller.core.sequence import Group


class Pinning:
    """See the file's head. `most_pinned`: of a pool, by named prefixes. `homeless`: groups that may yet come to any."""

    def __init__(self, most_pinned: float) -> None:
        self._most_pinned = most_pinned
        self._prefixes: dict[int, Prefix] = {}
        self._tried: dict[int, set[int]] = {}  # prefix -> leases
        self._num_pins = 0  # ever; it orders them

    def salt_of(self, salt: bytes, tokens: Listing[int]) -> Salt:
        """A tenant's salt enters where its tokens leave the public prefixes."""
        return Salt(salt, public_run(tokens, self._prefixes.values()))

    def pin(self, pin: Pin, homes: Collection[Home], homeless: Listing[Group]) -> Refused | None:
        """Have some worker group hold a prefix. Where there is none yet, the first to come will."""
        salt = Salt() if pin.is_public else self.salt_of(pin.salt, pin.tokens)
        prefix = Prefix(pin.prefix_id, pin.tokens, salt, pin.is_public)
        if not pin.tokens:
            return Refused(pin.prefix_id, Refusal.EMPTY, "the prefix has no tokens")
        objections = self._pin_somewhere(prefix, homes, homeless)
        if objections:
            self.unpin(pin.prefix_id, homes)
            return Refused(pin.prefix_id, *objections[0][1])
        self._prefixes[pin.prefix_id] = prefix
        return None

    def settle(self, homes: Collection[Home], homeless: Listing[Group]) -> list[NotPinned]:
        """Worker groups have come or gone. Returns what can be held by none of them, and why."""
        held = {pin.request_id for home in homes if not home.lease.is_leaving for pin in home.scheduler.line.all_pins}
        present = {home.lease.id for home in homes}
        refused = []
        for prefix in self._prefixes.values():
            self._tried[prefix.prefix_id] &= present
            if prefix.prefix_id not in held:
                objections = self._pin_somewhere(prefix, homes, homeless)
                refused += [NotPinned(prefix.prefix_id, home.lease.hello.name, why) for home, (_, why) in objections]
        return refused

    def used(self, home: Home, group: Group, homeless: Listing[Group]) -> list[NotPinned]:
        """A request is about to wait here: what it begins with is held here from now on. Returns what cannot be."""
        refused = []
        for prefix in self._prefixes.values():
            if home.lease.id in self._tried[prefix.prefix_id] or not prefix.serves(group.salt.value):
                continue
            # Half of it: a prompt that has the first words in common with it does not ask for it.
            if 2 * common_run(tuple(group.live[0].prompt), prefix.tokens) >= len(prefix.tokens):
                objection = self._pin_on(home, prefix, homeless)
                if objection is not None:
                    refused.append(NotPinned(prefix.prefix_id, home.lease.hello.name, objection[1]))
        return refused

    def unpin(self, prefix_id: int, homes: Iterable[Home]) -> None:
        """The name is gone, and what was held by it is not any more."""
        self._prefixes.pop(prefix_id, None)
        self._tried.pop(prefix_id, None)
        for home in homes:
            for pin in home.scheduler.line.all_pins:
                if pin.request_id == prefix_id:
                    home.scheduler.line.cancel(pin)

    def _pin_somewhere(
        self, prefix: Prefix, homes: Iterable[Home], homeless: Listing[Group]
    ) -> list[tuple[Home, tuple[Refusal, str]]]:
        """On the group with the least to do of those that take it. Empty: one did, or there is nobody to ask."""
        objections: list[tuple[Home, tuple[Refusal, str]]] = []
        tried = self._tried.setdefault(prefix.prefix_id, set())
        able = [home for home in homes if home.lease.takes_requests and home.lease.id not in tried]
        for home in sorted(able, key=lambda home: (home.scheduler.line.load, home.lease.id)):
            objection = self._pin_on(home, prefix, homeless)
            if objection is None:
                return []
            objections.append((home, objection))
        return objections

    def _pin_on(self, home: Home, prefix: Prefix, homeless: Listing[Group]) -> tuple[Refusal, str] | None:
        """Have a worker group compute and hold a prefix; returns why, and the reason in words, where it cannot."""
        self._num_pins += 1
        self._tried[prefix.prefix_id].add(home.lease.id)
        group = PinGroup(prefix, self._num_pins)
        objection = home.scheduler.objection_to_pin(group, self._most_pinned, homeless)
        if objection is None:
            home.scheduler.line.enqueue(group)
        return objection
