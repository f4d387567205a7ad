"""Which bytes of a block each rank reads, for all sizes on both sides, against a brute-force twin."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvrelay.kv_transfer.shares import Heads, shares
from kvrelay.paged_engine.sharding import kv_head_range
from kvrelay.wire.errors import Incompatible

SIZES = (1, 2, 4, 8)
HEAD_BYTES = 3


def layout(kv_heads: int, size: int) -> list[Heads]:
    return [kv_head_range(kv_heads, rank, size) for rank in range(size)]


def block(heads: Heads) -> list[tuple[int, int]]:
    """A rank's block as (head, byte of the head)."""
    return [(head, byte) for head in range(*heads) for byte in range(HEAD_BYTES)]


@pytest.mark.parametrize(
    ("kv_heads", "readers", "sources"), list(itertools.product(SIZES, SIZES, SIZES))
)
def test_each_byte_of_each_block_is_read_exactly_once_from_where_it_is(kv_heads, readers, sources):
    here, there = layout(kv_heads, readers), layout(kv_heads, sources)
    for rank, heads in enumerate(here):
        mine: list[tuple[int, int] | None] = [None] * len(block(heads))
        for source, share in shares(rank, here, there, HEAD_BYTES):
            theirs = block(there[source])
            assert 0 <= share.remote_start < share.remote_start + share.num_bytes <= len(theirs)
            for index in range(share.num_bytes):
                assert mine[share.local_start + index] is None
                mine[share.local_start + index] = theirs[share.remote_start + index]
        assert mine == block(heads)


@pytest.mark.parametrize(
    ("kv_heads", "readers", "sources"), list(itertools.product(SIZES, SIZES, SIZES))
)
def test_each_source_is_one_peer_and_ranks_that_hold_the_same_are_read_evenly(
    kv_heads, readers, sources
):
    here, there = layout(kv_heads, readers), layout(kv_heads, sources)
    load: Counter[int] = Counter()
    for rank in range(readers):
        found = [source for source, _ in shares(rank, here, there, HEAD_BYTES)]
        assert len(found) == len(set(found))
        load.update(found)
    for held in set(there):
        loads = [load[source] for source, heads in enumerate(there) if heads == held]
        assert max(loads) - min(loads) <= 1


def test_a_head_that_nobody_holds_is_refused():
    with pytest.raises(Incompatible, match="no rank of the source holds KV head 1"):
        shares(0, [(0, 2)], [(0, 1), (2, 3)], 1)
