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
        self._full: Callable[[], bool] | None = None
        self._room: Callable[[], Awaitable[None]] | None = None

    def pass_on(
        self, put: Callable[[bytes], None], full: Callable[[], bool], room: Callable[[], Awaitable[None]]
    ) -> None:
        """From now on each payload goes to `put`; `room` waits while the client is `full`."""
        self._put, self._full, self._room = put, full, room

    def put(self, payload: bytes) -> None:
        """Add bytes for the client; empty ones are nothing."""
        if payload:
            self._put(payload)

    @property
    def full(self) -> bool:
        """Whether there is something to wait for before more is put. What is kept until it is whole never is."""
        return self._full is not None and self._full()

    def room(self) -> Awaitable[None] | None:
        """What to wait for before more is put, if anything."""
        return self._room() if self._room is not None and self.full else None

    def kept(self) -> bytes:
        """All that was put and not passed on."""
        return b"".join(self._kept)
