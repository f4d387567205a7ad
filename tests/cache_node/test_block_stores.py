"""Files and objects of KV blocks: what is read back is what was written, or nothing."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from stores import BLOCK_BYTES, BUCKET, IDENTITY, S3, SLOTS, Store, name

from kvrelay.cache_node import store
from kvrelay.cache_node.store import PAGE, BlockObjects
from kvrelay.wire.errors import ConfigError

pytest.importorskip("nixl")


class Written(Store):
    """A store that blocks of a pool can be written to by their numbers."""

    def __init__(self, place: str, identity: bytes = IDENTITY) -> None:
        super().__init__(place, identity)
        self.checksums = self.sums(range(SLOTS))

    def block(self, slot: int) -> bytes:
        return self.memory[slot].numpy().tobytes()

    def write(self, slots: Sequence[int]) -> None:
        self.blocks.write([name(slot) for slot in slots], slots, [self.checksums[s] for s in slots])

    def path(self, number: int, identity: bytes = IDENTITY) -> Path:
        return Path(self.blocks.place, identity.hex(), name(number).hex())


def key(number: int, identity: bytes = IDENTITY) -> tuple[bytes, int]:
    return identity + name(number), PAGE + BLOCK_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Written:
    return Written(str(tmp_path / "store"))


@pytest.fixture
def bucket(s3: S3) -> Written:
    return Written(f"s3://{BUCKET}/kv/of/all/")


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_blocks_come_back_into_any_slot_also_for_another_process(
    kind: str, request: pytest.FixtureRequest
) -> None:
    store: Written = request.getfixturevalue(kind)
    names, slots = [name(slot) for slot in range(8)], [50 - slot for slot in range(8)]
    wanted = [store.block(slot) for slot in range(8)]
    assert store.blocks.there(names) == [False] * 8
    store.write(range(8))
    again = Written(store.blocks.place)
    again.memory.zero_()
    assert again.blocks.there([*names, name(99)]) == [*[True] * 8, False]
    assert again.blocks.read(names, slots) == store.checksums[:8]
    assert [again.block(slot) for slot in slots] == wanted
    assert Written(store.blocks.place, b"j" * 16).blocks.there(names) == [False] * 8
    again.blocks.clear()
    assert again.blocks.there(names) == [False] * 8


def test_the_folder_tells_its_keys_the_least_recently_used_first(folder: Written) -> None:
    folder.write(range(4))
    other = Written(folder.blocks.place, b"j" * 16)
    other.write([7])
    long_ago = time.time() - 1000
    for number in range(4):
        os.utime(folder.path(number), (long_ago + number,) * 2)
    assert folder.path(1).parent.stat().st_mode & 0o777 == 0o700  # KV tells what was asked
    assert folder.path(1).stat().st_mode & 0o777 == 0o600
    folder.blocks.read([name(0)], [60])
    Path(folder.blocks.place, 32 * "f").write_text("not a folder that can be read")
    keys = folder.blocks.keys()
    assert keys[:3] == [key(1), key(2), key(3)]
    assert set(keys[3:]) == {key(0), key(7, b"j" * 16)}
    folder.blocks.delete(key(7, b"j" * 16)[0])
    folder.blocks.clear()
    assert folder.blocks.keys() == []


def test_kv_of_another_identity_is_not_read(folder: Written) -> None:
    folder.write([1])
    other = Written(folder.blocks.place, b"j" * 16)
    folder.path(1).rename(folder.path(1, b"j" * 16))  # if somebody moves its file there
    assert other.blocks.read([name(1)], [1]) == [b""]


def damages(rng: random.Random) -> list[Callable[[bytearray], object]]:
    def flip(content: bytearray, start: int, end: int) -> None:
        content[rng.randrange(start, end)] ^= 1 << rng.randrange(8)

    def rest_of_another(content: bytearray) -> None:
        at = PAGE + rng.randrange(BLOCK_BYTES - 1)
        content[at:] = bytes(byte ^ 0xFF for byte in content[at:])

    return [
        lambda content: flip(content, PAGE, PAGE + BLOCK_BYTES),
        lambda content: flip(content, 0, 50),
        lambda content: content.__delitem__(slice(rng.randrange(len(content)), None)),
        rest_of_another,
    ]


def test_none_of_ten_thousand_damaged_files_is_served(folder: Written) -> None:
    rng = random.Random(2)
    folder.write(range(10))
    paths = [folder.path(slot) for slot in range(10)]
    sound = [path.read_bytes() for path in paths]
    kinds = damages(rng)
    for count in range(10_000):
        at = count % 10
        content = bytearray(sound[at])
        kinds[count // 10 % len(kinds)](content)
        assert content != sound[at]
        paths[at].write_bytes(content)
        assert folder.blocks.read([name(at)], [60]) == [b""]
        if not count % 50:  # what comes before it in a transfer is served
            found = folder.blocks.read([name(1), name(2), name(at)], [50, 51, 52])
            assert found == [*folder.checksums[1:3], b""]
        paths[at].write_bytes(sound[at])
    assert folder.blocks.read([name(3)], [60]) == [folder.checksums[3]]


def test_a_damaged_object_is_not_found_until_it_is_written_again(bucket: Written, s3: S3) -> None:
    rng = random.Random(3)
    bucket.write(range(4))
    names = [name(number) for number in range(4)]
    path = f"kv/of/all/{IDENTITY.hex()}/{name(2).hex()}"
    page = bucket.blocks._page(name(2), bucket.checksums[2])
    sound = page.ljust(PAGE, b"\0") + bucket.block(2)
    for count in range(40):
        content = bytearray(sound)
        damages(rng)[count % 4](content)
        s3.put(path, bytes(content) or b"-")
        bucket.blocks.read([*names[:2], name(3)], range(60, 63))  # not what was there before
        assert bucket.blocks.read(names, range(50, 54))[2] == b""
    bucket.blocks.delete(IDENTITY + name(2))
    assert bucket.blocks.there(names) == [True, True, False, True]
    bucket.write([2])
    assert bucket.blocks.there(names) == [True] * 4
    assert bucket.blocks.read(names, range(50, 54)) == bucket.checksums[:4]


def test_what_a_writer_left_half_is_no_block_and_goes_when_it_is_old(folder: Written) -> None:
    folder.write([1])
    path = folder.path(1)
    old, new = (path.with_name(f"{path.name}-{end}.part") for end in ("old", "new"))
    for part in (old, new):
        part.write_bytes(b"half")
    long_ago = time.time() - 1000
    os.utime(old, (long_ago, long_ago))
    assert folder.blocks.keys() == [key(1)]
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(
    ("probe", "found"),
    [
        (store._OPEN_GDS, "not measured, and can"),  # or cannot
        ("raise OSError('no cuFile')", "cannot be opened here (OSError: no cuFile)"),
    ],
)
def test_what_is_found_of_gds_is_said(
    probe: str, found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_OPEN_GDS", probe)
    with caplog.at_level(logging.INFO):
        store.look_for_gds()
    assert found in caplog.text


def test_a_store_that_cannot_be_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_store .*file cannot be opened"):
        Written(str(tmp_path / "file"))
    monkeypatch.setattr(BlockObjects, "_agent_of", BlockObjects.read)
    with pytest.raises(ConfigError, match=r"kv_store s3://.* it needs nixl-cu12, or beside"):
        Written("s3://kvrelay")
