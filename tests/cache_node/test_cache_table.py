"""The blocks that a tier keeps, by its pure table."""

from __future__ import annotations

import pytest
from stores import name

from kvrelay.cache_node.table import CacheTable
from kvrelay.wire.kv_events import CacheChanges, Pin


def names(*numbers: int) -> list[bytes]:
    return [name(number) for number in numbers]


def take(table: CacheTable, most: int = 100) -> list[int]:
    """Bring all that the table wants now; return it by number."""
    wanted = table.wanted(most)
    slots = table.room(len(wanted))
    assert slots is not None
    sums = [b"sum of " + each for each in wanted]
    table.landed(wanted, slots, sums, table.clears)
    return [int.from_bytes(each, "big") for each in wanted]


def held(table: CacheTable, *numbers: int) -> list[bool]:
    return [bool(table.pool.lookup([each])) for each in names(*numbers)]


def test_all_goes_down_while_there_is_room_and_once() -> None:
    table = CacheTable(4)
    table.note(CacheChanges(names(1, 2, 3), []))
    table.note(CacheChanges(names(1), names(3)))
    assert table.wanted(1) == names(1)
    table.note(CacheChanges(names(1), []))
    table.landed(names(1), table.room(1) or [], [b"x"], 0)
    assert take(table) == [2]
    assert table.wanted(9) == []
    assert held(table, 1, 2, 3) == [True, True, False]


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        (CacheChanges(names(9), []), []),
        (CacheChanges(names(9), [], used=names(9)), [9]),
        (CacheChanges(names(8), []), [8]),  # which was there before
    ],
)
def test_a_block_takes_the_room_of_a_reused_one_if_its_own_reuse_was_seen(
    changes: CacheChanges, taken: list[int]
) -> None:
    table = CacheTable(2)
    table.note(CacheChanges(names(7, 8), []))
    assert take(table) == [7, 8]
    # Others may take that of blocks without it.
    table.note(CacheChanges(names(1, 2), [], used=names(1)))
    assert take(table) == [1, 2]
    table.note(CacheChanges([], [], used=names(2)))
    table.note(changes)
    assert take(table) == taken
    assert table.stats.evicted == 2 + len(taken)


def test_what_is_found_in_the_pool_stays_longest_below_it() -> None:
    table = CacheTable(3)
    table.note(CacheChanges(names(1, 2, 3), []))
    assert take(table) == [1, 2, 3]
    table.note(CacheChanges([], [], used=names(3, 2)))
    table.note(CacheChanges(names(4), []))
    assert take(table) == [4]
    assert held(table, 1, 2, 3, 4) == [False, True, True, True]


def test_what_is_pinned_comes_and_stays_until_its_time_is_over() -> None:
    table, wish = CacheTable(4), Pin("ann", 1.0, 60)
    table.pool.allow_pins(0.5, 60)

    def flood(*numbers: int) -> None:
        table.note(CacheChanges(names(*numbers), [], used=names(*numbers)))
        take(table)

    flood(1, 2, 3, 4)
    # One that is there, one that comes, and one beyond what may be pinned.
    table.note(CacheChanges(names(5), [], pinned=[(each, wish) for each in names(3, 5)]))
    assert take(table) == [5]
    table.note(CacheChanges([], [], pinned=[(name(4), wish)]))
    flood(10, 11)
    flood(12, 13)
    assert held(table, 3, 4, 5, 13) == [True, False, True, True]
    table.pool.expire(60)
    flood(14, 15, 16, 17)
    assert held(table, 3, 5, 14, 17) == [False, False, True, True]


def test_a_reset_forgets_what_is_there_and_what_is_on_its_way() -> None:
    table = CacheTable(4)
    table.note(CacheChanges(names(1, 2), []))
    assert take(table, 1) == [1]
    coming, since = table.wanted(1), table.clears
    slots = table.room(1)
    assert slots is not None
    table.note(CacheChanges([], [], cleared=True))
    table.note(CacheChanges(names(2), []))
    table.landed(coming, slots, [b"old"], since)
    assert held(table, 1, 2) == [False, False]
    assert table.pool.free == 4
    assert take(table) == [2]


def test_names_that_are_remembered_are_bounded() -> None:
    table = CacheTable(20)
    table.note(CacheChanges(names(*range(1000)), []))
    assert len(table._seen) == 80
