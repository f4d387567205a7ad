"""Which fetched blocks are compared with their source by checksum, and what comes of it. Pure.

Owns the draw, and what is known of one fetch's drawn blocks: the source's checksums and ours; no
arithmetic on bytes. The draw is a function of lease, block and share, so whoever knows these knows
what was drawn, in whichever order blocks come and however often they are asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.kv_transfer.leases import LeaseId

__all__ = ["MOST_BLOCKS", "Checks", "drawn", "in_our_order"]

# So many blocks in one question and one launch: the answer has 256 KiB with 128 KV heads.
MOST_BLOCKS = 256
_WRAP = 1 << 64
CHECKSUM_BYTES = 8  # of a KV head's part of a block (kernels/block_checksums.py)


def drawn(lease: LeaseId, blocks: Sequence[int], share: float) -> list[int]:
    """Of these blocks, named by the source's ids, those that are checked: each with the probability
    `share`.
    """
    if share >= 1 or share <= 0:
        return list(blocks) if share >= 1 else []
    # Multiples of a random odd number, modulo 2**64: 0.1 us a block, and neighbours are spread over
    # a lease evenly.
    digest = hashlib.blake2b(f"{lease.epoch}/{lease.request_id}".encode(), digest_size=8).digest()
    seed, limit = int.from_bytes(digest, "little") | 1, int(share * _WRAP)
    return [block for block in blocks if (block + 1) * seed % _WRAP < limit]


def in_our_order(checksums: bytes, order: Sequence[int]) -> bytes:
    """A source's checksums of a block as ours lie: of each KV head of each of our ranks.

    `order`: where each of these lies in the source's. Empty, which equals none of ours, if their
    number is wrong.
    """
    size = CHECKSUM_BYTES
    if len(checksums) < (max(order) + 1) * size:
        return b""
    return b"".join(checksums[place * size : (place + 1) * size] for place in order)


@dataclass(slots=True)
class Checks:
    """Of one fetch. A block has a place: its index among those that are fetched."""

    places: dict[int, int] = field(default_factory=dict)
    """Of drawn blocks that the source can vouch for, by its own id."""
    unchecked: set[int] = field(default_factory=set)
    """Places of drawn blocks for which it cannot."""
    _theirs: dict[int, bytes] = field(default_factory=dict)
    _ours: dict[int, bytes] = field(default_factory=dict)
    _asked: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Places of which we have asked for our own checksums, by the number of the question."""

    @property
    def unanswered(self) -> list[int]:
        """Blocks, by the source's ids, of which it has not sent the checksum."""
        return [block for block, place in self.places.items() if place not in self._theirs]

    @property
    def settled(self) -> bool:
        """Whether both checksums are known of each drawn block."""
        return len(self._theirs) == len(self._ours) == len(self.places)

    @property
    def wrong(self) -> list[int]:
        """Places of blocks that are not what the source has."""
        return sorted(
            place for place, ours in self._ours.items() if self._theirs.get(place, ours) != ours
        )

    @property
    def sound(self) -> float:
        """How many first blocks a fetch that fails may keep, as far as is known here; none if any
        block is wrong.
        """
        if self.wrong:
            return 0
        open_places = (
            at for at in self.places.values() if at not in self._theirs or at not in self._ours
        )
        return min(open_places, default=float("inf"))

    def between(self, first: int, end: int) -> list[int]:
        """Places of blocks to compare from `first` on and before `end`."""
        return sorted(place for place in self.places.values() if first <= place < end)

    def ask(self, number: int, places: Sequence[int]) -> None:
        """The blocks at these places are in: our checksums of them are asked for under this number."""
        self._asked[number] = tuple(places)

    def hear_theirs(self, checksums: Mapping[int, bytes]) -> None:
        """From the source, by its ids. What was not asked for, or comes again, is ignored."""
        for block, checksum in checksums.items():
            if block in self.places:
                self._theirs.setdefault(self.places[block], checksum)

    def hear_ours(self, number: int, checksums: Sequence[bytes]) -> bool:
        """The answer to a question of ours; False if it is none of ours."""
        places = self._asked.pop(number, None)
        if places is None:
            return False
        self._ours.update(zip(places, checksums, strict=True))
        return True
