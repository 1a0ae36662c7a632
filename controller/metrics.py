"""Figures for Prometheus, read when somebody asks.

Nothing is counted here: gauges and counters are the engine's snapshot, the link's counters and the streams' counts at
the moment of the scrape. So a figure cannot drift from what it is about, and a scrape that fails stops nothing.
Counters of a worker group begin anew with each of its leases, as those of any restarted process do.
"""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kilburn.controller.core.snapshot import GroupSnapshot, Snapshot
from kilburn.controller.streams import Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# (name, help, field of GroupSnapshot)
_GROUP_GAUGES = (
    ("requests_running", "requests that hold blocks", "running_requests"),
    ("requests_queued", "requests placed here that wait for blocks", "waiting_requests"),
    ("sequences_running", "sequences in the batch", "running_sequences"),
    ("flights", "plans under way", "flights"),
    ("filled_slots", "token positions of running sequences that have their KV", "filled_slots"),
    ("owned_slots", "token positions that their blocks could hold", "owned_slots"),
    ("shared_blocks", "blocks that sharing saves", "shared_refs"),
)
_GROUP_COUNTERS = (
    ("steps", "steps committed", "steps"),
    ("step_prompt_tokens", "prompt positions computed", "prompt_tokens"),
    ("step_generated_tokens", "tokens drawn", "generated_tokens"),
    ("prefix_query_tokens", "prompt tokens looked up in the prefix cache", "prefix_query_tokens"),
    ("prefix_hit_tokens", "prompt tokens found there", "prefix_hit_tokens"),
    ("preemptions", "requests that had to give up their blocks", "preemptions"),
    ("block_copies", "blocks copied on write", "block_copies"),
    ("evictions", "cached blocks that lost their names", "evictions"),
)
_PHASES = ("idle", "apply", "forward", "sample")
_LINK = ("frames_in", "bytes_in", "frames_out", "bytes_out", "unsent", "strangers", "denied")


class Metrics:
    """One process's figures, in a registry of their own."""

    def __init__(self, snapshot: Callable[[], Snapshot], counts: Counts, link_counters: object) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Reading(snapshot, counts, link_counters))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Reading(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot], counts: Counts, link_counters: object) -> None:
        self._snapshot, self._counts, self._link = snapshot, counts, link_counters

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        yield _gauge("up_to_serve", "1 when tokens can be produced", float(snapshot.can_produce))
        yield _gauge("worker_groups", "worker groups with a lease", len(snapshot.groups))
        yield _gauge("requests", "requests known to the engine", snapshot.requests)
        yield _gauge("requests_homeless", "requests that wait for a worker group", snapshot.homeless_requests)
        yield _counter("leases_began", "leases given", snapshot.leases_began)
        yield _counter("leases_ended", "leases that ended", snapshot.leases_ended)
        yield _counter("laws_broken", "bugs found by our own accounting", snapshot.laws_broken)
        yield from self._edge()
        yield from self._of_groups(snapshot.groups)
        yield from self._of_link()

    def _edge(self) -> Iterator[Metric]:
        counts = self._counts
        yield _counter("prompt_tokens", "prompt tokens of requests that were started", counts.prompt_tokens)
        yield _counter("cached_tokens", "of these, tokens found in the prefix cache", counts.cached_tokens)
        yield _counter("output_tokens", "tokens given to clients", counts.output_tokens)
        ended = CounterMetricFamily("kilburn_requests_ended", "requests, by how they ended", labels=["how"])
        for how, number in counts.requests.items():
            ended.add_metric([how], number)
        yield ended

    def _of_groups(self, groups: tuple[GroupSnapshot, ...]) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("kilburn_blocks", "device blocks, by state", labels=["group", "state"])
        seconds = CounterMetricFamily("kilburn_worker_seconds", "a worker's time, by phase", labels=["group", "phase"])
        for group in groups:
            for state in ("free", "cached", "owned", "quarantined"):
                blocks.add_metric([group.name, state], getattr(group, f"{state}_blocks"))
            for phase in _PHASES:
                seconds.add_metric([group.name, phase], getattr(group, f"worker_{phase}_s"))
        yield blocks
        yield seconds
        for name, about, field in _GROUP_GAUGES:
            yield _per_group(GaugeMetricFamily(f"kilburn_{name}", about, labels=["group"]), groups, field)
        for name, about, field in _GROUP_COUNTERS:
            yield _per_group(CounterMetricFamily(f"kilburn_{name}", about, labels=["group"]), groups, field)

    def _of_link(self) -> Iterator[Metric]:
        for name in _LINK:
            yield _counter(
                f"link_{name}", f"{name.replace('_', ' ')}, on the socket to workers", _number(self._link, name)
            )
        garbage = CounterMetricFamily("kilburn_link_garbage", "frames that were no messages", labels=["kind"])
        for kind, number in getattr(self._link, "garbage", {}).items():
            garbage.add_metric([kind], number)
        yield garbage


def _number(counters: object, name: str) -> float:
    value: Any = getattr(counters, name, 0)
    return float(value)


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kilburn_{name}", about, value=value)


def _counter(name: str, about: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"kilburn_{name}", about, value=value)


def _per_group(
    family: GaugeMetricFamily | CounterMetricFamily, groups: tuple[GroupSnapshot, ...], field: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for group in groups:
        family.add_metric([group.name], getattr(group, field))
    return family
