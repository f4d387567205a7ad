"""The backends of one rank, led by the transfer engine at rank 0."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import zmq
from msgspec.structs import replace

from kvrelay.kv_transfer.backend import BackendEvent, BackendThread, TransferBackend
from kvrelay.kv_transfer.checksums import Checksums
from kvrelay.kv_transfer.connector import OnError, PoolRegion
from kvrelay.kv_transfer.ranks import (
    MAX_RANK_MESSAGE_BYTES,
    BackendTerms,
    Broke,
    Close,
    Do,
    FromRank,
    LinkAddress,
    News,
    Prepared,
    Stop,
    Sum,
    Summed,
    ToRank,
    from_rank,
    to_rank,
)
from kvrelay.kv_transfer.sockets import JOIN_S, Connection, SocketThread, received
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError, PeerLost

__all__ = ["LedBackends", "RankBackends", "join_connector", "make_backends", "terms_of"]

# The fastest first: a pair chooses among those that both have.
KINDS = ("direct", "nixl", "nccl")


class RankBackends:
    """A rank's backends, each on a thread over its pool, and its checksums."""

    def __init__(
        self,
        region: PoolRegion,
        backends: Mapping[str, TransferBackend],
        summed_heads: int,
        tell: Callable[[FromRank], None],
        on_error: OnError,
    ) -> None:
        """Prepare all. `summed_heads`: this rank's KV heads if it gives checksums, else 0.

        `tell` is called from threads. Raises ConfigError if blocks cannot be summed.
        """
        self._tell = tell
        self.missing: dict[str, str] = {}
        """Backends that cannot be had, and why."""
        self._threads: dict[str, BackendThread] = {}
        for kind, backend in backends.items():
            thread = BackendThread(backend, partial(self._news, kind), on_error)
            try:
                thread.start()
            except ConfigError as error:
                self.missing[kind] = error.message
            else:
                self._threads[kind] = thread
        self._checksums = Checksums(region, summed_heads, on_error) if summed_heads else None

    def do(self, message: ToRank) -> None:
        match message:
            case Do(kind, job) if kind in self._threads:
                self._threads[kind].do(job)
            case Stop(kind) if kind in self._threads:
                self._threads.pop(kind).stop()
            case Sum(number, blocks):
                assert self._checksums is not None
                self._checksums.ask(blocks, lambda sums: self._tell(Summed(number, sums)))
            case Close():
                self.close(JOIN_S)

    def _news(self, kind: str, event: BackendEvent) -> None:
        self._tell(News(kind, event))

    def silent_s(self) -> float:
        workers = [*self._threads.values(), self._checksums]
        return max((each.silent_s() for each in workers if each is not None), default=0.0)

    def close(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        threads = list(self._threads.values())
        for thread in threads:
            thread.stop()
        for each in [*threads, self._checksums]:
            if each is not None:
                each.close(max(0.0, until - time.monotonic()))


class LedBackends(SocketThread):
    def __init__(
        self,
        rank: int,
        region: PoolRegion,
        backends: Mapping[str, TransferBackend],
        address: LinkAddress,
        lost: Callable[[str], None],
    ) -> None:
        """Prepare them and tell rank 0.

        `lost` is called once, from another thread, at an unexpected end.
        """
        super().__init__("kv-rank", MAX_RANK_MESSAGE_BYTES, unbounded=True)
        self._lost = lost
        self._backends = RankBackends(
            region,
            backends,
            address.terms.summed_heads,
            self._send,
            lambda error: self._send(Broke(f"{type(error).__name__}: {error}")),
        )
        self._connection = Connection(self, zmq.curve_keypair(), address.key)
        self._connection.connect(address.host, address.port)
        self._send(Prepared(rank, region, self._backends.missing))
        self.start()

    def close(self, timeout_s: float = JOIN_S) -> None:
        super().close(timeout_s)
        self._backends.close(JOIN_S)

    def on_ready(self, ready: set[Any]) -> None:
        if self._connection.dealer in ready:
            for (frame,) in received(self._connection.dealer):
                message = to_rank.decode(frame)
                self._backends.do(message)
                if isinstance(message, Close):
                    self._closing = True
        if self._connection.monitor in ready and not self._closing:
            self._connection.end_event()
            raise PeerLost("the connection to rank 0 has ended or was refused")

    def on_error(self, error: Exception) -> None:
        self._lost(f"{type(error).__name__}: {error}")

    def on_close(self) -> None:
        self._connection.close()

    def _send(self, message: FromRank) -> None:
        self.post(partial(self._connection.send, from_rank.encode(message)))


def join_connector(
    rank: int, region: PoolRegion, address: LinkAddress, host: str, lost: Callable[[str], None]
) -> LedBackends:
    """Prepare the backends of a rank other than 0, which rank 0 opens.

    `host`: this machine's address for peers. `lost` is called, from another thread, if rank 0 is
    lost.
    """
    terms = replace(address.terms, host=host)
    backends = make_backends(f"{address.engine_id}-{rank}", region, terms)
    return LedBackends(rank, region, backends, address, lost)


def terms_of(config: TransferConfig, rank_heads: int = 0) -> BackendTerms:
    """Return the backends' configuration; `rank_heads`: KV heads of each of several ranks."""
    kinds = KINDS if config.kv_connector == "auto" else (config.kv_connector,)
    # A pair made after its fetch's deadline is useless; who is silent for a lease has lost it.
    summed_heads = rank_heads if config.kv_checksums else 0
    return BackendTerms(
        kinds, config.kv_host, config.transfer_deadline_s, config.lease_s, summed_heads
    )


def make_backends(name: str, region: PoolRegion, terms: BackendTerms) -> dict[str, TransferBackend]:
    return {kind: _backend(kind, name, region, terms) for kind in terms.kinds}


def _backend(kind: str, name: str, region: PoolRegion, terms: BackendTerms) -> TransferBackend:
    if kind == "direct":
        from kvrelay.kv_transfer.direct import DirectBackend

        return DirectBackend(region)
    if kind == "nixl":
        from kvrelay.kv_transfer.nixl import NixlBackend

        # NIXL knows peers by name: a restarted node needs another name.
        return NixlBackend(f"{name}-{uuid.uuid4().hex}", region, terms.host)
    from kvrelay.kv_transfer.nccl import NcclBackend

    return NcclBackend(region, terms.host, terms.meet_s, terms.patience_s)
