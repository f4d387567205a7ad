"""How long KV takes between two processes: what is measured of which connector, whatever breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrelay.profiling import transfer_times as measured
from kvrelay.profiling.transfer_pair import Part, Took
from kvrelay.wire.errors import TransferError

OF = cast(
    measured.BlocksMoved,
    SimpleNamespace(devices=("cuda:0", "cuda:1"), block_bytes=1024, block_size=16),
)


class FakePair:
    """Takes a millisecond for each block; does what `broken` says of a connector."""

    def __init__(self, broken: dict[str, str]) -> None:
        self._broken = broken
        self._kind = ""
        self.num_blocks = [40, 30]

    def open(self, kind: str, block_bytes: int) -> None:
        self._kind = kind
        self._fail("open")

    def hand_over(self, parts: Sequence[Part], lead_s: float) -> Took:
        self._fail("hand_over")
        (part,) = parts
        if len(part.local) > 4:
            self._fail("long ones")
        assert len(part.remote) == len(part.local)
        assert 0 not in (*part.remote, *part.local)
        return Took(len(part.local) / 1e3, 0.0, 0.0)

    def _fail(self, what: str) -> None:
        if self._broken.get(self._kind) == what:
            raise TransferError("it broke")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the processes are opened with, and which connectors break."""
    about: dict[str, Any] = {"broken": {}, "pairs": 0, "starts": True}

    @contextlib.contextmanager
    def open_pair(
        devices: Sequence[str], pool_bytes: int, unit_bytes: int, until: float
    ) -> Iterator[FakePair]:
        about["pairs"] += 1
        if not about["starts"]:
            raise TransferError("no memory")
        yield FakePair(about["broken"])

    monkeypatch.setattr(measured, "open_pair", open_pair)
    return about


def test_all_connectors_are_measured_by_one_pair_of_processes(opened: dict[str, Any]) -> None:
    told: list[str] = []
    times = measured.transfer_times(OF, [1, 4, 16], "auto", 60.0, told.append)
    assert times == {kind: {1: 1.0, 4: 4.0, 16: 16.0} for kind in ("direct", "nixl", "nccl")}
    assert (told, opened["pairs"]) == ([], 1)


def test_one_that_breaks_takes_no_other_with_it(opened: dict[str, Any]) -> None:
    told: list[str] = []
    opened["broken"] = {"direct": "open", "nixl": "hand_over"}
    times = measured.transfer_times(OF, [1, 4], "auto", 60.0, told.append)
    assert list(times) == ["nccl"]
    assert told == ["direct: it broke", "nixl: it broke"]
    assert opened["pairs"] == 3


def test_one_that_breaks_in_its_middle_has_no_times(opened: dict[str, Any]) -> None:
    told: list[str] = []
    opened["broken"] = {"nixl": "long ones"}
    assert list(measured.transfer_times(OF, [1, 4, 16], "auto", 60.0, told.append)) == [
        "direct",
        "nccl",
    ]
    assert told == ["nixl: it broke"]


def test_processes_that_do_not_start_end_the_matter(opened: dict[str, Any]) -> None:
    told: list[str] = []
    opened["starts"] = False
    assert measured.transfer_times(OF, [1], "auto", 60.0, told.append) == {}
    assert told == [f"{kind}: no memory" for kind in ("direct", "nixl", "nccl")]


def test_what_has_no_room_is_left_out(opened: dict[str, Any]) -> None:
    assert measured.transfer_times(OF, [1, 4, 30], "nixl", 60.0, print) == {
        "nixl": {1: 1.0, 4: 4.0}
    }


def test_without_time_the_first_connector_has_its_two_ends(opened: dict[str, Any]) -> None:
    told: list[str] = []
    assert measured.transfer_times(OF, [1, 2, 4], "auto", 0.0, told.append) == {
        "direct": {1: 1.0, 4: 4.0}
    }
    assert told == ["nixl: no time was left for it", "nccl: no time was left for it"]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_nccl_needs_a_gpu_for_each_end(opened: dict[str, Any], device: str) -> None:
    told: list[str] = []
    both = cast(measured.BlocksMoved, SimpleNamespace(devices=(device, device), block_bytes=1024))
    assert set(measured.transfer_times(both, [1], "auto", 60.0, told.append)) == {
        "direct",
        "nixl",
    }
    assert "a GPU each" in told[0]
