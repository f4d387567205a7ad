"""Bytes of a block that a reading rank takes from each rank of a source. Pure.

A block is [kv_heads of its rank, bytes of a head], so two ranks have one contiguous range in
common: a *share*. KV heads on several source ranks are taken from them in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.wire.errors import Incompatible

__all__ = ["Heads", "Share", "order_of_heads", "shares"]

Heads = tuple[int, int]
"""The first KV head of a rank, and the one behind its last."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """A range of `num_bytes` of every block, from a start on either side."""

    remote_start: int
    local_start: int
    num_bytes: int


def shares(
    rank: int, readers: Sequence[Heads], sources: Sequence[Heads], head_bytes: int
) -> list[tuple[int, Share]]:
    """Return (rank of the source, share) for reader `rank`, in its block's order.

    Raises Incompatible for a head that no rank of the source holds.
    """
    first, end = readers[rank]
    turn = readers[:rank].count(readers[rank])
    found = []
    while first < end:
        holders = [index for index, (low, high) in enumerate(sources) if low <= first < high]
        if not holders:
            raise Incompatible(
                f"no rank of the source holds KV head {first}: they hold {list(sources)}"
            )
        holder = holders[turn % len(holders)]
        low, high = sources[holder]
        stop = min(end, high)
        remote, local = first - low, first - readers[rank][0]
        found.append(
            (holder, Share(remote * head_bytes, local * head_bytes, (stop - first) * head_bytes))
        )
        first = stop
    return found


def order_of_heads(readers: Sequence[Heads], sources: Sequence[Heads]) -> list[int]:
    """Return where each reader's KV heads lie among the source's. Raises Incompatible."""
    before = [sum(end - first for first, end in sources[:index]) for index in range(len(sources))]
    return [
        before[source] + share.remote_start + head
        for rank in range(len(readers))
        for source, share in shares(rank, readers, sources, 1)
        for head in range(share.num_bytes)
    ]
