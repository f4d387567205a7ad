"""HTTP connections of the router and of nodes, with limits on number, size and time.

Adds them, and the check of Host, to uvicorn's httptools protocol.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import re
import resource
import sys
import termios
from asyncio import TimerHandle
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from kvrelay.wire.errors import KvrelayError, RequestError, RequestTimeout, Unavailable
from kvrelay.wire.log_lines import Seldom

__all__ = ["HEAD_DEADLINE_S", "HttpConnection", "connection_class"]

HEAD_DEADLINE_S = 20.0
"""Until the headers of a connection or further request are complete."""
# A body that still comes after the answer is read for so long, or the answer is lost.
_LINGER_S = 5.0
_FLUSH_S = 30.0
# A peer that reads less than this in _FLUSH_S does not read.
_FLUSHED_BYTES = 32 << 10
_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 128
_MAX_URL_BYTES = 8 << 10
# A name or an address, RFC 3986, 3.2.2, and a port; both may be empty.
_HOST = re.compile(rb"(?:\[[\w.~!$&'()*+,;=%:-]+\]|[\w.~!$&'()*+,;=%-]*)(?::\d*)?")
_ANSWER = (
    (b"content-type", b"application/json"),
    (b"connection", b"close"),
)

_log = logging.getLogger("kvrelay.http")


class HttpConnection(HttpToolsProtocol):
    max_connections = 0
    max_files = sys.maxsize
    refusals = Seldom()
    head_deadline_s = HEAD_DEADLINE_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: TimerHandle | None = None
        self._head_bytes = 0
        self._fed_bytes = 0
        self._head_over = True
        self._whole = True
        self._wrong: KvrelayError | None = None
        self._answering: RequestResponseCycle | None = None
        self._flushing: TimerHandle | None = None
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (full := self._full()) is None:
            self._arm(self.head_deadline_s)
            return
        if times := self.refusals.times(self.loop.time()):
            _log.warning("%s; refused connections=%d since this was last said", full, times)
        self._refuse(Unavailable(f"{full}; try again"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.flush_at_leisure()
        super().connection_lost(exc)
        self._tell_gone()

    def eof_received(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._tell_gone()

    def data_received(self, data: bytes) -> None:
        # The parser reports whole headers and trailers only, and buffers incomplete ones.
        self._fed_bytes += len(data)
        super().data_received(data)
        if self._fed_bytes > 2 * _MAX_HEAD_BYTES:
            self._refuse(_too_large(f"the headers are longer than {_MAX_HEAD_BYTES} bytes", 431))
        if self._timer is None and not self._busy():
            self._arm(self.head_deadline_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._fed_bytes = 0
        self._head_over = self._whole = False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > _MAX_URL_BYTES:
            self._wrong = _too_large(f"the URL is longer than {_MAX_URL_BYTES} bytes", 414)
            raise ValueError(self._wrong.message)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_over:  # a trailer is no header: RFC 9110, 6.5.1
            super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        if len(self.headers) > _MAX_HEADERS or self._head_bytes > _MAX_HEAD_BYTES:
            limits = f"the limits are {_MAX_HEADERS} headers and {_MAX_HEAD_BYTES} bytes"
            self._wrong = _too_large(f"the request has too many or too long headers; {limits}", 431)
            raise ValueError(self._wrong.message)

    def on_headers_complete(self) -> None:
        self._head_over = True
        self._disarm()
        self._check_host()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._fed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._whole = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.flush_in_time()
        if not self._whole and self._head_over and not self._busy():
            self._arm(_LINGER_S)

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self.flush_in_time()

    def flush_in_time(self) -> None:
        self.flush_at_leisure()
        self._unread = self._not_taken()
        self._flushing = self.loop.call_later(_FLUSH_S, self._look_at_flush)

    def flush_at_leisure(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None

    def _look_at_flush(self) -> None:
        if self._unread - self._not_taken() < _FLUSHED_BYTES:
            self.transport.abort()
        else:
            self.flush_in_time()

    def _not_taken(self) -> int:
        # The kernel's bytes count, too: it asks for more by megabytes.
        waiting = self.transport.get_write_buffer_size()
        socket = self.transport.get_extra_info("socket")
        if socket is not None:
            with suppress(OSError):  # it is closed
                waiting += int.from_bytes(
                    fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder
                )
        return waiting

    def _close(self) -> None:
        self.transport.close()
        self.flush_in_time()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, functools.partial(self._answer, cycle, app))

    async def _answer(self, cycle: RequestResponseCycle, app: Any, *args: Any) -> None:
        # uvicorn would answer 500 and log a traceback.
        try:
            await app(*args)
        except asyncio.CancelledError:
            if cycle.response_started:
                self._close()
            else:
                self._refuse(
                    Unavailable(
                        "this server ends, and could not answer in the time left; try another one"
                    )
                )
            cycle.disconnected = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            self._wrong or RequestError("this is no HTTP request that could be read one way only")
        )

    def _check_host(self) -> None:
        # RFC 9112, 3.2: one, valid, and none only before HTTP/1.1. Servers differ on two of them.
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) == 1 and _HOST.fullmatch(hosts[0]):
            return
        if not hosts and self.parser.get_http_version() == "1.0":
            return
        why = (
            f"{len(hosts)} Host headers"
            if len(hosts) != 1
            else "a Host header that is no host, or host:port"
        )
        self._wrong = RequestError(f"the request has {why}; send one, with the host of the URL")
        raise ValueError(self._wrong.message)

    def _full(self) -> str | None:
        if len(self.connections) > self.max_connections:
            return f"{self.max_connections} connections are open, and no more may be"
        socket = self.transport.get_extra_info("socket")
        # A file has the lowest free number. The other half is for nodes: without a file left, libuv
        # hangs up silently, and a request fails as if its node were gone.
        if socket is not None and 2 * socket.fileno() >= self.max_files:
            return (
                f"half of the {self.max_files} files that this process may have are open (ulimit "
                "-Hn)"
            )
        return None

    def _tell_gone(self) -> None:
        # uvicorn tells the newest request; an older one may be being answered.
        answering, self._answering = self._answering, None
        if answering is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()

    def _busy(self) -> bool:
        return self.transport.is_closing() or (
            self.cycle is not None and not self.cycle.response_complete
        )

    def _refuse(self, why: KvrelayError) -> None:
        self._disarm()
        if self.transport.is_closing():
            return
        begun = self._answering
        if begun is not None and begun.response_started and not begun.response_complete:
            # Within another answer this one would be a part of it.
            self._close()
            return
        body = why.json()
        headers = [*_ANSWER, (b"content-length", str(len(body)).encode())]
        if why.retry_after_s is not None:
            headers.append((b"retry-after", str(why.retry_after_s).encode()))
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[why.status] + head + b"\r\n" + body)
        self._close()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self._head_over:
            self._refuse(
                RequestTimeout(f"the headers did not arrive within {self.head_deadline_s:g} s")
            )
        elif not self.transport.is_closing():
            self._close()


def _too_large(message: str, status: int) -> RequestError:
    error = RequestError(f"{message}; send less")
    error.status = status
    return error


def connection_class(
    at_most: int,
    head_deadline_s: float = HEAD_DEADLINE_S,
    of: type[HttpConnection] = HttpConnection,
) -> type[HttpToolsProtocol]:
    """Return a class with these limits, for uvicorn's Config as `http`."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limits = {
        "max_connections": at_most,
        "max_files": sys.maxsize if files == resource.RLIM_INFINITY else files,
        "head_deadline_s": head_deadline_s,
        "refusals": Seldom(),
    }
    return type(of.__name__, (of,), limits)
