"""A port that several processes listen on: the kernel gives each connection to one of them, by its
addresses.
"""

from __future__ import annotations

import socket

from kvrelay.wire.errors import ConfigError

__all__ = ["shared_port"]


def shared_port(host: str, port: int) -> socket.socket:
    """Return a socket that holds the port, beside others of the same user that were made here; 0
    takes a free one.

    Raises ConfigError.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("several workers need SO_REUSEPORT, which this system has not; use one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        held = socket.socket(family, kind, protocol)
    except OSError as why:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why}; give another --host"
        ) from why
    try:
        held.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a port in TIME_WAIT counts as free
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.bind(address)
    except OSError as why:
        held.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why.strerror}; choose another with --port"
        ) from why
    return held
