"""KV events of a node (wire/kv_events.py), as frames for the routers that follow them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.kv_events import BlockHash, CacheChanges

__all__ = ["KvEvents"]

_QUEUED = 1_024
"""Changes that wait for a router, of which there are 20 a second."""
_HASHES = 4_096
"""Hashes in a frame of all that is held, 74 KB: a router takes a millisecond for them."""


class KvEvents:
    """A record of what the prefix cache holds, and the routers that follow it."""

    def __init__(self) -> None:
        self._held: set[BlockHash] = set()
        self.followers: set[asyncio.Queue[bytes]] = set()
        """Their changes, without those of routers that fell behind and are to begin anew."""

    def publish(self, changes: CacheChanges) -> None:
        if changes.cleared:
            self._held.clear()
        self._held.difference_update(changes.removed)
        self._held.update(changes.stored)
        packed = msgspec.msgpack.encode(changes)
        for queue in tuple(self.followers):
            if queue.full():
                self.followers.discard(queue)
            else:
                queue.put_nowait(packed)

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Yield all that is held, then each change; all again if the reader falls behind."""
        while True:
            queue = asyncio.Queue[bytes](_QUEUED)
            self.followers.add(queue)
            try:
                held = list(self._held)
                for at in range(0, len(held) or 1, _HASHES):
                    part = CacheChanges(held[at : at + _HASHES], [], cleared=at == 0)
                    yield Frame(FrameKind.TOKENS, msgspec.msgpack.encode(part))
                while queue in self.followers:
                    yield Frame(FrameKind.TOKENS, await queue.get())
            finally:
                self.followers.discard(queue)
