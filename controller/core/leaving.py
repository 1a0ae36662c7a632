"""How a victim leaves: by swap or by recompute, and what either is predicted to take.

    swap        blocks out, then in: all that the group alone holds, save what the host has a copy of already (out) and
                what the device is expected to hold still when it comes back (in)
    recompute   its tokens, minus what the prefix cache still holds: blocks that others hold too stay where they are,
                those that have a copy on the host come up from there, and of the rest some are found again, as
                earlier victims' were

Questions only. What it costs in the end is told to `Costs` by commit, so that the next choice knows better.
"""

from collections.abc import Iterable

from kilburn.controller.core.departure import Departure, Way, Why
from kilburn.controller.core.memory import Memory, Moves
from kilburn.controller.core.policy import Costs, Preemption
from kilburn.controller.core.sequence import Group
from kilburn.shared.layout import blocks_for


class Leaving:
    """See the file's head."""

    def __init__(self, memory: Memory, costs: Costs, preemption: Preemption) -> None:
        self._memory, self._costs, self._preemption = memory, costs, preemption

    def choose(self, group: Group, pinned: Iterable[int], moves: Moves) -> Departure:
        """How this group leaves."""
        kept = list(pinned)
        departure = self._predicted(group, kept, moves)
        departure.way, departure.why = self._way(group, kept, moves, departure)
        return departure

    def _way(self, group: Group, pinned: list[int], moves: Moves, predicted: Departure) -> tuple[Way, Why]:
        if self._preemption is Preemption.RECOMPUTE:
            return Way.RECOMPUTE, Why.SETTING
        if group.has_followers:
            return Way.RECOMPUTE, Why.FORMING
        if not any(predicted.targets.values()):
            return Way.RECOMPUTE, Why.NOTHING
        if not self._memory.has_host_room(group, pinned, moves):
            return Way.RECOMPUTE, Why.NO_ROOM
        if not self._memory.is_within_bound(group, pinned, moves):
            return Way.RECOMPUTE, Why.BOUND
        if self._preemption is Preemption.SWAP:
            return Way.SWAP, Why.SETTING
        is_swap_cheaper = predicted.swap_s < predicted.recompute_s
        return (Way.SWAP if is_swap_cheaper else Way.RECOMPUTE), Why.CHEAPER

    def _predicted(self, group: Group, pinned: list[int], moves: Moves) -> Departure:
        memory, costs, size = self._memory, self._costs, self._memory.block_size
        stays, holders, tokens = set(pinned), dict[int, int](), dict[int, int]()
        for sequence in group.live:
            blocks = sequence.own_table.blocks[: blocks_for(sequence.num_computed, size)]
            for i, block in enumerate(blocks):
                holders[block] = holders.get(block, 0) + 1
                tokens[block] = min(size, sequence.num_computed - i * size)
        stays |= {block for block, held in holders.items() if memory.device.refs(block) > held}
        own = [block for block in tokens if block not in stays]
        on_host = [block for block in own if memory.has_host_copy(block, moves)]
        to_compute = sum(tokens[block] for block in own) - sum(tokens[block] for block in on_host)
        # A last block that several hold is one block on the host, and each of them gets its own.
        num_in = sum(holders[block] if tokens[block] < size else 1 for block in own)
        num_out = memory.new_host_blocks(group, pinned, moves)
        return Departure(
            way=Way.RECOMPUTE,
            why=Why.NOTHING,
            swap_s=costs.swap_s(num_out, num_in),
            recompute_s=costs.recompute_s(to_compute, len(on_host), size),
            request_id=group.request_id,
            targets={sequence.index: sequence.num_computed for sequence in group.live},
            num_kept=sum(1 for block in holders if block in stays),
            num_own=sum(1 for block in own if tokens[block] == size),
        )
