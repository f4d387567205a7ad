"""A store below a table of blocks: full, shared, slow, gone and empty."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path

import pytest
from stores import BLOCK_BYTES, BUCKET, IDENTITY, S3, SLOTS, Store, name, use

from kvrelay.cache_node import store_tier
from kvrelay.cache_node.store import PAGE
from kvrelay.cache_node.store_tier import StoreTier
from kvrelay.cache_node.table import CacheTable
from kvrelay.wire.kv_events import ANY

pytest.importorskip("nixl")
FILE_BYTES = PAGE + BLOCK_BYTES


class Tier(Store):
    """A store tier with blocks of its table, each of one byte value."""

    def __init__(self, place: str, limit: float = inf, identity: bytes = IDENTITY) -> None:
        super().__init__(place, identity)
        self.table = CacheTable(SLOTS - 1)
        self.tier = StoreTier(self.table, self.blocks, limit, 0.0, lambda: None)
        self.stats = self.tier.stats

    def until(self, done: Callable[[], object], within_s: float = 120.0) -> None:
        end = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < end
            self.tier.turn(time.monotonic())
            time.sleep(0.001)

    def fill(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            slots = self.table.room(1) or []
            self.memory[slots[0]] = number + 1
            self.table.landed([name(number)], slots, self.sums(slots), self.table.clears)
            self.tier.to_write.append(name(number))

    def store(self, numbers: Sequence[int]) -> None:
        wanted = self.stats.stored + len(numbers)
        self.fill(numbers)
        self.until(lambda: self.stats.stored == wanted)

    def read(self, numbers: Sequence[int]) -> int:
        """Empty the table, and return how many of these come from the store; each is right."""
        self.table.pool.reset()
        ended: list[int] = []
        self.tier.read([name(number) for number in numbers], lambda: ended.append(1))
        self.until(lambda: ended)
        slots = self.table.pool.lookup([name(number) for number in numbers])
        for number, slot in zip(numbers, slots, strict=False):
            assert (self.memory[slot] == number + 1).all()
        return len(slots)


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def test_the_limit_is_the_folders_whoever_has_written(place: str) -> None:
    other_model = Tier(place, 100 * FILE_BYTES, b"j" * 16)
    other_model.store(range(6))
    one = Tier(place, 16 * FILE_BYTES)
    one.until(lambda: one.stats.blocks == 6)
    one.store(range(10))
    assert (one.stats.blocks, one.stats.evicted) == (16, 0)
    two = Tier(place, 16 * FILE_BYTES)
    two.until(lambda: two.stats.blocks == 16)
    assert sorted(two.tier.names()) == [name(number) for number in range(10)]
    # What another model left is the oldest, and makes room first.
    two.store(range(20, 26))
    assert len(list(Path(place).glob("*/*"))) == 16
    assert not any((Path(place) / (b"j" * 16).hex()).iterdir())
    # A node reads what others have written since it looked, and learns what they deleted.
    assert one.read(range(20, 26)) == 6
    one.store(range(30, 36))
    two.store(range(40, 44))
    two.until(lambda: len(list(Path(place).glob("*/*"))) == 16)


def test_the_order_of_use_outlives_a_node(place: str) -> None:
    old = Tier(place, 8 * FILE_BYTES)
    old.store(range(8))
    for number in range(8):
        os.utime(Path(place, (b"i" * 16).hex(), name(number).hex()), (number, number))
    assert old.read([0, 1]) == 2
    new = Tier(place, 6 * FILE_BYTES)  # smaller now
    new.until(lambda: new.stats.evicted == 2)
    new.until(lambda: len(list(Path(place).glob("*/*"))) == 6)
    assert new.read([0, 1]) == 2
    assert new.read([2]) == new.read([3]) == 0
    assert set(new.tier.names()) == {name(number) for number in (0, 1, 4, 5, 6, 7)}


def test_a_full_disk_costs_its_blocks_alone_and_is_said_once(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = Tier(place, 100 * FILE_BYTES)
    it.store(range(3))

    move = it.blocks._move

    def full(way: str, places: Sequence[tuple[int, str]]) -> None:
        if way == "WRITE":
            raise OSError(28, "No space left on device")
        move(way, places)

    monkeypatch.setattr(store_tier, "_PAUSE_S", 0.01)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(it.blocks, "_move", full)
        for failed, first in ((4, 10), (8, 20)):
            it.fill(range(first, first + 4))
            it.until(lambda: it.stats.failed == failed)  # noqa: B023
        assert len(list(Path(place).glob("*/*"))) == 3  # no half one
        assert it.read(range(3)) == 3
    assert [each.message for each in caplog.records if "kv_store" in each.message] == [
        f"kv_store {place} fails, times=1: [Errno 28] No space left on device"
    ]
    assert it.table.pool.free == SLOTS - 1
    it.store(range(30, 34))


def test_a_file_that_cannot_be_read_is_a_miss(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Tier(place, 100 * FILE_BYTES)
    it.store(range(4))

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(it.blocks, "_move", broken)
        assert it.read(range(4)) == 0
    assert it.stats.failed == 4
    assert it.table.pool.free == SLOTS - 1


def test_nobody_waits_for_a_disk_that_hangs(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "_PAUSE_S", inf)
    it = Tier(place, 100 * FILE_BYTES)
    it.store(range(4))
    back, move = threading.Event(), it.blocks._move

    def hang(*fields: object) -> None:
        assert back.wait(120)
        move(*fields)  # type: ignore[arg-type]

    monkeypatch.setattr(it.blocks, "_move", hang)
    for names in [name(3)], [name(number) for number in range(4)]:
        it.table.pool.reset()
        it.tier.read(names, lambda: None)
    it.until(lambda: it.table.pool.free == SLOTS - 1 - 5)  # the second one's turn does not come
    for ask in it.tier._asks:
        ask.until = 0.0
    it.until(lambda: it.stats.failed == 5)
    monkeypatch.setattr(store_tier, "DEADLINE_S", inf)
    for _ in range(50):
        assert it.read(range(4)) == 0  # at once
    assert it.table.pool.free == SLOTS - 1 - 5  # the disk may still write there
    back.set()
    it.until(lambda: it.table.pool.free == SLOTS - 1)
    assert len(it.tier.names()) == 4
    it.tier._resume_at = 0.0
    assert it.read(range(4)) == 4


def test_objects_are_found_by_a_node_that_starts_again(s3: S3) -> None:
    place = f"s3://{BUCKET}/kv"
    Tier(place).store(range(40))
    again = Tier(place)
    assert again.tier.names() == [*again.tier.news().stored] == [ANY]
    assert again.read(range(50)) == 40
    assert again.read([50, 1]) == 0
    again.tier.clear()
    assert again.read(range(40)) == 0
    assert again.stats.failed == 0


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that answers nothing."""
    pytest.importorskip("nixl_cu12")
    with socket.create_server(("127.0.0.1", 0)) as server:
        use(monkeypatch, server.getsockname()[1])
        yield


@pytest.mark.usefixtures("silent")
def test_nobody_waits_for_a_bucket_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "_PAUSE_S", inf)
    it = Tier(f"s3://{BUCKET}")
    with monkeypatch.context() as patch:
        patch.setattr(store_tier, "DEADLINE_S", 0.2)
        assert it.read(range(4)) == 0
    monkeypatch.setattr(store_tier, "DEADLINE_S", inf)
    assert [it.read(range(4)) for _ in range(20)] == [0] * 20  # at once
    assert it.stats.failed == 4
    it.until(lambda: it.tier._busy_since == inf, 60)


def test_a_wrong_bucket_is_said_once_with_what_to_check(
    s3: S3, caplog: pytest.LogCaptureFixture
) -> None:
    it = Tier("s3://no-such-bucket/kv")
    with caplog.at_level(logging.WARNING):
        it.fill(range(3))
        it.until(lambda: it.stats.failed == 3)
    (said,) = [each.message for each in caplog.records if "kv_store" in each.message]
    assert said.startswith("kv_store s3://no-such-bucket/kv fails, times=1: NIXL_ERR_BACKEND; NIXL")
    assert "AWS_ENDPOINT_URL" in said
    assert it.read(range(3)) == 0
