"""The bytes between the walk and one client: a bounded buffer with one writer and one reader.

The walk puts payloads without waiting, so that a payload is either counted and kept, or neither, whenever the walk is
cut off; and it waits for room before it reads on, so that a slow client slows its nodes instead of filling memory.
"""

from __future__ import annotations

import asyncio

from wire.errors import KvrelayError

__all__ = ["HIGH_WATER_BYTES", "Kept", "Reply"]

HIGH_WATER_BYTES = 1 << 20


class Reply:
    """Not for threads. Closed exactly once, with or without a failure."""

    def __init__(self) -> None:
        self.closed = False
        self.failure: KvrelayError | None = None
        self._chunks: list[bytes] = []
        self._bytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def put(self, payload: bytes) -> None:
        """Add bytes for the client; empty ones are nothing."""
        if payload:
            self._chunks.append(payload)
            self._bytes += len(payload)
            self._news.set()
            if self._bytes > HIGH_WATER_BYTES:
                self._room.clear()

    @property
    def full(self) -> bool:
        """Whether `room` would wait."""
        return not self._room.is_set()

    async def room(self) -> None:
        """Wait until the client has taken enough."""
        await self._room.wait()

    def close(self, failure: KvrelayError | None) -> None:
        """Nothing follows."""
        if not self.closed:
            self.closed, self.failure = True, failure
            self._news.set()

    async def take(self, within_s: float | None) -> bytes:
        """All bytes there are; empty if none came in time, or none will."""
        if not self._chunks and not self.closed:
            self._news.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._news.wait()
            except TimeoutError:
                return b""
        payload = b"".join(self._chunks)
        self._chunks.clear()
        self._bytes = 0
        self._room.set()
        return payload


class Kept(Reply):
    """A part of an answer that somebody reads once it is whole: nobody makes room before."""

    @property
    def full(self) -> bool:
        """It never is."""
        return False

    async def room(self) -> None:
        """There always is."""
