"""The NCCL backend's control socket: one thread on which readers ask and a source answers.

A ROUTER that readers dial, a DEALER for each peer we read from, and a pair for each of them. A
thread of its own, because the backend's looks around every 2 ms, and many transfers are shorter.

Each backend makes a CURVE key pair at its start. The public half is in its metadata, which travels
over the encrypted control channel alone; without it nobody gets through the handshake.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq

from kvrelay.kv_transfer.nccl_pairs import (
    MAX_PAIR_MESSAGE_BYTES,
    Address,
    Ask,
    Leave,
    Meet,
    Pair,
    PairMessage,
    Part,
    ReaderPair,
    SourcePair,
    Terms,
    Transfer,
    decode,
    encode,
)
from kvrelay.kv_transfer.sockets import LINGER_MS, Connection, SocketThread, received
from kvrelay.wire.errors import PeerLost

__all__ = ["PairControl"]

log = logging.getLogger(__name__)

# How long we wait for the pairs' threads when we close.
JOIN_S = 0.1


@dataclass(slots=True)
class _Source:
    generation: str
    where: str
    connection: Connection
    pair: ReaderPair | None = None


class PairControl(SocketThread):
    """A thread for the control socket. Public methods return at once, except `close`."""

    def __init__(self, host: str, terms: Terms) -> None:
        """Listens from here on; zmq must have CURVE. Raises ConfigError without the address."""
        super().__init__("kv-nccl", MAX_PAIR_MESSAGE_BYTES)
        self._terms = terms
        terms.budget.wanted = partial(self.post, self._make_room)
        self.broken: Exception | None = None
        """Why the thread has ended, if it was an error of ours."""
        self._sources: dict[str, _Source] = {}
        # By the pair: the connection that it came by, and the pair.
        self._readers: dict[bytes, tuple[bytes, SourcePair]] = {}
        self._keys = zmq.curve_keypair()
        self._router, port = self.new_router(host, 0, self._keys)
        self.address = Address(host, port, self._keys[0])
        self.start()

    def dial(self, generation: str, address: Address) -> None:
        self.post(partial(self._dial, generation, address))

    def read(self, generation: str, transfer: Transfer) -> None:
        """Ask a peer to send, through a pair that is made if there is none."""
        self.post(partial(self._read, generation, transfer))

    def hang_up(self, generation: str) -> None:
        """Forget a peer, and end its pair."""
        self.post(partial(self._hang_up, generation, "nothing is read from it any more"))

    def on_error(self, error: Exception) -> None:
        self.broken = error

    def on_ready(self, ready: set[Any]) -> None:
        if self._router in ready:
            self._serve()
        for source in [s for s in self._sources.values() if s.connection.dealer in ready]:
            self._listen(source)
        for source in [s for s in self._sources.values() if s.connection.monitor in ready]:
            source.connection.end_event()
            self._hang_up(
                source.generation, f"the connection to {source.where} has ended or was refused"
            )

    def on_close(self) -> None:
        pairs = self._pairs()
        for sender, pair in self._readers.values():
            pair.abort(PeerLost("closed here"))
            self._send_to_reader(sender, Part(pair.name, "it closes"))
        for generation in list(self._sources):
            self._hang_up(generation, "it closes")
        for ended in pairs:
            ended.join(JOIN_S / len(pairs))
        self._router.close(linger=LINGER_MS)

    # As the source.

    def _serve(self) -> None:
        # Whatever a reader says, this thread goes on.
        for sender, *frames in received(self._router):
            try:
                (frame,) = frames
                self._answer(sender, decode(frame))
            except (msgspec.DecodeError, ValueError) as error:
                log.warning("a reader of the NCCL backend is not understood: %s", error)

    def _answer(self, sender: bytes, message: PairMessage) -> None:
        if isinstance(message, Meet):
            self._meet(sender, message)
            return
        known, pair = self._readers.get(message.pair, (b"", None))
        if pair is None or known != sender:  # has ended meanwhile; or is somebody else's
            return
        if isinstance(message, Part):
            pair.abort(PeerLost(f"the reader has ended the pair: {message.reason}"))
            return
        try:
            if isinstance(message, Ask):
                pair.serve(message)
        except ValueError as error:
            # A transfer that is not sent would shift all that follow: the pair ends.
            pair.abort(PeerLost(f"refused: {error}"))

    def _meet(self, sender: bytes, meet: Meet) -> None:
        limit = self._terms.slice_bytes
        if not 0 < meet.slice_bytes <= limit or meet.pair in self._readers:
            reason = (
                f"refused: slices of {meet.slice_bytes} bytes are over the limit of {limit}, "
                f"or the pair exists"
            )
            self._send_to_reader(sender, Part(meet.pair, reason))
            return
        pair = SourcePair(
            meet, self._terms, partial(self._post_to_reader, sender), self._post_ended
        )
        self._readers[meet.pair] = sender, pair
        pair.start()

    # As the reader.

    def _dial(self, generation: str, address: Address) -> None:
        connection = Connection(self, self._keys, address.key)
        where = f"{address.host}:{address.port}"
        self._sources[generation] = _Source(generation, where, connection)
        try:
            connection.connect(address.host, address.port)
        except zmq.ZMQError as error:
            self._hang_up(generation, f"{where}: {error}")

    def _read(self, generation: str, transfer: Transfer) -> None:
        source = self._sources.get(generation)
        if source is None:
            transfer.error = PeerLost(
                "the connection to the source's NCCL backend has ended or was refused"
            )
            return
        if source.pair is None or not source.pair.read(transfer):
            say = partial(self._post_to_source, generation)
            source.pair = ReaderPair(os.urandom(16), self._terms, say, self._post_ended)
            source.pair.read(transfer)
            source.pair.start()

    def _listen(self, source: _Source) -> None:
        for frames in received(source.connection.dealer):
            try:
                (frame,) = frames
                message = decode(frame)
            except (msgspec.DecodeError, ValueError) as error:
                log.warning("the NCCL backend of %s is not understood: %s", source.where, error)
                continue
            pair = source.pair
            if pair is None or message.pair != pair.name:  # of a pair that has ended
                continue
            if isinstance(message, Part):
                self._parted(source, pair, message)
            elif isinstance(message, Leave):
                pair.part()

    def _parted(self, source: _Source, pair: ReaderPair, message: Part) -> None:
        why = PeerLost(f"{source.where} has ended the pair: {message.reason}")
        if not message.idle:
            pair.abort(why)
            return
        # It closes what has long been idle: only who slept, or asks at that very moment, has asked
        # for anything.
        for transfer in pair.unheard(why):
            self._read(source.generation, transfer)

    def _hang_up(self, generation: str, reason: str) -> None:
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
            pair.part()

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
        # Full means that the reader has not read for long: patience ends what waits for it.
        with contextlib.suppress(zmq.Again):
            self._router.send_multipart([sender, encode(message)], zmq.NOBLOCK)

    # From the pairs' threads, too.

    def _post_to_source(self, generation: str, message: PairMessage) -> None:
        self.post(partial(self._send_to_source, generation, message))

    def _post_to_reader(self, sender: bytes, message: PairMessage) -> None:
        self.post(partial(self._send_to_reader, sender, message))

    def _post_ended(self, pair: Pair) -> None:
        self.post(partial(self._forget, pair))
