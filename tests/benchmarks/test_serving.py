"""`python -m benchmarks.serving` without a server: what it says in the end."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

import pytest

from benchmarks import serving
from kvrelay.load.measures import Record
from kvrelay.load.sender import Outcome


def record(failure: str = "") -> Record:
    return Record(
        0, 0, 0.0, 0.0, 0.1, 0.2, 16, 0, 2, 2, 2, True, failure=failure, gaps_s=[0.1], counts=[1, 1]
    )


@pytest.mark.parametrize("failure", ["", "status"])
def test_a_failure_behind_the_plus_is_one(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def running(command: str, *flags: str) -> Iterator[tuple[str, int]]:
        yield "http://a:1", 1

    def measure(
        url: str, model: str, vocab: int, rows: list[serving.Row], seed: int, within_s: float
    ) -> list[Outcome]:
        loads = [[record()], [record(), record(failure)]]
        return [Outcome(records, 0.1, []) for records in loads[: len(rows)]]

    monkeypatch.setattr(serving, "running", running)
    monkeypatch.setattr(serving, "measure", measure)
    monkeypatch.setattr(
        serving, "urlopen", lambda url, timeout: io.BytesIO(b'{"data": [{"id": "m"}]}')
    )
    monkeypatch.setattr(sys, "argv", ["serving", "serve", "16:2:1:1+16:2:1:2"])
    assert serving.main() == (1 if failure else 0)
