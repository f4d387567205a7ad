"""Where zmq sockets listen and connect."""

from __future__ import annotations

import socket
from typing import Any

import zmq

from kvrelay.wire.errors import ConfigError

__all__ = ["listen", "tcp"]


def tcp(host: str, port: int | str) -> str:
    """What zmq calls it; an IPv6 number goes into brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listen(
    listener: zmq.Socket[Any],
    host: str,
    port: int = 0,
    called: tuple[str, str] = ("kv_host", "kv_port"),
) -> int:
    """Listen at this address of this machine; returns the port, which is a free one for 0. Raises
    ConfigError.

    `host`: * is all addresses. `called`: the options that host and port come from. zmq binds to
    numbers only, so names are looked up first.
    """
    try:
        found = None if host == "*" else socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        number = host if found is None else str(found[0][4][0])
        listener.bind(tcp(number, port or "*"))
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(
            f"cannot listen at {called[0]} {host!r}, {called[1]} {port}: {error}; take an address "
            f"of this machine, or "
            f"{called[1]} 0"
        ) from error
    return int(listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
