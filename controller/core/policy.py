"""Who is admitted, who is preempted, and what a group needs. Questions only: nothing here changes anything."""

from collections.abc import Sequence as Listing

from kilburn.controller.core.block_pool import BlockPool
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


class Need:
    """What admitting a group takes: for each live sequence its hits, and the blocks that it must take."""

    __slots__ = ("hits", "num_common", "taken")

    def __init__(self, group: Group, hits: list[list[int]], block_size: int) -> None:
        """`hits`: blocks found in the pool for each live sequence, in order."""
        self.hits = hits
        self.num_common = shared_blocks(group, block_size)
        self.taken: list[int] = []
        for i, (sequence, found) in enumerate(zip(group.live, hits, strict=True)):
            total = blocks_for(min(len(sequence.tokens), sequence.limit), block_size)
            # The first computes what all share; one that finds less than that in the pool waits for it.
            covered = len(found) if i == 0 else max(len(found), self.num_common)
            self.taken.append(total - covered)

    def follows(self, i: int) -> bool:
        """Whether sequence number i waits for the first one's common blocks."""
        return i > 0 and len(self.hits[i]) < self.num_common

    def num_blocks(self, pool: BlockPool) -> int:
        """Blocks that admission takes out of what is available: taken ones, and cached ones that gain an owner."""
        revived = {
            block
            for i, found in enumerate(self.hits)
            if not self.follows(i)
            for block in found
            if pool.is_cached(block)
        }
        return sum(self.taken) + len(revived)


def victim(running: Listing[Group], asking: int, was_granted: bool) -> Group | None:
    """Whom to preempt for the group at position `asking` of `running`, which is in order of place.

    The last in line; the asking group itself where nobody is behind it; nobody where that would be a group to which
    this plan has already given work.
    """
    if asking + 1 < len(running):
        return running[-1]
    return None if was_granted else running[asking]
