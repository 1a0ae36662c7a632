"""Who is admitted, who is preempted, and what a group needs. Questions only: nothing here changes anything."""

from collections.abc import Sequence as Listing
from enum import Enum

from kilburn.controller.core.block_pool import BlockPool
from kilburn.controller.core.memory import Hits
from kilburn.controller.core.sequence import Group
from kilburn.shared.layout import blocks_for


def most_blocks(num_prompt: int, limit: int, n: int, block_size: int) -> int:
    """Blocks of a group when every sequence is at its limit: full prompt blocks once, the rest for each.

    It holds after a preemption too, since a forked group is recomputed as it was made.
    """
    total = blocks_for(max(limit, 0), block_size)
    if n == 1 or limit <= num_prompt:  # with one token each, all end at the fork and nothing is written after it
        return total
    common = num_prompt // block_size
    return common + n * (total - common)


def longest_limit(num_prompt: int, n: int, num_blocks: int, block_size: int) -> int:
    """The largest limit at which a group of n still fits a pool; below num_prompt - 1 the prompt does not fit."""
    alone = num_blocks * block_size
    if n == 1 or alone <= num_prompt:
        return alone
    common = num_prompt // block_size
    return max((common + (num_blocks - common) // n) * block_size, num_prompt)


def shared_blocks(group: Group, block_size: int) -> int:
    """Full blocks that all sequences of a forked group have in common."""
    # At least the newest token of each is its own, so this never covers a newest token.
    return group.live[0].num_prompt // block_size


class Preemption(Enum):
    """How a victim leaves."""

    AUTO = "auto"  # whichever is predicted to cost less
    RECOMPUTE = "recompute"
    SWAP = "swap"  # wherever the host has room


class Costs:
    """Seconds that a worker has shown to take for a block moved and for a token computed. They learn as results come.

    Averages forget by a fifth at each observation. Until there is one, a slow copy (4 GB/s) and a fast prefill (10 us a
    token) are assumed, which favour recomputing.
    """

    def __init__(self, bytes_per_block: int) -> None:
        self.move_s_per_block = bytes_per_block / 4e9
        self.compute_s_per_token = 1e-5
        self._has_moved = self._has_computed = False

    def moved(self, num_blocks: int, seconds: float) -> None:
        if num_blocks:
            each = seconds / num_blocks
            weight = 0.2 if self._has_moved else 1.0
            self.move_s_per_block += weight * (each - self.move_s_per_block)
            self._has_moved = True

    def computed(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            each = seconds / num_tokens
            weight = 0.2 if self._has_computed else 1.0
            self.compute_s_per_token += weight * (each - self.compute_s_per_token)
            self._has_computed = True

    def swap_s(self, num_out: int, num_in: int) -> float:
        """Predicted seconds for a group to leave by swap and to come back."""
        return (num_out + num_in) * self.move_s_per_block

    def recompute_s(self, num_tokens: int) -> float:
        """Predicted seconds to compute tokens again."""
        return num_tokens * self.compute_s_per_token


class Need:
    """What admitting a group takes: for each live sequence its hits, and the blocks that it must take."""

    __slots__ = ("_follows", "hits", "num_common", "taken")

    def __init__(self, group: Group, hits: list[Hits], block_size: int) -> None:
        """`hits`: what was found for each live sequence, in order. Only the first brings blocks up from the host."""
        self.num_common = shared_blocks(group, block_size)
        # The first computes what all share; one that finds less than that waits for it.
        self._follows = [i > 0 and len(found.device) < self.num_common for i, found in enumerate(hits)]
        self.hits = [self._usable(i, found) for i, found in enumerate(hits)]
        self.taken: list[int] = []
        for i, sequence in enumerate(group.live):
            total = blocks_for(min(len(sequence.tokens), sequence.limit), block_size)
            self.taken.append(total - (self.num_common if self._follows[i] else len(self.hits[i].device)))

    def _usable(self, i: int, found: Hits) -> Hits:
        if self._follows[i]:
            return Hits([], [])
        return found if i == 0 else Hits(found.device, [])

    def follows(self, i: int) -> bool:
        """Whether sequence number i waits for the first one's common blocks."""
        return self._follows[i]

    def num_blocks(self, pool: BlockPool) -> int:
        """Blocks that admission takes out of what is available: taken ones, and cached ones that gain an owner."""
        revived = {block for found in self.hits for block in found.device if pool.is_cached(block)}
        return sum(self.taken) + len(revived)


def victim(running: Listing[Group], asking: int, was_granted: bool) -> Group | None:
    """Whom to preempt for the group at position `asking` of `running`, which is in order of place.

    The last in line; the asking group itself where nobody is behind it; nobody where that would be a group to which
    this plan has already given work.
    """
    if asking + 1 < len(running):
        return running[-1]
    return None if was_granted else running[asking]
