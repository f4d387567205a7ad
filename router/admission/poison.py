"""Requests on which nodes die: which ones, and for how long they are refused. Pure: `now` is an argument.

A request is known by its fingerprint, a hash of its key and its whole body, so a client that sends it again gets no
fresh nodes. A process counts once however many requests of a fingerprint it had, and a request that was answered to its
end is forgotten: whoever has died with others is mostly innocent.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

__all__ = ["DEATHS", "REFUSED_S", "Mark", "Poison", "fingerprint_of"]

DEATHS = 2
"""The node where it was first, and the only other one that it goes to."""
REFUSED_S = 300.0
"""How long a request is refused since the last death. A large model takes minutes to load: before the request may try
the next nodes, those that it has killed are back."""
_MOST = 4096
"""Fingerprints that are known; beyond, the one with the oldest death is forgotten. A death has as many as requests that
were unanswered there."""


Mark = tuple[bytes, list[str], float]
"""A fingerprint, the processes that died, and until when they count."""


@dataclass(slots=True)
class _Suspect:
    processes: set[str] = field(default_factory=set)
    until: float = 0.0


class Poison:
    """A record of one router process. False while nothing is known of any request."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()  # by the time of their last death

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def died(self, fingerprint: bytes, process: str, now: float) -> None:
        """This process died while the request was unanswered there."""
        suspect = self._suspects.setdefault(fingerprint, _Suspect())
        suspect.processes.add(process)
        suspect.until = now + REFUSED_S
        self._suspects.move_to_end(fingerprint)
        while len(self._suspects) > self._most:
            self._suspects.popitem(last=False)

    def spared(self, fingerprint: bytes) -> None:
        """The request was answered to its end. If it is refused it stays so."""
        suspect = self._suspects.get(fingerprint)
        if suspect is not None and len(suspect.processes) < DEATHS:
            del self._suspects[fingerprint]

    def marks(self, now: float) -> list[Mark]:
        """Return all that is known."""
        self.processes(b"", now)
        return [(of, sorted(suspect.processes), suspect.until) for of, suspect in self._suspects.items()]

    def take_over(self, marks: Iterable[Mark], now: float) -> None:
        """Know what another process knows, and nothing else."""
        self._suspects = OrderedDict((of, _Suspect(set(died), until)) for of, died, until in marks if until > now)

    def processes(self, fingerprint: bytes, now: float) -> Set[str]:
        """Name the processes that have died of late while the request was unanswered there."""
        while self._suspects and next(iter(self._suspects.values())).until <= now:
            self._suspects.popitem(last=False)
        suspect = self._suspects.get(fingerprint)
        return frozenset() if suspect is None else suspect.processes

    def refused_s(self, fingerprint: bytes, now: float) -> float:
        """For how much longer the request is refused; 0 if it is not."""
        if len(self.processes(fingerprint, now)) < DEATHS:
            return 0.0
        return self._suspects[fingerprint].until - now


def fingerprint_of(key: str, body: bytes) -> bytes:
    """Hash what a request is known by; `key` is the hash of its API key, empty without one."""
    return hashlib.blake2b(body, digest_size=16, key=hashlib.sha256(key.encode()).digest()).digest()
