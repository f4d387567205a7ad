"""The link between rank 0 of an engine, where its `TransferEngine` is, and its other ranks.

An engine of one rank has none. Connections are authenticated and encrypted (ZMQ CURVE) by a key
that rank 0 draws at its start and sends with the engine's own messages, so ranks of other hosts
need no secret.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from kvrelay.kv_transfer.backend import BackendEvent, BackendJob
from kvrelay.kv_transfer.connector import OnError, PoolRegion, Tagged
from kvrelay.kv_transfer.shares import Heads
from kvrelay.kv_transfer.sockets import Codec, SocketThread, received, require_curve
from kvrelay.wire import errors
from kvrelay.wire.errors import ConfigError, KvrelayError, TransferError

__all__ = [
    "OPEN_S",
    "BackendTerms",
    "Broke",
    "Close",
    "Do",
    "FromRank",
    "LinkAddress",
    "News",
    "Prepared",
    "RankLink",
    "Stop",
    "Sum",
    "Summed",
    "ToRank",
    "from_rank",
    "to_rank",
]

# Ranks' time to prepare or open backends: on a GPU each compiles.
OPEN_S = 300.0
# A Read names up to 100,000 blocks on either side.
MAX_RANK_MESSAGE_BYTES = 1 << 20


class BackendTerms(msgspec.Struct, frozen=True):
    """A choice of backends, the best first, and their configuration."""

    kinds: tuple[str, ...]
    host: str
    meet_s: float
    patience_s: float
    summed_heads: int = 0
    """KV heads of each rank, if checksums are given; else 0."""


class LinkAddress(msgspec.Struct, frozen=True):
    """A socket where rank 0 awaits the others, and its CURVE key."""

    host: str
    port: int
    key: bytes
    engine_id: str
    terms: BackendTerms


class Stop(Tagged, frozen=True):
    """A command to close a backend that another rank cannot have."""

    kind: str


class Do(Tagged, frozen=True):
    kind: str
    job: BackendJob


class Sum(Tagged, frozen=True):
    """A question for checksums of blocks. Summed follows."""

    number: int
    blocks: list[int]


class Close(Tagged, frozen=True):
    """A message that the engine ends."""


class Prepared(Tagged, frozen=True):
    """A rank's first message: its pool, and why it lacks some backends."""

    rank: int
    region: PoolRegion
    missing: dict[str, str]


class News(Tagged, frozen=True):
    kind: str
    event: BackendEvent


class Summed(Tagged, frozen=True):
    """An answer to Sum, in the order of its blocks."""

    number: int
    checksums: list[bytes]


class Broke(Tagged, frozen=True):
    """A thread of the rank has ended by our own error."""

    reason: str


ToRank = Stop | Do | Sum | Close
FromRank = Prepared | News | Summed | Broke


def _encoded(value: object) -> object:
    assert isinstance(value, KvrelayError)
    return type(value).__name__, value.message


def _decoded(kind: type, value: tuple[str, str]) -> KvrelayError:
    name, message = value
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, TransferError):
        return known(message)
    return TransferError(message)


to_rank: Codec[ToRank] = Codec(ToRank, MAX_RANK_MESSAGE_BYTES, _encoded, _decoded)
from_rank: Codec[FromRank] = Codec(FromRank, MAX_RANK_MESSAGE_BYTES, _encoded, _decoded)


class RankLink(SocketThread):
    """A link's end at rank 0. All but `prepared` and `close` return at once."""

    def __init__(
        self, host: str, heads: Sequence[Heads], engine_id: str, terms: BackendTerms
    ) -> None:
        """Listen at `host`. `heads`: of all ranks. Raises ConfigError."""
        require_curve("tensor_parallel_size above 1")
        # Bounded by the requests of one engine.
        super().__init__("kv-ranks", MAX_RANK_MESSAGE_BYTES, unbounded=True)
        self.heads = tuple(heads)
        self._on_message: Callable[[int, FromRank], None] = lambda _rank, _message: None
        self._on_error: OnError = lambda _error: None
        self._prepared: queue.Queue[Prepared] = queue.Queue()
        self._names: dict[bytes, int] = {}  # of connections
        self._ranks: dict[int, bytes] = {}
        keys = zmq.curve_keypair()
        port = self.new_router(host, 0, keys)
        self.address = LinkAddress(host, port, keys[0], engine_id, terms)
        self.start()

    def prepared(
        self, on_message: Callable[[int, FromRank], None], on_error: OnError
    ) -> list[Prepared]:
        """Wait for all other ranks, then hand on their messages. Raises ConfigError without one."""
        self._on_message, self._on_error = on_message, on_error
        until = time.monotonic() + OPEN_S
        found: dict[int, Prepared] = {}
        while len(found) < len(self.heads) - 1:
            try:
                one = self._prepared.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(1, len(self.heads))) - set(found))
                raise ConfigError(
                    f"ranks {missing} have not prepared their KV connectors within {OPEN_S:g} s; "
                    f"their logs may say why, and no firewall may stand before port "
                    f"{self.address.port} of {self.address.host}"
                ) from None
            found[one.rank] = one
        return [found[rank] for rank in sorted(found)]

    def send(self, rank: int, message: ToRank) -> None:
        self.post(lambda: self.reply(self._ranks[rank], to_rank.encode(message)))

    def on_ready(self, ready: set[Any]) -> None:
        if self.router in ready:
            for name, frame in received(self.router):
                self._take(name, from_rank.decode(frame))

    def on_error(self, error: Exception) -> None:
        self._on_error(error)

    def on_close(self) -> None:
        for name in self._ranks.values():
            self.reply(name, to_rank.encode(Close()))

    def _take(self, name: bytes, message: FromRank) -> None:
        if isinstance(message, Prepared):
            self._names[name], self._ranks[message.rank] = message.rank, name
            self._prepared.put(message)
        elif name in self._names:
            self._on_message(self._names[name], message)
