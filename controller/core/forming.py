"""Prefixes in the making: which full blocks running sequences have yet to compute, by their names.

    filler    [ a b c d ][ e f g h ][ i j k l ][ m ...       computed up to here: |
                  D0         D1  |      D2                    D1 and D2 are being filled
    waiting   [ a b c d ][ e f g h ][ x y ...                 may wait for D1, and then begins with two blocks

A name says everything before it and the tenant's salt too, so that nobody waits for what another tenant computes. Only
tokens known at admission count: what a sequence has yet to draw has no name.

Entries are looked at when they are asked for: one whose block is there, or whose filler does not run any more, is
none. They are cleared away once they are most of what is here.
"""

from kilburn.controller.core.sequence import Sequence, State


def is_filling(filler: Sequence, end: int) -> bool:
    """Whether this sequence is still on its way to compute its positions up to `end`."""
    return filler.state is State.RUNNING and filler.num_computed < end


class Forming:
    """See the file's head."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._fillers: dict[bytes, tuple[Sequence, int]] = {}  # name of a block -> who fills it, and where it ends
        self._most = 1024

    def __bool__(self) -> bool:
        return bool(self._fillers)

    def begins(self, filler: Sequence, first: int, end: int) -> None:
        """A sequence runs, and will fill its blocks number [first, end), whose names are in its chain."""
        names = filler.chain[first:end]
        if len(self._fillers) + len(names) > self._most:
            self._fillers = {name: entry for name, entry in self._fillers.items() if is_filling(*entry)}
            self._most = 1024 + 2 * len(self._fillers) + len(names)
        for i, name in enumerate(names, start=first + 1):
            self._fillers[name] = (filler, i * self._block_size)

    def filler_of(self, name: bytes) -> Sequence | None:
        """Who is filling the block of this name; None: nobody."""
        entry = self._fillers.get(name)
        return entry[0] if entry is not None and is_filling(*entry) else None
