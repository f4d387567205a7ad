"""Checksums of blocks: GPU and CPU against plain integers, and what they notice."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kernels.block_checksums import STRIDE, block_checksums

MASK = (1 << 64) - 1


def plain(words: list[int]) -> int:
    """The definition, in Python's own integers; `words` signed."""
    total = 0
    for place, word in enumerate(words):
        multiple = signed((place + 1) * STRIDE)
        total += (word + (word >> 32)) * ((multiple ^ (multiple >> 32)) | 1)
    return signed(total)


def signed(number: int) -> int:
    number &= MASK
    return number - (1 << 64) if number >> 63 else number


def pool_of(num_blocks: int, kv_heads: int, words: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, kv_heads, words * 8)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(torch.int64)


def on_cpu(pool: torch.Tensor, blocks: Iterable[int]) -> list[list[int]]:
    """Checksums by block and head of a pool [num_blocks, kv_heads, words]."""
    sums = [block_checksums(pool[block].numpy(), pool.shape[1]) for block in blocks]
    return [np.frombuffer(each, np.int64).tolist() for each in sums]


@pytest.mark.parametrize("words", [1, 2, 100, (16 << 10) + 3])
def test_a_cpu_finds_what_plain_integers_say(words: int) -> None:
    pool = pool_of(4, 2, words)
    pool[1, 0, 0], pool[1, 1, -1] = -1, -(1 << 63)
    assert on_cpu(pool, [3, 1]) == [
        [plain(pool[block, head].tolist()) for head in range(2)] for block in (3, 1)
    ]


@pytest.mark.parametrize(
    "slice_bytes", [16, 4096, (16 << 10) + 16, (128 << 10) - 16, (128 << 10) + 32]
)
@pytest.mark.parametrize(("kv_heads", "blocks"), [(1, [2]), (3, [4, 0, 3])])
def test_triton_equals_the_cpu(
    slice_bytes: int,
    kv_heads: int,
    blocks: list[int],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu_checksums = pytest.importorskip("kvrelay.kernels.gpu_checksums", exc_type=ImportError)

    pool = pool_of(5, kv_heads, slice_bytes // 8, seed=slice_bytes)
    there, ids = pool.to(device), torch.tensor(blocks, dtype=torch.int32, device=device)
    monkeypatch.setattr(gpu_checksums, "PROGRAMS", 2)
    found = gpu_checksums.gpu_block_checksums(
        there.data_ptr(), ids, kv_heads=kv_heads, slice_bytes=slice_bytes
    )
    assert found.tolist() == on_cpu(pool, blocks)


@pytest.mark.gpu
def test_pools_of_more_than_4_gib(device: torch.device) -> None:
    """Offsets pass int32 at 2 GiB and uint32 at 4 GiB."""
    from kvrelay.kernels.gpu_checksums import gpu_block_checksums

    slice_bytes, kv_heads, blocks = 1 << 20, 8, [0, 255, 256, 511, 512, 639]
    pool = torch.zeros(640, kv_heads, slice_bytes // 8, dtype=torch.int64, device=device)
    few = pool_of(len(blocks), kv_heads, slice_bytes // 8)
    pool[torch.tensor(blocks, device=device)] = few.to(device)
    ids = torch.tensor(blocks, dtype=torch.int32, device=device)
    found = gpu_block_checksums(pool.data_ptr(), ids, kv_heads=kv_heads, slice_bytes=slice_bytes)
    assert found.tolist() == on_cpu(few, range(len(blocks)))


def one(words: list[int]) -> int:
    block = np.array(words, dtype=np.int64).tobytes()
    return int.from_bytes(block_checksums(block, 1), sys.byteorder, signed=True)


WORD = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.lists(WORD, min_size=2, max_size=40), st.data())
def test_flipped_bits_and_words_in_the_wrong_place_are_noticed(
    words: list[int], data: st.DataObject
) -> None:
    before, changed = one(words), list(words)
    places = st.integers(0, len(words) - 1)
    flips = st.sets(st.tuples(places, st.integers(0, 63)), min_size=1, max_size=4)
    for place, bit in data.draw(flips):
        changed[place] = signed(changed[place] ^ (1 << bit))
    assert one(changed) != before
    first, second = data.draw(places), data.draw(places)
    swapped = list(words)
    swapped[first], swapped[second] = words[second], words[first]
    for moved in (swapped, [*words[1:], words[0]]):
        assert (one(moved) == before) == (moved == words)
