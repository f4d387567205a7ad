"""Which fetched blocks are compared with their source by checksum, and what comes of it. Pure.

Owns the draw, and what is known of one fetch's drawn blocks: the source's checksums and ours; no
arithmetic on bytes. The draw is a function of lease, block and share, so whoever knows these knows
what was drawn, in whichever order blocks come and however often they are asked for.
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
from typing import Any, Protocol

from kvrelay.kv_transfer.connector import LeaseId, PoolRegion
from kvrelay.wire.errors import ConfigError

__all__ = ["MOST_BLOCKS", "Checks", "ChecksumThread", "Checksums", "drawn", "in_our_order"]

log = logging.getLogger(__name__)

# So many blocks in one question and one launch: the answer has 256 KiB with 128 KV heads.
MOST_BLOCKS = 256
_WRAP = 1 << 64
CHECKSUM_BYTES = 8  # of a KV head's part of a block (kernels/block_checksums.py)


def drawn(lease: LeaseId, blocks: Sequence[int], share: float) -> list[int]:
    """Of these blocks, named by the source's ids, those that are checked: each with the probability
    `share`.
    """
    if share >= 1 or share <= 0:
        return list(blocks) if share >= 1 else []
    # Multiples of a random odd number, modulo 2**64: 0.1 us a block, and neighbours are spread over
    # a lease evenly.
    digest = hashlib.blake2b(f"{lease.epoch}/{lease.request_id}".encode(), digest_size=8).digest()
    seed, limit = int.from_bytes(digest, "little") | 1, int(share * _WRAP)
    return [block for block in blocks if (block + 1) * seed % _WRAP < limit]


def in_our_order(checksums: bytes, order: Sequence[int]) -> bytes:
    """A source's checksums of a block as ours lie: of each KV head of each of our ranks.

    `order`: where each of these lies in the source's. Empty, which equals none of ours, if their
    number is wrong.
    """
    size = CHECKSUM_BYTES
    if len(checksums) < (max(order) + 1) * size:
        return b""
    return b"".join(checksums[place * size : (place + 1) * size] for place in order)


@dataclass(slots=True)
class Checks:
    """Of one fetch. A block has a place: its index among those that are fetched."""

    places: dict[int, int] = field(default_factory=dict)
    """Of drawn blocks that the source can vouch for, by its own id."""
    unchecked: set[int] = field(default_factory=set)
    """Places of drawn blocks for which it cannot."""
    _theirs: dict[int, bytes] = field(default_factory=dict)
    _ours: dict[int, bytes] = field(default_factory=dict)
    _asked: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Places of which we have asked for our own checksums, by the number of the question."""

    @property
    def unanswered(self) -> list[int]:
        """Blocks, by the source's ids, of which it has not sent the checksum."""
        return [block for block, place in self.places.items() if place not in self._theirs]

    @property
    def settled(self) -> bool:
        """Whether both checksums are known of each drawn block."""
        return len(self._theirs) == len(self._ours) == len(self.places)

    @property
    def wrong(self) -> list[int]:
        """Places of blocks that are not what the source has."""
        return sorted(
            place for place, ours in self._ours.items() if self._theirs.get(place, ours) != ours
        )

    @property
    def sound(self) -> float:
        """How many first blocks a fetch that fails may keep, as far as is known here; none if any
        block is wrong.
        """
        if self.wrong:
            return 0
        open_places = (
            at for at in self.places.values() if at not in self._theirs or at not in self._ours
        )
        return min(open_places, default=float("inf"))

    def between(self, first: int, end: int) -> list[int]:
        """Places of blocks to compare from `first` on and before `end`."""
        return sorted(place for place in self.places.values() if first <= place < end)

    def ask(self, number: int, places: Sequence[int]) -> None:
        """The blocks at these places are in: our checksums of them are asked for under this number."""
        self._asked[number] = tuple(places)

    def hear_theirs(self, checksums: Mapping[int, bytes]) -> None:
        """From the source, by its ids. What was not asked for, or comes again, is ignored."""
        for block, checksum in checksums.items():
            if block in self.places:
                self._theirs.setdefault(self.places[block], checksum)

    def hear_ours(self, number: int, checksums: Sequence[bytes]) -> bool:
        """The answer to a question of ours; False if it is none of ours."""
        places = self._asked.pop(number, None)
        if places is None:
            return False
        self._ours.update(zip(places, checksums, strict=True))
        return True


