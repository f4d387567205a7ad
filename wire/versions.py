"""Versions of our wires, for processes of different releases.

A release speaks its own version and the one before, so that a cluster is upgraded node by node.
Both sides compute the highest common version; without one they are no pair.

A field more, at the end and with a default that means what was before, needs no new version:
readers skip unknown fields. A new kind of message or frame, a new word where few are expected,
another meaning of a field or of a ticket's signature needs one.
"""

from __future__ import annotations

import msgspec

__all__ = ["HANDOVER", "LEGS", "RELEASE", "Versions"]

RELEASE = "0.1.0"
"""kvrelay's, as in pyproject.toml; processes of one engine or router have the same."""


class Versions(msgspec.Struct, frozen=True, array_like=True):
    """A range of versions."""

    oldest: int
    newest: int

    def common(self, other: Versions) -> int | None:
        """Return the highest common version, if there is one."""
        highest = min(self.newest, other.newest)
        return highest if highest >= max(self.oldest, other.oldest) else None

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest

    def __str__(self) -> str:
        return str(self.oldest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


HANDOVER = Versions(1, 2)
"""Node and node: tickets, control channel, data planes. Version 1 leased no cached blocks."""

LEGS = Versions(2, 2)
"""Router and node: request streams, their frames, and the bodies of requests (wire/frames.py). A
stream names its version; one that names none is of version 1. Version 1 had no packed prompts.
"""
