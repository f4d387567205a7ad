"""Requests on which nodes die: which ones, and for how long they are refused. Pure: `now` is an
argument.

A request is known by its fingerprint, a hash of its key and its whole body, so a client that sends
it again gets no fresh nodes. A process counts once however many requests of a fingerprint it had,
and a request that was answered to its end is forgotten: whoever has died with others is mostly
innocent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Set

import msgspec

__all__ = ["DEATHS", "REFUSED_S", "Poison", "Suspect", "fingerprint_of"]

DEATHS = 2
"""The node where it was first, and the only other one that it goes to."""
REFUSED_S = 300.0
"""How long a request is refused since the last death. A large model takes minutes to load: before
the request may try the next nodes, those that it has killed are back.
"""
_MOST = 4096
"""Fingerprints that are known; beyond, the one with the oldest death is forgotten. A death has as
many as requests that were unanswered there.
"""


class Suspect(msgspec.Struct, frozen=True, array_like=True):
    """A request on which processes have died, and until when that counts."""

    processes: frozenset[str] = frozenset()
    until: float = 0.0


_NOBODY = Suspect()


class Poison:
    """A record of one router process. False while nothing is known of any request."""

    def __init__(self) -> None:
        self._suspects: dict[bytes, Suspect] = {}
        """By fingerprint, in the order of their last deaths."""
        self.tell: Callable[[bytes, str], None] = lambda _fingerprint, _process: None
        """Called with each death, and without a process when a request was answered."""

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def died(self, fingerprint: bytes, process: str, now: float) -> None:
        """Note that this process died while the request was unanswered there."""
        known = self._suspects.pop(fingerprint, _NOBODY)
        self._suspects[fingerprint] = Suspect(known.processes | {process}, now + REFUSED_S)
        if len(self._suspects) > _MOST:
            del self._suspects[next(iter(self._suspects))]
        self.tell(fingerprint, process)

    def spared(self, fingerprint: bytes) -> None:
        """Note that the request was answered to its end. If it is refused it stays so."""
        suspect = self._suspects.get(fingerprint)
        if suspect is not None and len(suspect.processes) < DEATHS:
            del self._suspects[fingerprint]
        self.tell(fingerprint, "")

    def suspects(self, now: float) -> Mapping[bytes, Suspect]:
        """Return those that count now, by their fingerprints; forget all others."""
        while self._suspects and next(iter(self._suspects.values())).until <= now:
            del self._suspects[next(iter(self._suspects))]
        return self._suspects

    def take_over(self, suspects: Mapping[bytes, Suspect]) -> None:
        """Know what another process knows, and nothing else."""
        self._suspects = dict(suspects)

    def processes(self, fingerprint: bytes, now: float) -> Set[str]:
        """Name the processes that have died of late while the request was unanswered there."""
        return self.suspects(now).get(fingerprint, _NOBODY).processes

    def refused_s(self, fingerprint: bytes, now: float) -> float:
        """Return for how much longer the request is refused; 0 if it is not."""
        if len(self.processes(fingerprint, now)) < DEATHS:
            return 0.0
        return self._suspects[fingerprint].until - now


def fingerprint_of(key: str, body: bytes) -> bytes:
    """Hash what a request is known by; `key` is the hash of its API key."""
    return hashlib.blake2b(body, digest_size=16, key=hashlib.sha256(key.encode()).digest()).digest()
