"""A figure is a row of a table: its name, its words, its labels, and where it is read.

    Figure("blocks", Kind.GAUGE, "blocks, by tier and state", ("tier", "state"), lambda group: [...])
        kilburn_blocks{group="worker-0", tier="device", state="free"} 812

Rows read whatever thing they are rows of (a snapshot of a worker group, the counts of the edge) and hold no numbers of
their own, so a figure cannot drift from what it is about. Labels have few values, all of our choosing, save the names
of worker groups and of the model.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kilburn.controller.core.histogram import Spread

T = TypeVar("T")
Labels = tuple[str, ...]
Values = Iterable[tuple[Labels, float | Spread]]  # values of the labels, and the figure


class Kind(Enum):
    GAUGE = "gauge"
    COUNTER = "counter"  # its name gets the ending _total
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Figure(Generic[T]):
    """See the file's head. `read` gives the values of `labels` and a number, or a Spread for a histogram."""

    name: str
    kind: Kind
    about: str
    labels: Labels
    read: Callable[[T], Values]


def single(read: Callable[[T], float | Spread]) -> Callable[[T], Values]:
    """Of a figure without labels."""
    return lambda thing: [((), read(thing))]


def families(
    figures: Iterable[Figure[T]],
    things: Iterable[tuple[Labels, T]],
    prefix: str = "kilburn_",
    labels: Labels = (),
) -> Iterator[Metric]:
    """Every figure of every thing. `labels` are those that all figures have; each thing comes with their values."""
    held = list(things)
    for figure in figures:
        family = _family(figure, prefix + figure.name, labels)
        for values, thing in held:
            for more, value in figure.read(thing):
                _add(family, [*values, *more], value)
        yield family


def _family(figure: Figure[T], name: str, labels: Labels) -> Metric:
    every = [*labels, *figure.labels]
    match figure.kind:
        case Kind.GAUGE:
            return GaugeMetricFamily(name, figure.about, labels=every)
        case Kind.COUNTER:
            return CounterMetricFamily(name, figure.about, labels=every)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(name, figure.about, labels=every)


def _add(family: Metric, labels: list[str], value: float | Spread) -> None:
    if isinstance(value, Spread):
        if not isinstance(family, HistogramMetricFamily):
            raise TypeError(f"{family.name} is no histogram")
        edges = [*(f"{edge:g}" for edge in value.edges), "+Inf"]
        family.add_metric(labels, list(zip(edges, accumulate(value.counts), strict=True)), value.total)
    elif isinstance(family, GaugeMetricFamily | CounterMetricFamily):
        family.add_metric(labels, float(value))
    else:
        raise TypeError(f"{family.name} is a histogram, and {value!r} is one number")
