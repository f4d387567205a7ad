"""The NCCL backend: two-rank communicators between pairs of nodes with GPUs.

NCCL's bytes are not encrypted and go between addresses of its choice (NCCL_SOCKET_IFNAME). The
control socket is encrypted; its key is in the metadata.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq

from kvrelay.kv_transfer.backend import Source
from kvrelay.kv_transfer.connector import BlockIds, PoolRegion
from kvrelay.kv_transfer.nccl_library import NcclLibrary
from kvrelay.kv_transfer.nccl_pairs import (
    MAX_PAIR_MESSAGE_BYTES,
    Address,
    Ask,
    Meet,
    Pair,
    PairMessage,
    Part,
    ReaderPair,
    SourcePair,
    Terms,
    Transfer,
    codec,
    encode,
)
from kvrelay.kv_transfer.sockets import Connection, SocketThread, require_curve
from kvrelay.kv_transfer.staging import Budget, StagedPool
from kvrelay.wire.errors import ConfigError, PeerLost, TransferError
from kvrelay.wire.frames import MALFORMED

__all__ = ["NcclBackend"]

# 64 MiB take 190 us over NVLink, twice what the host needs per slice; larger ones are not faster,
# smaller ones leave the wire idle.
SLICE_BYTES = 64 << 20
# 7 pairs on a GPU.
MEMORY_CAP_BYTES = 2 << 30
PAIRS_END_S = 0.1


class NcclBackend:
    helps_readers = False  # its threads do

    def __init__(
        self,
        region: PoolRegion,
        host: str,
        meet_s: float,
        patience_s: float,
        slice_bytes: int = SLICE_BYTES,
        memory_cap_bytes: int = MEMORY_CAP_BYTES,
        nccl: NcclLibrary | None = None,
    ) -> None:
        """`host` is an address of this machine that peers reach.

        A pair gets `meet_s` to be made, and each slice `patience_s`; then the peer counts as
        stopped. Tests give another `nccl`.
        """
        self._region = region
        self._host = host
        self._meet_s, self._patience_s = meet_s, patience_s
        self._slice_bytes = slice_bytes
        self._nccl = nccl
        self.budget = Budget(memory_cap_bytes)

    def prepare(self) -> None:
        """Load NCCL and compile the kernels. Raises ConfigError without a GPU, NCCL or CURVE."""
        require_curve("kv_connector nccl")
        nccl = self._nccl
        if nccl is None:
            if self._region.gpu is None:
                raise ConfigError(
                    f"kv_connector nccl needs a GPU, and the KV pool is on {self._region.device}; "
                    "take nixl or direct"
                )
            nccl = NcclLibrary(self._region.gpu, self._patience_s)
        pool = StagedPool(self._region)
        pool.compile()
        self._terms = Terms(
            pool, nccl, self.budget, self._slice_bytes, self._meet_s, self._patience_s
        )

    def open(self) -> bytes:
        self._control = PairControl(self._host, self._terms)
        return msgspec.msgpack.encode(self._control.address)

    def add_peer(self, source: Source) -> None:
        """Dial a peer's control socket; the first read makes the pair."""
        try:
            address = msgspec.msgpack.decode(source.metadata, type=Address)
        except MALFORMED as error:
            raise TransferError(
                f"{source.engine_id} does not hand KV over by NCCL: set one kv_connector"
            ) from error
        self._control.post(partial(self._control.dial, source.generation, address))

    def post_read(
        self, source: Source, remote_blocks: BlockIds, local_blocks: BlockIds
    ) -> Transfer:
        part = source.part
        try:
            encode(Ask(bytes(16), list(remote_blocks), part.remote_start, part.num_bytes))
        except ValueError as error:
            raise TransferError(
                f"{len(remote_blocks)} blocks are too many to ask for at once: {error}"
            ) from error
        transfer = Transfer(remote_blocks, local_blocks, part)
        self._control.post(partial(self._control.read, source.generation, transfer))
        return transfer

    def poll(self, handle: object) -> bool:
        """Return True when all is in. Raises only PeerLost, after which nothing lands."""
        assert isinstance(handle, Transfer)
        if handle.error is not None:
            raise PeerLost(handle.error.message) from handle.error
        return handle.done

    def peer_gone(self, generation: str) -> None:
        """Do nothing: the control socket tells the same."""

    def drop_peer(self, generation: str) -> None:
        why = "nothing is read from it any more"
        self._control.post(partial(self._control.hang_up, generation, why))

    def progress(self) -> None:
        """Raise RuntimeError if the control thread has ended."""
        if self._control.broken is not None:
            raise RuntimeError(
                f"the NCCL backend's control thread has ended: {self._control.broken}"
            )

    def close(self) -> None:
        """Hang up everywhere. A hung communicator keeps its staging, never the pool.

        A pair or thread that has not ended in time goes on alone.
        """
        self._control.close()


@dataclass(slots=True)
class _Source:
    generation: str
    where: str
    connection: Connection
    pair: ReaderPair | None = None


