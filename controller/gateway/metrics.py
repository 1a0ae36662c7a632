"""A gateway's figures for Prometheus, read when somebody asks. Names begin with kilburn_gateway_."""

from collections.abc import Iterator
from dataclasses import dataclass
from platform import python_version

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kilburn.controller.gateway.fleet import Fleet
from kilburn.controller.gateway.forward import ForwardCounters
from kilburn.controller.gateway.roster import Member, State
from kilburn.controller.metrics_families import Figure, Kind, families, single
from kilburn.controller.registry import RegistryCounters
from kilburn.controller.version import version

GAUGE, COUNTER = Kind.GAUGE, Kind.COUNTER


@dataclass(frozen=True, slots=True)
class GatewaySources:
    """Whom a scrape asks."""

    fleet: Fleet
    forwarded: ForwardCounters
    registry: RegistryCounters


SERVICE: tuple[Figure[GatewaySources], ...] = (
    Figure("build_info", GAUGE, "1; what runs here", ("version", "python"),
           lambda s: [((version(), python_version()), 1)]),
    Figure("controllers", GAUGE, "controllers that are known, by what the last probe said", ("state",),
           lambda s: [((state.name.lower(),), sum(member.state is state for member in s.fleet.members))
                      for state in State]),
    Figure("requests_under_way", GAUGE, "requests that controllers work on", (),
           single(lambda s: sum(len(member.under_way) for member in s.fleet.members))),
    Figure("requests_answered", COUNTER, "requests that got a controller's answer, whatever it was", (),
           single(lambda s: s.forwarded.answered)),
    Figure("requests_routed", COUNTER, "requests by what chose whom to ask first: prefixes, or load", ("by",),
           lambda s: [(("prefix",), s.forwarded.by_prefix), (("load",), s.forwarded.by_load)]),
    Figure("requests_retried", COUNTER, "tries with another controller, before any token", (),
           single(lambda s: s.forwarded.retried)),
    Figure("requests_unanswered", COUNTER, "requests that no controller took", (),
           single(lambda s: s.forwarded.unanswered)),
    Figure("streams_broken", COUNTER, "streams that ended with an error, as their controller was lost", (),
           single(lambda s: s.forwarded.broken)),
    Figure("clients_stalled", COUNTER, "clients that were disconnected as they read nothing of their answers", (),
           single(lambda s: s.forwarded.stalled)),
    Figure("connections_refused", COUNTER, "connections that were one too many (--max-connections)", (),
           single(lambda s: s.forwarded.turned_away)),
    Figure("requests_incomplete", COUNTER, "requests given up as too little of them came, by what had come", ("part",),
           lambda s: [((part,), number) for part, number in s.forwarded.incomplete.items()]),
    Figure("prompt_tokens", COUNTER, "tokens of prompts that were read here", (),
           single(lambda s: s.forwarded.prompt_tokens)),
    Figure("hit_tokens", COUNTER, "of these, tokens that the controller asked first was said to have computed", (),
           single(lambda s: s.forwarded.hit_tokens)),
    Figure("registry_up", GAUGE, "1 when the prefix registry answers", (), single(lambda s: s.registry.is_up)),
    Figure("registry_lookups", COUNTER, "blocks that the registry was asked about, by what it knew", ("result",),
           lambda s: [(("hit",), s.registry.hits), (("miss",), s.registry.misses)]),
    Figure("registry_failures", COUNTER, "turns and questions that the prefix registry did not answer", (),
           single(lambda s: s.registry.failures)),
    Figure("registry_ignored", COUNTER, "entries of the registry that were not signed, or made no sense", (),
           single(lambda s: s.registry.ignored)),
)  # fmt: skip

EACH: tuple[Figure[Member], ...] = (
    Figure("controller_up", GAUGE, "1 while a controller would admit a request", (),
           single(lambda m: m.state is State.READY)),
    Figure("controller_requests", GAUGE, "requests of this gateway that a controller works on", (),
           single(lambda m: len(m.under_way))),
    Figure("controller_requests_lost", COUNTER, "of these, requests broken off as it answered no more", (),
           single(lambda m: m.num_lost)),
)  # fmt: skip


class GatewayMetrics:
    """Figures in a registry of their own."""

    def __init__(self, sources: GatewaySources) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Reading(sources))
        ProcessCollector(namespace="kilburn_gateway", registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Reading(Collector):
    def __init__(self, sources: GatewaySources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        yield from families(SERVICE, [((), self._sources)], "kilburn_gateway_")
        members = [((member.address,), member) for member in self._sources.fleet.members]
        yield from families(EACH, members, "kilburn_gateway_", ("controller",))
