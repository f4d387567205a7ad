"""Random fault schedules by a fake clock keep every promise of the hand-over; and without any one
rule they do not.

More of them: `python tests/kv_transfer/simulated_faults.py --first 0 --count 100000`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from simulated_faults import FAULTS, STATES, run_many
from simulated_world import Violation

import kvrelay.kv_transfer.fetch
from kvrelay.kv_transfer.fetches import FetchTable
from kvrelay.kv_transfer.offers import Offers
from kvrelay.node.pulls import Pulls

COUNT = 500
# Enough for each of the mutants below, several times over.
MUTANT_COUNT = 3000


def test_faults_in_all_states_leave_nothing_behind_and_nothing_wrong() -> None:
    seen, ends = run_many(0, COUNT)
    # Rare pairs need more schedules than a test has time for.
    assert len(seen) >= 0.95 * len(FAULTS) * len(STATES)
    # That it is not for want of hand-overs, nor of broken ones.
    assert ends["done"] > COUNT
    assert ends["Fetched"] > COUNT
    assert ends["pulled"] > COUNT / 3
    assert (
        min(ends[why] for why in ("LeaseLost", "PeerLost", "TransferTimeout", "TransferError"))
        > COUNT / 100
    )


# Without a rule. Each of them is one line of the product.


def no_entry_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kvrelay.kv_transfer.fetch, "MARGIN", -3.0)


def no_exit_fence(patch: pytest.MonkeyPatch) -> None:
    around(
        patch,
        FetchTable,
        "confirmed",
        lambda real, *args, held, now: real(*args, held=True, now=now),
    )


def no_quarantine_of_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FetchTable, "_abandon", FetchTable._settle)


def no_quarantine_of_broken_reads(patch: pytest.MonkeyPatch) -> None:
    around(
        patch,
        FetchTable,
        "read_failed",
        lambda real, *args, in_flight: real(*args, in_flight=False),
    )


def no_proof_of_what_is_kept(patch: pytest.MonkeyPatch) -> None:
    def verified(real: Callable[..., None], table: FetchTable, read_id: int, now: float) -> None:
        fetch = table._reading(read_id)
        real(table, read_id, now)
        if fetch is not None:
            fetch.verified = fetch.landed

    around(patch, FetchTable, "read_ended", verified)


def no_epochs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Offers, "find", lambda offers, lease: offers._offers.get(lease.request_id))


def no_waiting_for_the_step_that_writes(patch: pytest.MonkeyPatch) -> None:
    def at_once(real: Callable[..., None], pulls: Pulls) -> None:
        pulls._leases = deque((0, *lease) for _, *lease in pulls._leases)
        real(pulls)

    around(patch, Pulls, "answer", at_once)


MUTANTS = [
    (no_entry_fence, "whose time is over"),
    (no_exit_fence, "does not hold tokens|nothing spoils KV"),
    (no_quarantine_of_reads, "which is free|does not hold tokens"),
    (no_quarantine_of_broken_reads, "which is free|does not hold tokens"),
    (no_proof_of_what_is_kept, "does not hold tokens"),
    (no_epochs, "was taken for its successor|does not hold tokens"),
    (no_waiting_for_the_step_that_writes, "does not hold tokens|nothing spoils KV"),
]


@pytest.mark.parametrize(
    ("mutate", "complaint"), MUTANTS, ids=[mutate.__name__ for mutate, _ in MUTANTS]
)
def test_without_this_rule_a_promise_is_broken(
    mutate: Callable[[pytest.MonkeyPatch], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    # Where it is found soon. Some need a moment that one schedule of a thousand has.
    first = {
        no_waiting_for_the_step_that_writes: 1500,
        no_exit_fence: 360,
        no_quarantine_of_broken_reads: 140,
        no_epochs: 120,
        no_entry_fence: 2190,
        no_proof_of_what_is_kept: 4880,
    }.get(mutate, 0)
    with pytest.raises(Violation, match=complaint):
        run_many(first, MUTANT_COUNT)


def around(patch: pytest.MonkeyPatch, owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper`, which is given the real one first."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: wrapper(real, *args, **named))
