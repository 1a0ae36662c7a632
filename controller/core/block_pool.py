"""The blocks of one tier, and who they belong to.

    FREE         nobody refers to it and its content means nothing
    CACHED       nobody refers to it, but its content has a name and may be hit
    OWNED        refs >= 1: so many block tables hold it
    QUARANTINED  involved in a broken law; out of use until the lease ends

Law: every block is in exactly one of the four; `refs` equals the number of tables that hold it; a digest names at most
one block, which is CACHED or OWNED. A block is *writable* when it has one owner and no name.

    take    FREE or (evicted) CACHED -> OWNED
    share   CACHED or OWNED -> OWNED
    drop    OWNED -> OWNED, CACHED or FREE

Questions change nothing; commands cannot fail for a reason that a question could have answered.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kilburn.controller.core.histogram import Histogram
from kilburn.shared.types import LawBroken

# A block as one byte, for onlookers: FREE is 0, OWNED the number of its tables up to the most that is told apart.
MOST_CELL_REFS = 60
CELL_CACHED = 61
CELL_QUARANTINED = 62
_CLIPPED = bytes(min(refs, MOST_CELL_REFS) for refs in range(256))
_CLIPPED_OR_CACHED = bytes([CELL_CACHED]) + _CLIPPED[1:]
AGES_S = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)  # edges for the lives of blocks


class Name(NamedTuple):
    """What a full block is known by. The tokens and the parent are kept so that a collision is a miss."""

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


@dataclass(slots=True)
class NameJournal:
    """Digests that became findable, and digests that ceased to be, since somebody last looked: the net of it."""

    published: dict[bytes, None] = field(default_factory=dict)  # in order
    withdrawn: dict[bytes, None] = field(default_factory=dict)

    def publish(self, digest: bytes) -> None:
        if digest in self.withdrawn:
            del self.withdrawn[digest]
        else:
            self.published[digest] = None

    def withdraw(self, digest: bytes) -> None:
        if digest in self.published:
            del self.published[digest]
        else:
            self.withdrawn[digest] = None


class BlockPool:
    """See the file's head. `order` is the order in which the first blocks are handed out (default: by id).

    `now` is the time of whatever happens next, told by whoever knows it; nothing here depends on it.
    """

    def __init__(self, num_blocks: int, order: Iterable[int] | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.now = 0.0
        self.lifetimes_s = Histogram(AGES_S)  # of evicted blocks: since they were taken
        self.idle_s = Histogram(AGES_S)  # and since their last owner let go of them
        self.journal = NameJournal()
        self._refs = [0] * num_blocks
        self._taken_at = [0] * num_blocks  # the step whose plan last took the block
        self._born_s = [0.0] * num_blocks  # when that was
        self._free: deque[int] = deque(range(num_blocks) if order is None else order)
        self._cached: OrderedDict[int, float] = OrderedDict()  # since when; least recently used first
        self._quarantined: set[int] = set()
        self._names: dict[int, bytes] = {}  # digests
        self._named: dict[bytes, int] = {}
        self._contents: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}  # parent and tokens, by digest
        self._was_shared: set[int] = set()
        self._num_owned = 0
        self._num_refs = 0
        self._num_shared = 0

    # --- questions

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return self._num_owned

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_refs(self) -> int:
        """Entries of all tables: num_owned plus what sharing saves."""
        return self._num_refs

    @property
    def num_shared(self) -> int:
        """Blocks that several tables hold."""
        return self._num_shared

    def refs(self, block: int) -> int:
        return self._refs[block]

    def is_writable(self, block: int) -> bool:
        return self._refs[block] == 1 and block not in self._names

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def name_of(self, block: int) -> Name | None:
        digest = self._names.get(block)
        return None if digest is None else Name(digest, *self._contents[digest])

    def find(self, digest: bytes) -> int | None:
        """The block with this name, which may be shared."""
        return self._named.get(digest)

    def held_since(self, block: int) -> int:
        """The step whose plan last took the block: what a step >= this one read is what the block still holds."""
        return self._taken_at[block]

    def all_names(self) -> list[bytes]:
        return list(self._named)

    def suspects(self, tables: Iterable[Sequence[int]]) -> set[int]:
        """Blocks whose count of owners differs from the tables that hold them, or that are also free or cached."""
        holders = [0] * self.num_blocks
        for table in tables:
            for block in table:
                holders[block] += 1
        unowned = {*self._free, *self._cached}
        return {b for b, count in enumerate(holders) if count != self._refs[b] or (count and b in unowned)}

    def was_shared(self, block: int) -> bool:
        """Whether anybody found the block, or forked off it, since it was taken."""
        return block in self._was_shared

    def next_evicted(self, num_blocks: int) -> list[int]:
        """The cached blocks that taking so many would evict."""
        num_evicted = num_blocks - len(self._free)
        return list(islice(self._cached, num_evicted)) if num_evicted > 0 else []

    def cells(self) -> bytearray:
        """Every block's state as one byte. No loop over all blocks: 100,000 of them cost some milliseconds."""
        try:
            refs = bytes(self._refs)
        except ValueError:  # a block that more than 255 tables hold
            refs = bytes([min(count, MOST_CELL_REFS) for count in self._refs])
        if len(self._free) < len(self._cached):
            cells = bytearray(refs.translate(_CLIPPED_OR_CACHED))
            for block in self._free:
                cells[block] = 0
        else:
            cells = bytearray(refs.translate(_CLIPPED))
            for block in self._cached:
                cells[block] = CELL_CACHED
        for block in sorted(self._quarantined):
            cells[block] = CELL_QUARANTINED
        return cells

    # --- commands

    def take(self, num_blocks: int, step: int) -> list[int]:
        """Blocks for one new owner, written by plans from `step` on. Evicts the least recently used where it must."""
        if num_blocks > self.num_available:
            raise LawBroken(f"{num_blocks} blocks taken of {self.num_available}: num_available was not asked")
        taken = [self._free.popleft() for _ in range(min(num_blocks, len(self._free)))]
        while len(taken) < num_blocks:
            taken.append(self._evict())
        for block in taken:
            self._refs[block], self._taken_at[block], self._born_s[block] = 1, step, self.now
        self._was_shared.difference_update(taken)
        self._num_owned += num_blocks
        self._num_refs += num_blocks
        return taken

    def _evict(self) -> int:
        block, idle_since_s = self._cached.popitem(last=False)
        self._forget(block)
        self.num_evictions += 1
        self.lifetimes_s.observe(self.now - self._born_s[block])
        self.idle_s.observe(self.now - idle_since_s)
        return block

    def share(self, block: int) -> None:
        """One more table holds the block."""
        if self._refs[block] == 0:
            if block not in self._cached:
                raise LawBroken(f"block {block} shared, though nobody owns it and it has no name")
            del self._cached[block]
            self._num_owned += 1
        elif self._refs[block] == 1:
            self._num_shared += 1
        self._refs[block] += 1
        self._num_refs += 1
        self._was_shared.add(block)

    def drop(self, blocks: Sequence[int]) -> None:
        """A table lets go of its blocks, tails first, so that a prefix outlives what extends it."""
        for block in reversed(blocks):
            refs = self._refs[block]
            if refs == 0:
                raise LawBroken(f"block {block} dropped by a table that does not hold it")
            self._refs[block] = refs - 1
            self._num_refs -= 1
            if refs > 1:
                self._num_shared -= refs == 2
                continue
            self._num_owned -= 1
            if block in self._names:
                self._cached[block] = self.now
            else:
                self._free.append(block)

    def publish(self, block: int, name: Name) -> bool:
        """Give a full block its name. False, and nothing happens, where another block has that name already."""
        if self._refs[block] == 0:
            raise LawBroken(f"block {block} named, though nobody owns it")
        if name.digest in self._named or block in self._names:
            return False
        self._names[block] = name.digest
        self._named[name.digest] = block
        self._contents[name.digest] = (name.parent, name.tokens)
        self.journal.publish(name.digest)
        return True

    def withdraw(self, block: int) -> None:
        """The content is not to be trusted: no name, no further hits. Its owners, if any, keep it."""
        if block in self._names:
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def quarantine(self, block: int) -> None:
        """Out of use until the lease ends, whoever holds it."""
        self.withdraw(block)
        if self._refs[block]:
            self._num_refs -= self._refs[block]
            self._num_shared -= self._refs[block] > 1
            self._refs[block] = 0
            self._num_owned -= 1
            self._quarantined.add(block)
        elif block in self._free:
            self._free.remove(block)
            self._quarantined.add(block)

    def _forget(self, block: int) -> None:
        digest = self._names.pop(block)
        del self._named[digest], self._contents[digest]
        self.journal.withdraw(digest)

    # --- laws

    def check(self) -> None:
        """The part of the law that costs nothing."""
        total = len(self._free) + len(self._cached) + self._num_owned + len(self._quarantined)
        if total != self.num_blocks or len(self._names) != len(self._named):
            raise LawBroken(
                f"{len(self._free)} free + {len(self._cached)} cached + {self._num_owned} owned + "
                f"{len(self._quarantined)} quarantined are not {self.num_blocks} blocks"
            )

    def validate(self, tables: Iterable[Sequence[int]]) -> None:
        """The whole law, counted anew from every table that holds blocks of this pool."""
        holders = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise LawBroken(f"a table holds a block twice: {list(table)}")
            for block in table:
                holders[block] += 1
        for block, count in enumerate(holders):
            if count != self._refs[block]:
                raise LawBroken(f"block {block} is held by {count} tables and says {self._refs[block]}")
        owned = {block for block, count in enumerate(holders) if count}
        groups = [set(self._free), set(self._cached), owned, self._quarantined]
        if sum(map(len, groups)) != self.num_blocks or len(set().union(*groups)) != self.num_blocks:
            raise LawBroken("a block is in two states, or in none")
        if len(self._free) != len(groups[0]):
            raise LawBroken("a block is free twice")
        if not groups[1] <= self._names.keys() <= groups[1] | owned:
            raise LawBroken("a name on a block that is neither cached nor owned, or a cached block without one")
        if self._names != {b: d for d, b in self._named.items()}:
            raise LawBroken("names and blocks do not agree")
        if sum(holders) != self._num_refs:
            raise LawBroken(f"{sum(holders)} table entries, counted {self._num_refs}")
        if sum(count > 1 for count in holders) != self._num_shared:
            raise LawBroken(f"{self._num_shared} blocks are said to be shared")
        self.check()