Done = Callable[[list[bytes]], None]


class _Side(Protocol):
    """What differs between a CPU and a GPU."""

    def sums(self, blocks: Sequence[int]) -> list[bytes]:
        """Of each block the checksums of all KV heads, 8 bytes each, little-endian."""


class _HostSide:
    def __init__(self, region: PoolRegion, kv_heads: int) -> None:
        import numpy as np

        from kvrelay.kernels import block_checksums

        slice_bytes = _slice_bytes(region, kv_heads, block_checksums.WORD_BYTES)
        whole = (ctypes.c_uint8 * (region.num_blocks * region.block_bytes)).from_address(
            region.address
        )
        self._pool = (
            np.ctypeslib.as_array(whole).view(np.int64).reshape(region.num_blocks, kv_heads, -1)
        )
        self._keys = block_checksums.keys(slice_bytes // block_checksums.WORD_BYTES)
        self._sums = block_checksums.block_checksums

    def sums(self, blocks: Sequence[int]) -> list[bytes]:
        return _packed(self._sums(self._pool, blocks, self._keys))


class _GpuSide:
    """The thread's current stream is ours, of the lowest priority: waiting programs of steps go
    first.
    """

    def __init__(self, region: PoolRegion, kv_heads: int) -> None:
        import torch

        from kvrelay.kernels import cuda_runtime, gpu_checksums

        self._address, self._kv_heads = region.address, kv_heads
        self._slice_bytes = _slice_bytes(region, kv_heads, gpu_checksums.VECTOR_BYTES)
        self._copy, self._kernel = cuda_runtime.copy, gpu_checksums.gpu_block_checksums
        device = torch.device(region.device)
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        # Pinned memory made for each question would cost half a millisecond.
        self._host_ids = torch.empty(MOST_BLOCKS, dtype=torch.int32, pin_memory=True)
        self._ids = torch.empty(MOST_BLOCKS, dtype=torch.int32, device=device)
        self._host_sums = torch.empty(MOST_BLOCKS, kv_heads, dtype=torch.int64, pin_memory=True)
        self.sums([0])  # compiles

    def sums(self, blocks: Sequence[int]) -> list[bytes]:
        count, stream = len(blocks), self._stream.cuda_stream
        self._host_ids.numpy()[:count] = blocks
        self._copy(self._ids.data_ptr(), self._host_ids.data_ptr(), 4 * count, stream)
        found = self._kernel(
            self._address, self._ids[:count], kv_heads=self._kv_heads, slice_bytes=self._slice_bytes
        )
        self._copy(self._host_sums.data_ptr(), found.data_ptr(), 8 * count * self._kv_heads, stream)
        self._stream.synchronize()
        return _packed(self._host_sums[:count].numpy())


class ChecksumThread:
    """Over this process's own pool. `ask` may be called from any thread and returns at once."""

    def __init__(
        self, region: PoolRegion, kv_heads: int, broke: Callable[[Exception], None]
    ) -> None:
        """`kv_heads`: of this rank. `broke` is called from the thread if it ends by an error of
        ours.
        """
        self._region, self._kv_heads, self._broke = region, kv_heads, broke
        self._asked: queue.Queue[tuple[Sequence[int], Done] | None] = queue.Queue()
        self._opened: queue.Queue[Exception | None] = queue.Queue()
        self._begun_at: float | None = None  # of the question that is being answered
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-checksums", daemon=True)

    def open(self) -> None:
        """Start, and on a GPU compile. Raises ConfigError."""
        self._thread.start()
        if (error := self._opened.get()) is not None:
            raise error

    def ask(self, blocks: Sequence[int], done: Done) -> None:
        """`done` is called from our thread, with the checksums of each of these blocks, at most
        `MOST_BLOCKS`.
        """
        self._asked.put((blocks, done))

    def silent_s(self) -> float:
        """Seconds since it was seen at work; 0 while it is asked nothing."""
        begun_at = self._begun_at
        return 0.0 if begun_at is None else time.monotonic() - begun_at

    def close(self, timeout_s: float) -> None:
        """End the thread; what it was asked and has not begun is never answered."""
        self._closing = True
        self._asked.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            gpu = self._region.device != "cpu"
            side: _Side = (_GpuSide if gpu else _HostSide)(self._region, self._kv_heads)
        except Exception as error:  # noqa: BLE001 - raised again by open(), in the thread that asked
            self._opened.put(error)
            return
        self._opened.put(None)
        try:
            while (asked := self._asked.get()) is not None and not self._closing:
                blocks, done = asked
                self._begun_at = time.monotonic()
                done(side.sums(blocks))
                self._begun_at = None
        except Exception as error:
            # The edge of this thread: the step loop must hear of it.
            log.exception("the thread of KV checksums ended")
            self._broke(error)


@dataclass(slots=True)
class _Question:
    done: Done
    missing: set[int]
    parts: dict[int, list[bytes]] = field(default_factory=dict)


class Checksums:
    """Of all ranks of an engine. Methods may be called from any thread and return at once, but for
    `close`.
    """

    def __init__(
        self, own: ChecksumThread, ranks: int, tell: Callable[[int, int, Sequence[int]], None]
    ) -> None:
        """`tell` hands a question (rank, its number, blocks) to another rank, whose answer comes to
        `heard`.
        """
        self._own, self._ranks, self._tell = own, ranks, tell
        self._lock = threading.Lock()
        self._questions: dict[int, _Question] = {}
        self._numbers = 0

    def ask(self, blocks: Sequence[int], done: Done) -> None:
        """`done` is called from any thread: of each block its checksums, those of rank 0's KV heads
        first.

        At most `MOST_BLOCKS` blocks.
        """
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._questions[number] = _Question(done, set(range(self._ranks)))
        for rank in range(1, self._ranks):
            self._tell(rank, number, blocks)
        self._own.ask(blocks, lambda sums: self.heard(0, number, sums))

    def heard(self, rank: int, number: int, sums: list[bytes]) -> None:
        """A rank's answer."""
        with self._lock:
            question = self._questions[number]
            question.parts[rank] = sums
            question.missing.discard(rank)
            if question.missing:
                return
            del self._questions[number]
        parts = [question.parts[index] for index in range(self._ranks)]
        question.done([b"".join(of_block) for of_block in zip(*parts, strict=True)])

    def silent_s(self) -> float:
        """Seconds since our thread was seen at work."""
        return self._own.silent_s()

    def close(self, timeout_s: float) -> None:
        """End our thread."""
        self._own.close(timeout_s)


def _slice_bytes(region: PoolRegion, kv_heads: int, unit: int) -> int:
    """Bytes of a KV head's part of a block. Raises ConfigError."""
    slice_bytes, rest = divmod(region.block_bytes, kv_heads)
    if rest or slice_bytes % unit:
        raise ConfigError(
            f"kv_checksums reads {unit} bytes of a KV head at a time, and a block of "
            f"{region.block_bytes} bytes has "
            f"{kv_heads} heads; leave kv_checksums out"
        )
    return slice_bytes


def _packed(sums: Any) -> list[bytes]:
    """`sums`: numpy's, int64 [blocks, kv_heads]."""
    return [row.astype("<i8").tobytes() for row in sums]
