"""Threads that own ZMQ sockets: one loop, its wake-up, connections, and messages of limited size."""

from __future__ import annotations

import abc
import collections
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrelay.wire.errors import ConfigError
from kvrelay.wire.log_lines import Seldom

__all__ = [
    "NO_HANDSHAKE",
    "Codec",
    "Connection",
    "Socket",
    "SocketThread",
    "listen",
    "received",
    "require_curve",
]

log = logging.getLogger(__name__)

T = TypeVar("T")
Socket = zmq.Socket[bytes]

# Messages taken from one socket before the others get their turn.
BURST = 256
# How long farewells may take when we close.
LINGER_MS = 100
# The most that a close waits for its thread; a connector closes two, within a second.
JOIN_S = 0.4
# What CURVE adds to a message under zmq's size limit.
CURVE_OVERHEAD_BYTES = 33
# A node with another secret hangs up silently ("no detail", as a cut connection).
NO_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
NO_HANDSHAKE |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | NO_HANDSHAKE


class Codec(Generic[T]):
    """A union of messages as msgpack frames of a limited size."""

    def __init__(
        self,
        messages: Any,
        limit: int,
        enc_hook: Callable[[Any], Any] | None = None,
        dec_hook: Callable[[type, Any], Any] | None = None,
    ) -> None:
        """`limit`: bytes of a frame; hooks as msgspec's."""
        self.limit = limit
        self._malformed = Seldom()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
        self._decoder: msgspec.msgpack.Decoder[T]
        self._decoder = msgspec.msgpack.Decoder(messages, dec_hook=dec_hook)

    def encode(self, message: T) -> bytes:
        frame = self._encoder.encode(message)
        self._check(frame)
        return frame

    def decode(self, frame: bytes) -> T:
        """Return a message. Raises msgspec.DecodeError; ValueError if too long or nested."""
        self._check(frame)
        try:
            return self._decoder.decode(frame)
        except RecursionError as why:
            raise ValueError("the message is nested too deeply") from why

    def received(self, sock: Socket) -> Iterator[tuple[bytes, T | None]]:
        """Yield waiting messages, with a ROUTER's senders; None if malformed."""
        for frames in received(sock):
            *sender, frame = frames
            try:
                if len(sender) > (sock.type == zmq.ROUTER):
                    raise ValueError(f"a message has one frame, not {len(frames)}")
                message = self.decode(frame)
            except (msgspec.DecodeError, ValueError) as error:
                if times := self._malformed.times(time.monotonic()):
                    log.warning(
                        "%s is not understood: %s, times=%d since the last line",
                        sock.getsockopt_string(zmq.LAST_ENDPOINT),
                        error,
                        times,
                    )
                message = None
            yield sender[0] if sender else b"", message

    def _check(self, frame: bytes) -> None:
        if len(frame) > self.limit:
            raise ValueError(f"message of {len(frame)} bytes is over the limit of {self.limit}")


