"""The two messages between a router's parent process and its workers: a length, then msgpack.

The parent sends its whole state with every change; a worker reports what it sees. Both ends are of
one installation, so the format has no versions.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from kvrelay.router.nodes.node import NodeSpec, Source
from kvrelay.router.request.failures import Suspect
from kvrelay.router.state import WorkerStatus
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.router_config import RouterConfig

__all__ = [
    "MAX_BYTES",
    "ClusterState",
    "LinkBroken",
    "MetricFamily",
    "WorkerReport",
    "encode_message",
    "read_message",
]

MAX_BYTES = 64 << 20
_LENGTH_BYTES = 4
_Message = TypeVar("_Message", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder().encode


class LinkBroken(KvrelayError):
    """A connection between the router's processes that is gone or carries no message."""


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    name: str
    about: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class ClusterState(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of all that a worker must know."""

    version: int
    listening: int
    config: RouterConfig
    """The configuration of one worker, with the port of all."""
    members: dict[Source, list[NodeSpec]]
    nodes: dict[str, tuple[str | None, list[str], int]]
    """By address: drained generation, adapters, cache resets."""
    poison: dict[bytes, Suspect]
    deaths: dict[int, int]
    """How many of each worker's deaths are in `poison`, by its index."""


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    version: int
    death: tuple[bytes, str] | None = None
    """A request's fingerprint, and the process that just died of it; empty: it was answered."""
    status: WorkerStatus | None = None
    metrics: list[MetricFamily] = []


def encode_message(message: ClusterState | WorkerReport) -> bytes:
    """Return a message as it is sent. Raises LinkBroken if it is too long."""
    body = _encode(message)
    if len(body) > MAX_BYTES:
        raise LinkBroken(f"a message of {len(body)} bytes is longer than {MAX_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_message(reader: asyncio.StreamReader, kind: type[_Message]) -> _Message:
    """Wait for the next message. Raises LinkBroken for anything else, and at the end."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > MAX_BYTES:
            raise LinkBroken(f"a message of {length} bytes is longer than {MAX_BYTES}")
        return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
    except (OSError, EOFError) as why:
        raise LinkBroken("the other end is gone") from why
    except MALFORMED as why:
        raise LinkBroken(f"what came is no message: {why}") from why
