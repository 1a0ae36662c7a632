"""What clients of a simulation saw, and what it comes to.

    time to first token    from arrival to the first token
    inter-token            from one token of a sequence to the next
    normalized             from arrival to the last token, per token of the answer (as Orca and PagedAttention have it)
    goodput                requests whose first token, and mean time between tokens, were within their objectives

Gaps between tokens are counted by tenths of milliseconds, not kept. Means over pools are over samples taken at equal
distances of time; those over steps count a step by its seconds.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kilburn.controller.core.events import Beam, Finished, Submit
from kilburn.controller.core.snapshot import Snapshot
from kilburn.controller.simulate.reservations import Slots
from kilburn.controller.simulate.saturated import slots_of

GAP_S = 1e-4
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Seen:
    """One request as its client saw it."""

    at_s: float
    num_prompt: int
    num_output: int  # of each sequence
    num_left: int  # sequences that have not ended
    first_s: float = -1.0
    last_s: float = -1.0
    num_tokens: int = 0
    cached_tokens: int = 0
    width: int = 1


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a client hopes for; 0: anything will do."""

    first_s: float = 0.0
    gap_s: float = 0.0

    def are_met(self, seen: Seen) -> bool:
        if self.first_s and seen.first_s - seen.at_s > self.first_s:
            return False
        gaps = max(seen.num_tokens // seen.width - 1, 1)
        return not self.gap_s or (seen.last_s - seen.first_s) / gaps <= self.gap_s


@dataclass(slots=True)
class Record:
    """Told of everything by the cluster."""

    seen: dict[int, Seen] = field(default_factory=dict)
    gaps: Counter[int] = field(default_factory=Counter)  # in units of GAP_S
    num_refused: int = 0
    busy_s: float = 0.0
    row_seconds: float = 0.0
    samples: list[tuple[Slots, float]] = field(default_factory=list)  # the pool, and its tail waste
    saved: tuple[int, int] = (0, 0)  # blocks that sharing saved, of those that would have been needed; over samples
    last_end_s: float = 0.0
    from_s: float = 0.0  # steps and samples before are not counted

    def arrives(self, submit: Submit, now: float) -> None:
        self.seen[submit.request_id] = Seen(now, len(submit.prompt), submit.max_tokens, submit.n, width=submit.width)

    def started(self, request_id: int, cached_tokens: int, now: float) -> None:
        self.seen[request_id].cached_tokens = cached_tokens

    def emitted_by(self, request_ids: Iterable[int], now: float) -> None:
        """A token of a sequence of each of these."""
        gaps, gap, since_s = self.gaps, 0, -1.0
        for request_id in request_ids:
            seen = self.seen[request_id]
            if seen.num_tokens >= seen.num_output * seen.width:
                continue  # padding
            seen.num_tokens += 1
            if seen.first_s < 0:
                seen.first_s = now
            elif now > seen.last_s:  # of several sequences one gap a step
                if seen.last_s != since_s:  # most of those who go on together did so before
                    since_s, gap = seen.last_s, int((now - seen.last_s) / GAP_S + 0.5)
                gaps[gap] += 1
            seen.last_s = now

    def emitted_together(self, num_sequences: Mapping[int, int], times: Sequence[float]) -> None:
        """As `emitted_by` at each of the times, for so many sequences of each request."""
        gaps, num_alike = gaps_of(times), 0
        for request_id, count in num_sequences.items():
            self.emitted_by((request_id,) * count, times[0])
            seen = self.seen[request_id]
            most = seen.num_output * seen.width - seen.num_tokens  # what is left: beyond it is padding
            num_times = min(len(times) - 1, -(-most // count))
            if num_times <= 0:
                continue
            seen.num_tokens += min(num_times * count, most)
            seen.last_s = times[num_times]
            if num_times == len(times) - 1:
                num_alike += 1
            else:
                self.gaps += gaps_of(times[: num_times + 1])
        for gap, number in gaps.items():
            self.gaps[gap] += number * num_alike

    def ended(self, effect: Finished | Beam, now: float) -> bool:
        """Whether that was its last sequence."""
        seen = self.seen[effect.request_id]
        if isinstance(effect, Beam):
            seen.num_tokens += len(effect.tokens)
            if seen.first_s < 0:
                seen.first_s = now
        seen.num_left -= 1
        if seen.num_left:
            return False
        seen.last_s, self.last_end_s = now, max(self.last_end_s, now)
        return True

    def refused(self, request_id: int) -> None:
        self.num_refused += 1
        del self.seen[request_id]

    def step(self, num_rows: int, seconds: float, now: float) -> None:
        if now < self.from_s:
            return
        self.busy_s += seconds
        self.row_seconds += num_rows * seconds

    def steps(self, num_rows: int, seconds: Sequence[float], times: Sequence[float]) -> None:
        """As `step` at each of the times, which are in order."""
        first = bisect_left(times, self.from_s)
        busy_s = sum(seconds[first:])
        self.busy_s += busy_s
        self.row_seconds += num_rows * busy_s

    def __call__(self, request_id: int) -> int:
        """Slots that each sequence of a request has filled: for gates."""
        seen = self.seen[request_id]
        return seen.num_prompt + max(seen.num_tokens // seen.width - 1, 0) if seen.num_tokens else 0

    def sample(self, snapshot: Snapshot, slots: Slots | None, now: float) -> None:
        if now < self.from_s:
            return
        for group in snapshot.groups:
            if not group.running_sequences:
                continue
            pool = slots_of(group) if slots is None else slots
            held = pool.used + pool.reserved + pool.internal
            self.samples.append((pool, 1 - pool.used / held if held else 0.0))
            needed = group.owned_blocks + group.shared_refs
            self.saved = (self.saved[0] + group.shared_refs, self.saved[1] + needed)

    def merge(self, other: "Record") -> None:
        """Another controller's clients. Their requests are told apart by nothing but their numbers here."""
        self.seen |= {len(self.seen) + i: seen for i, seen in enumerate(other.seen.values())}
        self.gaps += other.gaps
        self.num_refused += other.num_refused
        self.busy_s += other.busy_s
        self.row_seconds += other.row_seconds
        self.samples += other.samples
        self.saved = (self.saved[0] + other.saved[0], self.saved[1] + other.saved[1])
        self.last_end_s = max(self.last_end_s, other.last_end_s)


def gaps_of(times: Sequence[float]) -> Counter[int]:
    """The gaps between one time and the next, in units of GAP_S."""
    return Counter([int((now - before) / GAP_S + 0.5) for before, now in pairwise(times)])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in order, by the nearest rank; 0 of none."""
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)] if ordered else 0.0


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else 0.0
    return {"mean": mean} | {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}


def spread_of_counts(counts: Counter[int], unit: float) -> dict[str, float]:
    total, found, at = sum(counts.values()), {"mean": 0.0}, 0
    if not total:
        return found | {f"p{percent}": 0.0 for percent in PERCENTILES}
    found["mean"] = unit * sum(value * count for value, count in counts.items()) / total
    wanted = [(percent, min(int(total * percent / 100), total - 1)) for percent in PERCENTILES]
    for value in sorted(counts):
        at += counts[value]
        while wanted and at > wanted[0][1]:
            found[f"p{wanted.pop(0)[0]}"] = unit * value
    return found