class SocketThread(abc.ABC):
    def __init__(self, name: str, max_message_bytes: int, *, unbounded: bool = False) -> None:
        """`unbounded`: never drop messages to a slow reader."""
        self._max_bytes, self._unbounded = max_message_bytes, unbounded
        self._context: zmq.Context[Socket] = zmq.Context()
        self.router: Socket
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._closing = False
        self.poller = zmq.Poller()
        # ZMQ sockets belong to one thread; a socket pair wakes it.
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self.poller.register(self._woken, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self.wake()

    def wake(self) -> None:
        # full: the thread is about to look
        with suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def close(self, timeout_s: float = JOIN_S) -> None:
        """Have the thread end with its sockets, and wait for that, `timeout_s` at most."""
        self._closing = True
        self.wake()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join(timeout_s)

    def new_socket(
        self, kind: int, keys: tuple[bytes, bytes] | None = None, server: bytes | None = None
    ) -> Socket:
        """Return a socket; with CURVE `keys` (public, secret) a server or its client."""
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.IPV6, 1)
        # Before it listens: connections keep the value of then, and without a limit a reply to a
        # peer that has gone can hold up the end of the context for good.
        sock.linger = LINGER_MS
        sock.setsockopt(zmq.MAXMSGSIZE, self._max_bytes + CURVE_OVERHEAD_BYTES)
        if self._unbounded:
            sock.set_hwm(0)
        if keys is not None:
            sock.curve_publickey, sock.curve_secretkey = keys
            if server is None:
                sock.curve_server = True
            else:
                sock.curve_serverkey = server
        return sock

    def new_router(self, host: str, port: int, keys: tuple[bytes, bytes] | None) -> int:
        """Listen with a ROUTER; return its port. Raises ConfigError, with all closed."""
        router = self.new_socket(zmq.ROUTER, keys)
        try:
            port = listen(router, host, port)
        except ConfigError:
            self._context.destroy()
            self._close_waker()
            raise
        self.poller.register(router, zmq.POLLIN)
        self.router = router
        return port

    def reply(self, name: bytes, frame: bytes) -> None:
        """Send to a peer of the ROUTER; lost if it is gone or has not read for long."""
        with suppress(zmq.Again):
            self.router.send_multipart([name, frame], zmq.NOBLOCK)

    def run_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()()

    def wait_ms(self) -> int | None:
        """Return the longest time to poll; None: no limit."""
        return None

    @abc.abstractmethod
    def on_ready(self, ready: set[Any]) -> None: ...

    @abc.abstractmethod
    def on_error(self, error: Exception) -> None:
        """Report that our own error has ended the thread."""

    @abc.abstractmethod
    def on_close(self) -> None: ...

    def _run(self) -> None:
        try:
            while not self._closing:
                self.run_jobs()
                ready = {sock for sock, _ in self.poller.poll(self.wait_ms())}
                with suppress(BlockingIOError):
                    self._woken.recv(1 << 16)
                self.on_ready(ready)
        except Exception as error:
            # The edge of this thread: the step loop must hear of it.
            log.exception("thread %s ended", self._thread.name)
            self.on_error(error)
        finally:
            self._end()

    def _end(self) -> None:
        self.on_close()
        self._context.destroy()
        self._close_waker()

    def _close_waker(self) -> None:
        self._woken.close()
        self._waker.close()


class Connection:
    """A DEALER that dials once, and the monitor that tells when its connection is over."""

    def __init__(
        self,
        thread: SocketThread,
        keys: tuple[bytes, bytes] | None = None,
        server: bytes | None = None,
    ) -> None:
        self._thread = thread
        self.dealer = thread.new_socket(zmq.DEALER, keys, server)
        # Another process may have come to this address.
        self.dealer.reconnect_ivl = -1
        self.monitor = self.dealer.get_monitor_socket(_GONE)
        # Looked at in this order: whoever sees the end sees also the last messages before it.
        for sock in (self.monitor, self.dealer):
            thread.poller.register(sock, zmq.POLLIN)

    def connect(self, host: str, port: int) -> None:
        """Dial. Raises ZMQError if this is no address."""
        self.dealer.connect(_tcp(host, port))

    def send(self, frame: bytes) -> None:
        """Send, or drop the frame after 1,000 unread ones."""
        with suppress(zmq.Again):
            self.dealer.send(frame, zmq.NOBLOCK)

    def end_event(self) -> int:
        """Return the ZMQ event by which the connection has ended."""
        return int(recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"])

    def close(self) -> None:
        """Hang up; what was sent has LINGER_MS to go out."""
        for sock in (self.dealer, self.monitor):
            self._thread.poller.unregister(sock)
        self.dealer.disable_monitor()
        self.monitor.close()
        self.dealer.close()


def require_curve(who: str) -> None:
    """Raise ConfigError if libzmq has no CURVE, with the setting that needs it."""
    if not zmq.has("curve"):
        raise ConfigError(
            f"{who} needs CURVE, which libzmq {zmq.zmq_version()} was built without "
            "here; take pyzmq from a wheel: pip install --force-reinstall --only-binary pyzmq pyzmq"
        )


def received(sock: Socket) -> Iterator[list[bytes]]:
    """Yield waiting messages, BURST at most, while the socket is open."""
    for _ in range(BURST):
        if sock.closed:
            return
        try:
            yield sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def listen(listener: zmq.Socket[Any], host: str, port: int = 0) -> int:
    """Listen at this address; return the port, a free one for 0. Raises ConfigError."""
    try:
        # zmq binds to numbers only.
        found = None if host == "*" else socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        number = host if found is None else str(found[0][4][0])
        listener.bind(_tcp(number, port or "*"))
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(
            f"cannot listen at kv_host {host!r}, kv_port {port}: {error}; take an address of this "
            f"machine, or kv_port 0"
        ) from error
    return int(listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _tcp(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
