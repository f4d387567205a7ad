"""Reports of the engine process: statistics, updates of requests, changes of its prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request
from kvrelay.wire.engine_messages import CacheChanges, EngineStats, RequestUpdate
from kvrelay.wire.outputs import Finish, PromptBlocks
from kvrelay.wire.transfer import Ticket

__all__ = ["CacheReporter", "engine_stats", "request_update"]

# A message to every router, whose knowledge may be as old as this.
_CACHE_INTERVAL_S = 0.05


class CacheReporter:
    """A reporter of prefix cache changes, silent unless `enabled`."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        send: Callable[[CacheChanges], None],
        *,
        enabled: bool,
    ) -> None:
        self._pool, self._block_size, self._send, self._enabled = pool, block_size, send, enabled
        self._due = 0.0
        if enabled:
            pool.note_changes()

    def poll(self, now: float, *, idle: bool) -> None:
        if self._pool.changed and (idle or now >= self._due):
            self._due = now + _CACHE_INTERVAL_S
            changes = self._pool.changes()
            stored, removed = list(changes.stored), list(changes.removed)
            self._send(CacheChanges(stored, removed, cleared=changes.cleared))

    def prompt_blocks(self, request: Request) -> PromptBlocks | None:
        """Return the hashes by which a router finds this prompt in KV events."""
        if not self._enabled:
            return None
        hashes = request.block_hashes(self._block_size)[: request.prompt_tokens // self._block_size]
        return PromptBlocks(self._block_size, b"".join(hashes))


def request_update(
    request: Request, ticket: Ticket | None, error: str | None, now: float
) -> RequestUpdate:
    """Return what is new of a request, and clear it there. `ticket` claims its held KV."""
    early = bool(request.new_tokens) and request.timings_told < 2
    request.timings_told += early
    if request.finish is Finish.ERROR and error is None and request.guide is not None:
        error = request.guide.error
    constrained = request.params.constraint is not None
    update = RequestUpdate(
        request.request_id,
        request.new_tokens,
        logprobs=request.new_logprobs or None,
        finish=request.finish,
        cached_tokens=request.cached_tokens or 0,
        held=ticket,
        timing=request.timing(now) if request.finish or early else None,
        fetch_error=request.fetch_error,
        error=error,
        refused=error is not None and constrained and request.fetch_error is None,
        prompt_logprobs=request.prompt_logprobs or None,
    )
    request.new_tokens, request.new_logprobs, request.prompt_logprobs = [], [], []
    return update


def engine_stats(
    engine: Engine, connector: TransferEngine, mismatched_kv: int, now: float, asked: int = 0
) -> EngineStats:
    scheduler, counters, transfers = engine.scheduler, engine.counters, connector.stats()
    return EngineStats(
        load=engine.load(now),
        held_blocks=scheduler.kept.num_held,
        quarantined_blocks=scheduler.pool.quarantined,
        steps=counters.steps,
        step_s=counters.step_s,
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=scheduler.preemptions,
        draft_tokens=scheduler.speculation.draft_tokens,
        accepted_tokens=scheduler.speculation.accepted_tokens,
        fetches=transfers.fetches,
        fetch_failures=dict(Counter(transfers.failures) + Counter(Incompatible=mismatched_kv)),
        fetch_retries=transfers.retries,
        fetch_kept_blocks=scheduler.kept_blocks,
        fetched_bytes=transfers.fetched_bytes,
        fetch_s=transfers.fetch_s,
        checked_blocks=transfers.checked_blocks,
        wrong_blocks=transfers.wrong_blocks,
        unchecked_blocks=transfers.unchecked_blocks,
        leases_granted=transfers.leases_granted,
        leases_released=transfers.leases_released,
        leases_expired=transfers.leases_expired,
        asked=asked,
        kv_silent_s=transfers.silent_s,
    )
