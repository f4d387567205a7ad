"""Reports of the engine process: statistics, and updates of requests."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.node.pulls import Pulls
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.engine_messages import EngineReady, EngineStats, RequestUpdate
from kvrelay.wire.outputs import Finish, PromptBlocks
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import Fingerprint, KvFacts, Ticket
from kvrelay.wire.versions import HANDOVER

__all__ = ["engine_ready", "engine_stats", "fingerprint_of", "request_update"]


def fingerprint_of(engine: Engine, config: EngineConfig) -> Fingerprint:
    model = engine.model
    return Fingerprint(
        protocol=HANDOVER.oldest,
        model=model.name,
        kv_dtype=str(engine.pool.dtype).removeprefix("torch."),
        block_size=engine.pool.block_size,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        layers=model.num_layers,
        window=model.window,
        tp_size=config.tensor_parallel_size,
        rope=engine.rope_variant,
        protocol_newest=HANDOVER.newest,
    )


def engine_ready(
    engine: Engine,
    connector: TransferEngine,
    config: NodeConfig,
    costs: StepCosts | None,
    load_s: float,
) -> EngineReady:
    (host, port), ranks = connector.address, config.engine.tensor_parallel_size
    return EngineReady(
        engine_id=connector.engine_id,
        generation=connector.generation,
        model_name=engine.model.name,
        vocab_size=engine.model.vocab_size,
        max_model_len=engine.max_model_len,
        block_size=engine.pool.block_size,
        num_blocks=engine.scheduler.pool.total,
        kv_bytes_per_token=engine.pool.block_bytes * ranks // engine.pool.block_size,
        eos_token_ids=list(engine.model.eos_token_ids),
        load_s=load_s,
        adapters=[] if engine.adapters is None else engine.adapters.loaded,
        kv=KvFacts(
            fingerprint_of(engine, config.engine),
            connector.planes,
            _host_id(),
            host,
            config.transfer.lease_s,
            config.transfer.kv_load_failure_policy == "recompute",
            port,
            connector.generation,
            connector.address_seal,
            compares=config.transfer.kv_checksums > 0,
        ),
        costs=costs,
        max_gap_ms=engine.scheduler.budget.gap_ms,
    )


def _host_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def request_update(
    request: Request,
    ticket: Ticket | None,
    error: str | None,
    now: float,
    blocks: PromptBlocks | None = None,
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
        found=request.found if early or request.finish else None,
        blocks=blocks,
        pinned_tokens=request.pinned_tokens,
    )
    request.new_tokens, request.new_logprobs, request.prompt_logprobs = [], [], []
    return update


def engine_stats(
    engine: Engine,
    connector: TransferEngine,
    pulls: Pulls,
    mismatched_kv: int,
    now: float,
    asked: int = 0,
) -> EngineStats:
    scheduler, counters, transfers = engine.scheduler, engine.counters, connector.stats()
    transfers.failures["Incompatible"] += mismatched_kv
    return EngineStats(
        load=engine.load(now),
        held_blocks=scheduler.kept.num_held,
        lent_blocks=scheduler.kept.num_lent,
        quarantined_blocks=scheduler.kept.quarantined,
        **asdict(counters),
        preemptions=scheduler.preemptions,
        draft_tokens=scheduler.speculation.draft_tokens,
        accepted_tokens=scheduler.speculation.accepted_tokens,
        kept_blocks=scheduler.kept_blocks,
        transfers=transfers,
        asked=asked,
        pulled_tokens=pulls.tokens,
        pull_failures=pulls.failures + Counter(transfers.ask_failures),
        pinned_blocks=scheduler.pool.pinned,
        pins_refused=scheduler.pool.pins_refused,
    )
