"""What the pure tables want done: values that name a peer, a lease or blocks, and do nothing.

Owns the words that fetches, planes, ranks and the desk have in common; no state, no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.kv_transfer.leases import LeaseId

__all__ = ["Ask", "Command", "End", "PeerCommand", "PeerKey", "Prove", "Read", "Sum"]


class PeerKey(NamedTuple):
    """One process that we read from. A restarted one has a new generation, so it is another peer."""

    host: str
    port: int
    generation: str


@dataclass(frozen=True, slots=True)
class Read:
    """Command: read remote block i into local block i, and tell `read_ended`."""

    read_id: int
    peer: PeerKey
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Command: tell the peer that we are through with this lease; its answer goes to `confirmed`
    with this token.
    """

    peer: PeerKey
    lease: LeaseId
    token: int
    """A number of the fetch that waits for the answer; 0 if nobody does."""


@dataclass(frozen=True, slots=True)
class Prove:
    """Command: renew this lease now, not with the next heartbeat; its answer proves what has been
    read.
    """

    peer: PeerKey
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Ask:
    """Command: have the peer send the checksums of these blocks of a lease, by its own ids; they go
    to `vouched`.
    """

    peer: PeerKey
    lease: LeaseId
    remote_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """Command: compute the checksums of these blocks of ours; they go to `summed` with this number."""

    number: int
    local_blocks: tuple[int, ...]


PeerCommand = Read | End | Prove | Ask
Command = PeerCommand | Sum
