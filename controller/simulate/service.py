"""Services that judge gateways and controllers together, by seed: several of each, with a registry between them.

    circumstances (seed) -> clients --> fronts --lines--> sites --> worker groups            one clock for all

Each site is judged as a world is (judge.py), each client by what he is owed (customers.py). A service ends when
everybody has an answer, all is calm again, each gateway has found every controller, one more client of each was served,
and nobody holds anything.

    python -m kilburn.controller.simulate.service --seed 17 --story
    python -m kilburn.controller.simulate.service --steps 1000000 --jobs 8
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from kilburn.controller.core.events import Names, Shutdown, Submit, Unpin
from kilburn.controller.registry_redis import FLEET_TTL_S
from kilburn.controller.simulate.agenda import Agenda
from kilburn.controller.simulate.circumstances import FIRST_LATE, Circumstances, Death, draw_circumstances
from kilburn.controller.simulate.customers import Customers, is_known_ready
from kilburn.controller.simulate.front import FLEET_S, Front
from kilburn.controller.simulate.network import Network
from kilburn.controller.simulate.scenario import Errand
from kilburn.controller.simulate.site import Site
from kilburn.controller.simulate.story import Story
from kilburn.controller.simulate.virtual import LATEST_S, PATIENCE_S
from kilburn.controller.simulate.witness import WorldBroken
from kilburn.controller.simulate.world import Verdict, command
from kilburn.shared.sampling import Sampling

COMMAND = "kilburn.controller.simulate.service"
TO_FIND_OUT_S = 5.0  # beyond `lost_s`: probes, their patience, and a try or two
MOST_EVENTS = 2_000_000


class Service:
    """See the file's head."""

    def __init__(self, circumstances: Circumstances) -> None:
        self.circumstances = circumstances
        self.rng = Random(circumstances.seed ^ 0x5E71)
        self.agenda = Agenda()
        self.network = Network(circumstances, self.agenda, self.rng)
        self.customers = Customers()
        self.lives: list[Site] = []
        public = [wish.pin.tokens for site in circumstances.sites for wish in site.pins if wish.pin.is_public]
        addresses = [f"http://site{number}" for number in range(len(circumstances.sites))]
        self.fronts = [
            Front(
                f"gateway{number}", addresses if circumstances.is_listed else [], public, self.network, self.customers
            )
            for number in range(circumstances.num_gateways)
        ]
        self.num_to_come = len(circumstances.errands)
        self.num_events = 0

    @property
    def sites(self) -> list[Site]:
        """The controllers that live now."""
        return [site for site in self.network.sites if site is not None]

    def lives_at(self, number: int) -> list[Site]:
        return [life for life in self.lives if life.number == number]

    @property
    def story(self) -> Story:
        """Of all lives, in order."""
        story = Story()
        entries = [replace(entry, where=site.id) for site in self.lives for entry in site.story.entries]
        story.entries = sorted(entries, key=lambda entry: entry.at_s)
        return story

    # --- the course of things

    def run(self) -> None:
        """Until everybody has an answer and all is as it was. Raises WorldBroken, LawBroken."""
        plan = self.circumstances
        for number in range(len(plan.sites)):
            self._lives(number)
        for front in self.fronts:
            front.begin()
        for errand in plan.errands:
            self.agenda.after(errand.at_s, partial(self._comes, errand))
        for death in plan.deaths:
            self.agenda.after(death.at_s, partial(self._dies, death))
        for at_s, number in plan.gateway_deaths:
            self.agenda.after(at_s, self.fronts[number].end)
        for at_s in plan.flushes_s:
            self.agenda.after(at_s, self.network.flush)
        self._announce()
        self._pass(PATIENCE_S + plan.calm_s, lambda: self.num_to_come == 0 and not self.customers.waiting())
        self.customers.check_all()
        self._recover()
        self._close()

    def next(self) -> None:
        """One thing happens somewhere."""
        self.num_events += 1
        if self.num_events > MOST_EVENTS:
            raise WorldBroken("no end in sight")
        sites = self.sites
        first = min(sites, key=lambda site: site.wanted_s, default=None)
        if first is not None and first.wanted_s < self.agenda.next_s:
            first.tick()
            return
        self.agenda.next()
        for site in sites:
            if site.is_alive:
                site.perhaps_take_turn()

    def _pass(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Let time pass, for so long at most. Whether it came to be so."""
        end_s = self.agenda.now + seconds
        self.agenda.after(seconds, lambda: None)
        while self.agenda.now < end_s:
            if until() and not any(site.inbox for site in self.sites):
                return True
            self.next()
        return until()

    def _recover(self) -> None:
        """Once all is calm, each gateway finds all controllers, and they serve."""
        addresses = [f"http://site{number}" for number in range(len(self.network.sites))]
        # Who died last is taken for alive until it was silent for long enough, and who follows it by its name waits.
        settle_s = LATEST_S + max(site.silence_s for site in self.circumstances.sites)
        self._pass(max(self.circumstances.calm_s - self.agenda.now, 0.0) + settle_s, lambda: False)
        fronts = [front for front in self.fronts if front.is_alive]
        found_s = FLEET_TTL_S + TO_FIND_OUT_S

        def is_found() -> bool:
            return all(is_known_ready(front.roster.members, addresses) for front in fronts)

        if not self._pass(found_s + PATIENCE_S, is_found):
            raise WorldBroken("all is calm, and a gateway does not know every controller")
        for id, front in enumerate(fronts, FIRST_LATE):  # one after the other: nobody waits behind another
            front.ask(Errand(self.agenda.now, Submit(id, (1,), 1, Sampling(seed=id << 32)), (), ()))
            self._pass(PATIENCE_S, lambda: not self.customers.waiting())
            self.customers.check_calm(id)

    def _close(self) -> None:
        """Nobody holds anything for anybody."""
        for site in self.sites:
            site.inbox += [Unpin(case.pin.prefix_id) for case in site.judge.clients.pins.live()]
        patience_s = LATEST_S + max(site.silence_s + site.step_deadline_s for site in self.circumstances.sites)
        self._pass(patience_s, lambda: not any(site.held() for site in self.sites))
        for site in self.sites:
            if site.held():
                raise WorldBroken(f"when everybody is answered, {site.id} still holds {site.held()}")
            site.inbox.append(Shutdown())
        self._pass(patience_s, lambda: not any(site.judge.leases.views for site in self.sites))
        if any(site.judge.leases.views for site in self.sites):
            raise WorldBroken("leases were not drained")

    # --- clients

    def _comes(self, errand: Errand) -> None:
        self.num_to_come -= 1
        front = self.rng.choice([front for front in self.fronts if front.is_alive])
        front.ask(errand)
        for cancel_s in errand.cancels_s:
            self.agenda.after(cancel_s, partial(front.leave, errand.submit.request_id))

    # --- controllers

    def _lives(self, number: int) -> None:
        """A controller begins at this place, and nobody remembers anything of the one before."""
        before = len(self.lives_at(number))
        scenario = self.circumstances.sites[number]
        if before:
            scenario = replace(scenario, seed=scenario.seed + 1_000_003 * before, pins=())
        site = Site(scenario, number, before, self.agenda, self.next)
        site.names = partial(self._names, site)
        if number in self.network.silent:  # whoever asks it about old connections is told that there are none
            for front in self.fronts:
                at_s = self.network.arrival_s(f"site{number}", front.name) + self.circumstances.lost_s
                self.network.later(at_s, partial(front.broken, self.lives_at(number)[-1]))
        self.lives.append(site)
        self.network.sites[number] = site
        self.network.silent.discard(number)
        site.begin(is_first=not before)

    def _names(self, site: Site, names: Names) -> None:
        self.network.learn(site, names)

    def _dies(self, death: Death) -> None:
        site = self.network.sites[death.site]
        if site is None:
            return
        self.network.seen["controller died"] += 1
        site.end()
        self.network.sites[death.site] = None
        if death.is_silent:
            self.network.silent.add(death.site)
        else:
            for front in self.fronts:
                at_s = self.network.arrival_s(f"site{death.site}", front.name)
                self.network.later(at_s, partial(front.broken, site))
        found_s = self.circumstances.lost_s + TO_FIND_OUT_S
        self.agenda.after(found_s, partial(self.customers.found_out, site))
        self.agenda.after(death.back_s, partial(self._lives, death.site))

    def _announce(self) -> None:
        for site in self.sites:
            self.network.announce(site)
        self.agenda.after(FLEET_S, self._announce)


def run_service(seed: int) -> Verdict:
    """The service of one seed. Never raises."""
    service = Service(draw_circumstances(seed))
    verdict = Verdict(seed, command=COMMAND)
    try:
        service.run()
    except WorldBroken as broken:
        verdict.failure, verdict.requests = str(broken), broken.requests
    except Exception as error:  # whatever production code raises is the finding
        verdict.failure = f"{type(error).__name__}: {error}"
    verdict.turns = sum(life.turn for life in service.lives)
    verdict.seen += service.network.seen
    for life in service.lives:
        verdict.seen += life.seen
    for record in service.customers.records.values():
        verdict.seen[f"client {record.end or 'waits'}"] += 1
    verdict.seen["life of a controller"] += len(service.lives)
    if verdict.failure:
        verdict.story = service.story
    return verdict


if __name__ == "__main__":
    sys.exit(command("service", "Run gateways and controllers amid faults.", "0:500", run_service))
