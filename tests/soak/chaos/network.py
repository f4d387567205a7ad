"""How the processes reach each other, and what can be done to it: nothing on the plain loopback,
the rest by namespaces (namespaces.py) or by proxies (proxies.py). Owns what all of them must be
able to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Bad", "Loopback", "Network", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process lives."""

    host: str
    prefix: tuple[str, ...] = ()
    """Of the command line by which it is started."""
    links: Mapping[int, int] | None = None
    """By a port to which it may connect, that of the proxy in between."""


@dataclass(frozen=True, slots=True)
class Bad:
    """What is wrong between two processes, named; of all others if `other` is empty."""

    kind: str
    """cut, resets, loss or delay."""
    name: str
    other: str = ""
    way: str = "both"
    """in: what comes to `name`; out: what it sends."""
    amount: float = 0.0
    """Share that is lost, or seconds of the delay."""


class Network(Protocol):
    """One of a run."""

    name: str
    kinds: frozenset[str]
    """What it can do, of `Bad.kind`."""

    async def join(self, names: Mapping[str, Sequence[int]]) -> None:
        """Prepare places for processes; the ports on which each listens. Raises OSError."""

    def place(self, name: str) -> Place:
        """Of one that has joined."""

    async def begin(self, bad: Bad) -> None:
        """From now on."""

    async def end(self, bad: Bad) -> None:
        """As it was."""

    async def close(self) -> None:
        """Give everything back."""


class Loopback:
    """Nothing can be done to it."""

    name = "loopback"
    kinds: frozenset[str] = frozenset()

    async def join(self, names: Mapping[str, Sequence[int]]) -> None:
        """Nothing to prepare."""

    def place(self, name: str) -> Place:
        """All on one address."""
        return Place("127.0.0.1")

    async def begin(self, bad: Bad) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(bad.kind)

    async def end(self, bad: Bad) -> None:
        """Nothing to end."""

    async def close(self) -> None:
        """Nothing to give back."""
