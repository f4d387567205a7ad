"""The network devices that UCX may use: those of `kv_host`, so that it listens at no other address
of this machine.

Reads interfaces and their RDMA devices from sysfs; opens nothing and knows nothing of NIXL. UCX's
listener has no authentication, so the interfaces that it listens on are all that keeps strangers
from it.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from kvrelay.wire.config_checks import is_loopback
from kvrelay.wire.errors import ConfigError

__all__ = ["addresses_here", "net_devices", "net_devices_of"]

_SIOCGIFCONF = 0x8912
# An ifreq of the kernel, on 64 bits: 16 bytes of name, then a sockaddr_in with the address at its
# byte 4.
_IFREQ_BYTES, _ADDRESS_AT = 40, 20
_MOST_ADDRESSES = 4096


def net_devices(kv_host: str) -> str | None:
    """UCX_NET_DEVICES for a node whose `kv_host` this is; None leaves all devices to UCX. Raises
    ConfigError.
    """
    if is_loopback(kv_host):
        return "lo"
    try:
        number = str(socket.getaddrinfo(kv_host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"kv_host {kv_host!r} is no address: {error}") from error
    return net_devices_of(number, addresses_here(), Path("/sys"))


def net_devices_of(address: str, known: Iterable[tuple[str, str]], sysfs: Path) -> str | None:
    """The same for a number, on a machine with these (interface, address) pairs. Raises
    ConfigError.
    """
    wanted = ipaddress.ip_address(address)
    if wanted.is_unspecified:
        return None
    if wanted.is_loopback:
        return "lo"
    # Of a link-local number the part behind % names the interface, which the list has in its own
    # column.
    numbers = [(name, ipaddress.ip_address(each.partition("%")[0])) for name, each in known]
    name = next(
        (name for name, each in numbers if each == ipaddress.ip_address(address.partition("%")[0])),
        None,
    )
    if name is None:
        raise ConfigError(
            f"no network interface of this machine has kv_host's address {address}, so UCX would "
            f"listen on all "
            "of them; take an address of this machine, or set UCX_NET_DEVICES"
        )
    return ",".join([name, *_rdma_ports(name, sysfs)])


def _rdma_ports(name: str, sysfs: Path) -> list[str]:
    """Ports of the RDMA devices that belong to an interface, or to those that a bond or VLAN is
    made of.
    """
    interface = sysfs / "class/net" / name
    return sorted(
        f"{device.name}:{port.name}"
        for place in (interface, *interface.glob("lower_*"))
        for device in place.glob("device/infiniband/*")
        for port in (sysfs / "class/infiniband" / device.name / "ports").glob("*")
    )


def addresses_here() -> list[tuple[str, str]]:
    """Each address of this machine with its interface. Raises ConfigError without Linux."""
    try:
        return [*_ipv4(), *_ipv6()]
    except OSError as error:
        raise ConfigError(
            f"the network interfaces of this machine cannot be listed: {error}"
        ) from error


def _ipv4() -> list[tuple[str, str]]:
    space = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    where, _ = space.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        used, _ = struct.unpack(
            "iL", fcntl.ioctl(asker, _SIOCGIFCONF, struct.pack("iL", len(space), where))
        )
    found = []
    for at in range(0, used, _IFREQ_BYTES):
        # A second address may have a label of its own, eth0:1.
        name = bytes(space[at : at + 16]).partition(b"\0")[0].decode().partition(":")[0]
        found.append(
            (name, socket.inet_ntoa(bytes(space[at + _ADDRESS_AT : at + _ADDRESS_AT + 4])))
        )
    return found


def _ipv6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []  # the kernel has no IPv6
    return [
        (line.split()[5], str(ipaddress.ip_address(bytes.fromhex(line.split()[0]))))
        for line in lines
    ]
