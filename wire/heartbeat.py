"""Heartbeats: what nodes tell routers of themselves, in a datagram signed with HMAC-SHA256.

An old message cannot be played again: each is newer than its node's last one, and within MAX_SKEW_S
of now.
"""

from __future__ import annotations

import enum
import hashlib
import hmac

import msgspec

from kvrelay.wire.config import Role
from kvrelay.wire.errors import RequestError, Unauthorized
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.outputs import Load

__all__ = [
    "HEARTBEAT_S",
    "LOST_AFTER_S",
    "MAX_BYTES",
    "MAX_SKEW_S",
    "Heartbeat",
    "NodeState",
    "opened",
    "sealed",
]

HEARTBEAT_S = 3.0
# Three missed, and half of one for the way.
LOST_AFTER_S = 3.5 * HEARTBEAT_S
# A beat has some 300; a datagram could have 65,507.
MAX_BYTES = 4096
MAX_SKEW_S = 60.0

_MAC_BYTES = 32
_CONTEXT = b"kvrelay heartbeat 1\0"


class NodeState(enum.StrEnum):
    OK = "ok"
    DRAINING = "draining"
    LEAVING = "leaving"


class Heartbeat(msgspec.Struct, frozen=True):
    """An announcement, with the Unix second by the node's clock."""

    url: str
    role: Role
    model: str
    generation: str
    load: Load
    """For routers of the release before, as `state` but for LEAVING."""
    sent_at: float
    state: NodeState = NodeState.OK


def sealed(beat: Heartbeat, key: str) -> bytes:
    """Return the signed message."""
    told = msgspec.msgpack.encode(beat)
    return _mac(told, key) + told


def opened(message: bytes, key: str, unix_now: float) -> Heartbeat:
    """Return what was sealed. Raises Unauthorized, RequestError."""
    if not _MAC_BYTES < len(message) <= MAX_BYTES:
        raise RequestError(f"a heartbeat has up to {MAX_BYTES} bytes, got {len(message)}")
    told = message[_MAC_BYTES:]
    if not hmac.compare_digest(message[:_MAC_BYTES], _mac(told, key)):
        raise Unauthorized(
            "a heartbeat was signed with another key; give the router and its nodes the same one"
        )
    try:
        beat = msgspec.msgpack.decode(told, type=Heartbeat)
    except MALFORMED as why:
        raise RequestError(f"a heartbeat is malformed: {why}") from why
    if not abs(beat.sent_at - unix_now) <= MAX_SKEW_S:
        raise RequestError(
            f"a heartbeat of {beat.url[:100]} is {unix_now - beat.sent_at:.0f} s old, and "
            f"{MAX_SKEW_S:g} s are taken; "
            "set the clocks of both machines"
        )
    return beat


def _mac(told: bytes, key: str) -> bytes:
    return hmac.digest(key.encode(), _CONTEXT + told, hashlib.sha256)
