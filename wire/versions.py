"""Which versions of our own wires this code speaks, and what two processes of different releases
speak with each other.

A release speaks a range: its own version and the one before, so that a cluster is upgraded node by
node, in any order. Each side says its range, both compute the highest version that is in both, and
nobody sends what that one does not have. Without a common version two processes are no pair, and
say so with both ranges.

What needs no new version: a field more, at the end of an array and with a default that means what
was before. Readers skip fields that they do not know, in maps and behind the end of arrays. What
needs one: a new kind of message or frame, a new word where a few are expected (a finish reason, a
role), another meaning of a field, anything else in what a ticket's signature covers.
"""

from __future__ import annotations

import msgspec

__all__ = ["HANDOVER", "LEGS", "RELEASE", "Versions"]

RELEASE = "0.1.0"
"""Of kvrelay, as pyproject.toml has it. Processes that are one engine or one router must have the
same.
"""


class Versions(msgspec.Struct, frozen=True, array_like=True):
    """A range of versions, from the oldest to the newest."""

    oldest: int
    newest: int

    def common(self, other: Versions) -> int | None:
        """Return the highest version in both; None if there is none."""
        highest = min(self.newest, other.newest)
        return highest if highest >= max(self.oldest, other.oldest) else None

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest

    def __str__(self) -> str:
        return str(self.oldest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


HANDOVER = Versions(1, 1)
"""Node and node: tickets, the control channel, what data planes say to each other
(wire/transfer.py, kv_transfer).
"""

LEGS = Versions(2, 2)
"""Router and node: request streams, their frames, and the bodies of requests (wire/frames.py). A
stream names its version; one that names none is of version 1. Version 1 had no packed prompts.
"""
