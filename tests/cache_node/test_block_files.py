"""Files of KV blocks: what is read back is what was written, or nothing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvrelay.cache_node.store import PAGE, BlockFiles, Damaged
from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer.checksums import sums_of
from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.wire.errors import ConfigError

pytest.importorskip("nixl")
BLOCK_BYTES, SLOTS, HEADS = 512, 64, 2
IDENTITY = b"i" * 16


class Folder:
    """A folder of files, and a pool of random blocks."""

    def __init__(self, path: Path, identity: bytes = IDENTITY) -> None:
        self.memory = zeros(SLOTS * BLOCK_BYTES, torch.device("cpu"))
        self.memory.random_(0, 256, generator=torch.Generator().manual_seed(1))
        region = PoolRegion(self.memory.data_ptr(), SLOTS, BLOCK_BYTES, "cpu")
        self.sums = sums_of(region, HEADS)
        self.files = BlockFiles(path, identity, region, self.sums)
        self.checksums = self.sums(range(SLOTS))

    def block(self, slot: int) -> bytes:
        part = self.memory[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]
        return bytes(part.numpy().tobytes())

    def write(self, slot: int) -> Path:
        assert self.files.write(name(slot), slot, self.checksums[slot])
        return self.files._path(name(slot))


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_blocks_come_back_into_any_slot_also_for_another_process(
    folder: Folder, tmp_path: Path
) -> None:
    wanted = [folder.block(slot) for slot in range(8)]
    for slot in range(8):
        os.utime(folder.write(slot), (slot, slot))
    assert folder.files._folder.stat().st_mode & 0o777 == 0o700  # KV tells what was asked
    assert folder.files._path(name(1)).stat().st_mode & 0o777 == 0o600
    again = Folder(tmp_path)
    again.memory.zero_()
    assert again.files.names() == [name(slot) for slot in range(8)]
    for slot in range(8):
        assert again.files.read(name(slot), 50 - slot) == folder.checksums[slot]
        assert again.block(50 - slot) == wanted[slot]
    again.files.clear()
    assert again.files.names() == []
    assert again.files.read(name(1), 1) is None


def test_kv_of_another_identity_is_not_found(folder: Folder, tmp_path: Path) -> None:
    path = folder.write(1)
    other = Folder(tmp_path, b"j" * 16)
    assert other.files.names() == []
    # Neither if somebody moves its file there.
    path.rename(other.files._path(name(1)))
    with pytest.raises(Damaged):
        other.files.read(name(1), 1)


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


def test_none_of_ten_thousand_damaged_files_is_served(folder: Folder) -> None:
    rng = random.Random(2)
    paths = [folder.write(slot) for slot in range(10)]
    sound = [path.read_bytes() for path in paths]
    kinds = damages(rng)
    for count in range(10_000):
        at = count % 10
        content = bytearray(sound[at])
        kinds[count // 10 % len(kinds)](content)
        assert content != sound[at]
        paths[at].write_bytes(content)
        with pytest.raises(Damaged):
            folder.files.read(name(at), 60)
        assert not paths[at].exists()
    paths[3].write_bytes(sound[3])
    assert folder.files.read(name(3), 60) == folder.checksums[3]


def test_what_a_writer_left_half_is_no_block_and_goes_when_it_is_old(folder: Folder) -> None:
    path = folder.write(1)
    old, new = (path.with_name(f"{path.name}-{end}.part") for end in ("old", "new"))
    for part in (old, new):
        part.write_bytes(b"half")
    long_ago = time.time() - 1000
    os.utime(old, (long_ago, long_ago))
    assert folder.files.names() == [name(1)]
    assert (old.exists(), new.exists()) == (False, True)


def test_a_disk_that_takes_nothing_loses_the_block_alone(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder.files, "_move", full)
        assert not folder.files.write(name(1), 1, folder.checksums[1])
    assert list(folder.files._folder.iterdir()) == []
    folder.write(1)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_store .*file cannot be opened"):
        Folder(tmp_path / "file")
