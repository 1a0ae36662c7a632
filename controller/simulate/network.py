"""What lies between the parties of a virtual service: lines that are late or cut, addresses, and the registry.

A line delivers in order. Where it is cut, what is under way comes once it is mended, as TCP has it. The registry is one
shelf for all: hints of who holds which block, and who is there, until that expires. Whoever is cut off from it learns
nothing new, and what he has to tell is lost; it may be flushed at any time.
"""

from collections import Counter
from random import Random

from kilburn.controller.core.events import Names
from kilburn.controller.registry import Announcement, InProcessRegistry
from kilburn.controller.registry_redis import FLEET_TTL_S, HINT_TTL_S
from kilburn.controller.simulate.agenda import Action, Agenda
from kilburn.controller.simulate.circumstances import Circumstances
from kilburn.controller.simulate.site import Site

REGISTRY = "registry"


class Network:
    """See the file's head."""

    def __init__(self, circumstances: Circumstances, agenda: Agenda, rng: Random) -> None:
        self.circumstances, self.agenda, self.rng = circumstances, agenda, rng
        self.sites: list[Site | None] = [None for _ in circumstances.sites]  # lives, by number
        self.silent: set[int] = set()  # numbers of machines that are gone
        self.hints = InProcessRegistry(ttl_s=HINT_TTL_S)
        self._fleet: dict[str, tuple[Announcement, float]] = {}  # by id, and until when
        self.seen: Counter[str] = Counter()

    @property
    def now(self) -> float:
        return self.agenda.now

    # --- lines

    def is_cut(self, *parties: str) -> bool:
        return self._mended_s(parties, self.now) > self.now

    def was_cut(self, parties: tuple[str, str], since_s: float) -> bool:
        """Whether nothing got through at some time since then."""
        return any(
            set(cut.parties) == set(parties) and cut.start_s <= self.now and cut.end_s >= since_s
            for cut in self.circumstances.cuts
        )

    def _mended_s(self, parties: tuple[str, ...], at_s: float) -> float:
        """The first moment from `at_s` on at which something gets through."""
        for cut in sorted(self.circumstances.cuts, key=lambda cut: cut.start_s):
            if set(cut.parties) == set(parties) and cut.start_s <= at_s < cut.end_s:
                at_s = cut.end_s
        return at_s

    def arrival_s(self, here: str, there: str, ready_s: float = 0.0) -> float:
        """When something comes that is sent now, after all that comes at `ready_s`."""
        at_s = self.now + self.circumstances.link_s * self.rng.uniform(0.5, 1.5)
        return self._mended_s((here, there), max(at_s, ready_s))

    def later(self, at_s: float, action: Action) -> None:
        self.agenda.after(at_s - self.now, action)

    def site_at(self, address: str) -> tuple[int, Site | None]:
        """The number of a machine, and the life of a controller that listens there."""
        number = int(address.removeprefix("http://site"))
        return number, self.sites[number]

    # --- the registry

    def learn(self, site: Site, names: Names) -> None:
        if self.is_cut(f"site{site.number}", REGISTRY):
            self.seen["hints lost"] += len(names.published) + len(names.withdrawn)
            return
        group = f"{site.id}/{names.group}"
        at_s = self.arrival_s(f"site{site.number}", REGISTRY)
        self.later(at_s, lambda: self.hints.learn(group, names.published, names.withdrawn, self.now))

    def announce(self, site: Site) -> None:
        if not self.is_cut(f"site{site.number}", REGISTRY):
            self._fleet[site.id] = (site.announcement, self.now + FLEET_TTL_S)

    def announced(self) -> dict[str, Announcement]:
        return {id: about for id, (about, until_s) in self._fleet.items() if until_s > self.now}

    def flush(self) -> None:
        self.hints = InProcessRegistry(ttl_s=HINT_TTL_S)
        self._fleet.clear()
