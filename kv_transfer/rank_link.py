"""The sockets between rank 0 of an engine, where the desk is, and the processes of its other ranks.

Carries messages; what they mean is for the two ends (`kv_transfer/rank_planes.py`,
`kv_transfer/led_planes.py`). One thread at each end, so that neither the step loop nor its messages
are in the way of a transfer. An engine of one rank has no link.

Every connection is authenticated and encrypted (ZMQ CURVE) by a key that rank 0 draws at its start.
It goes to the ranks with the engine's own messages, which are theirs alone: so ranks of other hosts
need no secret to be configured.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrelay.kv_transfer.poke import Poke
from kvrelay.kv_transfer.rank_messages import (
    MAX_RANK_MESSAGE_BYTES,
    Close,
    FromRank,
    Meeting,
    PlaneTerms,
    Prepared,
    Serve,
    ToRank,
)
from kvrelay.kv_transfer.shares import Heads
from kvrelay.kv_transfer.zmq_address import listen, tcp
from kvrelay.wire.errors import ConfigError, PeerLost

__all__ = ["OPEN_S", "LinkEnd", "RankLink"]

log = logging.getLogger(__name__)

# How long the ranks may take to prepare their planes, and to open one: on a GPU each compiles a
# kernel.
OPEN_S = 300.0
# How often rank 0 looks whether peers still read from here, after somebody began to.
SERVING_MS = 1000
LINGER_MS = 100
# What a CURVE message has beyond its content: counted by zmq's size limit.
CURVE_OVERHEAD_BYTES = 33
GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
GONE |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

_encoder = msgspec.msgpack.Encoder()


class RankLink:
    """Rank 0's end. Public methods may be called from any thread; all but `prepared` and `close`
    return at once.
    """

    def __init__(
        self, host: str, heads: Sequence[Heads], engine_id: str, terms: PlaneTerms
    ) -> None:
        """Listens at `host` from here on. `heads`: of all ranks. Raises ConfigError."""
        if not zmq.has("curve"):
            raise ConfigError(
                "tensor-parallel nodes need a libzmq with CURVE; take pyzmq from a wheel"
            )
        self.heads = tuple(heads)
        self._hear: Callable[[int, FromRank], None] = lambda _rank, _message: None
        self._serving: Callable[[], bool] = lambda: False
        self._broke: Callable[[Exception], None] = lambda _error: None
        self._told_serving = False
        self._closing = False
        self._todo: collections.deque[tuple[int, ToRank]] = collections.deque()
        self._prepared: queue.Queue[Prepared] = queue.Queue()
        self._names: dict[bytes, int] = {}  # of connections
        self._ranks: dict[int, bytes] = {}
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        public, secret = zmq.curve_keypair()
        self._router = _socket(self._context, zmq.ROUTER, public, secret)
        self._router.curve_server = True
        try:
            port = listen(self._router, host)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.meeting = Meeting(host, port, public, engine_id, terms)
        self._poller = zmq.Poller()
        self._poke = Poke(self._poller)
        self._poller.register(self._router, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-ranks", daemon=True)
        self._thread.start()

    def serve(
        self,
        hear: Callable[[int, FromRank], None],
        serving: Callable[[], bool],
        broke: Callable[[Exception], None],
    ) -> None:
        """From here on: what ranks say goes to `hear`; they help readers while `serving`; `broke`
        if this ends.
        """
        self._hear, self._serving, self._broke = hear, serving, broke

    def prepared(self) -> list[Prepared]:
        """Wait for all other ranks; in their order. Raises ConfigError if one does not come."""
        until = time.monotonic() + OPEN_S
        found: dict[int, Prepared] = {}
        while len(found) < len(self.heads) - 1:
            try:
                one = self._prepared.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(1, len(self.heads))) - set(found))
                raise ConfigError(
                    f"ranks {missing} have not prepared their KV connectors within {OPEN_S:g} s; "
                    f"their logs may say "
                    f"why, and no firewall may stand before port {self.meeting.port} of "
                    f"{self.meeting.host}"
                ) from None
            found[one.rank] = one
        return [found[rank] for rank in sorted(found)]

    def tell(self, rank: int, message: ToRank) -> None:
        """Send to a rank."""
        self._todo.append((rank, message))
        self._poke()

    def nudge(self) -> None:
        """Peers may be about to read from here."""
        if not self._told_serving:
            self._poke()

    def close(self, timeout_s: float) -> None:
        """Tell all ranks to close their planes, and end the thread."""
        self._closing = True
        self._poke()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            # The edge of this thread: the step loop must hear of it.
            log.exception("the link to the other ranks ended")
            self._broke(error)
        finally:
            for name in self._ranks.values():
                self._send(name, Close())
            self._router.close(linger=LINGER_MS)
            self._context.term()
            self._poke.close()

    def _turn(self) -> None:
        serving = self._serving()
        if serving != self._told_serving:
            self._told_serving = serving
            for name in self._ranks.values():
                self._send(name, Serve(serving))
        while self._todo:
            rank, message = self._todo.popleft()
            self._send(self._ranks[rank], message)
        ready = {
            source for source, _ in self._poller.poll(SERVING_MS if self._told_serving else None)
        }
        self._poke.take()
        while self._router in ready:
            try:
                name, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(name, self._decoder.decode(frame))

    def _take(self, name: bytes, message: FromRank) -> None:
        if isinstance(message, Prepared):
            if message.rank not in range(1, len(self.heads)) or message.rank in self._ranks:
                raise PeerLost(
                    f"rank {message.rank} of {len(self.heads)} came twice, or from elsewhere"
                )
            self._names[name], self._ranks[message.rank] = message.rank, name
            self._prepared.put(message)
        elif name in self._names:
            self._hear(self._names[name], message)

    def _send(self, name: bytes, message: ToRank) -> None:
        with contextlib.suppress(
            zmq.Again
        ):  # a rank that does not take what it is told has hung: so has the engine
            self._router.send_multipart([name, _encoder.encode(message)], zmq.NOBLOCK)


class LinkEnd:
    """Another rank's end. `say` and `close` may be called from any thread and return at once."""

    def __init__(
        self, meeting: Meeting, hear: Callable[[ToRank], None], lost: Callable[[str], None]
    ) -> None:
        """Dials. `hear` and `lost` are called from its thread; `lost` once, unless the engine ends
        in order.
        """
        self._hear, self._lost = hear, lost
        self._todo: collections.deque[FromRank] = collections.deque()
        self._over = False
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = _socket(self._context, zmq.DEALER, *zmq.curve_keypair())
        self._dealer.curve_serverkey = meeting.key
        # Messages would be lost between two connections, and nobody would know.
        self._dealer.reconnect_ivl = -1
        self._monitor = self._dealer.get_monitor_socket(GONE)
        self._poller = zmq.Poller()
        self._poke = Poke(self._poller)
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._dealer.connect(tcp(meeting.host, meeting.port))
        self._thread = threading.Thread(target=self._run, name="kv-rank", daemon=True)
        self._thread.start()

    def say(self, message: FromRank) -> None:
        """Send to rank 0."""
        self._todo.append(message)
        self._poke()

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        self._over = True
        self._poke()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._over:
                self._turn()
        except Exception as error:
            # The edge of this thread: the process must hear of it.
            log.exception("the link to rank 0 ended")
            self._lost(f"{type(error).__name__}: {error}")
        finally:
            self._dealer.disable_monitor()
            self._monitor.close(linger=0)
            self._dealer.close(linger=LINGER_MS)
            self._context.term()
            self._poke.close()

    def _turn(self) -> None:
        while self._todo:
            self._dealer.send(_encoder.encode(self._todo.popleft()), zmq.NOBLOCK)
        ready = {source for source, _ in self._poller.poll()}
        self._poke.take()
        while self._dealer in ready:
            try:
                message = self._decoder.decode(self._dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            self._hear(message)
            if isinstance(message, Close):
                self._over = True
        if self._monitor in ready and not self._over:
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            raise PeerLost("the connection to rank 0 has ended or was refused")


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, public: bytes, secret: bytes
) -> zmq.Socket[bytes]:
    sock = context.socket(kind)
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_RANK_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES)
    # Nothing is ever dropped for being too much: what is told is bounded by the requests of one
    # engine.
    sock.set_hwm(0)
    sock.curve_publickey, sock.curve_secretkey = public, secret
    return sock
