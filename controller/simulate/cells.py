"""A KV pool that knows what it holds: in each cell the chain of the prefix that the cell belongs to.

    block   0 | c(a) c(ab) c(abc) c(abcd) |      cell = chain of tokens[0..position]
            1 | c(abcde) ~c(abcdef) ?  ?  |      ~: not a number; ?: never written, or left over from somebody else

Reading a foreign, a stale or a never written cell is a fault of the plan and raises. Two kinds of damage are not:
a cell that is *not a number* (a row went bad and wrote it; who reads it goes bad too), and a block that is *lost*
(unreadable until it is filled anew). Freed blocks are not erased: the worker never hears that a block was freed.
"""

from kilburn.controller.simulate.oracle import ROOT, mix
from kilburn.controller.simulate.plan_rules import demand

POISON = -(1 << 63)  # what a cell holds before anybody wrote it


class CellPool:
    """The cells of one tier. A cell that is not a number holds the complement of its chain, so it is negative."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.chains = [[POISON] * block_size for _ in range(num_blocks)]
        self.tokens = [[-1] * block_size for _ in range(num_blocks)]
        self.lost: set[int] = set()
        self.generations = [0] * num_blocks  # how often each was filled from its beginning

    def copy_from(self, other: "CellPool", source: int, destination: int) -> None:
        """Everything that a block holds, its damage too."""
        self.chains[destination] = list(other.chains[source])
        self.tokens[destination] = list(other.tokens[source])
        self.generations[destination] += 1
        self.lost.discard(destination)
        if source in other.lost:
            self.lost.add(destination)

    def write(self, block: int, offset: int, chain: int, token: int, is_number: bool) -> None:
        if offset == 0:
            self.generations[block] += 1
            self.lost.discard(block)
        self.chains[block][offset] = chain if is_number else ~chain
        self.tokens[block][offset] = token

    def prefix(self, table: list[int], end: int) -> tuple[list[int], list[int]]:
        """The tokens and chains of positions [0, end), which must be one unbroken prefix from its beginning on."""
        tokens: list[int] = []
        chains: list[int] = []
        chain = ROOT
        for position in range(end):
            block, offset = table[position // self.block_size], position % self.block_size
            token, cell = self.tokens[block][offset], self.chains[block][offset]
            chain = mix(chain, token)
            demand(
                cell in (chain, ~chain),
                f"block {block} slot {offset} does not hold position {position} of one prefix: {describe(cell)}",
            )
            tokens.append(token)
            chains.append(chain)
        return tokens, chains

    def read(self, table: list[int], chains: list[int], end: int) -> bool:
        """Whether positions [0, end), whose chains are given, are all numbers. Raises if one is not its own."""
        size, is_number = self.block_size, True
        for i in range(-(-end // size)):
            start, block = i * size, table[i]
            stop = min(start + size, end)
            if self.chains[block][: stop - start] == chains[start:stop]:
                continue
            for position in range(start, stop):
                cell, chain = self.chains[block][position - start], chains[position]
                demand(
                    cell in (chain, ~chain),
                    f"position {position} reads block {block} slot {position - start}, a cell of "
                    f"another prefix: {describe(cell)}",
                )
            is_number = False
        return is_number

    def has_bad_cell(self, block: int) -> bool:
        """Whether a cell of the block is not a number."""
        return any(POISON < cell < 0 for cell in self.chains[block])


def describe(cell: int) -> str:
    if cell == POISON:
        return "never written"
    return f"holds {cell:016x}" if cell >= 0 else f"holds {~cell:016x}, not a number"
