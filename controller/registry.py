"""Which worker groups are said to hold which blocks: hints, never truth.

The engine's Names effects feed it, after the step they came from; nothing on the step path reads it, and it may be
forgotten at any time. A wrong hint costs a miss: whoever follows one still looks in the group's own prefix index,
which compares tokens. Bounded twice, in entries (oldest first) and in age, so that a group that vanishes without a
word is forgotten too.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol


class PrefixRegistry(Protocol):
    """What placement may ask, wherever the answers are kept."""

    def learn(self, group: str, published: Sequence[bytes], withdrawn: Sequence[bytes], now: float) -> None: ...

    def holders(self, digest: bytes, now: float) -> frozenset[str]: ...


class InProcessRegistry:
    """The registry of a single controller.

    Law: `_groups` and `_heard` have the same keys, at most `max_digests` of them, and no empty set of groups.
    """

    def __init__(self, max_digests: int = 1 << 18, ttl_s: float = 600.0) -> None:
        self._max_digests, self._ttl_s = max_digests, ttl_s
        self._groups: dict[bytes, set[str]] = {}
        self._heard: OrderedDict[bytes, float] = OrderedDict()  # when last published; oldest first

    def __len__(self) -> int:
        return len(self._groups)

    def learn(self, group: str, published: Sequence[bytes], withdrawn: Sequence[bytes], now: float) -> None:
        self._withdraw(group, withdrawn)
        for digest in published:
            self._groups.setdefault(digest, set()).add(group)
            self._heard[digest] = now
            self._heard.move_to_end(digest)
        while len(self._heard) > self._max_digests:
            digest, _ = self._heard.popitem(last=False)
            del self._groups[digest]

    def _withdraw(self, group: str, digests: Iterable[bytes]) -> None:
        for digest in digests:
            groups = self._groups.get(digest)
            if groups is None:
                continue
            groups.discard(group)
            if not groups:
                del self._groups[digest], self._heard[digest]

    def holders(self, digest: bytes, now: float) -> frozenset[str]:
        heard_at = self._heard.get(digest)
        if heard_at is None or now - heard_at > self._ttl_s:
            return frozenset()
        return frozenset(self._groups[digest])
