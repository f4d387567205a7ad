"""Probes of the hand-over: free blocks with a known pattern go to a node.

A probe uses the path of any KV (ticket, lease, fetch, quarantine), so nothing stays taken. There
is one at a time in each direction.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from kvrelay.kv_transfer.connector import Event, Fetched, FetchFailed, Released, Settled
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.paged_engine.engine import Engine, broadcast_aside
from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.paged_engine.sharding import kv_head_range
from kvrelay.wire.engine_messages import (
    PROBE_PREFIX,
    FetchProbe,
    OfferProbe,
    ProbeFetched,
    ProbeOffered,
    ProbeRefused,
)
from kvrelay.wire.transfer import AnswerState, HandoverRequest, KvTransferParams, Ticket

__all__ = ["PatternBlocks", "ProbePattern", "Probes", "host_id", "pattern"]

# The step loop fills and compares them: a CPU does 1 to 2 GB/s.
MAX_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return ""


class PatternBlocks(msgspec.Struct, tag="pattern", frozen=True):
    """A message to all ranks: write their shares of a pattern into blocks, or compare them."""

    seed: int
    blocks: list[int]
    num_kv_heads: int
    compare: bool = False


class ProbePattern:
    """A pattern of seed, block and position in one rank's pool, the same for any sharding of heads.

    Bytes are 0 to 63, finite in every dtype of KV: masked attention multiplies free blocks by zero.
    """

    def __init__(self, pool: KVPool, num_kv_heads: int, rank: int = 0, size: int = 1) -> None:
        head_words = pool.block_bytes // pool.bytes.shape[1] // 4
        self._first_word = kv_head_range(num_kv_heads, rank, size)[0] * head_words
        self._block_words = num_kv_heads * head_words
        # [num_blocks, words of a block]
        self._words = pool.bytes.view(pool.num_blocks, -1).view(torch.int32)

    def fill(self, seed: int, blocks: Sequence[int]) -> None:
        for index, block in enumerate(blocks):
            self._words[block] = self._expected(seed, index)
        if self._words.is_cuda:
            torch.cuda.synchronize(self._words.device)

    def matches(self, seed: int, blocks: Sequence[int]) -> bool:
        return all(
            torch.equal(self._words[block], self._expected(seed, index))
            for index, block in enumerate(blocks)
        )

    def _expected(self, seed: int, index: int) -> torch.Tensor:
        first_word = index * self._block_words + self._first_word
        return pattern(seed, first_word, self._words.shape[1], self._words.device)


def pattern(seed: int, first_word: int, words: int, device: torch.device) -> torch.Tensor:
    """Return the pattern from `first_word` on, int32 [words]."""
    first = (seed + first_word) % (1 << 31)
    # A multiplication that wraps, by 2**32 over the golden ratio as int32; its high bits are mixed.
    mixed = torch.arange(words, dtype=torch.int32, device=device).add_(first).mul_(-1640531535)
    return mixed.bitwise_xor_(mixed >> 15).bitwise_and_(0x3F3F3F3F)


@dataclass(slots=True)
class _Running:
    probe: FetchProbe
    blocks: list[int]
    spare_blocks: int


class Probes:
    def __init__(
        self,
        engine: Engine,
        connector: TransferEngine,
        send: Callable[[ProbeOffered | ProbeFetched | ProbeRefused], None],
        ranks: Ranks,
    ) -> None:
        self._engine, self._connector, self._send, self._ranks = engine, connector, send, ranks
        self._num_kv_heads = engine.model.num_kv_heads
        self._pattern = ProbePattern(engine.pool, self._num_kv_heads, 0, ranks.size)
        self._offered: str | None = None
        self._running: _Running | None = None
        self._host = host_id()

    def offer(self, probe: OfferProbe) -> None:
        if self._offered is not None:
            self._refuse(probe.probe_id, "another probe of this node has not been fetched yet")
            return
        spare = self._spare_blocks()
        blocks = self._take_blocks(probe.probe_id, probe.blocks)
        if blocks is None:
            return
        seed = random.getrandbits(31)
        self._wait_for_device()
        self._tell_ranks(PatternBlocks(seed, blocks, self._num_kv_heads))
        self._pattern.fill(seed, blocks)
        self._ranks.minimum(1)
        self._offered = probe.probe_id
        tokens = len(blocks) * self._engine.pool.block_size
        ticket = self._connector.offer(probe.probe_id, blocks, tokens)
        params = KvTransferParams.of(HandoverRequest(do_remote_prefill=True), AnswerState(), ticket)
        self._send(ProbeOffered(probe.probe_id, params, seed, spare, self._host))

    def fetch(self, probe: FetchProbe) -> None:
        remote = probe.ticket.remote_block_ids
        if not _is_probe(probe.ticket) or len(remote) != 1 or not remote[0]:
            reason = "the ticket is not one that a node has offered as a probe"
            self._refuse(probe.probe_id, reason, busy=False)
            return
        if self._running is not None:
            self._refuse(probe.probe_id, "another probe of this node is not over yet")
            return
        spare = self._spare_blocks()
        blocks = self._take_blocks(probe.probe_id, len(remote[0]))
        if blocks is None:
            return
        self._wait_for_device()
        self._running = _Running(probe, blocks, spare)
        self._connector.watch(probe.probe_id, probe.ticket)
        self._connector.fetch(probe.probe_id, remote[0], blocks)

    def handle(self, event: Event) -> bool:
        """Return whether an event was a probe's."""
        kept, running = self._engine.scheduler.kept, self._running
        if event.request_id == self._offered:
            assert isinstance(event, Released)
            kept.release(event.request_id)
            self._offered = None
            return True
        if running is None or event.request_id != running.probe.probe_id:
            return False
        match event:
            case Fetched():
                self._send(self._compare(running, event))
                kept.release(event.request_id)
                self._running = None
            case FetchFailed(probe_id, reason):
                kept.quarantine_held(probe_id)
                self._refuse(probe_id, reason, busy=False)
            case Settled(probe_id):
                kept.settle(probe_id)
                self._running = None
        return True

    def _compare(self, running: _Running, fetched: Fetched) -> ProbeFetched:
        seed, blocks = running.probe.seed, running.blocks
        self._tell_ranks(PatternBlocks(seed, blocks, self._num_kv_heads, compare=True))
        verified = self._ranks.minimum(int(self._pattern.matches(seed, blocks))) == 1
        way = self._connector.way(running.probe.ticket)
        return ProbeFetched(
            fetched.request_id,
            num_bytes=fetched.num_bytes,
            seconds=fetched.seconds,
            read_s=fetched.read_s,
            verified=verified,
            plane=way.plane if way is not None else "",
            missed=dict(way.missed) if way is not None else {},
            spare_blocks=running.spare_blocks,
            host=self._host,
        )

    def _take_blocks(self, probe_id: str, count: int) -> list[int] | None:
        spare = self._spare_blocks()
        blocks = self._engine.scheduler.lend_blocks(probe_id, count) if 0 < count <= spare else None
        if blocks is None:
            reason = f"this node can spare {spare} blocks now, and the probe asks for {count}"
            self._refuse(probe_id, reason)
        return blocks

    def _refuse(self, probe_id: str, reason: str, *, busy: bool = True) -> None:
        self._send(ProbeRefused(probe_id, reason, busy))

    def _spare_blocks(self) -> int:
        limit = MAX_BYTES[self._engine.device.type] // self._engine.pool.block_bytes
        return min(self._engine.scheduler.spare_blocks, max(1, limit))

    def _tell_ranks(self, message: PatternBlocks) -> None:
        if self._ranks.size > 1:
            broadcast_aside(self._ranks, msgspec.msgpack.encode(message))

    def _wait_for_device(self) -> None:
        # A step that runs may still write to what has just become free, on any rank.
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)


def _is_probe(ticket: Ticket) -> bool:
    return not ticket.growing and ticket.remote_request_id.startswith(PROBE_PREFIX)
