"""One sequence's blocks, in the order of its positions.

    position     0 1 2 3   4 5 6 7   8 9
    block           7         1       3           blocks = [7, 1, 3]

A decoding algorithm touches memory only by fork, append (a plan grows the table when the last block is full) and free.
Copy-on-write is `make_writable`, and happens in one place: when a plan is about to write.
"""

from kilburn.controller.core.block_pool import BlockPool


class BlockTable:
    """Holds one reference to each of `blocks`."""

    __slots__ = ("blocks", "pool")

    def __init__(self, pool: BlockPool, blocks: list[int] | None = None) -> None:
        self.pool = pool
        self.blocks: list[int] = [] if blocks is None else blocks

    def adopt(self, blocks: list[int]) -> None:
        """Share blocks that are already in the pool, at the end."""
        for block in blocks:
            self.pool.share(block)
        self.blocks.extend(blocks)

    def adopt_front(self, blocks: list[int]) -> None:
        """Share blocks that come before those already here."""
        for block in blocks:
            self.pool.share(block)
        self.blocks[:0] = blocks

    def grow(self, num_blocks: int, step: int) -> list[int]:
        """Take new blocks at the end; returns them."""
        taken = self.pool.take(num_blocks, step)
        self.blocks.extend(taken)
        return taken

    def fork(self) -> "BlockTable":
        """A second table over the same blocks."""
        child = BlockTable(self.pool)
        child.adopt(self.blocks)
        return child

    def make_writable(self, i: int, step: int) -> tuple[int, int] | None:
        """See to it that block number i may be written; returns the (source, destination) of a copy to run first."""
        source = self.blocks[i]
        if self.pool.refs(source) == 1:
            # Ours alone, but others may find it by name. Its content is about to differ from what the name says.
            self.pool.withdraw(source)
            return None
        (destination,) = self.pool.take(1, step)
        self.blocks[i] = destination
        self.pool.drop([source])
        return source, destination

    def free(self) -> None:
        self.pool.drop(self.blocks)
        self.blocks = []
