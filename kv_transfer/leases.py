"""Leases of the source side: which offered KV is still held, and until when. Pure.

A lease ends exactly once. While its KV grows a lease has no end of its own: whoever computes the
prompt is waited for, as the router waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.kv_transfer.connector import LeaseId, Released

__all__ = ["LeaseTable"]


class LeaseTable:
    """A source's leases. Times are seconds on any one monotonic clock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.events: list[Released] = []
        self.granted = 0
        self.released = 0
        self.expired = 0
        # Request id -> (epoch, expires at), by expiry: every grant and renewal moves to the end, and
        # all leases are equally long.
        self._held: dict[str, tuple[int, float]] = {}
        self._growing: dict[str, int] = {}  # request id -> epoch
        self._unwanted: set[str] = set()  # growing, and the reader has given up

    def __len__(self) -> int:
        return len(self._held) + len(self._growing)

    def grant(self, request_id: str, now: float, *, growing: bool = False) -> LeaseId:
        """Begin a lease. Raises ValueError if the request has one already."""
        if request_id in self._held or request_id in self._growing:
            raise ValueError(
                f"request {request_id!r} already has a lease; release it before offering it again"
            )
        self.granted += 1
        if growing:
            self._growing[request_id] = self.granted
        else:
            self._held[request_id] = (self.granted, now + self.lease_s)
        return LeaseId(request_id, self.granted)

    def complete(self, request_id: str, now: float) -> bool:
        """Start the time of a growing lease, or end one that nobody wants; False unless it runs."""
        if request_id in self._unwanted:
            self.release(request_id)
        epoch = self._growing.pop(request_id, None)
        if epoch is None:
            return False
        self._held[request_id] = (epoch, now + self.lease_s)
        return True

    def renew(self, leases: Iterable[LeaseId], now: float) -> tuple[list[LeaseId], list[LeaseId]]:
        """Prolong leases to `now + lease_s`. Returns (kept, lost)."""
        self.expire(now)
        kept, lost = self._split(leases)
        for lease in kept:
            if self._held.pop(lease.request_id, None) is not None:
                self._held[lease.request_id] = (lease.epoch, now + self.lease_s)
        return kept, lost

    def prolong(self, request_id: str, now: float) -> None:
        self.expire(now)
        held = self._held.pop(request_id, None)
        if held is not None:
            self._held[request_id] = (held[0], now + self.lease_s)

    def holds(self, lease: LeaseId, now: float) -> bool:
        self.expire(now)
        held, _ = self._split([lease])
        return bool(held) and lease.request_id not in self._growing

    def end(self, lease: LeaseId, now: float) -> bool:
        """End the lease for its reader. Returns whether it was held until now.

        While its KV grows it goes on: another reader may come (`want`).
        """
        if self._growing.get(lease.request_id) == lease.epoch:
            self._unwanted.add(lease.request_id)
        return self.holds(lease, now) and self.release(lease.request_id)

    def want(self, lease: LeaseId) -> None:
        if self._growing.get(lease.request_id) == lease.epoch:
            self._unwanted.discard(lease.request_id)

    def release(self, request_id: str) -> bool:
        """End the lease of a request, whatever its epoch. False if there is none."""
        if request_id not in self._held and request_id not in self._growing:
            return False
        self._close(request_id, expired=False)
        return True

    def expire(self, now: float) -> None:
        while (first := self.next_expiry()) is not None and first <= now:
            self._close(next(iter(self._held)), expired=True)

    def next_expiry(self) -> float | None:
        """Return when `expire` has something to do; None without leases."""
        return next((expires_at for _, expires_at in self._held.values()), None)

    def check(self) -> None:
        assert self.granted == self.released + self.expired + len(self)
        assert not self._held.keys() & self._growing.keys()
        assert self._unwanted <= self._growing.keys()
        expiries = [expires_at for _, expires_at in self._held.values()]
        assert expiries == sorted(expiries)

    def _split(self, leases: Iterable[LeaseId]) -> tuple[list[LeaseId], list[LeaseId]]:
        ours: list[LeaseId] = []
        lost: list[LeaseId] = []
        for lease in dict.fromkeys(leases):
            epoch, _ = self._held.get(lease.request_id, (self._growing.get(lease.request_id), 0.0))
            (ours if epoch == lease.epoch else lost).append(lease)
        return ours, lost

    def _close(self, request_id: str, *, expired: bool) -> None:
        self._unwanted.discard(request_id)
        if self._growing.pop(request_id, None) is None:
            del self._held[request_id]
        self.expired += expired
        self.released += not expired
        self.events.append(Released(request_id, expired))
