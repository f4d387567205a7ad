"""The bytes between the walk and one client: kept until somebody takes them, or passed on as they come.

The walk puts payloads without waiting, so that a payload is either counted and put, or neither, whenever the walk is
cut off; and it waits for room before it reads on, so that a slow client slows its nodes instead of filling memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

__all__ = ["Flow", "Reply"]


class Flow(Protocol):
    """Whether a client reads."""

    write_paused: bool

    def drain(self) -> Awaitable[None]:
        """Wait until it has read enough, or is gone."""
        ...


class Reply:
    """Not for threads."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self.put: Callable[[bytes], None] = self._kept.append
        """Adds bytes for the client."""
        self.put_last = self.put
        """Adds the very last ones."""
        self.flow: Flow | None = None
        """Whether the client reads, if bytes are passed on to it."""

    def pass_on(
        self, put: Callable[[bytes], None], flow: Flow, put_last: Callable[[bytes], None] | None = None
    ) -> None:
        """From now on each payload goes to `put`, the last one to `put_last`; who asks for room is told of `flow`."""
        self.put, self.put_last, self.flow = put, put_last or put, flow

    def pass_on_no_more(self) -> None:
        """The client has all that it gets."""
        self.put = self.put_last = self._kept.append
        self.flow = None

    def kept(self) -> bytes:
        """All that was put and not passed on."""
        return b"".join(self._kept)

    @property
    def full(self) -> bool:
        """Whether there is something to wait for before more is put. What is kept until it is whole never is."""
        return self.flow is not None and self.flow.write_paused

    def room(self) -> Awaitable[None] | None:
        """What to wait for before more is put, if anything."""
        flow = self.flow
        return flow.drain() if flow is not None and flow.write_paused else None
