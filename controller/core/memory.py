"""The two tiers of one worker group, and the moves between blocks that a plan carries.

      device  [ D0 ][ D1 ][ .. ]     swaps out    device -> host    a preempted group leaves, an evicted block is kept
      host    [ H0 ][ H1 ]           swaps in     host -> device    it comes back, or its name is hit
                                     copies       device -> device  copy-on-write

The worker runs a plan's moves in that order, before anything is written. What a move of a plan reads is let go of only
when the plan is sealed, so that in one plan no block is read by one move and filled by another, and none is filled
twice.

A swapped sequence has, for each of its blocks, the host block that holds a copy; or None where a named prefix keeps the
block on the device. A block that sequences share has one host copy. Host blocks of swapped groups never exceed the
device pool: where they would, the group is recomputed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kilburn.controller.core.block_pool import BlockPool, Name, NameJournal
from kilburn.controller.core.block_table import BlockTable
from kilburn.controller.core.departure import Departure
from kilburn.controller.core.prefix_index import Hasher, PrefixIndex
from kilburn.controller.core.sequence import Group, Sequence
from kilburn.shared.layout import blocks_for
from kilburn.shared.types import LawBroken, Tier


@dataclass(slots=True)
class Moves:
    """What the plan of one step moves before anything is written."""

    step: int
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (device, host)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host, device)
    device_reads: list[int] = field(default_factory=list)  # references to let go of when the plan is sealed
    host_reads: list[int] = field(default_factory=list)
    down: dict[int, int] = field(default_factory=dict)  # swaps_out as a map
    names: list[tuple[int, Name]] = field(default_factory=list)  # of host blocks, known once the plan is sealed
    shares: list[tuple[Departure, int]] = field(default_factory=list)  # blocks moved for a group that leaves or returns

    def __bool__(self) -> bool:
        return bool(self.swaps_out or self.copies or self.swaps_in)


@dataclass(frozen=True, slots=True)
class Hits:
    """What of a sequence's leading blocks is there: a run on the device, and the run that follows it on the host."""

    device: list[int]
    host: list[int]

    @property
    def num_blocks(self) -> int:
        return len(self.device) + len(self.host)


@dataclass(frozen=True, slots=True)
class Restore:
    """How a swapped sequence's blocks come back: device blocks that still have their content, or host sources.

    Sources with an equal key become one device block: full blocks that sequences share. A last, partial block is
    restored for each sequence by itself, since each is about to write it.
    """

    found: list[int | None]
    sources: list[tuple[int, int] | None]  # (host block, key)


