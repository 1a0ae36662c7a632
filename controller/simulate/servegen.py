"""Clients of a service as ServeGen publishes them (arXiv 2505.09999), and requests drawn from them.

    chunk-N-trace.csv           start of a window (s), requests a second, cv, Gamma | Weibull | nothing, shape, scale
    chunk-N-dataset.json(.gz)   {start of a window: {"input_tokens": "{tokens: share, ...}", "output_tokens": "..."}}

One pair of files is one client. Each window of its trace is a renewal process whose gaps have the given shape and the
mean that the rate says, since the published scales fit only roughly. Lengths are drawn from the histograms of the
window in which a request falls. The same seed gives the same requests; each client draws from dice of its own.
"""

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

from kilburn.controller.simulate.traces import Asked, TraceError, read_text

_ENTRY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*:\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*")
_PATTERNS = ("Gamma", "Weibull", "")  # the last: nobody asks


@dataclass(frozen=True, slots=True)
class Window:
    """How a client asks from `start_s` on, until its next window."""

    start_s: float
    rate: float  # requests a second
    pattern: str
    shape: float

    def gap_s(self, rng: Random) -> float:
        mean_s = 1.0 / self.rate
        if self.pattern == "Gamma":
            return rng.gammavariate(self.shape, mean_s / self.shape)
        return rng.weibullvariate(mean_s / math.gamma(1.0 + 1.0 / self.shape), self.shape)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Lengths and how often each occurs; empty where nobody asked."""

    lengths: tuple[int, ...] = ()
    cumulative: tuple[float, ...] = ()

    def draw(self, rng: Random) -> int:
        at = bisect_right(self.cumulative, rng.random() * self.cumulative[-1])
        return self.lengths[min(at, len(self.lengths) - 1)]


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    windows: tuple[Window, ...]  # in order of time
    lengths: tuple[tuple[float, Histogram, Histogram], ...]  # (start, prompts, answers), in order of time

    @property
    def mean_rate(self) -> float:
        return sum(window.rate for window in self.windows) / len(self.windows)

    def draw(self, seconds: float, share: float, rng: Random) -> Iterator[Asked]:
        """Its requests of the first `seconds`, at `share` of its rate."""
        ends = [window.start_s for window in self.windows[1:]] + [math.inf]
        for window, end_s in zip(self.windows, ends, strict=True):
            if window.start_s >= seconds:
                return
            if not window.pattern or not window.rate:
                continue
            at_s = window.start_s + window.gap_s(rng) / share * rng.random()  # it did not begin with the window
            while at_s < min(end_s, seconds):
                prompts, answers = self._lengths_at(at_s)
                if prompts.lengths and answers.lengths:
                    yield Asked(at_s, max(prompts.draw(rng), 1), max(answers.draw(rng), 1))
                at_s += window.gap_s(rng) / share

    def _lengths_at(self, at_s: float) -> tuple[Histogram, Histogram]:
        at = bisect_right([start for start, _, _ in self.lengths], at_s) - 1
        _, prompts, answers = self.lengths[max(at, 0)]
        return prompts, answers


def draw_requests(clients: Sequence[Client], seconds: float, rate: float, seed: int) -> list[Asked]:
    """Requests of all clients over so many seconds, in order of time. `rate`: of all in the mean; 0: their own."""
    total = sum(client.mean_rate for client in clients)
    share = rate / total if rate else 1.0
    found = [asked for c in clients for asked in c.draw(seconds, share, Random(f"{seed} {c.name}"))]
    return sorted(found, key=lambda asked: asked.at_s or 0.0)


def read_clients(folder: Path) -> list[Client]:
    """Every client of a folder. Raises TraceError."""
    traces = sorted(folder.glob("chunk-*-trace.csv*"))
    if not traces:
        raise TraceError(f"{folder}: holds no chunk-N-trace.csv, as ServeGen's folders of clients do")
    clients = []
    for trace in traces:
        name = trace.name.split("-trace.csv")[0]
        datasets = sorted(folder.glob(f"{name}-dataset.json*"))
        if not datasets:
            raise TraceError(f"{trace}: has no {name}-dataset.json beside it")
        clients.append(Client(name, tuple(_windows(trace)), tuple(_dataset(datasets[0]))))
    return clients


def _windows(path: Path) -> Iterator[Window]:
    number = 0
    for number, line in enumerate(read_text(path).splitlines(), 1):
        cells, where = line.split(","), f"{path}:{number}"
        try:
            start_s, rate, _, shape = float(cells[0]), float(cells[1]), float(cells[2] or 0), float(cells[4] or 0)
            if len(cells) != 6 or cells[3] not in _PATTERNS or not 0 <= rate < math.inf:
                raise ValueError
            if cells[3] and rate and not 0 < shape < math.inf:
                raise ValueError
        except (ValueError, IndexError) as error:
            raise TraceError(f"{where}: expected start,rate,cv,Gamma|Weibull|,shape,scale, found {line!r}") from error
        yield Window(start_s, rate, cells[3], shape)
    if not number:
        raise TraceError(f"{path}:1: holds no window")


def _dataset(path: Path) -> Iterator[tuple[float, Histogram, Histogram]]:
    try:
        windows = json.loads(read_text(path))
        if not isinstance(windows, dict):
            raise ValueError(f"found {type(windows).__name__}")
        starts = sorted((float(start), start) for start in windows)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{error.lineno}: not JSON ({error.msg})") from error
    except ValueError as error:
        raise TraceError(f"{path}: expected an object of windows by their start in seconds ({error})") from error
    if not starts:
        raise TraceError(f"{path}: holds no window")
    for start_s, start in starts:
        window = windows[start]
        if not isinstance(window, dict):
            raise TraceError(f"{path}: window {start} is no object")
        prompts, answers = (_histogram(window.get(k), f"{path}: {k} of window {start}") for k in
                            ("input_tokens", "output_tokens"))  # fmt: skip
        yield start_s, prompts, answers


def _histogram(text: object, where: str) -> Histogram:
    """A Python dict as text, which is read and not evaluated."""
    if not isinstance(text, str) or not (text.startswith("{") and text.endswith("}")):
        raise TraceError(f"{where}: expected a text such as '{{34: 0.25, 35: 0.75}}'")
    lengths, shares = [], []
    for part in text[1:-1].split(",") if text[1:-1].strip() else ():
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise TraceError(f"{where}: {part.strip()!r} is no 'tokens: share'")
        lengths.append(round(float(match[1])))
        shares.append(float(match[2]))
    if lengths and not sum(shares) > 0:
        raise TraceError(f"{where}: its shares are all 0")
    return Histogram(tuple(lengths), tuple(accumulate(shares)))
