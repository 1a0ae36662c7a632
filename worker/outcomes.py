"""What may become of a plan, and of a row, other than tokens."""

from dataclasses import dataclass

from kilburn.shared.types import Tier


class PlanBroken(Exception):
    """The plan breaks the contract between the core and the worker. Ends the lease."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The row's own request went wrong."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Blocks that the row read proved unreadable in step `step`."""

    blocks: tuple[tuple[Tier, int], ...]
    step: int


Death = Failed | Lost
