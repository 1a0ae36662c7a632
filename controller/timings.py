"""Where the time of one call went, for whoever asks for it: a few sums over the records of its requests.

    submitted ---- queue ----> started ---- prefill ----> first token ---- decode ----> end

Of a call with several prompts each span is that of its slowest request, and counts are sums. In an answer spans are
seconds, in the header Server-Timing milliseconds, as its standard has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kilburn.controller.story import Record


@dataclass(frozen=True, slots=True)
class Timings:
    """See the file's head."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    swap_s: float = 0.0  # blocks on their way to the host and back
    cached_tokens: int = 0
    preemptions: int = 0

    def as_data(self) -> dict[str, float | int]:
        return {
            "queue": round(self.queue_s, 6),
            "prefill": round(self.prefill_s, 6),
            "decode": round(self.decode_s, 6),
            "swap": round(self.swap_s, 6),
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
        }

    def as_header(self) -> str:
        spans = ("queue", self.queue_s), ("prefill", self.prefill_s), ("decode", self.decode_s), ("swap", self.swap_s)
        told = [f"{name};dur={1000 * seconds:.3f}" for name, seconds in spans]
        counts = ("cached_tokens", self.cached_tokens), ("preemptions", self.preemptions)
        return ", ".join(told + [f'{name};desc="{count}"' for name, count in counts])


def timings_of(records: Sequence[Record], now: float) -> Timings:
    """Of all requests of one call. `now`: for those that are not over."""
    queue_s = prefill_s = decode_s = 0.0
    for record in records:
        end = record.end.at if record.end is not None else now
        started = record.started_at if record.started_at is not None else end
        first = record.first_token_at if record.first_token_at is not None else end
        queue_s = max(queue_s, started - record.submitted_at)
        prefill_s = max(prefill_s, first - started)
        decode_s = max(decode_s, end - first)
    return Timings(
        queue_s,
        prefill_s,
        decode_s,
        sum(record.swap_s for record in records),
        sum(record.num_cached for record in records),
        sum(record.num_preempted for record in records),
    )
