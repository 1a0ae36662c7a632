"""How memory is kept for a sequence that grows: contiguous reservations as Orca's, and blocks on demand.

    Max       a contiguous piece for the longest sequence that the model could have
    Pow2      for the prompt and the next power of two above the true length of the answer
    Oracle    for exactly what the sequence will need, as if its end were known
    Paged     blocks, as they are filled

Contiguous pieces are placed by a buddy allocator. Every slot of the pool is, at any moment, one of four (Figure 2 of
Kwon et al., "Efficient memory management for large language model serving with PagedAttention", 2023):

    used       holds the KV of a token
    reserved   will, before the sequence ends
    internal   belongs to a sequence that will end before it gets there
    external   belongs to nobody: free, or lost to the allocator's rounding; no sequence that waits could be given it

and they sum to the pool. A policy stands where the scheduler's block pool does: it is asked whether a sequence fits and
whether it can grow, and told to do it. It knows nothing of batches, time or tokens.
"""

from dataclasses import dataclass
from typing import Protocol

from kilburn.controller.simulate.buddy import Buddy, Piece, length_for
from kilburn.shared.layout import blocks_for
from kilburn.shared.types import LawBroken


@dataclass(frozen=True, slots=True)
class Want:
    """A request as a policy may know it; only an oracle may look at `num_output`."""

    num_prompt: int
    num_output: int
    max_len: int  # prompt and output, of whatever may be asked of the model

    @property
    def num_slots(self) -> int:
        """Slots that it will have filled in the end: the last token is never computed on."""
        return self.num_prompt + self.num_output - 1


@dataclass(slots=True)
class Held:
    """What one sequence has."""

    want: Want
    capacity: int  # slots that are kept for it
    num_filled: int
    piece: Piece | None = None  # where they lie, if they lie in one piece

    @property
    def is_complete(self) -> bool:
        return self.num_filled >= self.want.num_slots


@dataclass(frozen=True, slots=True)
class Slots:
    """A pool at one moment, slot by slot."""

    used: int
    reserved: int
    internal: int
    external: int

    @property
    def total(self) -> int:
        return self.used + self.reserved + self.internal + self.external


class Reservation(Protocol):
    """A policy over one pool."""

    name: str
    num_slots: int

    def can_ever(self, want: Want) -> bool:
        """Whether an empty pool could hold it to its end."""

    def can_reserve(self, want: Want) -> bool: ...

    def reserve(self, want: Want) -> Held:
        """Memory for a sequence, its prompt filled in."""

    def can_grow(self, held: Held) -> bool: ...

    def grow(self, held: Held) -> None:
        """One more slot is filled."""

    def free(self, held: Held) -> None: ...

    def slots(self) -> Slots: ...


class _Kept:
    """The sequences of one pool, and how its slots are counted."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.holders: dict[int, Held] = {}

    def keep(self, held: Held) -> Held:
        self.holders[id(held)] = held
        return held

    def fill(self, held: Held) -> None:
        if id(held) not in self.holders or held.num_filled >= held.capacity:
            raise LawBroken(f"{held} grows beyond what is kept for it")
        held.num_filled += 1

    def let_go(self, held: Held) -> None:
        if self.holders.pop(id(held), None) is None:
            raise LawBroken(f"{held} is freed and was not held")

    def slots(self) -> Slots:
        used = reserved = internal = 0
        for held in self.holders.values():
            needed = min(held.capacity, held.want.num_slots)
            used += held.num_filled
            reserved += needed - held.num_filled
            internal += held.capacity - needed
        return Slots(used, reserved, internal, self.num_slots - used - reserved - internal)


class Contiguous:
    """One piece for each sequence, for its whole life; `kept_for` says how large."""

    name = "contiguous"

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.buddy = Buddy(num_slots)
        self._kept = _Kept(num_slots)

    def kept_for(self, want: Want) -> int:
        raise NotImplementedError

    def can_ever(self, want: Want) -> bool:
        return length_for(self.kept_for(want)) <= 1 << (self.num_slots.bit_length() - 1)

    def can_reserve(self, want: Want) -> bool:
        return self.buddy.can_take(self.kept_for(want))

    def reserve(self, want: Want) -> Held:
        capacity = self.kept_for(want)
        return self._kept.keep(Held(want, capacity, want.num_prompt, self.buddy.take(capacity)))

    def can_grow(self, held: Held) -> bool:
        return held.num_filled < held.capacity

    def grow(self, held: Held) -> None:
        self._kept.fill(held)

    def free(self, held: Held) -> None:
        self._kept.let_go(held)
        if held.piece is not None:
            self.buddy.give_back(held.piece)

    def slots(self) -> Slots:
        return self._kept.slots()


class Max(Contiguous):
    name = "Orca (Max)"

    def kept_for(self, want: Want) -> int:
        return want.max_len


class Pow2(Contiguous):
    name = "Orca (Pow2)"

    def kept_for(self, want: Want) -> int:
        return min(want.num_prompt + length_for(want.num_output), want.max_len)


class Oracle(Contiguous):
    name = "Orca (Oracle)"

    def kept_for(self, want: Want) -> int:
        return want.num_slots


class Paged:
    """Blocks as they are filled; none is kept ahead of time, so that a sequence may find no room to grow."""

    name = "paged"

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_slots = num_slots
        self.num_free = num_slots // block_size
        self._kept = _Kept(num_slots)

    def can_ever(self, want: Want) -> bool:
        return blocks_for(want.num_slots, self.block_size) <= self.num_slots // self.block_size

    def can_reserve(self, want: Want) -> bool:
        return blocks_for(want.num_prompt, self.block_size) <= self.num_free

    def reserve(self, want: Want) -> Held:
        num_blocks = blocks_for(want.num_prompt, self.block_size)
        self._take(num_blocks)
        return self._kept.keep(Held(want, num_blocks * self.block_size, want.num_prompt))

    def can_grow(self, held: Held) -> bool:
        return held.num_filled < held.capacity or self.num_free > 0

    def grow(self, held: Held) -> None:
        if held.num_filled == held.capacity:
            self._take(1)
            held.capacity += self.block_size
        self._kept.fill(held)

    def free(self, held: Held) -> None:
        self._kept.let_go(held)
        self.num_free += held.capacity // self.block_size

    def slots(self) -> Slots:
        return self._kept.slots()

    def _take(self, num_blocks: int) -> None:
        if num_blocks > self.num_free:
            raise LawBroken(f"{num_blocks} blocks taken of {self.num_free}")
        self.num_free -= num_blocks
