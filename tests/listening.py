"""What the processes of this machine listen on, as /proc has it: TCP ports, and UDP ports that take
from anybody.

Owns the kernel's tables; refuses to know which of the ports there should be.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Port", "listening"]

# States of the kernel: a TCP socket that listens, and a UDP socket that is connected to nobody.
_STATES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}


@dataclass(frozen=True, slots=True, order=True)
class Port:
    """A port that a process listens on, at an address as people write it."""

    number: int
    protocol: str
    """tcp or udp."""
    address: str
    pid: int


def listening(pids: Iterable[int]) -> list[Port]:
    """All ports of these processes; one that has ended has none."""
    at: dict[str, tuple[str, str, int]] = {}
    for table, state in _STATES.items():
        with contextlib.suppress(FileNotFoundError):  # no IPv6
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state:
                    host, _, port = fields[1].rpartition(":")
                    at[fields[9]] = table[:3], _address(host), int(port, 16)
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for opened in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = os.readlink(opened).removeprefix("socket:[").removesuffix("]")
                    if inode in at:
                        protocol, address, number = at[inode]
                        found.add(Port(number, protocol, address, pid))
    return sorted(found)


def _address(written: str) -> str:
    """The kernel's hexadecimal words, as people write addresses."""
    words = [
        int(written[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(written), 8)
    ]
    packed = b"".join(words)
    if len(packed) == 16 and packed.startswith(b"\0" * 10 + b"\xff\xff"):
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
