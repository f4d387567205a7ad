"""Which requests are refused because nodes die on them."""

from __future__ import annotations

import pytest

from kvrelay.router.request import poison as poison_module
from kvrelay.router.request.poison import REFUSED_S, Poison, fingerprint_of

A, B = fingerprint_of("key", b"a"), fingerprint_of("key", b"b")


def test_a_request_is_known_by_its_key_and_its_whole_body() -> None:
    assert fingerprint_of("key", b"a") == A
    assert len({A, B, fingerprint_of("other", b"a"), fingerprint_of("", b"keya")}) == 4


def test_a_request_is_refused_after_the_second_death_for_a_while_and_forgotten_then() -> None:
    poison = Poison()
    assert not poison
    poison.died(A, "p1", 0.0)
    assert poison.refused_s(A, 1.0) == 0
    poison.died(A, "p2", 10.0)
    assert poison.refused_s(A, 11.0) == REFUSED_S - 1
    assert poison.refused_s(B, 11.0) == 0
    assert poison.refused_s(A, 10.0 + REFUSED_S) == 0
    assert not poison


def test_a_process_counts_once_however_many_requests_it_had() -> None:
    poison = Poison()
    for _ in range(3):
        poison.died(A, "p1", 0.0)
    assert poison.processes(A, 0.0) == {"p1"}
    assert poison.refused_s(A, 0.0) == 0


def test_what_was_answered_is_forgotten_unless_it_is_refused() -> None:
    poison = Poison()
    poison.died(A, "p1", 0.0)
    poison.spared(A)
    poison.spared(B)
    assert not poison
    for process in ("p1", "p2"):
        poison.died(A, process, 0.0)
    poison.spared(A)
    assert poison.refused_s(A, 1.0) > 0


def test_so_many_are_known_and_the_one_with_the_oldest_death_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poison_module, "_MAX_SUSPECTS", 2)
    poison = Poison()
    poison.died(A, "p1", 0.0)
    poison.died(B, "p1", 0.0)
    poison.died(A, "p2", 1.0)
    poison.died(fingerprint_of("key", b"c"), "p1", 2.0)
    assert poison.processes(B, 2.0) == set()
    assert poison.refused_s(A, 2.0) > 0
