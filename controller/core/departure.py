"""A preemption from the choice to its end: which way and why, what either way was predicted to take, and the truth.

    preempted              Departure(way, why, predictions); the group carries it while it is away
    moves, computes again  each step's result adds the group's share of its seconds
    back                   all that it had is there again: prediction and truth are counted and told

A group that ends, is lost or is preempted again before it is back has no truth to tell; it counts as a decision only.
"""

from dataclasses import dataclass
from enum import Enum


class Way(Enum):
    """How a group leaves its rows."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class Why(Enum):
    """What decided it."""

    CHEAPER = "predicted to be cheaper"
    SETTING = "as the setting says"
    NOTHING = "nothing is computed that could be moved"
    FORMING = "its sequences wait for what they will share"
    NO_ROOM = "the host pool has no room"
    BOUND = "swapped groups would hold more than the device has"
    LOST = "blocks that it needs are lost"


@dataclass(slots=True)
class Departure:
    """One group's way out and back. Seconds are the worker's own."""

    way: Way
    why: Why
    swap_s: float  # predicted, to leave by swap and to come back
    recompute_s: float  # predicted, to compute again what no cache is expected to hold
    request_id: int
    targets: dict[int, int]  # by sequence index: positions that had their KV, which are to be there again
    num_kept: int = 0  # device blocks that stay, since others hold them too
    num_own: int = 0  # full blocks that nobody else holds
    back_step: int = 0  # the step that brings it onto its rows again; 0: not yet
    num_found: int = 0  # of its own blocks, those still on the device then ...
    num_brought: int = 0  # ... and those that came up from the host
    actual_s: float = 0.0

    @property
    def predicted_s(self) -> float:
        """Of the way that was chosen."""
        return self.swap_s if self.way is Way.SWAP else self.recompute_s

    def is_back(self, step: int, computed: dict[int, int]) -> bool:
        """Whether all is there again, now that `step` is done. `computed`: by sequence index, of those not ended."""
        has_begun = 0 < self.back_step <= step
        return has_begun and all(num >= self.targets.get(index, 0) for index, num in computed.items())

    @property
    def text(self) -> str:
        return (
            f"by {self.way.value}: {self.why.value}; predicted {said(self.swap_s)} to swap out and in, "
            f"{said(self.recompute_s)} to recompute"
        )

    @property
    def outcome(self) -> str:
        return f"back by {self.way.value} in {said(self.actual_s)}, predicted {said(self.predicted_s)}"


def said(seconds: float) -> str:
    """A time for people."""
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
