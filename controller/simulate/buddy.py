"""A buddy allocator over slots: what contiguous reservations are placed by.

    [0 ............... 16)[16 .... 24)[24 25)      25 slots: arenas of powers of two, the largest first
    [0 ... 8)[8 ..... 16)                          a piece is halved until it is just large enough ...
             [8 . 12)[12 16)                       ... and two free halves of one piece become that piece again

Law: pieces and free pieces tile the arenas; each is a power of two long and begins at a multiple of its length; no two
free ones are halves of the same piece. The lowest free piece of the least sufficient length is taken, so that where
a piece lies is a function of what was asked before.
"""

from dataclasses import dataclass

from kilburn.shared.types import LawBroken


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Slots [start, start + length)."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def length_for(num_slots: int) -> int:
    """The length of the piece that so many slots get: the next power of two."""
    return 1 << max(num_slots - 1, 0).bit_length()


class Buddy:
    """See the file's head."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise LawBroken(f"{num_slots} slots to allocate from")
        self.num_slots = num_slots
        self._free: dict[int, set[int]] = {}  # starts, by length
        self._taken: dict[int, int] = {}  # lengths, by start
        self._arenas: list[Piece] = []
        start = 0
        for bit in reversed(range(num_slots.bit_length())):
            if num_slots >> bit & 1:
                self._arenas.append(Piece(start, 1 << bit))
                self._free.setdefault(1 << bit, set()).add(start)
                start += 1 << bit

    # --- questions

    @property
    def num_free(self) -> int:
        return sum(length * len(starts) for length, starts in self._free.items())

    @property
    def largest_free(self) -> int:
        return max((length for length, starts in self._free.items() if starts), default=0)

    def can_take(self, num_slots: int) -> bool:
        return length_for(num_slots) <= self.largest_free

    # --- commands

    def take(self, num_slots: int) -> Piece:
        """The piece for so many slots."""
        if num_slots < 1 or not self.can_take(num_slots):
            raise LawBroken(f"{num_slots} slots taken, the largest free piece has {self.largest_free}")
        wanted = length_for(num_slots)
        length = min(length for length, starts in self._free.items() if starts and length >= wanted)
        start = min(self._free[length])
        self._free[length].remove(start)
        while length > wanted:
            length //= 2
            self._free.setdefault(length, set()).add(start + length)
        self._taken[start] = length
        return Piece(start, length)

    def give_back(self, piece: Piece) -> None:
        if self._taken.get(piece.start) != piece.length:
            raise LawBroken(f"{piece} given back, which was not taken")
        del self._taken[piece.start]
        start, length = piece.start, piece.length
        longest = next(arena.length for arena in self._arenas if arena.start <= start < arena.end)
        while length < longest and start ^ length in self._free.get(length, ()):
            self._free[length].remove(start ^ length)
            start, length = start & ~length, 2 * length
        self._free.setdefault(length, set()).add(start)

    # --- laws

    def validate(self) -> None:
        free = [Piece(start, length) for length, starts in self._free.items() for start in starts]
        taken = [Piece(start, length) for start, length in self._taken.items()]
        end = 0
        for piece in sorted([*free, *taken]):
            if piece.start != end or piece.length & (piece.length - 1) or piece.start % piece.length:
                raise LawBroken(f"{piece} after {end}: a gap, an overlap, or out of place")
            end = piece.end
        if end != self.num_slots:
            raise LawBroken(f"pieces end at {end} of {self.num_slots}")
        arenas = set(self._arenas)
        for piece in free:
            if piece not in arenas and piece.start ^ piece.length in self._free[piece.length]:
                raise LawBroken(f"{piece} and its other half are both free")
