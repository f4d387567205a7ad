"""Responses that were answered, kept in memory so that a later request can go on from them. Pure.

A response belongs to the key that made it, its *owner*. By another one it is not found, exactly as one that was never
there: both are looked for in the same way. Bounded in number and in bytes; when either is reached, the owner that keeps
most of it loses first what it has not asked for the longest time: nobody takes room from one that keeps less. What is
kept dies with the process that keeps it. `Responses` is what the routes need of it: it may be another process.
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
    """A response as it was sent, the items that it answers, and all turns up to it.

    Each turn is a JSON list of items; `items` is how many there are in all of them."""

    body: bytes
    input: bytes
    turns: tuple[bytes, ...]
    items: int = 0

    @property
    def size(self) -> int:
        """Bytes. Turns are shared between the responses of a conversation, and counted for each: an upper bound."""
        return len(self.body) + len(self.input) + self.turn_bytes

    @property
    def turn_bytes(self) -> int:
        """Of all turns."""
        return sum(map(len, self.turns))


class _Share:
    """What one owner keeps, that asked for last at the end."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, Stored] = OrderedDict()
        self.bytes = 0

    def put(self, response_id: str, stored: Stored) -> None:
        """One more, or in place of one."""
        if response_id in self.kept:
            self.drop(response_id)
        self.kept[response_id] = stored
        self.bytes += stored.size

    def drop(self, response_id: str) -> None:
        """One that is there."""
        self.bytes -= self.kept.pop(response_id).size


class ResponseStore:
    """Responses by owner and id. Not for threads."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._shares: OrderedDict[str, _Share] = OrderedDict()
        """By owner, who asked last at the end. Nobody has an empty one."""

    def __len__(self) -> int:
        return sum(len(share.kept) for share in self._shares.values())

    @property
    def bytes(self) -> int:
        """Of all that is kept."""
        return sum(share.bytes for share in self._shares.values())

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """Keep a response; one that is larger than all the room there is is not kept."""
        if stored.size > self._max_bytes:
            return
        self._shares.setdefault(owner, _Share()).put(response_id, stored)
        self._shares.move_to_end(owner)
        number, size = len(self), self.bytes
        while number > self._max_responses or size > self._max_bytes:
            too_many = number > self._max_responses
            most = max(self._shares, key=lambda of: self._held(of, too_many))
            oldest = next(iter(self._shares[most].kept))
            number, size = number - 1, size - self._shares[most].kept[oldest].size
            self._drop(most, oldest)

    def get(self, owner: str, response_id: str, param: str | None = None) -> Stored:
        """A kept response. Raises NotFound, with `param` as the field that named it."""
        share = self._shares.get(owner)
        if share is None or response_id not in share.kept:
            raise missing(response_id, param, self._max_responses)
        share.kept.move_to_end(response_id)
        self._shares.move_to_end(owner)
        return share.kept[response_id]

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises NotFound."""
        if owner not in self._shares or response_id not in self._shares[owner].kept:
            raise missing(response_id, None, self._max_responses)
        self._drop(owner, response_id)

    def _held(self, owner: str, number: bool) -> int:
        share = self._shares[owner]
        return len(share.kept) if number else share.bytes

    def _drop(self, owner: str, response_id: str) -> None:
        self._shares[owner].drop(response_id)
        if not self._shares[owner].kept:
            del self._shares[owner]


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
        f"newer ones ({kept} are kept at most), or this server was restarted",
        param=param,
        code="previous_response_not_found" if param else "response_not_found",
    )
