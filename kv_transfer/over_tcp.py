"""Two processes on CPUs that send and receive memory: a TCP connection for each pair, opened by
whoever was invited.

Owns how the two ends find each other and how a wait ends: done, or PeerLost after a deadline, a
lost connection or `interrupt`. Refuses to know blocks, pools or pairs.

The reader listens at a port of its own for as long as the two meet, and says where, with a token,
over the encrypted control socket. Who does not show that token is no peer: nothing else of its is
looked at, and it is hung up on. (gloo of torch 2.13, which was here, takes whoever says a small
number first for the peer: 56 bytes of anybody's end the process, by an exception in a thread of
gloo's that nobody can catch. And it never closes a connection of a stranger's.)

A slice moves while it is waited for, on the pair's own thread; how far ahead it is, is what the
kernel's buffers hold.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from kvrelay.kv_transfer.communicators import Communicator, Work
from kvrelay.wire.errors import PeerLost
from kvrelay.wire.frames import MALFORMED

__all__ = ["TcpBackend"]

TOKEN_BYTES = 32
# Those who have come in and not shown a token yet; one more, and the first of them is hung up on.
MAX_STRANGERS = 16
# So often who waits for the other side looks whether it still should.
LOOK_S = 0.05


class Invitation(msgspec.Struct, frozen=True):
    """Where the reader waits for the source, and what to show there."""

    host: str
    port: int
    token: bytes


class TcpBackend:
    """A `Backend` between addresses of these hosts."""

    def __init__(self, host: str, patience_s: float) -> None:
        """`host` is an address of this machine that the others reach."""
        self._host = host
        self._patience_s = patience_s

    def invite(
        self, say: Callable[[bytes], None], given_up: Callable[[], bool], deadline: float
    ) -> Communicator:
        """See Backend."""
        token = os.urandom(TOKEN_BYTES)
        try:
            with _listening(self._host) as listener:
                host, port, *_ = listener.getsockname()
                say(msgspec.msgpack.encode(Invitation(_said(self._host, host), port, token)))
                return _TcpCommunicator(
                    _guest(listener, token, given_up, deadline), self._patience_s
                )
        except OSError as error:
            raise PeerLost(
                f"cannot wait for the source at kv_host {self._host!r}: {error}"
            ) from error

    def join(self, facts: bytes, given_up: Callable[[], bool], deadline: float) -> Communicator:
        """See Backend."""
        try:
            to = msgspec.msgpack.decode(facts, type=Invitation)
        except MALFORMED as error:
            raise PeerLost(
                "the reader does not say where it waits; it may be of another release"
            ) from error
        try:
            sock = _connected(to, given_up, deadline)
        except OSError as error:
            raise PeerLost(f"cannot reach the reader at {to.host}:{to.port}: {error}") from error
        return _TcpCommunicator(sock, self._patience_s)


def _said(host: str, number: str) -> str:
    """What the source dials, of a reader at `host` that listens at this number.

    A name may have other numbers, too, and over there another one of them first. A wildcard is
    nobody's address, and a number of one link means nothing without its interface, which only
    `host` names.
    """
    bound = ipaddress.ip_address(number)
    return host if bound.is_unspecified or bound.is_link_local else number


@contextlib.contextmanager
def _listening(host: str) -> Iterator[socket.socket]:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
        yield listener


def _guest(
    listener: socket.socket, token: bytes, given_up: Callable[[], bool], deadline: float
) -> socket.socket:
    """The first who shows the token. Raises PeerLost, OSError."""
    strangers: dict[socket.socket, bytes] = {}
    with contextlib.ExitStack() as at_the_end, selectors.DefaultSelector() as selector:
        at_the_end.callback(_hang_up_on, strangers)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in _ready(selector, given_up, deadline):
                if key.fileobj is listener:
                    _let_in(listener, strangers, selector)
                    continue
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock not in strangers:  # was hung up on just now
                    continue
                shown = strangers[sock] + _shown(sock, TOKEN_BYTES - len(strangers[sock]))
                if len(shown) < TOKEN_BYTES and len(shown) > len(strangers[sock]):
                    strangers[sock] = shown
                    continue
                del strangers[sock]
                selector.unregister(sock)
                if hmac.compare_digest(shown, token):
                    return sock
                sock.close()


def _hang_up_on(strangers: dict[socket.socket, bytes]) -> None:
    for stranger in strangers:
        stranger.close()


def _let_in(
    listener: socket.socket, strangers: dict[socket.socket, bytes], selector: selectors.BaseSelector
) -> None:
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionError):  # it has gone again
        return
    sock.setblocking(False)
    strangers[sock] = b""
    selector.register(sock, selectors.EVENT_READ)
    if len(strangers) > MAX_STRANGERS:
        first = next(iter(strangers))
        del strangers[first]
        selector.unregister(first)
        first.close()


def _shown(sock: socket.socket, size: int) -> bytes:
    """Nothing of who has hung up."""
    try:
        return sock.recv(size)
    except OSError:
        return b""


def _connected(to: Invitation, given_up: Callable[[], bool], deadline: float) -> socket.socket:
    """Raises PeerLost, OSError."""
    family, _, _, _, address = socket.getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as if_it_fails, selectors.DefaultSelector() as selector:
        sock = if_it_fails.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setblocking(False)
        failed = sock.connect_ex(address)
        if failed == errno.EINPROGRESS:
            selector.register(sock, selectors.EVENT_WRITE)
            while not _ready(selector, given_up, deadline):
                pass
            failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        sock.send(to.token)  # the first bytes of a connection: there is room for them
        if_it_fails.pop_all()
        return sock


def _ready(
    selector: selectors.BaseSelector, given_up: Callable[[], bool], deadline: float
) -> list[tuple[selectors.SelectorKey, int]]:
    """What can be read or written, for a moment. Raises PeerLost when it is time to end."""
    if given_up():
        raise PeerLost("gave up while the two met")
    if time.monotonic() >= deadline:
        raise PeerLost("the other side did not come in time: it has stopped or is gone")
    return selector.select(LOOK_S)


class _TcpCommunicator:
    def __init__(self, sock: socket.socket, patience_s: float) -> None:
        self._sock = sock
        self._patience_s = patience_s
        self._closing = (
            threading.Lock()
        )  # the number of a socket that was closed is soon another one's
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, staging: torch.Tensor) -> Work:
        return _TcpWork(self._sock, self._sock.send, staging, self._patience_s)

    def recv(self, staging: torch.Tensor) -> Work:
        return _TcpWork(self._sock, self._sock.recv_into, staging, self._patience_s)

    def interrupt(self) -> None:
        with self._closing, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._closing:
            self._sock.close()


class _TcpWork:
    """Waited for in the order in which they were begun."""

    def __init__(
        self,
        sock: socket.socket,
        move: Callable[[memoryview], int],
        staging: torch.Tensor,
        patience_s: float,
    ) -> None:
        self._sock, self._move = sock, move
        self._left = memoryview(staging.numpy())  # type: ignore[arg-type]
        self._patience_s = patience_s

    def wait(self) -> None:
        deadline = time.monotonic() + self._patience_s
        try:
            while self._left:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                self._sock.settimeout(left_s)
                moved = self._move(self._left)
                if not moved:
                    raise PeerLost("the other side has closed the connection")
                self._left = self._left[moved:]
        except TimeoutError as error:
            raise PeerLost(
                f"a slice has not moved within {self._patience_s:g} s: the other side has stopped"
            ) from error
        except OSError as error:
            raise PeerLost(f"lost the other side: {error}") from error
