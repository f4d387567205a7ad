"""Which blocks are drawn for a check, and what is known of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv_transfer.checksums import Checks, drawn, in_our_order
from kvrelay.kv_transfer.connector import LeaseId
from kvrelay.kv_transfer.shares import Heads, order_of_heads

LEASE = LeaseId("request", 3)


@given(st.lists(st.integers(0, 2**31), unique=True), st.floats(0, 1), st.floats(0, 1), st.data())
def test_a_draw_depends_on_lease_block_and_share_alone(blocks, share, other, data) -> None:
    chosen = drawn(LEASE, blocks, share)
    assert chosen == [block for block in blocks if block in set(chosen)]
    some = data.draw(st.permutations(blocks))[: len(blocks) // 2]
    assert set(drawn(LEASE, some, share)) == set(chosen) & set(some)
    # Who checks more checks these, too.
    assert set(drawn(LEASE, blocks, min(share, other))) <= set(chosen)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.9])
def test_the_share_is_kept_and_leases_draw_apart(share: float) -> None:
    blocks = range(20_000)
    for lease in (LEASE, LeaseId("request", 4), LeaseId("another", 3)):
        assert len(drawn(lease, blocks, share)) == pytest.approx(20_000 * share, rel=0.15)
    assert drawn(LEASE, blocks, share) != drawn(LeaseId("request", 4), blocks, share)
    assert drawn(LEASE, blocks, share) != drawn(LeaseId("another", 3), blocks, share)


def test_none_and_all() -> None:
    assert drawn(LEASE, [1, 2], 0) == []
    assert drawn(LEASE, [1, 2], 1) == [1, 2]


def test_of_four_blocks_two_are_compared() -> None:
    checks = Checks(places={70: 1, 90: 3})
    assert (checks.unanswered, checks.settled, checks.sound) == ([70, 90], False, 1)
    assert checks.between(0, 2) == [1]
    checks.ask(11, [1])
    checks.ask(12, [3])
    checks.add_theirs({70: b"a", 80: b"not asked for"})
    assert (checks.unanswered, checks.sound) == ([90], 1)
    assert checks.add_ours(11, [b"a"])
    assert not checks.add_ours(11, [b"a"])
    assert (checks.sound, checks.wrong) == (3, [])
    assert checks.add_ours(12, [b"b"])
    assert (checks.settled, checks.wrong) == (False, [])
    checks.add_theirs({90: b"c"})
    assert (checks.settled, checks.wrong, checks.sound) == (True, [3], 0)


def test_without_checks_all_is_settled_and_sound() -> None:
    checks = Checks()
    assert checks.settled
    assert checks.sound == float("inf")


def of_heads(ranks: list[Heads]) -> bytes:
    """What the ranks of a node send of one block, where a checksum is its head's number."""
    return b"".join(
        head.to_bytes(8, "little") for first, end in ranks for head in range(first, end)
    )


LAYOUTS: list[list[Heads]] = [
    [(0, 4)],
    [(0, 2), (2, 4)],
    [(0, 1), (1, 2), (2, 3), (3, 4)],
    [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4)],
]


@pytest.mark.parametrize("readers", LAYOUTS)
@pytest.mark.parametrize("sources", LAYOUTS)
def test_any_ranks_compare_with_any_ranks(readers: list[Heads], sources: list[Heads]) -> None:
    order = order_of_heads(readers, sources)
    assert in_our_order(of_heads(sources), order) == of_heads(readers)
    assert in_our_order(of_heads(sources)[:-1], order) in (b"", of_heads(readers))


def test_of_a_head_that_two_ranks_hold_each_reader_compares_with_its_own() -> None:
    ranks: list[Heads] = [(0, 1), (0, 1)]
    assert order_of_heads(ranks, ranks) == [0, 1]


def test_too_few_checksums_equal_none() -> None:
    assert in_our_order(bytes(8), [0, 1]) == b""
