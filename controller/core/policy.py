"""Who is admitted, who is preempted, and what a group needs. Questions only: nothing here changes anything."""

from collections.abc import Iterable
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


class Rate:
    """Seconds for each of something, from sums that forget by a fifth at each observation; a guess until there is one.

    By sums and not by averages of ratios: what was seen to take long for little counts for little.
    """

    __slots__ = ("_amount", "_guess_s", "_seconds")

    def __init__(self, guess_s: float) -> None:
        self._guess_s, self._amount, self._seconds = guess_s, 0.0, 0.0

    def observe(self, amount: float, seconds: float) -> None:
        self._amount = 0.8 * self._amount + amount
        self._seconds = 0.8 * self._seconds + seconds

    def observe_each(self, seconds: Iterable[float]) -> None:
        """Each of these, of one."""
        amount, total_s = self._amount, self._seconds
        for each_s in seconds:
            amount = 0.8 * amount + 1
            total_s = 0.8 * total_s + each_s
        self._amount, self._seconds = amount, total_s

    @property
    def each_s(self) -> float:
        return max(self._seconds, 0.0) / self._amount if self._amount else self._guess_s


class Costs:
    """Seconds that a worker has shown to take for a block moved and for a token computed. They learn as results come.

    Until there is an observation, a slow copy (4 GB/s) and a fast prefill (10 us a token) are assumed, which favour
    recomputing. A chunk's seconds are those beyond a step that only decodes: those rows would have run anyway.
    """

    def __init__(self, bytes_per_block: int) -> None:
        self._move = Rate(bytes_per_block / 4e9)
        self._compute = Rate(1e-5)
        self._decode = Rate(0.0)
        self._found = Rate(0.0)  # of a victim's own full blocks: those still on the device when it came back ...
        self._brought = Rate(0.0)  # ... and those evicted to the host, and found there

    @property
    def move_s_per_block(self) -> float:
        return self._move.each_s

    @property
    def compute_s_per_token(self) -> float:
        return self._compute.each_s

    def moved(self, num_blocks: int, seconds: float) -> None:
        if num_blocks:
            self._move.observe(num_blocks, seconds)

    def computed(self, num_chunk_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step computed so many tokens of chunks beside so many rows that went on by one."""
        if num_chunk_tokens:
            self._compute.observe(num_chunk_tokens, self.chunk_s(num_decodes, seconds))
        elif num_decodes:
            self._decode.observe(1, seconds)

    def decoded(self, seconds: Iterable[float]) -> None:
        """As `computed`, of several steps one after the other that compute no chunks."""
        self._decode.observe_each(seconds)

    def chunk_s(self, num_decodes: int, seconds: float) -> float:
        """Of a step's seconds, those that its chunks took."""
        return seconds - min(self._decode.each_s, seconds) if num_decodes else seconds

    def came_back(self, num_own: int, num_found: int, num_brought: int | None) -> None:
        """Of a victim's own full blocks so many were still there. `num_brought`: None where it was swapped."""
        if num_own:
            self._found.observe(num_own, min(num_found, num_own))
            if num_brought is not None:
                self._brought.observe(num_own, min(num_brought, num_own))

    def swap_s(self, num_out: int, num_in: int) -> float:
        """Predicted seconds for a group to leave by swap and to come back, which some blocks need not."""
        return (num_out + num_in * (1.0 - self._found.each_s)) * self.move_s_per_block

    def recompute_s(self, num_tokens: int, num_on_host: int, block_size: int) -> float:
        """Predicted seconds to compute tokens again. So many more blocks of the group are on the host already."""
        found, brought = self._found.each_s, self._brought.each_s
        computed_s = num_tokens * max(1.0 - found - brought, 0.0) * self.compute_s_per_token
        # An evicted block that comes back was moved twice.
        num_moves = 2 * brought * num_tokens / block_size + num_on_host
        return computed_s + num_moves * self.move_s_per_block


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
