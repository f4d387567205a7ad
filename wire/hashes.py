"""Chained block hashes: equal prefixes have equal hashes on every node of every cluster.

The root is fixed (no process-random seed), the encoding is little-endian 32-bit token ids, so two
nodes that never spoke to each other name the same block alike. Only full blocks are hashed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

__all__ = ["BlockHash", "ROOT", "chain", "extend", "root_of"]

BlockHash = bytes
"""16 bytes of BLAKE2b over (parent hash, token ids)."""

_SIZE = 16
ROOT: BlockHash = blake2b(b"kvrelay block chain 1", digest_size=_SIZE).digest()


def root_of(salt: str | None, adapter: str = "") -> BlockHash:
    """The parent of a request's first block; a salt keeps tenants' caches apart, `adapter` (its
    name and content) KV that other weights have made.
    """
    root = ROOT if not salt else blake2b(ROOT + salt.encode(), digest_size=_SIZE).digest()
    # Personalized: no salt that a client chooses gives the root of an adapter.
    return (
        root
        if not adapter
        else blake2b(root + adapter.encode(), digest_size=_SIZE, person=b"adapter").digest()
    )


def chain(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of one full block with these tokens behind `parent`."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return blake2b(parent + packed.tobytes(), digest_size=_SIZE).digest()


def extend(
    hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, root: BlockHash = ROOT
) -> None:
    """Append the hashes of all full blocks of `token_ids` that `hashes` does not name yet."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(chain(parent, token_ids[start : start + block_size]))
