"""What a router's parent process and its workers say to each other: a length, then msgpack. Pure
but for the reading.

There are two kinds of messages, and none is an answer. The parent sends a snapshot of all that its
workers must know, whenever that is not what they have; a worker reports what it sees. Both ends are
of one installation, so there are no versions of the format. Lengths are limited, types are checked;
nothing is pickled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvrelay.router.membership.warm_up import WarmPairs
from kvrelay.router.nodes.members import NodeSpec, Source
from kvrelay.router.nodes.node import NodeEvent
from kvrelay.router.request.poison import Suspect
from kvrelay.router.state import WorkerStatus
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.frames import MALFORMED
from kvrelay.wire.router_config import RouterConfig

__all__ = ["MAX_BYTES", "Family", "LinkBroken", "Report", "Snapshot", "framed", "received"]

MAX_BYTES = 64 << 20
_LENGTH_BYTES = 4
_Message = TypeVar("_Message", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder().encode


class LinkBroken(KvrelayError):
    """An end of a connection between the processes of a router that says what no other end would."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric of a registry: its name, help and type, and each sample's name, labels and value."""

    name: str
    about: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """All that a worker must know. What is applied twice is as once, and a newer one makes an older
    one useless.
    """

    version: int
    listening: int
    """Workers that take connections."""
    config: RouterConfig
    """Of one worker; its port is that of all."""
    names: dict[Source, list[NodeSpec]]
    """By source, the nodes that it names."""
    drained: dict[str, str]
    """By the address of a node that an operator wants to take no legs, which process was meant."""
    addresses: dict[str, str]
    """By the address of a vLLM node, that of its P2pNcclConnector."""
    news: Sequence[NodeEvent]
    """The last things that happened to nodes; a worker that begins asks them itself."""
    warm_pairs: WarmPairs
    poison: dict[bytes, Suspect]
    """By fingerprint."""
    heard: dict[int, int]
    """By worker, how many of its deaths are in `poison`."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a worker sees."""

    version: int
    """Of the snapshot that it has applied."""
    legs: dict[str, int]
    """By address of a node."""
    death: tuple[bytes, str] | None = None
    """A request's fingerprint, and which process has just died of it; empty: it was answered."""
    seen: WorkerStatus | None = None
    """For the console, once in a while, and so are the metrics."""
    families: list[Family] = []


def framed(message: Snapshot | Report) -> bytes:
    """Return a message as it is sent. Raises LinkBroken if it is too long."""
    body = _encode(message)
    if len(body) > MAX_BYTES:
        raise LinkBroken(f"a message of {len(body)} bytes is longer than {MAX_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def received(reader: asyncio.StreamReader, kind: type[_Message]) -> _Message:
    """Wait for the next message. Raises LinkBroken for what is none, and once the other end is
    gone.
    """
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > MAX_BYTES:
            raise LinkBroken(f"a message of {length} bytes is longer than {MAX_BYTES}")
        return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
    except (OSError, EOFError) as why:
        raise LinkBroken("the other end is gone") from why
    except MALFORMED as why:
        raise LinkBroken(f"what came is no message: {why}") from why