class PairControl(SocketThread):
    def __init__(self, host: str, terms: Terms) -> None:
        """Listen. Raises ConfigError without the address."""
        super().__init__("kv-nccl", MAX_PAIR_MESSAGE_BYTES)
        self._terms = terms
        terms.budget.wanted = partial(self.post, self._make_room)
        self.broken: Exception | None = None
        """Our own error that ended the thread."""
        self._sources: dict[str, _Source] = {}
        # By pair: its connection, and the pair.
        self._readers: dict[bytes, tuple[bytes, SourcePair]] = {}
        self._keys = zmq.curve_keypair()
        self.address = Address(host, self.new_router(host, 0, self._keys), self._keys[0])
        self.start()

    def on_error(self, error: Exception) -> None:
        self.broken = error

    def on_ready(self, ready: set[Any]) -> None:
        if self.router in ready:
            for sender, message in codec.received(self.router):
                if message is not None:
                    self._answer(sender, message)
        for source in [s for s in self._sources.values() if s.connection.dealer in ready]:
            self._listen(source)
        for source in [s for s in self._sources.values() if s.connection.monitor in ready]:
            source.connection.end_event()
            self.hang_up(
                source.generation, f"the connection to {source.where} has ended or was refused"
            )

    def on_close(self) -> None:
        pairs = self._pairs()
        for sender, pair in self._readers.values():
            pair.abort(PeerLost("closed here"))
            self._send_to_reader(sender, Part(pair.name, "it closes"))
        for generation in list(self._sources):
            self.hang_up(generation, "it closes")
        for ended in pairs:
            ended.thread.join(PAIRS_END_S / len(pairs))

    # As the source.

    def _answer(self, sender: bytes, message: PairMessage) -> None:
        if isinstance(message, Meet):
            self._meet(sender, message)
            return
        known, pair = self._readers.get(message.pair, (b"", None))
        if pair is None or known != sender:  # ended meanwhile, or somebody else's
            return
        if isinstance(message, Part):
            pair.abort(PeerLost(f"the reader has ended the pair: {message.reason}"))
            return
        try:
            if isinstance(message, Ask):
                pair.serve(message)
        except ValueError as error:
            # A skipped transfer would shift all that follow: the pair ends.
            pair.abort(PeerLost(f"refused: {error}"))

    def _meet(self, sender: bytes, meet: Meet) -> None:
        limit = max(self._terms.slice_bytes, self._terms.pool.block_bytes)
        if not 0 < meet.slice_bytes <= limit or meet.pair in self._readers:
            reason = (
                f"refused: slices of {meet.slice_bytes} bytes are over the limit of {limit}, "
                f"or the pair exists"
            )
            self._send_to_reader(sender, Part(meet.pair, reason))
            return
        say = self._posting(partial(self._send_to_reader, sender))
        pair = SourcePair(meet, self._terms, say, self._posting(self._forget))
        self._readers[meet.pair] = sender, pair
        pair.thread.start()

    # As the reader.

    def dial(self, generation: str, address: Address) -> None:
        where = f"{address.host}:{address.port}"
        try:
            connection = Connection(self, self._keys, address.key)
        except zmq.ZMQError:  # this is no key; a read finds no source
            return
        self._sources[generation] = _Source(generation, where, connection)
        try:
            connection.connect(address.host, address.port)
        except zmq.ZMQError as error:
            self.hang_up(generation, f"{where}: {error}")

    def read(self, generation: str, transfer: Transfer) -> None:
        """Ask a peer to send, through a pair made on demand."""
        source = self._sources.get(generation)
        if source is None:
            transfer.error = PeerLost(
                "the connection to the source's NCCL backend has ended or was refused"
            )
            return
        if source.pair is None or not source.pair.read(transfer):
            say = self._posting(partial(self._send_to_source, generation))
            ended = self._posting(self._forget)
            slice_bytes = max(self._terms.slice_bytes, transfer.part.num_bytes)
            source.pair = ReaderPair(os.urandom(16), slice_bytes, self._terms, say, ended)
            source.pair.read(transfer)
            source.pair.thread.start()

    def _listen(self, source: _Source) -> None:
        for _, message in codec.received(source.connection.dealer):
            pair = source.pair  # the pair may have ended
            if isinstance(message, Part) and pair is not None and message.pair == pair.name:
                self._parted(source, pair, message)

    def _parted(self, source: _Source, pair: ReaderPair, message: Part) -> None:
        why = PeerLost(f"{source.where} has ended the pair: {message.reason}")
        if not message.idle:
            pair.abort(why)
            return
        # Asked for when the source closed an idle pair: asked for again.
        for transfer in pair.end(why):
            self.read(source.generation, transfer)

    def hang_up(self, generation: str, reason: str) -> None:
        source = self._sources.pop(generation, None)
        if source is None:
            return
        if source.pair is not None:
            source.pair.abort(PeerLost(reason))
            source.connection.send(encode(Part(source.pair.name, reason)))
        source.connection.close()

    # Both.

    def _make_room(self) -> None:
        idle = [
            (since, pair)
            for pair in self._pairs()
            if (since := pair.idle_since) is not None and pair.over is None
        ]
        for _, pair in sorted(idle, key=lambda at: at[0])[: self._terms.budget.waiting]:
            pair.make_room()

    def _pairs(self) -> list[Pair]:
        reading = [source.pair for source in self._sources.values() if source.pair is not None]
        return [*(pair for _, pair in self._readers.values()), *reading]

    def _forget(self, pair: Pair) -> None:
        self._readers.pop(pair.name, None)
        for source in self._sources.values():
            if source.pair is pair:
                source.pair = None

    def _send_to_source(self, generation: str, message: PairMessage) -> None:
        if (source := self._sources.get(generation)) is not None:
            source.connection.send(encode(message))

    def _send_to_reader(self, sender: bytes, message: PairMessage) -> None:
        self.reply(sender, encode(message))  # patience ends what waits for a lost one

    def _posting(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        # For the pairs' threads.
        return lambda value: self.post(partial(call, value))
