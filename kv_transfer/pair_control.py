"""The NCCL plane's control socket: one thread on which readers ask and a source answers.

Owns the sockets and the pairs, one for each reader and source, and which of them ends when memory
is short. A ROUTER that readers dial, a DEALER for each peer we read from. A thread of its own,
because a source must answer when it is asked: its data plane's thread looks around every 2 ms, and
many transfers are shorter than that.

Who may ask: each plane makes a CURVE key pair at its start. The public half is in the metadata,
which travels over the desk's channel to peers that were welcomed, and nowhere else; without it
nobody gets through the handshake.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrelay.kv_transfer.pair_ends import ReaderPair, SourcePair
from kvrelay.kv_transfer.pair_messages import (
    MAX_PAIR_MESSAGE_BYTES,
    Address,
    Ask,
    Leave,
    Meet,
    PairMessage,
    Part,
    decode,
    encode,
)
from kvrelay.kv_transfer.pairs import Pair, Terms, Transfer
from kvrelay.kv_transfer.poke import Poke
from kvrelay.kv_transfer.zmq_address import listen, tcp
from kvrelay.wire.errors import ConfigError, PeerLost

__all__ = ["PairControl"]

log = logging.getLogger(__name__)

# Messages taken from one socket before the others get their turn.
BURST = 256
# How long farewells may take when we close, and how long we wait for the pairs' threads.
LINGER_MS, JOIN_S = 100, 0.1
# What a CURVE message has beyond its content: counted by zmq's size limit.
CURVE_OVERHEAD_BYTES = 33
GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
GONE |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(slots=True)
class _Source:
    """A peer that we read from."""

    generation: str
    where: str
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    pair: ReaderPair | None = None


class PairControl:
    """See the module. Public methods may be called from any thread and return at once, except
    `close`.
    """

    def __init__(self, host: str, terms: Terms) -> None:
        """Listens from here on; zmq must have CURVE. Raises ConfigError if the address cannot be
        had.
        """
        self._terms = terms
        terms.budget.wanted = partial(self._post, self._make_room)
        self.broken: Exception | None = None
        """Why the thread has ended, if it was an error of ours."""
        self._closing = False
        self._todo: collections.deque[Callable[[], None]] = collections.deque()
        self._sources: dict[str, _Source] = {}
        self._readers: dict[
            bytes, tuple[bytes, SourcePair]
        ] = {}  # pair -> the connection that it came by, and the pair
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = zmq.curve_keypair()
        self._router = self._socket(zmq.ROUTER)
        self._router.curve_server = True
        try:
            port = listen(self._router, host)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.address = Address(host, port, self._keys[0])
        self._poller = zmq.Poller()
        self._poke = Poke(self._poller)
        self._poller.register(self._router, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-nccl", daemon=True)
        self._thread.start()

    def dial(self, generation: str, address: Address) -> None:
        """Connect to a peer's plane."""
        self._post(partial(self._dial, generation, address))

    def read(self, generation: str, transfer: Transfer) -> None:
        """Ask a peer that was dialled, through a pair that is made if there is none."""
        self._post(partial(self._read, generation, transfer))

    def hang_up(self, generation: str) -> None:
        """Forget a peer, and end its pair."""
        self._post(partial(self._hang_up, generation, "nothing is read from it any more"))

    def close(self) -> None:
        """End the thread, its sockets and all pairs: from the return of this call on no pair
        touches the pool.
        """
        self._closing = True
        self._poke()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            # The edge of this thread: the plane's thread, which tells the step loop, looks at
            # `broken`.
            log.exception("control socket of the NCCL plane ended")
            self.broken = error
        finally:
            self._end()

    def _turn(self) -> None:
        ready = {source for source, _ in self._poller.poll()}
        self._poke.take()
        if self._router in ready:
            self._serve()
        for source in [s for s in self._sources.values() if s.dealer in ready]:
            self._listen(source)
        # After the messages: a peer's last words count even if the connection ended right behind
        # them.
        for source in [s for s in self._sources.values() if s.monitor in ready]:
            recv_monitor_message(source.monitor, zmq.NOBLOCK)
            self._hang_up(
                source.generation, f"the connection to {source.where} has ended or was refused"
            )
        while self._todo:
            self._todo.popleft()()

    # As the source.

    def _serve(self) -> None:
        """Hear readers. Whatever one of them says, this thread goes on."""
        for _ in range(BURST):
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                (frame,) = frames
                self._answer(sender, decode(frame))
            except (msgspec.DecodeError, ValueError) as error:
                log.warning("a reader of the NCCL plane is not understood: %s", error)

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
            self._tell_reader(sender, Part(meet.pair, reason))
            return
        pair = SourcePair(
            meet, self._terms, partial(self._post_to_reader, sender), self._post_ended
        )
        self._readers[meet.pair] = sender, pair
        pair.start()

    # As the reader.

    def _dial(self, generation: str, address: Address) -> None:
        dealer = self._socket(zmq.DEALER)
        dealer.curve_serverkey = address.key
        # No reconnecting under our feet: behind the same address there may be another process.
        dealer.reconnect_ivl = -1
        source = _Source(
            generation, f"{address.host}:{address.port}", dealer, dealer.get_monitor_socket(GONE)
        )
        self._sources[generation] = source
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(source.monitor, zmq.POLLIN)
        try:
            dealer.connect(tcp(address.host, address.port))
        except zmq.ZMQError as error:
            self._hang_up(generation, f"{source.where}: {error}")

    def _read(self, generation: str, transfer: Transfer) -> None:
        source = self._sources.get(generation)
        if source is None:
            transfer.error = PeerLost(
                "the connection to the source's NCCL plane has ended or was refused"
            )
            return
        if source.pair is None or not source.pair.read(transfer):
            say = partial(self._post_to_source, generation)
            source.pair = ReaderPair(os.urandom(16), self._terms, say, self._post_ended)
            source.pair.read(transfer)
            source.pair.start()

    def _listen(self, source: _Source) -> None:
        for _ in range(BURST):
            try:
                frames = source.dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                (frame,) = frames
                message = decode(frame)
                pair = source.pair
                if pair is None or message.pair != pair.name:  # of a pair that has ended
                    continue
                if isinstance(message, Part):
                    self._parted(source, pair, message)
                elif isinstance(message, Leave):
                    pair.part()
            except (msgspec.DecodeError, ValueError) as error:
                log.warning("the NCCL plane of %s is not understood: %s", source.where, error)

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
            self._say(source.dealer, [encode(Part(source.pair.name, reason))])
        self._poller.unregister(source.dealer)
        self._poller.unregister(source.monitor)
        source.dealer.disable_monitor()
        source.monitor.close(linger=0)
        source.dealer.close(linger=LINGER_MS)

    # Both.

    def _make_room(self) -> None:
        """Memory is short: of the pairs that are idle those end that have been it for longest, one
        for each who waits.

        One that becomes idle later sees for itself that somebody waits.
        """
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

    def _end(self) -> None:
        pairs = self._pairs()
        for sender, pair in self._readers.values():
            pair.abort(PeerLost("closed here"))
            self._tell_reader(sender, Part(pair.name, "it closes"))
        for generation in list(self._sources):
            self._hang_up(generation, "it closes")
        for ended in pairs:
            ended.join(JOIN_S / len(pairs))
        self._router.close(linger=LINGER_MS)
        self._context.term()
        self._poke.close()

    def _tell_source(self, generation: str, message: PairMessage) -> None:
        source = self._sources.get(generation)
        if source is not None:
            self._say(source.dealer, [encode(message)])

    def _tell_reader(self, sender: bytes, message: PairMessage) -> None:
        self._say(self._router, [sender, encode(message)])

    def _say(self, sock: zmq.Socket[bytes], frames: list[bytes]) -> None:
        # Full (1,000 messages) means that the peer has not read for long: patience ends what waits
        # for it.
        with contextlib.suppress(zmq.Again):
            sock.send_multipart(frames, zmq.NOBLOCK)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.IPV6, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_PAIR_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES)
        sock.curve_publickey, sock.curve_secretkey = self._keys
        return sock

    # From the pairs' threads, too.

    def _post_to_source(self, generation: str, message: PairMessage) -> None:
        self._post(partial(self._tell_source, generation, message))

    def _post_to_reader(self, sender: bytes, message: PairMessage) -> None:
        self._post(partial(self._tell_reader, sender, message))

    def _post_ended(self, pair: Pair) -> None:
        self._post(partial(self._forget, pair))

    def _post(self, job: Callable[[], None]) -> None:
        self._todo.append(job)
        self._poke()
