"""Prometheus metrics of a node: its requests, its processes, and what its engine reports.

Names that begin with `vllm:` mean what vLLM means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from kvrelay.wire.config import Role
from kvrelay.wire.engine_messages import EngineReady, EngineStats, Timing
from kvrelay.wire.errors import KV_CAUSES
from kvrelay.wire.ladder import RUNGS
from kvrelay.wire.outputs import Finish, Load

__all__ = ["NodeMetrics"]

disable_created_metrics()  # type: ignore[no-untyped-call]
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# vLLM's begin at 10 ms; a decode step of an H200 takes less.
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# A stage may take 100 us only.
_STAGE_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0),
)

_TOKENS = [float(first * 10**zeros) for zeros in range(9) for first in (1, 2, 5)]
# Without bounds these are numbers of tokens.
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("From arrival here to the first token", _TTFT_S),
    "vllm:inter_token_latency_seconds": ("Between tokens that follow each other", _TOKEN_S),
    "vllm:e2e_request_latency_seconds": ("From arrival here to the end", _REQUEST_S),
    "vllm:request_queue_time_seconds": ("Waiting for a seat or for blocks", _STAGE_S),
    "vllm:request_prefill_time_seconds": ("Computing the prompt", _STAGE_S),
    "vllm:request_decode_time_seconds": ("From the first to the last token", _STAGE_S),
    "kvrelay_transfer_seconds": (
        "From a request's first wait for its KV to the last byte",
        _STAGE_S,
    ),
    "kvrelay_transfer_exposed_seconds": (
        "The part of kvrelay_transfer_seconds after the prompt was computed",
        _STAGE_S,
    ),
    "kvrelay_decode_queue_seconds": (
        "With KV from elsewhere: waiting for a seat and blocks, and for a step",
        _STAGE_S,
    ),
    "kvrelay_first_step_seconds": ("The first decode step, from its launch to its token", _STAGE_S),
    "vllm:request_prompt_tokens": ("Tokens of a request's prompt", ()),
    "vllm:request_generation_tokens": ("Tokens that a request generated here", ()),
    "vllm:request_max_num_generation_tokens": ("Most tokens that a request may generate here", ()),
}
# The text, a label and its values, all shown from the start: a first rate is right.
_COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "vllm:request_success": (
        "Requests by how they ended",
        "finished_reason",
        tuple(map(str, Finish)),
    ),
    "kvrelay_node_flips": (
        "Changes of the node's role, by how they ended",
        "outcome",
        ("done", "cancelled"),
    ),
    "kvrelay_fetches_failed": ("KV fetches that failed, by cause", "cause", KV_CAUSES),
    "kvrelay_pulls_failed": (
        "Pulls of KV from another node's prefix cache that failed, by cause",
        "cause",
        ("NotHeld", "NoSeat", *KV_CAUSES),
    ),
    "kvrelay_prompt_tokens": (
        "Tokens of prompts, by where their KV was found, or lost as far as this node knows",
        "rung",
        RUNGS,
    ),
    "kvrelay_recomputed_prompts": (
        "Prompts computed on this decode node after a failed fetch, from the first missing block on",
        "",
        (),
    ),
    "kvrelay_requests_not_loaded": (
        "Requests ended with an error after a failed fetch (kv_load_failure_policy fail)",
        "",
        (),
    ),
}
_TIERS = {"host": "host memory", "store": "the store"}
# By name: the text, and the attribute of EngineStats.
_GAUGES = {
    "vllm:num_requests_running": ("Requests in the current batch", "load.running"),
    "vllm:num_requests_waiting": ("Requests that wait for a seat or for blocks", "load.waiting"),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", "load.kv_usage"),
    "kvrelay_blocks_free": ("KV blocks that can be given out", "load.free_blocks"),
    "kvrelay_blocks": ("KV blocks of the pool", "load.total_blocks"),
    "kvrelay_blocks_held": ("KV blocks kept under a lease for a decode node", "held_blocks"),
    "kvrelay_blocks_pinned": (
        "KV blocks to be evicted last, as requests asked",
        "pinned_blocks",
    ),
    "kvrelay_blocks_quarantined": (
        "KV blocks that a lost transfer may still write to",
        "quarantined_blocks",
    ),
    "kvrelay_tier_host_used_blocks": (
        "Blocks of KV in host memory that are read or written now",
        "host.used",
    ),
    "kvrelay_waiting_tokens": (
        "Tokens of prompts that are still to be computed",
        "load.waiting_tokens",
    ),
    "kvrelay_step_pace": (
        "Time of a step over what this node measured at its start",
        "load.pace",
    ),
} | {
    f"kvrelay_tier_{tier}_blocks": (f"Blocks of KV in {place}", f"{tier}.blocks")
    for tier, place in _TIERS.items()
}
_ENGINE_COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens computed", "prompt_tokens"),
    "vllm:generation_tokens": ("Tokens generated", "generated_tokens"),
    "vllm:num_preemptions": ("Requests that lost their blocks to older ones", "preemptions"),
    "vllm:spec_decode_num_draft_tokens": ("Tokens proposed before they were drawn", "draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Proposed tokens that were drawn", "accepted_tokens"),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache",
        "looked_up_tokens",
    ),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", "cached_prompt_tokens"),
    "kvrelay_engine_steps": ("Engine steps", "steps"),
    "kvrelay_engine_step_seconds": ("Time inside engine steps", "step_s"),
    "kvrelay_pulled_tokens": (
        "Tokens found in the prefix cache of another node",
        "pulled_tokens",
    ),
    "kvrelay_pins_refused": (
        "Requests whose KV was not or only partly pinned: the key's or node's budget was spent",
        "pins_refused",
    ),
    "kvrelay_fetches": ("KV fetches started", "transfers.fetches"),
    "kvrelay_fetch_kept_blocks": (
        "KV blocks of failed fetches that need not be computed again",
        "kept_blocks",
    ),
    "kvrelay_fetched_bytes": ("KV bytes fetched from prefill nodes", "transfers.fetched_bytes"),
    "kvrelay_fetch_seconds": (
        "Time spent waiting for KV of prompts already computed",
        "transfers.fetch_s",
    ),
    "kvrelay_fetch_checked_blocks": (
        "Fetched KV blocks whose checksum was compared with the source's",
        "transfers.checked_blocks",
    ),
    "kvrelay_fetch_wrong_blocks": (
        "Compared KV blocks that differ from their source",
        "transfers.wrong_blocks",
    ),
    "kvrelay_fetch_unchecked_blocks": (
        "Fetched KV blocks drawn for a check whose source gives no checksums",
        "transfers.unchecked_blocks",
    ),
    "kvrelay_leases_granted": ("Leases given to other nodes", "transfers.leases_granted"),
    "kvrelay_leases_released": (
        "Leases ended by their reader or by the router",
        "transfers.leases_released",
    ),
    "kvrelay_leases_expired": (
        "Leases that expired because nobody ended them in time",
        "transfers.leases_expired",
    ),
} | {
    f"kvrelay_tier_{tier}_{field}_blocks": (f"KV blocks {text} {place}", f"{tier}.{field}")
    for tier, place in _TIERS.items()
    for field, text in (
        ("stored", "that came into"),
        ("loaded", "requested from"),
        ("evicted", "that made room for others in"),
        ("corrupt", "dropped because they differed from what had been stored in"),
        ("failed", "that could not be found, read or written in time in"),
    )
}


class NodeMetrics:
    """A registry of one node process. `engine_pid` returns -1 while there is no engine process.

    Samples have the labels model_name and role: counts stay with the role in which they were
    counted, gauges have the present one.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        role: Role,
        info: EngineReady,
        model_name: str,
        engine_pid: Callable[[], int],
    ) -> None:
        self._stats, self._counted, self._model_name = stats, EngineStats(Load()), model_name
        self.registry = registry = CollectorRegistry()
        labels = "model_name", "role"
        sizes = [each for each in _TOKENS if each <= info.max_model_len]
        self._histograms = {
            name: Histogram(name, text, labels, buckets=bounds or sizes, registry=registry)
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(name, text, (*labels, label) if label else labels, registry=registry)
            for name, (text, label, _) in _COUNTERS.items()
        } | {
            name: Counter(name, text, labels, registry=registry)
            for name, (text, _) in _ENGINE_COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(name, text, labels, registry=registry)
            for name, (text, _) in _GAUGES.items()
        }
        text = "1 for the role that the node has now, else 0"
        self._node_role = Gauge("kvrelay_node_role", text, labels, registry=registry)
        ProcessCollector(registry=registry)
        ProcessCollector(namespace="kvrelay_engine", pid=engine_pid, registry=registry)
        self._begin(role)

    def set_role(self, role: Role) -> None:
        self._read_engine()
        self._begin(role)

    def _begin(self, role: Role) -> None:
        self._labels = self._model_name, str(role)
        self._of_role = {
            name: histogram.labels(*self._labels) for name, histogram in self._histograms.items()
        }
        for name, (_, _, values) in _COUNTERS.items():
            for value in values:
                self._counters[name].labels(*self._labels, value)
        for name in (
            "kvrelay_recomputed_prompts",
            "kvrelay_requests_not_loaded",
            *_ENGINE_COUNTERS,
        ):
            self._counters[name].labels(*self._labels)
        for each in {role} if role is Role.AGGREGATED else (Role.PREFILL, Role.DECODE):
            self._node_role.labels(self._model_name, str(each)).set(each is role)
        for gauge in self._gauges.values():
            gauge.clear()

    def observe(self, name: str, value: float) -> None:
        self._of_role[name].observe(value)

    def count(self, name: str, *labels: str, more: float = 1) -> None:
        self._counters[name].labels(*self._labels, *labels).inc(more)

    def count_end(
        self,
        finish: Finish,
        total_s: float,
        tokens: int,
        timing: Timing | None,
        ttft_s: float | None = None,
        rungs: Mapping[str, int] = {},
        *,
        not_fetched: bool,
    ) -> None:
        for rung, found in rungs.items():
            self.count("kvrelay_prompt_tokens", rung, more=found)
        if ttft_s is not None:
            self.observe("vllm:time_to_first_token_seconds", ttft_s)
        self.count("vllm:request_success", finish.value)
        self.observe("vllm:e2e_request_latency_seconds", total_s)
        self.observe("vllm:request_generation_tokens", tokens)
        if not_fetched:
            self.count(
                "kvrelay_requests_not_loaded"
                if finish is Finish.ERROR
                else "kvrelay_recomputed_prompts"
            )
        if timing is None:
            return
        self.observe("vllm:request_queue_time_seconds", timing.queue_s)
        self.observe("vllm:request_prefill_time_seconds", timing.prefill_s)
        self.observe("vllm:request_decode_time_seconds", timing.decode_s)
        if timing.transfer_bytes:
            self.observe("kvrelay_transfer_seconds", timing.transfer_s)
            self.observe("kvrelay_transfer_exposed_seconds", timing.exposed_s)
        if timing.transfer_s:
            self.observe("kvrelay_decode_queue_seconds", timing.decode_queue_s)
        if timing.first_step_s:
            self.observe("kvrelay_first_step_seconds", timing.first_step_s)

    def text(self) -> bytes:
        self._read_engine()
        return generate_latest(self.registry)

    def _read_engine(self) -> None:
        stats, counted = self._stats(), self._counted
        self._counted = stats
        for name, (_, field) in _ENGINE_COUNTERS.items():
            of = attrgetter(field)
            self.count(name, more=_more(of(stats), of(counted)))
        for name, failures, before in (
            ("kvrelay_fetches_failed", stats.transfers.failures, counted.transfers.failures),
            ("kvrelay_pulls_failed", stats.pull_failures, counted.pull_failures),
        ):
            for cause, number in failures.items():
                self.count(name, cause, more=_more(number, before.get(cause, 0)))
        for name, (_, field) in _GAUGES.items():
            self._gauges[name].labels(*self._labels).set(attrgetter(field)(stats))


def _more(count: float, before: float) -> float:
    return count - before if count >= before else count  # another process has begun at zero
