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
from kilburn.controller.registry import RegistryCounters
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
    ("pinned_blocks", "blocks that named prefixes hold", "pinned_blocks"),
    ("move_seconds_per_block", "what a block moved between the tiers is expected to take", "move_s_per_block"),
    ("compute_seconds_per_token", "what a prompt token is expected to take", "compute_s_per_token"),
)
_GROUP_COUNTERS = (
    ("steps", "steps committed", "steps"),
    ("step_prompt_tokens", "prompt tokens of requests that began", "prompt_tokens"),
    ("step_generated_tokens", "tokens drawn", "generated_tokens"),
    ("prefix_query_tokens", "prompt tokens looked up in the prefix cache", "prefix_query_tokens"),
    ("prefix_hit_tokens", "prompt tokens found there", "prefix_hit_tokens"),
    ("swapped_in", "requests that came back from the host pool", "swapped_in"),
    ("swap_out_blocks", "blocks copied to the host pool", "blocks_out"),
    ("swap_in_blocks", "blocks copied from the host pool", "blocks_in"),
    ("swap_out_bytes", "the same in bytes: groups that left, and evicted blocks that were kept", "bytes_out"),
    ("swap_in_bytes", "the same in bytes: groups that came back, and hits", "bytes_in"),
    ("host_saved_bytes", "bytes of evicted blocks that the host pool kept", "bytes_saved"),
    ("host_hit_bytes", "bytes that came back from there by their names", "bytes_hit"),
    ("preemptions_by_cost", "preemptions that the predictions decided", "chosen_by_cost"),
    ("swaps_without_room", "preempted by recompute, since the host pool had no room", "swaps_without_room"),
    ("host_saved_blocks", "evicted blocks that the host pool kept", "blocks_saved"),
    ("host_hits", "blocks that came back from there by their names", "host_hits"),
    ("block_copies", "blocks copied on write", "block_copies"),
    ("evictions", "cached blocks that lost their names", "evictions"),
)
_PHASES = ("idle", "apply", "forward", "sample")
_REGISTRY = (
    ("sent", "hints and names that the prefix registry took"),
    ("dropped", "hints that were not sent to the prefix registry"),
    ("failures", "turns in which the prefix registry did not answer"),
    ("ignored", "entries of the prefix registry that were not signed, or made no sense"),
)
_LINK = ("frames_in", "bytes_in", "frames_out", "bytes_out", "unsent", "strangers", "denied")


class Metrics:
    """One process's figures, in a registry of their own."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], counts: Counts, link_counters: object, registry: RegistryCounters
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Reading(snapshot, counts, link_counters, registry))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Reading(Collector):
    def __init__(
        self, snapshot: Callable[[], Snapshot], counts: Counts, link_counters: object, registry: RegistryCounters
    ) -> None:
        self._snapshot, self._counts, self._link, self._counters = snapshot, counts, link_counters, registry

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
        for name, about in _REGISTRY:
            yield _counter(f"registry_{name}", about, getattr(self._counters, name))
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
        sharing = GaugeMetricFamily(
            "kilburn_sharing_ratio", "blocks that sharing saves, of those needed without it", labels=["group"]
        )
        for group in groups:
            without = group.owned_blocks + group.shared_refs
            sharing.add_metric([group.name], group.shared_refs / without if without else 0.0)
        yield sharing
        preemptions = CounterMetricFamily(
            "kilburn_preemptions", "requests that had to give up their blocks", labels=["group", "by"]
        )
        for group in groups:
            for way in ("recompute", "swap"):
                preemptions.add_metric([group.name, way], getattr(group, f"preempted_by_{way}"))
        yield preemptions
        yield from _returns(groups)
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


def _returns(groups: tuple[GroupSnapshot, ...]) -> Iterator[Metric]:
    """Of preempted requests that were all there again: how many, what was predicted, and the truth."""
    returned = CounterMetricFamily(
        "kilburn_preemptions_returned", "preempted requests that had again all that they had", labels=["group", "by"]
    )
    seconds = CounterMetricFamily(
        "kilburn_preemption_seconds",
        "worker seconds that these preemptions were predicted to take, and took",
        labels=["group", "by", "what"],
    )
    for group in groups:
        for way in ("recompute", "swap"):
            returned.add_metric([group.name, way], getattr(group, f"returned_by_{way}"))
            for what in ("predicted", "actual"):
                seconds.add_metric([group.name, way, what], getattr(group, f"{what}_{way}_s"))
    yield returned
    yield seconds


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
