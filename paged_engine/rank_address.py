"""The address at which a tensor-parallel group's ranks meet. Asks this host alone. No torch."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct

from kvrelay.wire.errors import ConfigError

__all__ = [
    "address_towards",
    "listen_for_ranks",
    "check_rank_0",
    "interface_towards",
    "is_of_this_host",
]

_SIOCGIFADDR = 0x8915


def check_rank_0(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        _bound(host, 0).close()
    except OSError as why:
        raise ConfigError(
            f"tensor_parallel_address {address!r} is not of this host, where rank 0 runs "
            f"({why.strerror}); give an address of this host that the other ranks can reach, or "
            "none if all ranks run here"
        ) from why
    try:
        _bound(host, int(port)).close()
    except OSError as why:
        problem = "taken" if why.errno == errno.EADDRINUSE else f"refused ({why.strerror})"
        raise ConfigError(
            f"rank 0 cannot listen at tensor_parallel_address {address!r}: port {port} is "
            f"{problem}; choose another one, the same for all ranks"
        ) from why


def listen_for_ranks(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    listener = _bound(host, int(port))
    listener.listen()
    return listener


def is_of_this_host(host: str) -> bool:
    try:
        _bound(host, 0, socket.AF_UNSPEC).close()
    except OSError:
        return False
    return True


def _bound(host: str, port: int, family: int = socket.AF_INET) -> socket.socket:
    found, kind, _, _, place = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
    bound = socket.socket(found, kind)
    try:
        # A port in TIME_WAIT counts as free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError:
        bound.close()
        raise
    return bound


def address_towards(address: str, family: int = socket.AF_UNSPEC) -> str:
    host, _, port = address.rpartition(":")
    try:
        found, kind, _, _, place = socket.getaddrinfo(host, int(port), family, socket.SOCK_DGRAM)[0]
        with socket.socket(found, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as why:
        raise ConfigError(
            f"tensor_parallel_address {address!r} cannot be reached from this host: {why}; give "
            "rank 0's host:port"
        ) from why


def interface_towards(address: str) -> str:
    """Return the network interface from which `host:port` is reached. Raises ConfigError.

    gloo and NCCL take that of the host's name, which others may not reach.
    """
    mine = address_towards(address, socket.AF_INET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == mine:
                return name
    raise ConfigError(
        f"no network interface of this host has the address {mine}, from which "
        f"tensor_parallel_address {address!r} is reached; give one that is reached from an "
        "interface's own address"
    )
