"""The laws of one worker group's schedule, counted anew, and what is done when one is broken.

Nothing here shares arithmetic with the code that it checks: references are counted from the tables, progress from the
flights, rows from the sequences.
"""

from collections.abc import Iterable

from kilburn.controller.core.block_pool import BlockPool
from kilburn.controller.core.events import Effect
from kilburn.controller.core.lineup import Lineup
from kilburn.controller.core.sequence import Group, Sequence, State
from kilburn.shared.types import LawBroken

FAILED = "the server's block accounting failed for this request"


def validate(line: Lineup, in_flight: Iterable[tuple[Sequence, int, int]], block_size: int) -> None:
    """Everything that must hold between events. `in_flight`: (sequence, epoch, positions) of every plan under way."""
    sequences = [sequence for group in line.running for sequence in group.live]
    pinned = [sequence for pin in line.pinned for sequence in pin.live]
    memory = line.memory
    memory.device.validate([sequence.own_table.blocks for sequence in (*sequences, *pinned)])
    swapped = [sequence for group in line.waiting for sequence in group.live if sequence.state is State.SWAPPED]
    memory.host.validate([[host for host in sequence.host if host is not None] for sequence in swapped])
    if memory.host.num_owned > memory.device.num_blocks:
        raise LawBroken("swapped groups hold more on the host than the device has")
    if any(s.state is not State.PINNED or s.row >= 0 or s.num_computed != s.num_prompt for s in pinned):
        raise LawBroken("a pinned prefix that is not complete, or has a row")
    rows = [s.row for s in sequences] + [row for group in line.running for row in group.reserved_rows]
    if sorted(rows + line.free_rows) != list(range(line.max_rows)):
        raise LawBroken("a row is used twice, or lost")
    if line.sequences != sequences:
        raise LawBroken("others run than those who are planned for")
    if [g.place for g in line.running] != sorted(g.place for g in line.running):
        raise LawBroken("groups out of order")
    line.waiting.validate()
    line.grammars.validate([*line.running, *line.waiting])
    if any(not group.live for group in (*line.running, *line.waiting)):
        raise LawBroken("a group with nothing left to do")
    positions = dict.fromkeys(sequences, 0)
    for sequence, epoch, count in in_flight:
        if sequence in positions and epoch == sequence.epoch:
            positions[sequence] += count
    for sequence in sequences:
        _validate_running(sequence, positions[sequence], block_size)
        _validate_blocks(memory.device, sequence, block_size)
    for group in line.waiting:
        _validate_waiting(group)


def _validate_waiting(group: Group) -> None:
    for sequence in group.live:
        holds = sequence.table is not None or sequence.row >= 0 or sequence.num_planned != sequence.num_computed
        if holds or sequence.state is not (State.SWAPPED if group.is_swapped else State.WAITING):
            raise LawBroken(f"{sequence} waits and yet holds something, or not as its group does")
        if not group.is_swapped and (sequence.num_computed or sequence.host):
            raise LawBroken(f"{sequence} waits to be computed and claims to be")


def _validate_running(sequence: Sequence, in_flight: int, block_size: int) -> None:
    num_blocks = len(sequence.own_table.blocks)
    if sequence.state is not State.RUNNING or num_blocks * block_size != sequence.capacity:
        raise LawBroken(f"{sequence} runs with {num_blocks} blocks of capacity {sequence.capacity}")
    if not 0 <= sequence.num_computed <= sequence.num_planned <= sequence.limit:
        raise LawBroken(f"{sequence} is ahead of itself")
    if sequence.num_planned > sequence.capacity or sequence.num_computed > len(sequence.tokens):
        raise LawBroken(f"{sequence} computes what it has no slots or tokens for")
    if not sequence.is_fresh and sequence.num_planned - sequence.num_computed != in_flight:
        raise LawBroken(f"{sequence} has {in_flight} positions in flight")
    if sequence.is_fresh and sequence.num_planned != sequence.num_computed:
        raise LawBroken(f"{sequence} is to be admitted anew with work in flight")
    if sequence.is_steady:
        is_plain = type(sequence.group) is Group and not sequence.is_fresh and not sequence.followers
        if not is_plain or len(sequence.tokens) != sequence.num_computed + 1:
            raise LawBroken(f"{sequence} is said to go on by one token at a time, and may not")


def _validate_blocks(pool: BlockPool, sequence: Sequence, block_size: int) -> None:
    """What plans under way write is nobody else's, and only what is computed has a name."""
    for i, block in enumerate(sequence.own_table.blocks):
        start, end = i * block_size, (i + 1) * block_size
        is_written = start < sequence.num_planned and sequence.num_computed < min(end, sequence.num_planned)
        if is_written and not pool.is_writable(block):
            raise LawBroken(f"{sequence} writes block {block}, which others hold or may find")


def contain(line: Lineup, effects: list[Effect]) -> None:
    """A law is broken: blocks whose owners do not add up are quarantined, and the requests that hold them fail."""
    _contain_device(line, effects)
    _contain_host(line, effects)


def _contain_device(line: Lineup, effects: list[Effect]) -> None:
    holders: list[Group] = [*line.running, *line.pinned]
    tables = [[block for s in group.live if s.table for block in s.table.blocks] for group in holders]
    suspects = line.memory.device.suspects(tables)
    for block in suspects:
        line.memory.device.quarantine(block)
    for group, table in zip(holders, tables, strict=True):
        if suspects.isdisjoint(table):
            continue
        for sequence in group.live:
            sequence.table = None  # its references are not to be trusted
        line.fail(group, FAILED, effects)


def _contain_host(line: Lineup, effects: list[Effect]) -> None:
    holders = [group for group in line.waiting if group.is_swapped]
    copies = [[block for s in group.live for block in s.host if block is not None] for group in holders]
    suspects = line.memory.host.suspects(copies)
    for block in suspects:
        line.memory.host.quarantine(block)
    for group, held in zip(holders, copies, strict=True):
        if suspects.isdisjoint(held):
            continue
        for sequence in group.live:
            sequence.host = []
        line.fail(group, FAILED, effects)
