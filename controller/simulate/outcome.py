"""What a simulation came to, in one record: the row of a table, the object of a JSON file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kilburn.controller.core.departure import Way
from kilburn.controller.simulate.record import GAP_S, Objectives, Record, spread, spread_of_counts
from kilburn.controller.simulate.sizing import Tally

ANYTHING = Objectives()


@dataclass(slots=True)
class Outcome:
    """What one run came to. Seconds are simulated; shares are of 1."""

    num_requests: int
    num_refused: int
    seconds: float  # until the last answer
    num_prompt_tokens: int
    num_output_tokens: int
    first_s: dict[str, float]
    gap_s: dict[str, float]
    normalized_s: dict[str, float]
    good_share: float
    good_rate: float  # requests a second within their objectives
    hit_share: float  # of prompt tokens, found in the cache at the first start
    host_hit_share: float
    preempted_swap: int
    preempted_recompute: int
    tail_waste: float  # of the slots that are allocated, the share that holds no token
    pool: dict[str, float]  # shares of the pool: used, reserved, internal, external
    saved_share: float  # of blocks, by sharing
    mean_rows: float  # in a step, by its seconds
    busy_share: float  # of the groups' time
    num_steps: int
    num_sequence_steps: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def outcome_of(record: Record, tally: Tally, objectives: Objectives = ANYTHING) -> Outcome:
    ended = [seen for seen in record.seen.values() if not seen.num_left]
    seconds = record.last_end_s - min((seen.at_s for seen in record.seen.values()), default=0.0)
    good = sum(objectives.are_met(seen) for seen in ended)
    num_prompt = sum(seen.num_prompt for seen in ended)
    kinds = ("used", "reserved", "internal", "external")
    return Outcome(
        num_requests=len(ended),
        num_refused=record.num_refused,
        seconds=seconds,
        num_prompt_tokens=num_prompt,
        num_output_tokens=sum(seen.num_tokens for seen in ended),
        first_s=spread([seen.first_s - seen.at_s for seen in ended]),
        gap_s=spread_of_counts(record.gaps, GAP_S),
        normalized_s=spread([(seen.last_s - seen.at_s) / max(seen.num_output, 1) for seen in ended]),
        good_share=good / max(len(ended) + record.num_refused, 1),
        good_rate=good / seconds if seconds else 0.0,
        hit_share=sum(seen.cached_tokens for seen in ended) / max(num_prompt, 1),
        host_hit_share=tally.host_hit_tokens / max(tally.prompt_tokens, 1),
        preempted_swap=tally.preempted[Way.SWAP],
        preempted_recompute=tally.preempted[Way.RECOMPUTE],
        tail_waste=_mean([waste for _, waste in record.samples]),
        pool={kind: _mean([getattr(slots, kind) / slots.total for slots, _ in record.samples]) for kind in kinds},
        saved_share=record.saved[0] / max(record.saved[1], 1),
        mean_rows=record.row_seconds / record.busy_s if record.busy_s else 0.0,
        busy_share=record.busy_s / (seconds * tally.num_groups) if seconds else 0.0,
        num_steps=tally.num_steps,
        num_sequence_steps=tally.num_sequence_steps,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
