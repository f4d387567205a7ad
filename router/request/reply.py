"""The bytes between the walk and one client: kept until somebody takes them, or passed on as they
come.

The walk puts payloads without waiting, so that a payload is either counted and put, or neither,
whenever the walk is cut off; and it waits for room before it reads on, so that a slow client slows
its nodes instead of filling memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

__all__ = ["Flow", "Reply"]


class Flow(Protocol):
    """A client that reads, or not."""

    write_paused: bool

    def drain(self) -> Awaitable[None]:
        """Wait until it has read enough, or is gone."""
        ...


class Reply:
    """A reply to one client. Not for threads."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self.put: Callable[[bytes], None] = self._kept.append
        """Adds bytes for the client."""
        self.put_last = self.put
        """Adds the very last ones."""
        self.flow: Flow | None = None
        """Whether the client reads, if bytes are passed on to it."""

    def pass_on(
        self,
        put: Callable[[bytes], None],
        flow: Flow,
        put_last: Callable[[bytes], None] | None = None,
    ) -> None:
        """Give each payload to `put` from now on, the last one to `put_last`; who asks for room is
        told of `flow`.
        """
        self.put, self.put_last, self.flow = put, put_last or put, flow

    def pass_on_no_more(self) -> None:
        """Keep what still comes: the client has all that it gets."""
        self.put = self.put_last = self._kept.append
        self.flow = None

    def kept(self) -> bytes:
        """Return all that was put and not passed on."""
        return b"".join(self._kept)

    @property
    def full(self) -> bool:
        """Say whether there is something to wait for before more is put. Never for what is kept
        until it is whole.
        """
        return self.flow is not None and self.flow.write_paused

    def room(self) -> Awaitable[None] | None:
        """Return what to wait for before more is put, if anything."""
        return self.flow.drain() if self.flow is not None and self.flow.write_paused else None
