"""The bytes between the walk and one client: kept until somebody takes them, or passed on as they come.

The walk puts payloads without waiting, so that a payload is either counted and put, or neither, whenever the walk is
cut off; and it waits for room before it reads on, so that a slow client slows its nodes instead of filling memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

__all__ = ["Reply"]


class Reply:
    """Not for threads."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._put: Callable[[bytes], None] = self._kept.append
        self._room: Callable[[], Awaitable[None] | None] | None = None

    def pass_on(self, put: Callable[[bytes], None], room: Callable[[], Awaitable[None] | None]) -> None:
        """From now on each payload goes to `put`, and who asks for room asks `room`."""
        self._put, self._room = put, room

    def put(self, payload: bytes) -> None:
        """Add bytes for the client; empty ones are nothing."""
        if payload:
            self._put(payload)

    def room(self) -> Awaitable[None] | None:
        """What to wait for before more is put, if anything. What is kept until it is whole always has room."""
        return None if self._room is None else self._room()

    def kept(self) -> bytes:
        """All that was put and not passed on."""
        return b"".join(self._kept)
