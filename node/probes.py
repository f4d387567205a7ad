"""Probes of the hand-over, the engine process's half: a few free blocks with a known pattern go
from node to node.

A probe goes the way of any KV: a signed ticket, a lease, a fetch with its deadline, a quarantine if
that fails. So nothing stays taken, whoever dies between. Owns one probe at a time in each
direction; no request is delayed for it but by filling and comparing, which all ranks do at the same
time. Runs in the step loop and returns at once.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.kv_transfer.connector import Event, Fetched, FetchFailed, Released, Settled
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.node import rank_asides
from kvrelay.node.probe_pattern import ProbePattern
from kvrelay.node.rank_asides import Aside, FillBlocks, VerifyBlocks
from kvrelay.paged_engine.engine import Engine, aside
from kvrelay.paged_engine.ranks import Alone, Ranks
from kvrelay.wire.engine_messages import (
    PROBE_PREFIX,
    FetchProbe,
    OfferProbe,
    ProbeFetched,
    ProbeOffered,
    ProbeRefused,
)
from kvrelay.wire.transfer import AnswerState, HandoverRequest, KvTransferParams, Ticket

__all__ = ["Probes"]

# The step loop fills and compares them: a CPU does 1 to 2 GB/s.
MAX_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class _Running:
    """A probe that is being fetched."""

    ask: FetchProbe
    blocks: list[int]
    spare_blocks: int


def host_id() -> str:
    """Equal in all processes of one running host; empty if that is not known."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return ""


class Probes:
    """One node's probes. `send` takes what the HTTP process is told."""

    def __init__(
        self,
        engine: Engine,
        connector: TransferEngine,
        send: Callable[[ProbeOffered | ProbeFetched | ProbeRefused], None],
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks`: those of the engine, which have a share of each block."""
        self._engine, self._connector, self._send = engine, connector, send
        self._ranks = ranks or Alone()
        self._num_kv_heads = engine.model.num_kv_heads
        self._pattern = ProbePattern(engine.pool, self._num_kv_heads, 0, self._ranks.size)
        self._offered: str | None = None
        self._running: _Running | None = None
        self._host = host_id()

    def offer(self, ask: OfferProbe) -> None:
        """Source: fill and offer. The blocks are free again when the connector says Released."""
        if self._offered is not None:
            return self._refuse(
                ask.probe_id, "another probe of this node has not been fetched yet", busy=True
            )
        spare = self._spare_blocks
        blocks = self._taken(ask.probe_id, ask.blocks)
        if blocks is None:
            return None
        seed = random.getrandbits(31)
        # a step that is running may still write to what has just become free, on any rank
        self._settle_device()
        self._tell_ranks(FillBlocks(seed, blocks, self._num_kv_heads))
        self._pattern.fill(seed, blocks)
        self._ranks.least(1)
        self._offered = ask.probe_id
        ticket = self._connector.offer(
            ask.probe_id, blocks, len(blocks) * self._engine.pool.block_size
        )
        params = KvTransferParams.of(HandoverRequest(do_remote_prefill=True), AnswerState(), ticket)
        return self._send(ProbeOffered(ask.probe_id, params, seed, spare, self._host))

    def fetch(self, ask: FetchProbe) -> None:
        """Reader: fetch into free blocks. The answer comes with the connector's event."""
        remote = ask.ticket.remote_block_ids
        if not _is_probe(ask.ticket) or len(remote) != 1 or not remote[0]:
            return self._refuse(
                ask.probe_id, "the ticket is not one that a node has offered as a probe"
            )
        if self._running is not None:
            return self._refuse(
                ask.probe_id, "another probe of this node is not over yet", busy=True
            )
        spare = self._spare_blocks
        blocks = self._taken(ask.probe_id, len(remote[0]))
        if blocks is None:
            return None
        self._settle_device()  # a step that is running may still write to what has just become free
        self._running = _Running(ask, blocks, spare)
        self._connector.watch(ask.probe_id, ask.ticket)
        return self._connector.fetch(ask.probe_id, remote[0], blocks)

    def heard(self, event: Event) -> bool:
        """Whether the event was about a probe; if so it is dealt with."""
        scheduler, running = self._engine.scheduler, self._running
        if event.request_id == self._offered:
            assert isinstance(event, Released)
            scheduler.kept.released(event.request_id)
            self._offered = None
            return True
        if running is None or event.request_id != running.ask.probe_id:
            return False
        match event:
            case Fetched():
                self._send(self._compared(running, event))
                scheduler.kept.released(event.request_id)
                self._running = None
            case FetchFailed(probe_id, reason):
                scheduler.kept.set_aside(probe_id)
                self._refuse(probe_id, reason)
            case Settled(probe_id):
                scheduler.kept.settled(probe_id)
                self._running = None
        return True

    def _compared(self, running: _Running, fetched: Fetched) -> ProbeFetched:
        seed, blocks = running.ask.seed, running.blocks
        self._tell_ranks(VerifyBlocks(seed, blocks, self._num_kv_heads))
        verified = self._ranks.least(int(self._pattern.holds(seed, blocks))) == 1
        way = self._connector.way(running.ask.ticket)
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

    def _taken(self, probe_id: str, count: int) -> list[int] | None:
        """Blocks for a probe; None, and it is refused, if they cannot be spared."""
        spare = self._spare_blocks
        blocks = self._engine.scheduler.lend(probe_id, count) if 0 < count <= spare else None
        if blocks is None:
            self._refuse(
                probe_id,
                f"this node can spare {spare} blocks now, and the probe asks for {count}",
                busy=True,
            )
        return blocks

    def _refuse(self, probe_id: str, reason: str, *, busy: bool = False) -> None:
        self._send(ProbeRefused(probe_id, reason, busy))

    @property
    def _spare_blocks(self) -> int:
        most = MAX_BYTES[self._engine.device.type] // self._engine.pool.block_bytes
        return min(self._engine.scheduler.spare_blocks, max(1, most))

    def _tell_ranks(self, message: Aside) -> None:
        if self._ranks.size > 1:
            aside(self._ranks, rank_asides.encode(message))

    def _settle_device(self) -> None:
        """Wait until the device has done all that it was told: a GPU's step at most."""
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)


def _is_probe(ticket: Ticket) -> bool:
    return not ticket.growing and ticket.remote_request_id.startswith(PROBE_PREFIX)
