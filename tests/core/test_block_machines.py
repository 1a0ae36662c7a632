"""The block pool and its tables against a model that a child could run: for each block the list of those who hold it.

The model shares no arithmetic with the code. It has no counters: who holds a block is a list of names of tables, what
is free is what nobody holds and has no name, and the order of eviction is a list to which a block is added when its
last holder lets go. After every step all questions are asked of both.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kilburn.controller.core.block_pool import BlockPool, Name
from kilburn.controller.core.block_table import BlockTable
from kilburn.shared.types import LawBroken

EFFORT = settings(max_examples=50, stateful_step_count=40, deadline=None, database=None)


@dataclass
class Model:
    holders: dict[int, list[str]]
    names: dict[int, bytes] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)  # first in, first out
    idle: list[int] = field(default_factory=list)  # named and held by nobody, least recently used first
    quarantined: list[int] = field(default_factory=list)

    def take(self, holder: str) -> int:
        if self.free:
            block = self.free.pop(0)
        else:
            block = self.idle.pop(0)
            del self.names[block]
        self.holders[block] = [holder]
        return block

    def share(self, block: int, holder: str) -> None:
        if block in self.idle:
            self.idle.remove(block)
        self.holders[block].append(holder)

    def drop(self, block: int, holder: str) -> None:
        self.holders[block].remove(holder)
        if not self.holders[block]:
            (self.idle if block in self.names else self.free).append(block)

    def withdraw(self, block: int) -> None:
        if self.names.pop(block, None) and block in self.idle:
            self.idle.remove(block)
            self.free.append(block)


class World(RuleBasedStateMachine):
    """Tables t0, t1 ... over one pool; every rule does the same thing to both."""

    num_blocks = 7

    @initialize(order=st.permutations(range(7)))
    def begin(self, order: list[int]) -> None:
        self.pool = BlockPool(self.num_blocks, order)
        self.model = Model({block: [] for block in range(self.num_blocks)}, free=list(order))
        self.tables: dict[str, BlockTable] = {}
        self.wanted: dict[str, list[int]] = {}  # what each table holds, by the model
        self.num_made = self.step = 0
        self.findable: set[bytes] = set()  # by what the journal said

    def new(self) -> str:
        self.num_made += 1
        name = f"t{self.num_made}"
        self.tables[name], self.wanted[name] = BlockTable(self.pool), []
        return name

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.tables)), label="table")

    # --- rules

    @rule()
    def make(self) -> None:
        self.new()

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_blocks=st.integers(0, 3))
    def grow(self, data: st.DataObject, num_blocks: int) -> None:
        table = self.pick(data)
        self.step += 1
        available = len(self.model.free) + len(self.model.idle)
        if num_blocks > available:
            with pytest.raises(LawBroken, match="num_available was not asked"):
                self.tables[table].grow(num_blocks, self.step)
            return
        taken = self.tables[table].grow(num_blocks, self.step)
        assert taken == [self.model.take(table) for _ in range(num_blocks)]
        self.wanted[table] += taken
        assert all(self.pool.held_since(block) == self.step for block in taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        child = self.new()
        self.tables[child] = self.tables[parent].fork()
        self.wanted[child] = list(self.wanted[parent])
        for block in self.wanted[child]:
            self.model.share(block, child)

    @precondition(lambda self: any(self.wanted.values()))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Copy-on-write, as a plan asks for it."""
        table = data.draw(st.sampled_from(sorted(t for t, blocks in self.wanted.items() if blocks)))
        at = data.draw(st.integers(0, len(self.wanted[table]) - 1))
        source = self.wanted[table][at]
        is_alone = self.model.holders[source] == [table]
        if not is_alone and not self.model.free and not self.model.idle:
            return  # no room for a copy: a plan would have asked
        self.step += 1
        copy = self.tables[table].make_writable(at, self.step)
        if is_alone:
            assert copy is None
            self.model.withdraw(source)
        else:
            destination = self.model.take(table)
            self.model.drop(source, table)
            self.wanted[table][at] = destination
            assert copy == (source, destination)
            assert self.pool.held_since(destination) == self.step
        assert self.pool.is_writable(self.wanted[table][at])

    @precondition(lambda self: any(self.wanted.values()))
    @rule(data=st.data(), digest=st.integers(0, 9))
    def publish(self, data: st.DataObject, digest: int) -> None:
        block = data.draw(st.sampled_from(sorted({b for blocks in self.wanted.values() for b in blocks})))
        name = Name(bytes([digest]) * 32, b"p" * 32, (digest,))
        is_new = name.digest not in self.model.names.values() and block not in self.model.names
        assert self.pool.publish(block, name) is is_new
        if is_new:
            self.model.names[block] = name.digest

    @rule(block=st.integers(0, 6))
    def withdraw(self, block: int) -> None:
        self.pool.withdraw(block)
        self.model.withdraw(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), at_front=st.booleans())
    def adopt(self, data: st.DataObject, at_front: bool) -> None:
        """A hit: named blocks that the table does not hold yet."""
        table = self.pick(data)
        hits = sorted(self.model.names.keys() - set(self.wanted[table]))
        blocks = data.draw(st.lists(st.sampled_from(hits), unique=True)) if hits else []
        if at_front:
            self.tables[table].adopt_front(blocks)
            self.wanted[table] = blocks + self.wanted[table]
        else:
            self.tables[table].adopt(blocks)
            self.wanted[table] = self.wanted[table] + blocks
        for block in blocks:
            self.model.share(block, table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.pick(data)
        self.tables.pop(table).free()
        for block in reversed(self.wanted.pop(table)):
            self.model.drop(block, table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free_is_idempotent(self, data: st.DataObject) -> None:
        """A freed table holds nothing, so freeing it again frees nothing."""
        name = self.pick(data)
        table = self.tables.pop(name)
        table.free()
        for block in reversed(self.wanted.pop(name)):
            self.model.drop(block, name)
        table.free()
        assert table.blocks == []

    @precondition(lambda self: len(self.model.quarantined) < 3)
    @rule(block=st.integers(0, 6))
    def quarantine(self, block: int) -> None:
        """Of a block that nobody holds: with holders it happens only as a lease ends, see below."""
        if self.model.holders[block] or block in self.model.quarantined:
            return
        self.pool.quarantine(block)
        self.model.withdraw(block)
        self.model.free.remove(block)
        self.model.quarantined.append(block)

    @precondition(lambda self: any(self.wanted.values()))
    @rule(data=st.data())
    def share_what_nobody_has(self, data: st.DataObject) -> None:
        strangers = [*self.model.free, *self.model.quarantined]
        for block in strangers:
            with pytest.raises(LawBroken):
                self.pool.share(block)
            with pytest.raises(LawBroken):
                self.pool.drop([block])
            with pytest.raises(LawBroken):
                self.pool.publish(block, Name(b"x" * 32, b"p" * 32, (1,)))

    # --- what must hold

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        model, pool = self.model, self.pool
        assert {name: table.blocks for name, table in self.tables.items()} == self.wanted
        held = [block for block, holders in model.holders.items() if holders]
        assert (pool.num_free, pool.num_cached) == (len(model.free), len(model.idle))
        assert (pool.num_owned, pool.num_quarantined) == (len(held), len(model.quarantined))
        assert pool.num_available == len(model.free) + len(model.idle)
        assert pool.num_refs == sum(len(holders) for holders in model.holders.values())
        for block, holders in model.holders.items():
            assert pool.refs(block) == len(holders)
            assert pool.is_writable(block) is (len(holders) == 1 and block not in model.names)
            assert pool.is_cached(block) is (block in model.idle)
            name = pool.name_of(block)
            assert (name.digest if name else None) == model.names.get(block)
        for block, digest in model.names.items():
            assert pool.find(digest) == block
        assert sorted(pool.all_names()) == sorted(model.names.values())
        pool.validate([table.blocks for table in self.tables.values()])
        assert pool.suspects([table.blocks for table in self.tables.values()]) == set()

    @precondition(lambda self: hasattr(self, "pool"))
    @rule()
    def read_the_journal(self) -> None:
        """What it says since it was last read is the difference, in whichever order its two lists are applied."""
        published, withdrawn = set(self.pool.journal.published), set(self.pool.journal.withdrawn)
        one, other = (self.findable | published) - withdrawn, (self.findable - withdrawn) | published
        self.pool.journal.published.clear()
        self.pool.journal.withdrawn.clear()
        assert one == other == set(self.model.names.values())
        self.findable = one


def test_the_pool_and_its_tables_are_as_the_model_says() -> None:
    run_state_machine_as_test(World, settings=EFFORT)


def test_quarantine_takes_a_block_from_its_holders() -> None:
    pool = BlockPool(4)
    one = BlockTable(pool)
    one.grow(2, step=1)
    two = one.fork()
    pool.publish(one.blocks[0], Name(b"a" * 32, b"p" * 32, (1,)))
    pool.quarantine(one.blocks[0])
    assert (pool.num_free, pool.num_owned, pool.num_quarantined, pool.num_refs) == (2, 1, 1, 2)
    assert pool.find(b"a" * 32) is None
    pool.check()
    assert pool.suspects([one.blocks, two.blocks]) == {one.blocks[0]}, "the tables still hold it"
    pool.quarantine(one.blocks[0])
    pool.check()


def test_tails_are_evicted_before_heads() -> None:
    """A prefix outlives what extends it, and whoever was used last outlives both."""
    pool = BlockPool(6)
    first, second = BlockTable(pool), BlockTable(pool)
    first.grow(3, step=1)
    second.grow(3, step=1)
    for number, block in enumerate(first.blocks + second.blocks):
        pool.publish(block, Name(bytes([number]) * 32, b"p" * 32, (number,)))
    order = [*reversed(first.blocks), *reversed(second.blocks)]
    first.free()
    second.free()
    assert [pool.take(1, step=2)[0] for _ in range(6)] == order
    assert pool.num_evictions == 6
    assert pool.all_names() == []


def test_a_second_block_of_a_name_stays_nameless() -> None:
    pool = BlockPool(2)
    table = BlockTable(pool)
    one, two = table.grow(2, step=1)
    name = Name(b"a" * 32, b"p" * 32, (1,))
    assert pool.publish(one, name)
    assert not pool.publish(two, name)
    assert pool.find(name.digest) == one
    table.free()
    assert (pool.num_cached, pool.num_free) == (1, 1)


def test_freeing_twice_is_found_where_it_happens() -> None:
    pool = BlockPool(3)
    one = BlockTable(pool)
    one.grow(2, step=1)
    blocks = list(one.blocks)
    two = one.fork()
    one.make_writable(1, step=2)
    one.free()
    two.free()
    with pytest.raises(LawBroken, match="does not hold it"):
        pool.drop(blocks)
    pool.validate([])
