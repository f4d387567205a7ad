"""Checksums of KV blocks: which fetched blocks are compared with their source, and by what.

Both ends of a transfer ask `Checksums`: a source for blocks that are offered, a reader for blocks
that have landed. What it reads was written before it was asked. Whether blocks stay as they are is
for the lease to say: an answer may be about blocks that have changed since.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.kv_transfer.connector import LeaseId, PoolRegion
from kvrelay.wire.errors import ConfigError

__all__ = ["MOST_BLOCKS", "Checks", "Checksums", "drawn", "in_our_order"]

log = logging.getLogger(__name__)

# So many blocks in one question and one launch: the answer has 256 KiB with 128 KV heads.
MOST_BLOCKS = 256
_WRAP = 1 << 64
_CHECKSUM_BYTES = 8  # of a KV head's part of a block (kernels/block_checksums.py)

Done = Callable[[list[bytes]], None]


def drawn(lease: LeaseId, blocks: Sequence[int], share: float) -> list[int]:
    """Return those of the source's blocks that are checked, each with the probability `share`.

    A function of lease, block and share alone, in whichever order blocks come.
    """
    if share >= 1 or share <= 0:
        return list(blocks) if share >= 1 else []
    # Multiples of a random odd number, modulo 2**64: 0.1 us a block, and neighbours are spread over
    # a lease evenly.
    digest = hashlib.blake2b(f"{lease.epoch}/{lease.request_id}".encode(), digest_size=8).digest()
    seed, limit = int.from_bytes(digest, "little") | 1, int(share * _WRAP)
    return [block for block in blocks if (block + 1) * seed % _WRAP < limit]


def in_our_order(checksums: bytes, order: Sequence[int]) -> bytes:
    """Return a source's checksums of a block by the KV heads of our ranks; empty if any lacks.

    `order`: where each head of each of our ranks lies in the source's.
    """
    size = _CHECKSUM_BYTES
    if len(checksums) < (max(order) + 1) * size:
        return b""
    return b"".join(checksums[place * size : (place + 1) * size] for place in order)


@dataclass(slots=True)
class Checks:
    """A fetch's comparison. A block's place is its index among those that are fetched."""

    places: dict[int, int] = field(default_factory=dict)
    """Of drawn blocks whose source gives checksums, by its own ids."""
    unchecked: set[int] = field(default_factory=set)
    """Places of drawn blocks whose source gives none."""
    _theirs: dict[int, bytes] = field(default_factory=dict)
    _ours: dict[int, bytes] = field(default_factory=dict)
    _asked: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def unanswered(self) -> list[int]:
        """Blocks, by the source's ids, whose checksum it has not sent."""
        return [block for block, place in self.places.items() if place not in self._theirs]

    @property
    def settled(self) -> bool:
        """Return whether both checksums of each drawn block are known."""
        return len(self._theirs) == len(self._ours) == len(self.places)

    @property
    def wrong(self) -> list[int]:
        """Places of blocks that are not what the source has."""
        ours = self._ours.items()
        return sorted(place for place, own in ours if self._theirs.get(place, own) != own)

    @property
    def sound(self) -> float:
        """Number of first blocks that a failed fetch may keep; none if any block is wrong."""
        known = self._theirs.keys() & self._ours.keys()
        unknown = (place for place in self.places.values() if place not in known)
        return 0 if self.wrong else min(unknown, default=float("inf"))

    def between(self, first: int, end: int) -> list[int]:
        """Return the places to compare from `first` on and before `end`."""
        return sorted(place for place in self.places.values() if first <= place < end)

    def ask(self, number: int, places: Sequence[int]) -> None:
        """Note that our checksums of these blocks are asked for under this number."""
        self._asked[number] = tuple(places)

    def add_theirs(self, checksums: Mapping[int, bytes]) -> None:
        """Add the source's, by its ids. What was not asked for, or comes again, is ignored."""
        for block, checksum in checksums.items():
            if block in self.places:
                self._theirs.setdefault(self.places[block], checksum)

    def add_ours(self, number: int, checksums: Sequence[bytes]) -> bool:
        """Add the answer to a question of ours; False if it is none."""
        places = self._asked.pop(number, None)
        if places is None:
            return False
        self._ours.update(zip(places, checksums, strict=True))
        return True


@dataclass(slots=True)
class _Question:
    done: Done
    parts: dict[int, list[bytes]] = field(default_factory=dict)  # by rank


