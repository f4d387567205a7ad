"""The control channel: one thread with a ROUTER that peers dial, and a DEALER per peer we dial.

Sends never wait. With a cluster secret connections are authenticated and encrypted (ZMQ CURVE);
without one the configuration allows loopback addresses only.
"""

from __future__ import annotations

import hashlib
import math
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

from kvrelay.kv_transfer.connector import PeerKey
from kvrelay.kv_transfer.messages import MAX_MESSAGE_BYTES, Message, Refused, codec, encode
from kvrelay.kv_transfer.sockets import NO_HANDSHAKE, Connection, SocketThread, require_curve
from kvrelay.wire.versions import HANDOVER

if TYPE_CHECKING:
    from kvrelay.kv_transfer.transfer_engine import TransferEngine

__all__ = ["ENDED", "ENDED_EARLY", "ControlThread"]

# A live host says at once that nobody listens.
PROBE_S = 0.3
ENDED = "has ended or was refused"
ENDED_EARLY = (
    "ended during the handshake: it was cut, or the node there has another cluster_secret; if it "
    "happens again, set the same KVRELAY_CLUSTER_SECRET on all nodes"
)


class ControlThread(SocketThread):
    """A thread that hands messages to the engine. All but `close` return at once."""

    def __init__(self, engine: TransferEngine, host: str, port: int, secret: str) -> None:
        """Listen, to peers with the same secret. Raises ConfigError without address or CURVE."""
        super().__init__("kv-control", MAX_MESSAGE_BYTES)
        self._engine = engine
        self._keys = _keys(secret) if secret else None
        self._connections: dict[PeerKey, Connection] = {}
        self.address = (host, self.new_router(host, port, self._keys))

    def dial(self, peer: PeerKey, handshake: Message) -> None:
        self.post(partial(self._dial, peer, encode(handshake)))

    def send(self, peer: PeerKey, message: Message) -> None:
        """Send to a dialled peer; lost if it is gone or does not read."""
        self.post(partial(self._send, peer, encode(message)))

    def send_to_reader(self, reader: bytes, message: Message) -> None:
        """Send to a peer that dialled us; lost if it is gone or does not read."""
        self.post(partial(self.reply, reader, encode(message)))

    def hang_up(self, peer: PeerKey) -> None:
        self.post(partial(self._hang_up, peer))

    def probe(self, peer: PeerKey) -> None:
        """Find out whether a peer's process is gone; `on_process_gone` follows if nobody listens."""
        # Zmq does not tell a refused connection from one that could not be made.
        threading.Thread(target=self._probe, args=(peer,), name="kv-probe", daemon=True).start()

    def wait_ms(self) -> int:
        return max(0, math.ceil(self._engine.tick(time.monotonic()) * 1000))

    def on_ready(self, ready: set[Any]) -> None:
        if self.router in ready:
            self._serve()
        for peer, connection in list(self._connections.items()):
            if connection.dealer in ready:
                for _, message in codec.received(connection.dealer):
                    if message is not None:
                        self._engine.on_message(peer, message)
        for peer, connection in list(self._connections.items()):
            if connection.monitor in ready:
                early = connection.end_event() & NO_HANDSHAKE
                self._hang_up(peer)
                self._engine.on_disconnect(peer, ENDED_EARLY if early else ENDED)

    def on_error(self, error: Exception) -> None:
        self._engine.on_error(error)

    def on_close(self) -> None:
        self.run_jobs()
        for peer in list(self._connections):
            self._hang_up(peer)

    def _probe(self, peer: PeerKey) -> None:
        try:
            socket.create_connection((peer.host, peer.port), PROBE_S, all_errors=True).close()
        except ExceptionGroup as errors:
            if errors.split(ConnectionRefusedError)[1] is None:  # silence proves nothing
                self._engine.on_process_gone(peer)
        except OSError:  # no such name
            pass

    def _serve(self) -> None:
        refused = Refused(f"message not understood; this node speaks protocol {HANDOVER}")
        for reader, message in codec.received(self.router):
            answer = refused if message is None else self._engine.answer(reader, message)
            if answer is not None:
                try:
                    reply = encode(answer)
                except ValueError:  # it is longer than the question
                    reply = encode(refused)
                self.reply(reader, reply)  # if it is lost, the next heartbeat asks again

    def _dial(self, peer: PeerKey, handshake: bytes) -> None:
        server = None if self._keys is None else self._keys[0]
        connection = self._connections[peer] = Connection(self, self._keys, server)
        try:
            connection.connect(peer.host, peer.port)
        except zmq.ZMQError:
            self._hang_up(peer)
            self._engine.on_disconnect(peer, ENDED)
            return
        connection.send(handshake)

    def _send(self, peer: PeerKey, frame: bytes) -> None:
        if peer in self._connections:
            self._connections[peer].send(frame)

    def _hang_up(self, peer: PeerKey) -> None:
        if (connection := self._connections.pop(peer, None)) is not None:
            connection.close()


def _keys(secret: str) -> tuple[bytes, bytes]:
    require_curve("cluster_secret")
    # Any 32 bytes are a secret key.
    mine = z85.encode(
        hashlib.blake2b(secret.encode(), digest_size=32, person=b"kvrelay-curve").digest()
    )
    return zmq.curve_public(mine), mine
