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
    """Raise ConfigError if the rank 0 of this host cannot be met at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        _bind(host, 0)
    except OSError as why:
        raise ConfigError(
            f"tensor_parallel_address {address!r} is not of this host, where rank 0 runs "
            f"({why.strerror}); give an "
            "address of this host that the other ranks can reach, or none if all ranks run here"
        ) from why
    try:
        _bind(host, int(port))
    except OSError as why:
        taken = why.errno == errno.EADDRINUSE
        raise ConfigError(
            f"rank 0 cannot listen at tensor_parallel_address {address!r}: port {port} "
            f"{'is taken' if taken else f'is refused ({why.strerror})'}; choose another one, the "
            f"same for all ranks"
        ) from why


def _bind(host: str, port: int) -> None:
    with socket.socket() as probe:
        # A port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def listen_for_ranks(address: str) -> socket.socket:
    """Return rank 0's listening socket, at this address alone. Raises OSError."""
    host, _, port = address.rpartition(":")
    door = socket.socket()
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((host, int(port)))
        door.listen()
    except OSError:
        door.close()
        raise
    return door


def is_of_this_host(host: str) -> bool:
    """Return whether servers can listen at `host` here."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def address_towards(address: str) -> str:
    """Return this host's address on the way to `host:port`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as why:
        raise ConfigError(f"rank 0 at {address} cannot be reached from this host: {why}") from why


def interface_towards(address: str) -> str:
    """Return the network interface from which `host:port` is reached. Raises ConfigError.

    gloo and NCCL by themselves take the interface of the host's name, which others may not reach.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing
            mine = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode())
                try:
                    reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                except OSError:
                    continue  # an interface without an address
                if socket.inet_ntoa(reply[20:24]) == mine:
                    return name
    except (OSError, ValueError) as why:
        raise ConfigError(
            f"tensor_parallel_address {address!r} cannot be reached from this host: {why}; give "
            f"rank 0's host:port"
        ) from why
    raise ConfigError(
        f"no network interface of this host has the address {mine}, from which "
        f"tensor_parallel_address {address!r} is "
        "reached; give one that is reached from an interface's own address"
    )
