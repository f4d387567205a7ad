"""What an engine process reports: the numbers of its engine, scheduler, connector and adapters in
one value.
"""

from __future__ import annotations

from collections import Counter

from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.node.adapter_loads import AdapterLoads
from kvrelay.paged_engine.engine import Engine
from kvrelay.wire.engine_messages import EngineStats

__all__ = ["stats_of"]


def stats_of(
    engine: Engine, connector: TransferEngine, adapters: AdapterLoads, now: float, asked: int = 0
) -> EngineStats:
    """Counters since start and gauges now. `asked`: who has asked for them last."""
    scheduler, counters, transfers = engine.scheduler, engine.counters, connector.stats()
    running_adapters, waiting_adapters = adapters.in_use()
    return EngineStats(
        load=engine.load(now),
        held_blocks=scheduler.kept.num_held,
        quarantined_blocks=scheduler.pool.quarantined,
        cached_blocks=scheduler.pool.cached,
        steps=counters.steps,
        step_s=counters.step_s,
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=scheduler.preemptions,
        forked_blocks=scheduler.forked_blocks,
        drafts=scheduler.speculation.drafts,
        draft_tokens=scheduler.speculation.draft_tokens,
        accepted_tokens=scheduler.speculation.accepted_tokens,
        accepted_at=list(scheduler.speculation.accepted_at),
        step_sizes=list(counters.step_sizes),
        step_tokens=counters.step_tokens,
        fetches=transfers.fetches,
        fetch_failures=dict(Counter(transfers.failures) + Counter(Incompatible=adapters.unlike_kv)),
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
        running_adapters=running_adapters,
        waiting_adapters=waiting_adapters,
        asked=asked,
        kv_silent_s=transfers.silent_s,
    )
