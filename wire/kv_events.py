"""KV events: names of KV blocks, and what a node tells of its prefix cache.

Names are chained hashes over little-endian 32-bit token ids from a fixed root, equal on all nodes.
Only full blocks are hashed.

A router opens KV_EVENTS_PATH on the node's request stream, as a request that never ends. Frames of
kind TOKENS bring CacheChanges as msgpack: for each medium first one that is `cleared` and, in
several frames, all that is held, then each change; for a router that does not read as fast, all
again. A node that tells nothing, or is of a release before, answers 404.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import msgspec

from kvrelay.wire.config_checks import Share

__all__ = [
    "ANY",
    "CPU",
    "GPU",
    "KV_EVENTS_PATH",
    "ROOT",
    "STORAGE",
    "BlockHash",
    "CacheChanges",
    "Pin",
    "all_held",
    "chain",
    "extend",
    "keys_of",
    "read_changes",
    "root_of",
]

KV_EVENTS_PATH = "/kv/events"
GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
"""Media, by vLLM's names: an engine's pool on any device, and below it host memory and files."""

BlockHash = bytes
"""16 bytes of BLAKE2b over (parent hash, token ids)."""

_SIZE = 16
_HASHES = 4_096
"""Hashes in a message of all that is held, 74 KB: a router takes a millisecond for them."""
ROOT: BlockHash = blake2b(b"kvrelay block chain 1", digest_size=_SIZE).digest()


ANY: BlockHash = bytes(_SIZE)
"""A name that a store holds which cannot tell what it holds: any block may be there."""


def root_of(salt: str | None, adapter: str = "") -> BlockHash:
    """Return the parent of a request's first block.

    A salt keeps tenants' caches apart, `adapter` (name and content) KV of other weights.
    """
    root = ROOT if not salt else blake2b(ROOT + salt.encode(), digest_size=_SIZE).digest()
    # Personalized: no salt that a client chooses gives the root of an adapter.
    return (
        root
        if not adapter
        else blake2b(root + adapter.encode(), digest_size=_SIZE, person=b"adapter").digest()
    )


def chain(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    packed = array("I", token_ids).tobytes()  # all machines that run us are little-endian
    return blake2b(parent + packed, digest_size=_SIZE).digest()


def extend(
    hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, root: BlockHash = ROOT
) -> None:
    """Append the hashes of all further full blocks of `token_ids`."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(chain(parent, token_ids[start : start + block_size]))


class Pin(msgspec.Struct, frozen=True, omit_defaults=True):
    """A wish to evict blocks last, for a time after each use, and whose budget pays for it."""

    owner: str = ""
    """The API key's name; empty without a router."""
    share: Share = 1.0
    """Share of a node's blocks that the owner may have pinned."""
    seconds: int = 0


class CacheChanges(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A set of block hashes that a medium of the prefix cache gained and lost."""

    stored: list[BlockHash]
    removed: list[BlockHash]
    cleared: bool = False
    """All earlier blocks are gone."""
    used: list[BlockHash] = []
    """Hashes that requests have found; not for routers."""
    medium: str = GPU
    pinned: list[tuple[BlockHash, Pin]] = []
    """Not for routers, either."""

    def follow(self, held: set[BlockHash]) -> None:
        """Bring a set of all that is held up to date."""
        if self.cleared:
            held.clear()
        held.difference_update(self.removed)
        held.update(self.stored)


def all_held(names: Iterable[BlockHash], medium: str) -> Iterator[CacheChanges]:
    """Yield what tells of all that a medium holds."""
    held = list(names)
    for at in range(0, len(held) or 1, _HASHES):
        yield CacheChanges(held[at : at + _HASHES], [], cleared=at == 0, medium=medium)


read_changes = msgspec.msgpack.Decoder(CacheChanges).decode
"""Read a frame's payload. Raises one of MALFORMED (wire/frames.py)."""


def keys_of(hashes: Iterable[BlockHash]) -> list[int]:
    """Return 64 bits of each hash, enough to choose a node by."""
    return [int.from_bytes(block_hash[:8], "little") for block_hash in hashes]
