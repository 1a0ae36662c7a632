"""A service's circumstances, drawn from one seed: several controllers, each a world of its own, and what stands before.

    clients --> gateways --> controllers --> worker groups of one rank or several
                    \\---- registry ----/

Each controller has its own settings, worker groups (unequal ones, that join late, leave and are cut off) and faults; on
top of these controllers die, with or without a word, and come back; gateways die; nothing gets through between a
gateway and a controller, or between either of them and the registry, for a while; the registry is flushed.
"""

from dataclasses import dataclass, replace
from random import Random

from kilburn.controller.simulate.scenario import CALM, Errand, Scenario, draw_errands, draw_hello, draw_scenario
from kilburn.controller.simulate.upheaval import draw_upheaval

EVER_S = 1.0  # how long the bad times last at least
FIRST_LATE = 500  # requests once all is calm have numbers from here on


@dataclass(frozen=True, slots=True)
class Death:
    """A controller ends. Where it is silent nobody is told: its machine is gone, too."""

    at_s: float
    site: int
    back_s: float  # until another takes its place
    is_silent: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing gets through between two parties, either way."""

    start_s: float
    end_s: float
    parties: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Circumstances:
    seed: int
    sites: tuple[Scenario, ...]  # one controller each; their errands come by the gateways
    num_gateways: int
    is_listed: bool  # whether gateways were told of the controllers, or have to find them in the registry
    errands: tuple[Errand, ...]
    deaths: tuple[Death, ...]
    gateway_deaths: tuple[tuple[float, int], ...]
    cuts: tuple[Cut, ...]
    flushes_s: tuple[float, ...]
    lost_s: float  # how long a controller may be silent
    link_s: float
    calm_s: float  # from here on nothing fails any more


def draw_circumstances(seed: int) -> Circumstances:
    """The service of this seed."""
    base = draw_scenario(seed)
    rng = Random(seed ^ 0x5E41CE)
    errands = _with_others(rng, base)
    num_sites = rng.choice((2, 2, 3, 4))
    is_rough = rng.random() < 0.7
    sites = tuple([_draw_site(rng, base, errands, number, is_rough) for number in range(num_sites)])
    last_s = max(max(errand.at_s for errand in errands), EVER_S)
    num_gateways = rng.choice((1, 2, 2))
    deaths, cuts = _draw_deaths(rng, last_s, num_sites), _draw_cuts(rng, last_s, num_sites, num_gateways)
    over_s = [site.calm_s for site in sites] + [death.at_s + death.back_s for death in deaths]
    return Circumstances(
        seed=seed,
        sites=sites,
        num_gateways=num_gateways,
        is_listed=rng.random() < 0.5,
        errands=errands,
        deaths=deaths,
        gateway_deaths=((rng.uniform(0.0, last_s), 1),) if num_gateways > 1 and rng.random() < 0.2 else (),
        cuts=cuts,
        flushes_s=tuple([rng.uniform(0.0, last_s) for _ in range(rng.choice((0, 0, 1, 3)))]),
        lost_s=rng.choice((0.5, 2.0, 5.0)),
        link_s=rng.choice((0.0005, 0.005)),
        calm_s=max([*over_s, *(cut.end_s for cut in cuts)]),
    )


def _with_others(rng: Random, base: Scenario) -> tuple[Errand, ...]:
    """The requests of the base, and some rounds of others of the same kind, for whom much was computed already."""
    longest = max((errand.submit.prompt for errand in base.errands), key=len)
    stem = [*longest, *(rng.randrange(base.vocab_size) for _ in range(base.max_len - len(longest)))]
    warm_s = rng.choice((0.0, 2.5, 2.5))  # mostly everybody has found everybody before the first comes
    errands = [replace(errand, at_s=errand.at_s + warm_s) for errand in base.errands]
    for _ in range(rng.choice((1, 2, 4))):
        more = draw_errands(rng, [stem[: base.max_len]], base.vocab_size, False, first=len(errands) + 1)
        warm_s += rng.choice((0.0, EVER_S))
        errands += [replace(errand, at_s=errand.at_s + warm_s) for errand in more]
    return tuple(errands)


def _draw_site(rng: Random, base: Scenario, errands: tuple[Errand, ...], number: int, is_rough: bool) -> Scenario:
    """One controller: the settings of the base, and worker groups of its own."""
    num_groups = rng.choice((1, 1, 2, 3))
    sizes = (base.hellos[0].layout.block_size, base.max_len, base.vocab_size)
    world = base.hellos[0].world
    upheaval = draw_upheaval(rng.randrange(1 << 30), num_groups, 1)
    upheaval = replace(upheaval, poison=(), returns=True)
    num_all = num_groups + len(upheaval.late_joins_s)
    drawn = [replace(draw_hello(rng, i, errands, base.pins, sizes, False), world=world) for i in range(num_all)]
    if rng.random() < 0.5:  # all alike
        drawn = [replace(drawn[0], name=hello.name) for hello in drawn]
    return replace(
        base,
        seed=base.seed * 64 + number,
        hellos=tuple(drawn),
        joins_s=(*[rng.choice((0.0, 0.0, rng.uniform(0, 2.0))) for _ in range(num_groups)], *upheaval.late_joins_s),
        errands=(),
        pins=base.pins if number == 0 else (),
        faults=base.faults if is_rough else CALM,
        calm_s=max(base.calm_s, upheaval.over_s),
        shutdown_s=None,
        upheaval=upheaval,
    )


def _draw_deaths(rng: Random, last_s: float, num_sites: int) -> tuple[Death, ...]:
    return tuple(
        [
            Death(rng.uniform(0.0, last_s), rng.randrange(num_sites), rng.choice((0.3, 2.0, 8.0)), rng.random() < 0.4)
            for _ in range(rng.choice((0, 1, 1, 2, 3)))
        ]
    )


def _draw_cuts(rng: Random, last_s: float, num_sites: int, num_gateways: int) -> tuple[Cut, ...]:
    cuts = []
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        site, gateway = f"site{rng.randrange(num_sites)}", f"gateway{rng.randrange(num_gateways)}"
        parties = rng.choice(((gateway, site), (gateway, site), (gateway, "registry"), (site, "registry")))
        start_s = rng.uniform(0.0, last_s)
        cuts.append(Cut(start_s, start_s + rng.choice((0.2, 1.5, 6.0, 15.0)), parties))
    return tuple(cuts)