class Memory:
    """See the file's head."""

    def __init__(
        self,
        device: BlockPool,
        host: BlockPool,
        hasher: Hasher,
        block_size: int,
        new_index: Callable[[BlockPool, Hasher, int], PrefixIndex] = PrefixIndex,
    ) -> None:
        self.device, self.host, self.block_size = device, host, block_size
        self.index = new_index(device, hasher, block_size)
        self._host_index = new_index(host, hasher, block_size)
        self._origins: dict[int, tuple[Tier, int, int]] = {}  # device block -> (tier, block, step) that filled it
        self.num_saved = 0  # evicted blocks that went to the host
        self.num_host_hits = 0  # blocks that came back by their name

    def at(self, now: float) -> None:
        """The time of whatever happens next."""
        self.device.now = self.host.now = now

    def check(self) -> None:
        """The part of the law that costs nothing."""
        self.device.check()
        self.host.check()

    def seal(self, moves: Moves) -> None:
        """The plan is complete: what its moves read is free for the next one."""
        for block, name in moves.names:
            self.host.publish(block, name)
        for host, block in moves.swaps_in:
            brought = self.host.name_of(host)
            if brought is not None:
                self.device.publish(block, brought)
        self.device.drop(moves.device_reads)
        self.host.drop(moves.host_reads)
        moves.device_reads, moves.host_reads = [], []
        self.host.journal = NameJournal()  # hints speak of the device only

    def filled_from(self, host: int) -> list[int]:
        """Device blocks that still hold what they were filled with from a host block."""
        return [block for block in self._origins if self.origin(block) == (Tier.HOST, host)]

    # --- the device pool grows a table

    def grow(self, table: BlockTable, num_blocks: int, moves: Moves) -> list[int]:
        """New blocks at a table's end, written by this plan's advances. Named blocks that they evict may move down."""
        if self.host.num_blocks:
            for block in self.device.next_evicted(num_blocks):
                self._save(block, moves)
        return table.grow(num_blocks, moves.step)

    def _save(self, block: int, moves: Moves) -> None:
        """Keep an evicted block's content on the host, if it is likely to be asked for again."""
        name = self.device.name_of(block)
        if name is None or self.host.find(name.digest) is not None:
            return
        # A free host block costs nobody anything; a block that was shared before may displace one that is cached.
        if not self.host.num_free and not (self.device.was_shared(block) and self.host.num_available):
            return
        copy = self._move_down(block, moves)
        moves.host_reads.append(copy)  # cached once the plan is sealed, and so not taken again by it
        self.num_saved += 1

    def copy_at_end(self, source: int, table: BlockTable, moves: Moves) -> None:
        """A new block at a table's end, and the copy that fills it from a block of a named prefix."""
        self.copy(source, self._grow_for_move(table, moves), moves)

    def copy(self, source: int, block: int, moves: Moves) -> None:
        """A copy between device blocks."""
        moves.copies.append((source, block))
        # It may be the copy that tells of a lost source: nobody computes with a named prefix itself.
        self._origins[block] = (Tier.DEVICE, source, moves.step)

    def _grow_for_move(self, table: BlockTable, moves: Moves) -> int:
        """A new block at a table's end, which a copy or a swap in of this plan will fill.

        What it held is not kept: the worker runs moves in batches, and none may read what a later batch fills.
        """
        (block,) = table.grow(1, moves.step)
        return block

    def hits(self, sequence: Sequence, pinned: list[int]) -> Hits:
        """What of a sequence's known tokens need not be computed. `pinned`: blocks of a prefix that it begins with."""
        chain, tokens, salt = sequence.chain, sequence.tokens, sequence.group.salt
        most = sequence.group.most_hit(len(tokens)) // self.block_size
        # Not by name, which another block with the same content may have had first, and lost.
        device = pinned[:most]
        device = device + self.index.match(chain, tokens, salt, len(device), most)
        return Hits(device, self._host_index.match(chain, tokens, salt, len(device), most))

    def adopt(self, hits: Hits, table: BlockTable, moves: Moves) -> None:
        """The first blocks of an empty table are these; they stay where they are until the table can take more."""
        table.adopt(hits.device)
        for source in hits.host:
            self.host.share(source)
            moves.host_reads.append(source)

    def bring_back(self, hits: Hits, table: BlockTable, moves: Moves) -> None:
        """Blocks for the hits on the host, at the table's end, and the moves that fill them."""
        for host in hits.host:
            self._fill(self._grow_for_move(table, moves), host, moves)
        self.num_host_hits += len(hits.host)

    def _fill(self, block: int, host: int, moves: Moves) -> None:
        moves.swaps_in.append((host, block))
        self._origins[block] = (Tier.HOST, host, moves.step)

    # --- content that is not to be trusted

    def distrust(self, chain: Iterable[bytes]) -> None:
        """Blocks with these names may hold anything: no further hits, on either tier."""
        for pool in (self.device, self.host):
            for digest in chain:
                block = pool.find(digest)
                if block is not None:
                    pool.withdraw(block)

    def pool(self, tier: Tier) -> BlockPool:
        return self.device if tier is Tier.DEVICE else self.host

    def origin(self, block: int) -> tuple[Tier, int] | None:
        """The block that a move filled a device block from, if both still hold what they did then."""
        tier, source, step = self._origins.get(block, (Tier.HOST, -1, -1))
        if step < 0 or not self.device.held_since(block) == step >= self.pool(tier).held_since(source):
            return None
        return tier, source

    # --- a group leaves for the host

    def new_host_blocks(self, group: Group, pinned: Iterable[int], moves: Moves) -> int:
        """Host blocks that swapping a group out would take."""
        kept = set(pinned)
        return sum(1 for block in self._distinct(group) if block not in kept and self._host_copy(block, moves) is None)

    def has_host_room(self, group: Group, pinned: Iterable[int], moves: Moves) -> bool:
        """Whether all of the group fits the host pool."""
        return sum(self._host_need(group, pinned, moves)) <= self.host.num_available

    def is_within_bound(self, group: Group, pinned: Iterable[int], moves: Moves) -> bool:
        """Whether swapped groups, this one among them, hold no more on the host than the device has."""
        return self.host.num_owned + sum(self._host_need(group, pinned, moves)) <= self.device.num_blocks

    def _host_need(self, group: Group, pinned: Iterable[int], moves: Moves) -> tuple[int, int]:
        """Host blocks that swapping a group out takes: new ones, and cached ones that gain an owner."""
        kept = set(pinned)
        found = [self._host_copy(block, moves) for block in self._distinct(group) if block not in kept]
        copies = {copy for copy in found if copy is not None}
        return found.count(None), sum(1 for copy in copies if self.host.is_cached(copy))

    def has_host_copy(self, block: int, moves: Moves) -> bool:
        return self._host_copy(block, moves) is not None

    def _distinct(self, group: Group) -> list[int]:
        """The group's blocks with content, each once."""
        size = self.block_size
        return list(
            dict.fromkeys(b for s in group.live for b in s.own_table.blocks[: blocks_for(s.num_computed, size)])
        )

    def _host_copy(self, block: int, moves: Moves) -> int | None:
        if block in moves.down:
            return moves.down[block]
        name = self.device.name_of(block)
        return None if name is None else self.host.find(name.digest)

    def swap_out(self, group: Group, pinned: Iterable[int], moves: Moves) -> list[list[int | None]]:
        """Copy a group's blocks to the host; returns the host blocks of each live sequence.

        The tables keep their references until the plan is sealed.
        """
        kept, copies = set(pinned), dict[int, int]()
        for block in self._distinct(group):  # all copies that are there before any take, so that none is evicted by one
            copy = None if block in kept else self._host_copy(block, moves)
            if copy is not None:
                self.host.share(copy)
                moves.host_reads.append(copy)
                copies[block] = copy
        hosts: list[list[int | None]] = []
        for sequence in group.live:
            table = sequence.own_table
            hosts.append([])
            for block in table.blocks[: blocks_for(sequence.num_computed, self.block_size)]:
                hosts[-1].append(None if block in kept else self._copy_down(block, copies, moves))
            moves.device_reads.extend(table.blocks)
            table.blocks = []
        return hosts

    def _copy_down(self, block: int, copies: dict[int, int], moves: Moves) -> int:
        if block in copies:
            self.host.share(copies[block])
            return copies[block]
        copies[block] = self._move_down(block, moves)
        return copies[block]

    def _move_down(self, block: int, moves: Moves) -> int:
        (copy,) = self.host.take(1, moves.step)
        moves.swaps_out.append((block, copy))
        moves.down[block] = copy
        name = self.device.name_of(block)
        if name is not None:
            moves.names.append((copy, name))
        return copy

    # --- and comes back

    def restores(self, group: Group, pinned: list[int]) -> list[Restore] | None:
        """How each live sequence of a swapped group comes back; None where a block is nowhere any more.

        `pinned`: blocks of a named prefix that its prompt begins with.
        """
        restores: list[Restore] = []
        for sequence in group.live:
            found: list[int | None] = []
            sources: list[tuple[int, int] | None] = []
            num_full = sequence.num_computed // self.block_size
            self.index.extend(sequence.chain, sequence.tokens, num_full, group.salt)
            for i, source in enumerate(sequence.host):
                block = None
                if i < num_full:
                    is_pinned = i < len(pinned)
                    block = pinned[i] if is_pinned else self.index.find(sequence.chain, i, sequence.tokens)
                if block is None and source is None:
                    return None
                found.append(block)
                key = source if i < num_full else -1 - sequence.index
                sources.append(None if block is not None or source is None or key is None else (source, key))
            restores.append(Restore(found, sources))
        return restores

    def num_restored(self, restores: list[Restore], num_grown: int) -> int:
        """Device blocks that a group's return takes out of what is available; `num_grown`: beyond those restored."""
        keys = {source[1] for restore in restores for source in restore.sources if source is not None}
        revived = {b for restore in restores for b in restore.found if b is not None and self.device.is_cached(b)}
        return len(keys) + len(revived) + num_grown

    def swap_in(self, group: Group, restores: list[Restore], grown: list[int], moves: Moves) -> list[BlockTable]:
        """Tables for a swapped group's sequences, grown by so many blocks each. Its host copies are given up."""
        for restore in restores:  # all that is found before any take, so that none is evicted by one
            for block in restore.found:
                if block is not None:
                    self.device.share(block)
        filled: dict[int, int] = {}
        tables: list[BlockTable] = []
        for sequence, restore, num_grown in zip(group.live, restores, grown, strict=True):
            table = BlockTable(self.device)
            for block, source in zip(restore.found, restore.sources, strict=True):
                table.blocks.append(block if block is not None else self._copy_up(source, filled, moves))
            moves.host_reads.extend(host for host in sequence.host if host is not None)
            self.grow(table, num_grown, moves)
            tables.append(table)
        return tables

    def _copy_up(self, source: tuple[int, int] | None, filled: dict[int, int], moves: Moves) -> int:
        if source is None:
            raise LawBroken("a swapped block is nowhere")
        host, key = source
        if key in filled:
            self.device.share(filled[key])
            return filled[key]
        (block,) = self.device.take(1, moves.step)
        filled[key] = block
        self._fill(block, host, moves)
        return block

    def forget(self, sequence: Sequence) -> None:
        """A swapped sequence ends, or is to be recomputed: its host copies are nobody's."""
        self.host.drop([host for host in sequence.host if host is not None])
        sequence.host = []
