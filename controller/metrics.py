"""Figures for Prometheus, read when somebody asks.

    GET /metrics -> collect -> engine's snapshot, the edge's counts, link, registry, driver: whatever they say now

Nothing is counted here, so a figure cannot drift from what it is about, and a scrape that fails is an error of that
scrape and of nothing else: it is logged, answered with 500, and serving goes on. Names begin with kilburn_ and are in
base units; metrics_vllm.py says the same under names that dashboards made for vLLM know.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from platform import python_version
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kilburn.controller.api.errors import refusal_codes
from kilburn.controller.core.lease import LeaseState
from kilburn.controller.core.snapshot import Snapshot
from kilburn.controller.counts import Counts, known_refusals
from kilburn.controller.link import ControllerLink, LinkCounters
from kilburn.controller.metrics_families import Figure, Kind, Values, families, single
from kilburn.controller.metrics_groups import GROUP_FIGURES
from kilburn.controller.metrics_vllm import VLLM_ENGINE, VLLM_SERVICE
from kilburn.controller.registry import RegistryCounters
from kilburn.controller.streams import Streams
from kilburn.controller.version import version
from kilburn.shared.messages import PROTOCOL_VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGE, COUNTER, HISTOGRAM = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM


@dataclass(frozen=True, slots=True)
class Sources:
    """Whom a scrape asks."""

    now: Callable[[], float]  # on the clock that turns the engine
    snapshot: Callable[[float], Snapshot]  # as of such a time: the engine may not have turned of late
    is_serving: Callable[[Snapshot], bool]  # what /health says
    plan_s: Callable[[], float]  # seconds that the engine has taken so far
    streams: Streams
    link: ControllerLink
    registry: RegistryCounters
    about: tuple[tuple[str, str], ...]  # the configuration, in few words: (setting, value)
    model_name: str = ""


class Metrics:
    """One process's figures, in a registry of their own. `vllm_names`: under vLLM's names as well."""

    def __init__(self, sources: Sources, vllm_names: bool = False) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Reading(sources, vllm_names))
        ProcessCollector(namespace="kilburn", registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Reading(Collector):
    def __init__(self, sources: Sources, vllm_names: bool) -> None:
        self._sources, self._vllm_names = sources, vllm_names

    def collect(self) -> Iterator[Metric]:
        sources = self._sources
        now = sources.now()
        snapshot = sources.snapshot(now)
        groups = [((group.name,), group) for group in snapshot.groups]
        yield from families(ENGINE_FIGURES, [((), snapshot)])
        yield from families(EDGE_FIGURES, [((), sources.streams)])
        yield from families(PROCESS_FIGURES, [((), sources)])
        yield from families(GROUP_FIGURES, groups, labels=("group",))
        serving = float(sources.is_serving(snapshot))
        yield from families(SERVING_FIGURES, [((), serving)])
        silence = [((group.name,), now - group.heard_at) for group in snapshot.groups]
        yield from families(SILENCE_FIGURES, silence, labels=("group",))
        if self._vllm_names:
            model = sources.model_name
            engines = [((model, group.name), group) for group in snapshot.groups]
            yield from families(VLLM_ENGINE, engines, "vllm:", ("model_name", "engine"))
            yield from families(VLLM_SERVICE, [((model,), sources.streams.counts)], "vllm:", ("model_name",))


# --- the engine as a whole


def _leases(snapshot: Snapshot) -> Values:
    states = [group.state for group in snapshot.groups]
    return [((state.value,), states.count(state)) for state in LeaseState if state is not LeaseState.GONE]


ENGINE_FIGURES: tuple[Figure[Snapshot], ...] = (
    Figure("worker_groups", GAUGE, "worker groups with a lease", (), single(lambda s: len(s.groups))),
    Figure("ranks_waiting", GAUGE, "ranks that wait for the others of their worker group", (),
           single(lambda s: s.waiting_ranks)),
    Figure("leases", GAUGE, "leases, by state", ("state",), _leases),
    Figure("leases_began", COUNTER, "leases given", (), single(lambda s: s.leases_began)),
    Figure("leases_ended", COUNTER, "leases that ended", (), single(lambda s: s.leases_ended)),
    Figure("stale_messages", COUNTER, "messages of leases that are over, which have no effect", (),
           single(lambda s: s.stale_messages)),
    Figure("requests", GAUGE, "requests known to the engine", (), single(lambda s: s.requests)),
    Figure("requests_queued", GAUGE, "requests that wait, wherever they are", (), single(lambda s: s.waiting_requests)),
    Figure("requests_homeless", GAUGE, "requests that wait for a worker group", (),
           single(lambda s: s.homeless_requests)),
    Figure("drained_requests_per_second", GAUGE, "requests that left the queue for the rows, of late", (),
           single(lambda s: s.drained_requests_per_s)),
    Figure("drained_tokens_per_second", GAUGE, "their tokens", (), single(lambda s: s.drained_tokens_per_s)),
    Figure("requests_displaced", COUNTER, "requests whose worker group was lost or left", (),
           single(lambda s: s.requests_displaced)),
    Figure("requests_recovered", COUNTER, "of these, requests that found a place again", (),
           single(lambda s: s.requests_recovered)),
    Figure("requests_poisonous", COUNTER, "requests that ended one worker after the other, and failed for it", (),
           single(lambda s: s.poison_requests)),
    Figure("timeouts", COUNTER, "requests that waited too long to begin, or whose time ran out", ("kind",),
           lambda s: [(("queue",), s.queue_timeouts), (("request",), s.request_timeouts)]),
    Figure("laws_broken", COUNTER, "bugs found by our own accounting", (), single(lambda s: s.laws_broken)),
)  # fmt: skip


# --- the edge


def _edge(name: str, about: str, read: Callable[[Counts], Any], kind: Kind) -> Figure[Streams]:
    return Figure(name, kind, about, (), single(lambda streams: read(streams.counts)))


def _finished(streams: Streams) -> Values:
    return [((reason.value,), number) for reason, number in streams.counts.finished.items()]


def _refused(streams: Streams) -> Values:
    return [((code,), number) for code, number in known_refusals(streams.counts, refusal_codes()).items()]


EDGE_FIGURES: tuple[Figure[Streams], ...] = (
    _edge("prompt_tokens", "prompt tokens of requests that were started", lambda c: c.prompt_tokens, COUNTER),
    _edge("cached_tokens", "of these, tokens found in the prefix cache", lambda c: c.cached_tokens, COUNTER),
    _edge("output_tokens", "tokens given to clients", lambda c: c.output_tokens, COUNTER),
    Figure("requests_finished", COUNTER, "requests, by how they ended", ("reason",), _finished),
    Figure("requests_refused", COUNTER, "requests turned away, by the code that the client was told", ("reason",),
           _refused),
    _edge("request_queue_seconds", "from being asked to being started", lambda c: c.queue_s.spread(), HISTOGRAM),
    _edge("request_prefill_seconds", "from being started to the first token", lambda c: c.prefill_s.spread(),
          HISTOGRAM),
    _edge("first_token_seconds", "from being asked to the first token", lambda c: c.first_token_s.spread(), HISTOGRAM),
    _edge("inter_token_seconds", "between two tokens of a sequence", lambda c: c.inter_token_s.spread(), HISTOGRAM),
    _edge("displaced_pause_seconds", "from the loss of a request's worker group to its next token",
          lambda c: c.pause_s.spread(), HISTOGRAM),
    _edge("request_decode_seconds", "from the first token to the last", lambda c: c.decode_s.spread(), HISTOGRAM),
    _edge("request_seconds", "from being asked to the last token", lambda c: c.end_to_end_s.spread(), HISTOGRAM),
    _edge("request_prompt_tokens", "tokens of a request's prompt", lambda c: c.prompt_lengths.spread(), HISTOGRAM),
    _edge("request_output_tokens", "tokens of a request's answer, all its sequences together",
          lambda c: c.answer_lengths.spread(), HISTOGRAM),
    _edge("clients_stalled", "clients that were disconnected as they read nothing of their answers",
          lambda c: c.stalled, COUNTER),
    _edge("connections_refused", "connections that were one too many (--max-connections)",
          lambda c: c.turned_away, COUNTER),
    Figure("requests_incomplete", COUNTER, "requests given up as too little of them came, by what had come", ("part",),
           lambda streams: [((part,), number) for part, number in streams.counts.incomplete.items()]),
    Figure("streams_open", GAUGE, "answers that somebody waits for", (), single(lambda s: s.num_answers)),
    Figure("outbox_characters", GAUGE, "text of streams that their readers have not taken", (),
           single(lambda s: s.outbox_characters())),
)  # fmt: skip


# --- the process, and what it is connected to


def _linked(name: str, about: str, read: Callable[[LinkCounters], float]) -> Figure[Sources]:
    return Figure(f"link_{name}", COUNTER, about, (), single(lambda sources: read(sources.link.counters)))


def _garbage(sources: Sources) -> Values:
    return [((kind,), number) for kind, number in sources.link.counters.garbage.items()]


def _build(sources: Sources) -> Values:
    return [((version(), python_version(), str(PROTOCOL_VERSION), sources.model_name), 1)]


def _spent(sources: Sources) -> Values:
    return [(("plan",), sources.plan_s()), (("wire",), sources.link.counters.seconds)]


PROCESS_FIGURES: tuple[Figure[Sources], ...] = (
    Figure("build_info", GAUGE, "1; what runs here", ("version", "python", "protocol", "model"),
           _build),
    Figure("config_info", GAUGE, "1 for each setting that matters to these figures", ("setting", "value"),
           lambda s: [(pair, 1) for pair in s.about]),
    Figure("controller_seconds", COUNTER, "the controller's time: planning and committing, and the wire", ("phase",),
           _spent),
    Figure("registry_up", GAUGE, "1 when the prefix registry answers", (), single(lambda s: s.registry.is_up)),
    Figure("registry_turn_seconds", HISTOGRAM, "turns in which the prefix registry was written to and read", (),
           single(lambda s: s.registry.turn_s.spread())),
    Figure("registry_names", GAUGE, "named prefixes that the registry holds", (), single(lambda s: s.registry.names)),
    Figure("registry_lookups", COUNTER, "blocks that the registry was asked about, by what it knew", ("result",),
           lambda s: [(("hit",), s.registry.hits), (("miss",), s.registry.misses)]),
    Figure("registry_sent", COUNTER, "hints and names that the prefix registry took", (),
           single(lambda s: s.registry.sent)),
    Figure("registry_dropped", COUNTER, "hints that were not sent to the prefix registry", (),
           single(lambda s: s.registry.dropped)),
    Figure("registry_failures", COUNTER, "turns in which the prefix registry did not answer", (),
           single(lambda s: s.registry.failures)),
    Figure("registry_ignored", COUNTER, "entries of the registry that were not signed, or made no sense", (),
           single(lambda s: s.registry.ignored)),
    _linked("frames_in", "frames from workers", lambda link: link.frames_in),
    _linked("bytes_in", "bytes from workers", lambda link: link.bytes_in),
    _linked("frames_out", "frames to workers", lambda link: link.frames_out),
    _linked("bytes_out", "bytes to workers", lambda link: link.bytes_out),
    _linked("unsent", "frames that could not be queued, each the loss of its worker", lambda link: link.unsent),
    _linked("strangers", "messages of peers without a lease", lambda link: link.strangers),
    Figure("link_denied", COUNTER, "handshakes refused for their key", (), single(lambda s: s.link.denied)),
    Figure("link_garbage", COUNTER, "frames that were no messages", ("kind",), _garbage),
    Figure("link_handshakes_failed", COUNTER, "connections that never became a peer's", ("kind",),
           lambda s: [((kind,), number) for kind, number in s.link.counters.handshakes.failed.items()]),
    _linked("handshakes", "connections whose ends have greeted each other", lambda link: link.handshakes.succeeded),
    _linked("connections_ended", "connections from peers that ended", lambda link: link.handshakes.ended),
)  # fmt: skip

SERVING_FIGURES: tuple[Figure[float], ...] = (
    Figure("up_to_serve", GAUGE, "1 when tokens can be produced, as /health says", (), single(lambda serving: serving)),
)
SILENCE_FIGURES: tuple[Figure[float], ...] = (
    Figure("lease_silence_seconds", GAUGE, "since the worker group was last heard", (), single(lambda s: s)),
)
