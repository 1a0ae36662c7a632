"""The slots that block tables hold and no planned position will fill: what paging wastes.

    position     0 1 2 3   4 5 6 7   8 9            num_planned = 10
    block           7          3     12 . .         2 slots of block 12 are unused

Blocks are counted once, however many tables hold them: what one table fills is filled for all. Only blocks at the ends
of tables are looked at, so that it costs a glance at each sequence.
"""

from collections.abc import Iterable

from kilburn.controller.core.block_pool import BlockPool
from kilburn.controller.core.sequence import Sequence


def tail_slots(sequences: Iterable[Sequence], pool: BlockPool, block_size: int) -> int:
    """Of the blocks that `sequences` hold, which must be all who hold any."""
    filled: dict[int, int] = {}
    holders: dict[int, int] = {}
    for sequence in sequences:
        blocks, used = sequence.own_table.blocks, sequence.num_planned
        for i in range(used // block_size, len(blocks)):
            block, inside = blocks[i], max(used - i * block_size, 0)
            filled[block] = max(filled.get(block, 0), inside)
            holders[block] = holders.get(block, 0) + 1
    # Whoever holds a block and did not turn up here has filled it.
    return sum(block_size - inside for block, inside in filled.items() if pool.refs(block) == holders[block])
