"""What controllers tell each other about prefixes: which worker groups hold which blocks, and which names there are.

The engine's Names effects feed it, after the step they came from; nothing on the step path reads it, and it may be
forgotten at any time. A wrong hint costs a miss: whoever follows one still looks in the group's own prefix index,
which compares tokens. Bounded twice, in entries (oldest first) and in age, so that a group that vanishes without a
word is forgotten too.

A name is kept by the controller that registered it (named.py); a registry passes it on, and may lose it at any time.
Here is the registry of a controller that is alone. Another keeps both in Redis (registry_redis.py), and there each
controller also announces itself, for gateways (gateway/).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kilburn.controller.core.histogram import Histogram

TURNS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
NameKey = tuple[str, str]  # (tenant, or "" for a public name; the name)


@dataclass(frozen=True, slots=True)
class NamedEntry:
    """A named prefix, or the word that it was deleted. Of two with one key the later stamp is the true one."""

    tenant: str  # "" for a public one
    name: str
    cache_salt: str
    tokens: tuple[int, ...]  # () where it was deleted
    stamp: int  # microseconds since 1970, of its registration or deletion

    @property
    def key(self) -> NameKey:
        return self.tenant, self.name

    @property
    def is_public(self) -> bool:
        return not self.tenant

    @property
    def is_deleted(self) -> bool:
        return not self.tokens


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a controller says of itself to those who send it requests."""

    address: str  # of its REST API
    num_requests: int  # that it has, waiting or running
    model_digest: bytes  # with a block size, what it takes to name blocks as its workers do
    block_sizes: tuple[int, ...]  # of its worker groups


# What a controller would say of itself now; None while it wants no requests.
Announcer = Callable[[], Announcement | None]
# Told who announced itself, by the controller's id, as it appears in `holders` before the slash.
FleetHeard = Callable[[Mapping[str, Announcement]], None]
# Told of the names that a registry holds, and whether these are all, it answers with those to be published again.
NamesHeard = Callable[[Mapping[NameKey, NamedEntry], bool], Sequence[NamedEntry]]


@dataclass(slots=True)
class RegistryCounters:
    """Numbers of a registry. They only grow, but for `is_up` and `names`: what it is like at the moment."""

    sent: int = 0  # hints and names that the registry took
    dropped: int = 0  # that were not sent: it was down, or too slow
    failures: int = 0  # turns that it did not answer, or with an error
    ignored: int = 0  # entries that are not signed with our key, or make no sense
    hits: int = 0  # digests that it was asked about, and knew a holder of
    misses: int = 0
    names: int = 0  # that it holds
    is_up: bool = True
    turn_s: Histogram = field(default_factory=lambda: Histogram(TURNS_S))  # turns that it answered


class PrefixRegistry(Protocol):
    """What controllers may tell each other, wherever it is kept. Nothing here waits, save `start` and `close`."""

    @property
    def counters(self) -> RegistryCounters: ...

    def learn(self, group: str, published: Sequence[bytes], withdrawn: Sequence[bytes], now: float) -> None: ...

    def holders(self, digest: bytes, now: float) -> frozenset[str]: ...

    async def fetch(self, digests: Iterable[bytes], now: float, within_s: float) -> None:
        """Ask which groups of other controllers hold these; `holders` knows afterwards. Fails as if none did."""

    def publish(self, entry: NamedEntry) -> None:
        """Others may know this name, or that it is no more."""

    def listen(self, heard: NamesHeard) -> None:
        """Whom to tell of the names that are there."""

    def announce(self, about: Announcer) -> None:
        """Whom to ask, again and again, what gateways shall know of this controller."""

    def watch(self, heard: FleetHeard) -> None:
        """Whom to tell of the controllers that announce themselves."""

    def start(self) -> None: ...

    async def close(self) -> None: ...


class InProcessRegistry:
    """The registry of a single controller.

    Law: `_groups` and `_heard` have the same keys, at most `max_digests` of them, and no empty set of groups.
    """

    def __init__(self, max_digests: int = 1 << 18, ttl_s: float = 600.0) -> None:
        self._max_digests, self._ttl_s = max_digests, ttl_s
        self._groups: dict[bytes, set[str]] = {}
        self._heard: OrderedDict[bytes, float] = OrderedDict()  # when last published; oldest first
        self.counters = RegistryCounters()

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

    def ageing(self, heard_before: float, most: int) -> list[tuple[bytes, frozenset[str]]]:
        """Of what was last published before a time, the oldest: digests, and who holds them."""
        found: list[tuple[bytes, frozenset[str]]] = []
        for digest, heard_at in self._heard.items():
            if heard_at >= heard_before or len(found) == most:
                break
            found.append((digest, frozenset(self._groups[digest])))
        return found

    # Nobody else is there to be told or asked.

    async def fetch(self, digests: Iterable[bytes], now: float, within_s: float) -> None:
        pass

    def announce(self, about: Announcer) -> None:
        pass

    def watch(self, heard: FleetHeard) -> None:
        pass

    def publish(self, entry: NamedEntry) -> None:
        pass

    def listen(self, heard: NamesHeard) -> None:
        pass

    def start(self) -> None:
        pass

    async def close(self) -> None:
        pass
