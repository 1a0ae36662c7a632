"""The world kills every mutant; the table of kills is printed."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.sim.mutants import MUTANTS, NEAR, Kill, hunt, table


@pytest.fixture(scope="module")
def kills():
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(hunt, MUTANTS))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_old_text_occurs_once_and_is_changed(mutant):
    for file, old, new in mutant.edits:
        assert (mutant.folder / file).read_text().count(old) == 1, f"{mutant.name}: {file} has moved on"
        assert old != new


def test_names_are_unique():
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(MUTANTS) >= 20
    assert NEAR.keys() <= names


def test_the_world_kills_them_all(kills, capsys):
    with capsys.disabled():
        print("\n" + table(kills))
    assert [kill.mutant for kill in kills if kill.num_worlds is None] == []


def test_all_but_two_fall_in_a_world_and_not_by_the_table(kills: list[Kill]):
    by_table = {kill.mutant for kill in kills if kill.num_worlds == 0}
    assert by_table == {"writable means one owner only", "swapped groups hold more than the device has"}
