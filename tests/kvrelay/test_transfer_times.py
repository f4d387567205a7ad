"""How long KV takes between two processes: what is measured of which connector, whatever breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrelay.profiling import transfer_times as measured
from kvrelay.wire.errors import TransferError


class FakePair:
    """Takes a millisecond for each block; does what `broken` says of a connector."""

    def __init__(self, broken: dict[str, str]) -> None:
        self._broken = broken
        self._kind = ""
        self.num_blocks = [40, 30]

    def open(self, kind: str, block_bytes: int) -> None:
        self._kind = kind
        self._fail("open")

    def hand_over(self, remote: list[int], local: list[int]) -> tuple[float, int]:
        if len(local) > 4:
            self._fail("long ones")
        assert len(remote) == len(local)
        assert 0 not in (*remote, *local)
        return len(local) / 1e3, 0

    def _fail(self, what: str) -> None:
        if self._broken.get(self._kind) == what:
            raise TransferError("it broke")


def times(
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    connector: str = "auto",
    seconds: float = 60.0,
    devices: tuple[str, str] = ("cuda:0", "cuda:1"),
    broken: dict[str, str] | None = None,
) -> tuple[dict[str, list[int]], list[str]]:
    @contextlib.contextmanager
    def open_pair(*_: object) -> Iterator[FakePair]:
        yield FakePair(broken or {})

    monkeypatch.setattr(measured, "open_pair", open_pair)
    told: list[str] = []
    of: Any = cast(
        measured.BlocksMoved, SimpleNamespace(devices=devices, block_bytes=1024, block_size=16)
    )
    found = measured.transfer_times(of, sizes, connector, seconds, told.append)
    assert all(ms == blocks for each in found.values() for blocks, ms in each.items())
    return {kind: list(each) for kind, each in found.items()}, told


def test_all_connectors_are_measured_and_what_has_no_room_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {kind: [1, 4, 16] for kind in ("direct", "nixl", "nccl")}
    assert times(monkeypatch, [1, 4, 16]) == (found, [])
    assert times(monkeypatch, [1, 4, 30], "nixl") == ({"nixl": [1, 4]}, [])


def test_one_that_breaks_has_no_times_and_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = {"direct": "open", "nixl": "long ones"}
    told = ["direct: it broke", "nixl: it broke"]
    assert times(monkeypatch, [1, 4, 16], broken=broken) == ({"nccl": [1, 4, 16]}, told)


def test_without_time_the_first_connector_has_its_two_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["nixl: no time was left for it", "nccl: no time was left for it"]
    assert times(monkeypatch, [1, 2, 4], seconds=0.0) == ({"direct": [1, 4]}, told)


def test_nccl_needs_a_gpu_for_each_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = times(monkeypatch, [1], devices=("cuda:0", "cuda:0"))
    assert set(found) == {"direct", "nixl"}
    assert "a GPU each" in told[0]
