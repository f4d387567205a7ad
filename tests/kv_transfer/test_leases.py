"""Leases of the source side, against a twin that remembers everything and sweeps it whole."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv_transfer.connector import LeaseId, Released
from kvrelay.kv_transfer.leases import LeaseTable

LEASE_S = 5.0


@dataclass
class Granted:
    """One lease that was ever granted."""

    id: LeaseId
    until: float  # infinity while the KV grows
    ended: bool = False
    wanted: bool = True


class Twin:
    """The same, by brute force: a list of all leases ever granted, none ever removed."""

    def __init__(self) -> None:
        self.leases: list[Granted] = []
        self.events: list[Released] = []

    def alive(self, request_id: str) -> Granted | None:
        return next((x for x in self.leases if x.id.request_id == request_id and not x.ended), None)

    def sweep(self, now: float) -> None:
        due = [x for x in self.leases if not x.ended and x.until <= now]
        for lease in sorted(due, key=lambda x: x.until):
            self.end(lease, expired=True)

    def prolong(self, lease: Granted, now: float) -> None:
        """Of leases that end at the same time, the one that was prolonged last ends last."""
        lease.until = now + LEASE_S
        self.leases.remove(lease)
        self.leases.append(lease)

    def end(self, lease: Granted, *, expired: bool) -> None:
        lease.ended = True
        self.events.append(Released(lease.id.request_id, expired))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "grant",
                "grant growing",
                "complete",
                "renew",
                "prolong",
                "end",
                "want",
                "release",
                "expire",
            ]
        ),
        st.lists(st.sampled_from("abcd"), min_size=1, max_size=3),
        st.integers(0, 1),  # how many epochs old the reader's knowledge is
        st.floats(0.001, 4.0),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_leases_equal_their_brute_force_twin(
    operations: list[tuple[str, list[str], int, float]],
) -> None:
    table, twin, now = LeaseTable(LEASE_S), Twin(), 0.0
    for operation, names, age, seconds in operations:
        now += seconds
        known = [[x.id for x in twin.leases if x.id.request_id == name] for name in names]
        leases = [ids[-1 - age] for ids in known if len(ids) > age]
        if operation.startswith("grant"):
            growing = operation == "grant growing"
            # grant does not sweep: a lease that is over but not swept yet still counts.
            if twin.alive(names[0]) is not None:
                with pytest.raises(ValueError, match="already has a lease"):
                    table.grant(names[0], now)
            else:
                until = math.inf if growing else now + LEASE_S
                twin.leases.append(Granted(table.grant(names[0], now, growing=growing), until))
        elif operation == "complete":
            alive = twin.alive(names[0])
            grows = alive is not None and alive.until == math.inf
            assert table.complete(names[0], now) == (grows and alive is not None and alive.wanted)
            if alive is not None and grows:
                twin.prolong(alive, now)
                if not alive.wanted:
                    twin.end(alive, expired=False)
        elif operation == "want" and leases:
            table.want(leases[0])
            (lease,) = [x for x in twin.leases if x.id == leases[0]]
            lease.wanted = True
        elif operation == "renew":
            kept, lost = table.renew(leases, now)
            twin.sweep(now)
            assert set(kept) == {x.id for x in twin.leases if x.id in leases and not x.ended}
            assert set(kept) | set(lost) == set(leases)
            for lease in [
                x for known in kept for x in twin.leases if x.id == known and x.until < math.inf
            ]:
                twin.prolong(lease, now)
        elif operation == "prolong":
            table.prolong(names[0], now)
            twin.sweep(now)
            alive = twin.alive(names[0])
            if alive is not None and alive.until < math.inf:
                twin.prolong(alive, now)
        elif operation == "end" and leases:
            held = table.end(leases[0], now)
            twin.sweep(now)
            (lease,) = [x for x in twin.leases if x.id == leases[0]]
            assert held == (not lease.ended and lease.until < math.inf)
            if held:
                twin.end(lease, expired=False)
            else:
                lease.wanted = False
        elif operation == "release":
            alive = twin.alive(names[0])
            assert table.release(names[0]) == (alive is not None)
            if alive is not None:
                twin.end(alive, expired=False)
        elif operation == "expire":
            table.expire(now)
            twin.sweep(now)
        table.check()
        assert table.events == twin.events
        assert len(table) == sum(not x.ended for x in twin.leases)
        due = [x.until for x in twin.leases if not x.ended and x.until < math.inf]
        assert table.next_expiry() == min(due, default=None)


def test_unknown_leases_are_lost_and_unknown_releases_ignored() -> None:
    table = LeaseTable(LEASE_S)
    assert table.renew([LeaseId("x", 1)], 0.0) == ([], [LeaseId("x", 1)])
    assert not table.release("x")
    assert table.events == []
