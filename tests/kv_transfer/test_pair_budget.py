"""The memory cap of all pairs of a process."""

from __future__ import annotations

import time

import pytest

from kvrelay.kv_transfer.pair_budget import Budget
from kvrelay.wire.errors import PeerLost


def test_names_the_cap_when_there_is_no_room() -> None:
    budget = Budget(100)
    with budget.share(60, time.monotonic(), lambda: False):
        with (
            pytest.raises(PeerLost, match=r"60 bytes: pairs in use hold 60 of 100"),
            budget.share(60, time.monotonic() + 0.05, lambda: False),
        ):
            pass
        with budget.share(40, time.monotonic(), lambda: False):
            assert budget.used_bytes == budget.peak_bytes == 100
    assert budget.used_bytes == 0
