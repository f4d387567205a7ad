"""The control channel: one thread and all its sockets. A ROUTER that peers dial, and a DEALER per
peer we read from.

Carries messages and tells when a connection is gone; what they mean is the desk's. Neither blocks
nor answers for a slow peer: sends never wait, and every deadline is kept by `ControlDesk.beat`,
which this thread calls at least as often as it asks for, whatever the step loop does.

With a cluster secret every connection is authenticated and encrypted (ZMQ CURVE); nobody without
the secret gets a word in or out. Without one, it is neither, and the configuration allows loopback
addresses only.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvrelay.kv_transfer.commands import PeerKey
from kvrelay.kv_transfer.messages import MAX_MESSAGE_BYTES, Message, Refused, decode, encode
from kvrelay.kv_transfer.poke import Poke
from kvrelay.kv_transfer.zmq_address import listen, tcp
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.versions import HANDOVER

__all__ = ["ENDED", "ENDED_EARLY", "ControlDesk", "ControlThread"]

log = logging.getLogger(__name__)

# Messages taken from one socket before the others and the clock get their turn.
BURST = 256
# How long farewells may take when we close; the whole close must end within a second.
LINGER_MS = 100
# A host that is there says at once that nobody listens.
KNOCK_S = 0.3
# What a CURVE message has beyond its content (nonce, authenticator, flags): counted by zmq's size
# limit.
CURVE_OVERHEAD_BYTES = 33
# A source that has another secret, or one where we have none, hangs up during the handshake without
# a word (measured: all of them are "no detail", as a connection that was cut is).
NO_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
NO_HANDSHAKE |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | NO_HANDSHAKE
ENDED = "has ended or was refused"
ENDED_EARLY = (
    "ended during the handshake: it was cut, or the node there has another cluster_secret; if it "
    "happens again, set "
    "the same KVRELAY_CLUSTER_SECRET on all nodes"
)


class ControlDesk(Protocol):
    """What this thread calls; all of it returns at once."""

    def answer(self, sender: bytes, message: Message) -> Message | None:
        """As the source: a peer said this; `sender` is its name for `ControlThread.tell`."""

    def hear(self, peer: PeerKey, message: Message) -> None:
        """As the reader: a peer that we dialled said this."""

    def gone(self, peer: PeerKey, how: str) -> None:
        """As the reader: the connection to this peer is over; `how` goes on where "the connection
        to it" begins.
        """

    def vanished(self, peer: PeerKey) -> None:
        """As the reader, from any thread: the process of this peer is not there any more."""

    def beat(self, now: float) -> float:
        """Do what is due. Returns the seconds until something is due again."""

    def broke(self, error: Exception) -> None:
        """This thread has ended by an error of ours."""


class ControlThread:
    """See the module. Public methods may be called from any thread and return at once, except
    `close`.
    """

    def __init__(self, desk: ControlDesk, host: str, port: int, secret: str) -> None:
        """Listens from here on, to peers with the same secret (to all of this machine if it is
        empty).

        Raises ConfigError if the address cannot be had, or zmq cannot encrypt.
        """
        self._desk = desk
        self._keys = _keys(secret) if secret else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._todo: collections.deque[Callable[[], None]] = collections.deque()
        self._dealers: dict[PeerKey, zmq.Socket[bytes]] = {}
        self._monitors: dict[PeerKey, zmq.Socket[bytes]] = {}
        self._closing = False
        self._router = self._socket(zmq.ROUTER)
        try:
            self.address = (host, listen(self._router, host, port))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._poke = Poke(self._poller)
        self._poller.register(self._router, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-control", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def dial(self, peer: PeerKey, hello: Message) -> None:
        """Connect to a peer and introduce us. `gone` follows if that fails at once."""
        self._post(partial(self._dial, peer, encode(hello)))

    def say(self, peer: PeerKey, message: Message) -> None:
        """Send to a peer that was dialled. Lost without a word if the peer is gone or does not take
        what it has.
        """
        self._post(partial(self._say, peer, encode(message)))

    def tell(self, sender: bytes, message: Message) -> None:
        """Send to a peer that has dialled us, by the name it had in `answer`. Lost without a word
        if it is gone.
        """
        self._post(partial(self._tell, sender, encode(message)))

    def hang_up(self, peer: PeerKey) -> None:
        """Forget a peer. No `gone` follows."""
        self._post(partial(self._hang_up, peer))

    def knock(self, peer: PeerKey) -> None:
        """Find out whether the process of a peer is there. `vanished` follows if its host says that
        nobody listens.

        Zmq does not tell a refused connection from one that could not be made.
        """
        threading.Thread(target=self._knock, args=(peer,), name="kv-knock", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """Send what is still to be sent, end the thread and its sockets."""
        self._closing = True
        self._poke()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        else:
            self._hang_up_all()

    def _post(self, job: Callable[[], None]) -> None:
        self._todo.append(job)
        self._poke()

    def _knock(self, peer: PeerKey) -> None:
        try:
            for family, kind, _, _, address in socket.getaddrinfo(
                *peer[:2], type=socket.SOCK_STREAM
            ):
                with socket.socket(family, kind) as door:
                    door.settimeout(KNOCK_S)
                    if door.connect_ex(address) != errno.ECONNREFUSED:
                        return  # also if there is no answer, which proves nothing
        except OSError:
            return
        self._desk.vanished(peer)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            # The edge of this thread: the step loop must hear of it.
            log.exception("control channel of %s:%d ended", *self.address)
            self._desk.broke(error)
        finally:
            self._work_off()
            self._hang_up_all()

    def _turn(self) -> None:
        self._work_off()
        wait_s = self._desk.beat(time.monotonic())
        ready = {source for source, _ in self._poller.poll(max(0, math.ceil(wait_s * 1000)))}
        self._poke.take()
        if self._router in ready:
            self._serve()
        for peer in [p for p, dealer in self._dealers.items() if dealer in ready]:
            self._listen(peer)
        # After the messages: a peer's last words count even if the connection ended right behind
        # them.
        for peer in [p for p, monitor in self._monitors.items() if monitor in ready]:
            event = recv_monitor_message(self._monitors[peer], zmq.NOBLOCK)["event"]
            self._hang_up(peer)
            self._desk.gone(peer, ENDED_EARLY if event & NO_HANDSHAKE else ENDED)

    def _work_off(self) -> None:
        while self._todo:
            self._todo.popleft()()

    def _serve(self) -> None:
        """Answer peers. Whatever a stranger sends, this thread goes on."""
        for _ in range(BURST):
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                (frame,) = frames
                answer = self._desk.answer(sender, decode(frame))
                reply = (
                    None if answer is None else encode(answer)
                )  # ValueError too: an answer may be longer than a question
            except (msgspec.DecodeError, ValueError):
                reply = encode(
                    Refused(f"message not understood; this node speaks protocol {HANDOVER}")
                )
            if reply is not None:
                # A reader that does not take its answers loses them, and then its leases; nobody
                # waits for it.
                with contextlib.suppress(zmq.Again):
                    self._router.send_multipart([sender, reply], zmq.NOBLOCK)

    def _listen(self, peer: PeerKey) -> None:
        for _ in range(BURST):
            dealer = self._dealers.get(peer)
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK) if dealer is not None else []
            except zmq.Again:
                return
            if dealer is None:
                return
            try:
                (frame,) = frames
                message = decode(frame)
            except (msgspec.DecodeError, ValueError):
                log.warning(
                    "peer %s:%d sent a message that is not understood", peer.host, peer.port
                )
                continue
            self._desk.hear(peer, message)

    def _dial(self, peer: PeerKey, hello: bytes) -> None:
        dealer = self._socket(zmq.DEALER)
        # No reconnecting under our feet: behind the same address there may be another process.
        dealer.reconnect_ivl = -1
        self._dealers[peer], self._monitors[peer] = dealer, dealer.get_monitor_socket(GONE)
        try:
            dealer.connect(tcp(peer.host, peer.port))
        except zmq.ZMQError:
            self._hang_up(peer, registered=False)
            self._desk.gone(peer, ENDED)
            return
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(self._monitors[peer], zmq.POLLIN)
        self._say(peer, hello)

    def _say(self, peer: PeerKey, frame: bytes) -> None:
        dealer = self._dealers.get(peer)
        if dealer is not None:
            # Full (1,000 messages) means that the peer has not read for long: its lease or our
            # deadline ends it.
            with contextlib.suppress(zmq.Again):
                dealer.send(frame, zmq.NOBLOCK)

    def _tell(self, sender: bytes, frame: bytes) -> None:
        # A reader that does not take it asks again with its next heartbeat; nobody waits for it.
        with contextlib.suppress(zmq.Again):
            self._router.send_multipart([sender, frame], zmq.NOBLOCK)

    def _hang_up(self, peer: PeerKey, *, registered: bool = True) -> None:
        dealer, monitor = self._dealers.pop(peer, None), self._monitors.pop(peer, None)
        if dealer is None or monitor is None:
            return
        if registered:
            self._poller.unregister(dealer)
            self._poller.unregister(monitor)
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=LINGER_MS)

    def _hang_up_all(self) -> None:
        for peer in list(self._dealers):
            self._hang_up(peer)
        self._router.close(linger=LINGER_MS)
        self._context.term()
        self._poke.close()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.IPV6, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES)
        if self._keys is not None:
            sock.curve_publickey, sock.curve_secretkey = self._keys
            if kind == zmq.ROUTER:
                sock.curve_server = True
            else:
                sock.curve_serverkey = self._keys[0]
        return sock


def _keys(secret: str) -> tuple[bytes, bytes]:
    """The cluster's CURVE key pair, (public, secret), the same on every node. Raises ConfigError
    without CURVE.

    No ZAP handler lists who may come in: a client shows with its very first message that it knows
    the server's public key, CURVE never sends that key in the clear, and here it is made of the
    secret and published nowhere. So the handshake alone proves to both ends that the other one has
    the secret.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            f"cluster_secret needs CURVE, which libzmq {zmq.zmq_version()} was built without "
            f"here; take pyzmq from a "
            "wheel: pip install --force-reinstall --only-binary pyzmq pyzmq"
        )
    # Any 32 bytes are a secret key.
    mine = z85.encode(
        hashlib.blake2b(secret.encode(), digest_size=32, person=b"kvrelay-curve").digest()
    )
    return zmq.curve_public(mine), mine
