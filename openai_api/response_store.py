"""Responses that were answered, kept in memory so that a later request can go on from them. Pure.

A response belongs to the key that made it, its *owner*. By another one it is not found, exactly as one that was never
there: both are looked for in the same way. Bounded in number and in bytes; when either is reached, those go first that
nobody has asked for the longest time. What is kept dies with the process that keeps it. `Responses` is what the routes
need of it: it may be another process.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from wire.errors import NotFound

__all__ = ["MAX_RESPONSES", "MAX_STORED_BYTES", "KeptHere", "ResponseStore", "Responses", "Stored", "missing"]

MAX_RESPONSES = 4096
MAX_STORED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """One response as it was sent, the items that it answers, and all turns up to it, each a JSON list of items."""

    body: bytes
    input: bytes
    turns: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes. Turns are shared between the responses of a conversation, and counted for each: an upper bound."""
        return len(self.body) + len(self.input) + sum(map(len, self.turns))


class ResponseStore:
    """Responses by owner and id. Not for threads."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """Keep a response; one that is larger than all the room there is is not kept."""
        if stored.size > self._max_bytes:
            return
        self._kept[owner, response_id] = stored
        self.bytes += stored.size
        while len(self._kept) > self._max_responses or self.bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= oldest.size

    def get(self, owner: str, response_id: str, param: str | None = None) -> Stored:
        """A kept response. Raises NotFound, with `param` as the field that named it."""
        found = self._kept.get((owner, response_id))
        if found is None:
            raise missing(response_id, param, self._max_responses)
        self._kept.move_to_end((owner, response_id))
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises NotFound."""
        found = self._kept.pop((owner, response_id), None)
        if found is None:
            raise missing(response_id, None, self._max_responses)
        self.bytes -= found.size


class Responses(Protocol):
    """Where responses are kept."""

    async def get(self, owner: str, response_id: str, param: str | None = None) -> Stored:
        """As ResponseStore.get; also Unavailable if whoever keeps it does not answer."""
        ...

    async def delete(self, owner: str, response_id: str) -> None:
        """As ResponseStore.delete; also Unavailable."""
        ...

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """As ResponseStore.put."""
        ...


class KeptHere:
    """The Responses of one process alone."""

    def __init__(self) -> None:
        self._store = ResponseStore()

    async def get(self, owner: str, response_id: str, param: str | None = None) -> Stored:
        """See Responses."""
        return self._store.get(owner, response_id, param)

    async def delete(self, owner: str, response_id: str) -> None:
        """See Responses."""
        self._store.delete(owner, response_id)

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """See Responses."""
        self._store.put(owner, response_id, stored)


def missing(response_id: str, param: str | None, kept: int = MAX_RESPONSES) -> NotFound:
    """The error for a response that is not there; `param` is the field that named it."""
    return NotFound(
        f"response {response_id!r} is not kept here: it was never stored (store: false), was deleted, gave way to "
        f"newer ones (the last {kept} are kept), or this server was restarted",
        param=param,
        code="previous_response_not_found" if param else "response_not_found",
    )