class Checksums:
    """A thread that sums blocks of this process's pool, and joins what other ranks answer."""

    def __init__(
        self,
        region: PoolRegion,
        kv_heads: int,
        on_error: Callable[[Exception], None],
        ranks: int = 1,
        ask_rank: Callable[[int, int, Sequence[int]], None] = lambda *_: None,
    ) -> None:
        """`kv_heads`: of this rank. `ask_rank` hands (rank, number, blocks) to another rank.

        `on_error` is called if the thread ends. On a GPU this compiles. Raises ConfigError.
        """
        self._sums = (_host_sums if region.device == "cpu" else _gpu_sums)(region, kv_heads)
        self._on_error, self._ranks, self._ask_rank = on_error, ranks, ask_rank
        self._asked: queue.Queue[tuple[Sequence[int], Done] | None] = queue.Queue()
        self._questions: dict[int, _Question] = {}
        self._numbers = 0
        self._lock = threading.Lock()  # of the questions
        self._begun_at: float | None = None  # of the question that is being answered
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-checksums", daemon=True)
        self._thread.start()

    def ask(self, blocks: Sequence[int], done: Done) -> None:
        """Call `done` later, from any thread, with the checksums of each of these blocks.

        Rank 0's KV heads come first. At most `MOST_BLOCKS` blocks.
        """
        if self._ranks == 1:
            self._asked.put((blocks, done))
            return
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._questions[number] = _Question(done)
        for rank in range(1, self._ranks):
            self._ask_rank(rank, number, blocks)
        self._asked.put((blocks, lambda sums: self.answer(0, number, sums)))

    def answer(self, rank: int, number: int, sums: list[bytes]) -> None:
        """Add a rank's answer to a question."""
        with self._lock:
            question = self._questions[number]
            question.parts[rank] = sums
            if len(question.parts) < self._ranks:
                return
            del self._questions[number]
        parts = [question.parts[index] for index in range(self._ranks)]
        question.done([b"".join(of_block) for of_block in zip(*parts, strict=True)])

    def silent_s(self) -> float:
        """Return the seconds since the thread was seen at work; 0 while it is asked nothing."""
        begun_at = self._begun_at
        return 0.0 if begun_at is None else time.monotonic() - begun_at

    def close(self, timeout_s: float) -> None:
        """End the thread; what it was asked and has not begun is never answered."""
        self._closing = True
        self._asked.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (asked := self._asked.get()) is not None and not self._closing:
                blocks, done = asked
                self._begun_at = time.monotonic()
                done(self._sums(blocks))
                self._begun_at = None
        except Exception as error:
            # The edge of this thread: the step loop must hear of it.
            log.exception("the thread of KV checksums ended")
            self._on_error(error)


def _host_sums(region: PoolRegion, kv_heads: int) -> Callable[[Sequence[int]], list[bytes]]:
    import numpy as np

    from kvrelay.kernels.block_checksums import WORD_BYTES, block_checksums, keys

    places = keys(_slice_bytes(region, kv_heads, WORD_BYTES) // WORD_BYTES)
    memory = (ctypes.c_uint8 * (region.num_blocks * region.block_bytes)).from_address(
        region.address
    )
    pool = np.ctypeslib.as_array(memory).view(np.int64).reshape(region.num_blocks, kv_heads, -1)
    return lambda blocks: _packed(block_checksums(pool, blocks, places))


def _gpu_sums(region: PoolRegion, kv_heads: int) -> Callable[[Sequence[int]], list[bytes]]:
    import torch

    from kvrelay.kernels import cuda_runtime
    from kvrelay.kernels.gpu_checksums import VECTOR_BYTES, gpu_block_checksums

    slice_bytes = _slice_bytes(region, kv_heads, VECTOR_BYTES)
    device = torch.device(region.device)
    # A stream of the lowest priority: waiting programs of steps go first.
    stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
    # Pinned memory made for each question would cost half a millisecond.
    host_ids = torch.empty(MOST_BLOCKS, dtype=torch.int32, pin_memory=True)
    ids = torch.empty(MOST_BLOCKS, dtype=torch.int32, device=device)
    host_sums = torch.empty(MOST_BLOCKS, kv_heads, dtype=torch.int64, pin_memory=True)

    def sums(blocks: Sequence[int]) -> list[bytes]:
        count, copy = len(blocks), cuda_runtime.copy
        with torch.cuda.device(device), torch.cuda.stream(stream):
            host_ids.numpy()[:count] = blocks
            copy(ids.data_ptr(), host_ids.data_ptr(), 4 * count, stream.cuda_stream)
            found = gpu_block_checksums(
                region.address, ids[:count], kv_heads=kv_heads, slice_bytes=slice_bytes
            )
            size = _CHECKSUM_BYTES * count * kv_heads
            copy(host_sums.data_ptr(), found.data_ptr(), size, stream.cuda_stream)
            stream.synchronize()
        return _packed(host_sums[:count].numpy())

    sums([0])  # compiles
    return sums


def _slice_bytes(region: PoolRegion, kv_heads: int, unit: int) -> int:
    slice_bytes, rest = divmod(region.block_bytes, kv_heads)
    if rest or slice_bytes % unit:
        raise ConfigError(
            f"kv_checksums reads {unit} bytes of a KV head at a time, and a block of "
            f"{region.block_bytes} bytes has {kv_heads} heads; leave kv_checksums out"
        )
    return slice_bytes


def _packed(sums: Any) -> list[bytes]:
    return [row.astype("<i8").tobytes() for row in sums]
