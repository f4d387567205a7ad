"""Prometheus samples of what an engine process reports, made at each scrape.

Names that begin with `vllm:` mean what vLLM means by them, so that dashboards, autoscalers and
gateways made for vLLM read our nodes; `kvrelay_` is what vLLM has no name for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvrelay.wire.config import NodeConfig
from kvrelay.wire.engine_messages import STEP_TOKENS, EngineReady, EngineStats
from kvrelay.wire.errors import KV_CAUSES

__all__ = ["EngineMetrics"]

# By name: the text, and the field of EngineStats (`load.` of its Load).
_GAUGES = {
    "vllm:num_requests_running": ("Requests in the current batch", "load.running"),
    "vllm:num_requests_waiting": ("Requests that wait for a seat or for blocks", "load.waiting"),
    "kvrelay_blocks_free": ("KV blocks that can be given out", "load.free_blocks"),
    "kvrelay_blocks": ("KV blocks of the pool", "load.total_blocks"),
    "kvrelay_blocks_held": ("KV blocks kept under a lease for a decode node", "held_blocks"),
    "kvrelay_blocks_quarantined": (
        "KV blocks that a lost transfer may still write to",
        "quarantined_blocks",
    ),
    "kvrelay_blocks_cached": ("KV blocks that the prefix cache can find", "cached_blocks"),
    "kvrelay_waiting_tokens": (
        "Tokens of prompts that are still to be computed",
        "load.waiting_tokens",
    ),
    "kvrelay_context_tokens": (
        "Tokens of KV that the running requests have, together",
        "load.context_tokens",
    ),
}
_COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens computed", "prompt_tokens"),
    "vllm:generation_tokens": ("Tokens generated", "generated_tokens"),
    "vllm:num_preemptions": ("Requests that lost their blocks to older ones", "preemptions"),
    "vllm:spec_decode_num_drafts": ("Decode steps of a request with proposed tokens", "drafts"),
    "vllm:spec_decode_num_draft_tokens": ("Tokens proposed before they were drawn", "draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Proposed tokens that were drawn", "accepted_tokens"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", "cached_prompt_tokens"),
    "vllm:gpu_prefix_cache_hits": (
        "vllm:prefix_cache_hits by its older name",
        "cached_prompt_tokens",
    ),
    "vllm:nixl_num_kv_expired_reqs": (
        "Requests whose KV nobody fetched in time",
        "leases_expired",
    ),
    "kvrelay_forked_blocks": (
        "KV blocks of prompts that further choices have shared",
        "forked_blocks",
    ),
    "kvrelay_engine_steps": ("Engine steps", "steps"),
    "kvrelay_engine_step_seconds": ("Time inside engine steps", "step_s"),
    "kvrelay_fetches": ("KV fetches started", "fetches"),
    "kvrelay_fetch_retries": (
        "Reads of a KV fetch that broke and were tried again",
        "fetch_retries",
    ),
    "kvrelay_fetch_kept_blocks": (
        "KV blocks of failed fetches that need not be computed again",
        "fetch_kept_blocks",
    ),
    "kvrelay_fetched_bytes": ("KV bytes fetched from prefill nodes", "fetched_bytes"),
    "kvrelay_fetch_seconds": (
        "Time in which fetched KV was waited for, prompts computed",
        "fetch_s",
    ),
    "kvrelay_fetch_checked_blocks": (
        "Fetched KV blocks whose checksum was compared with the source's",
        "checked_blocks",
    ),
    "kvrelay_fetch_wrong_blocks": (
        "Of these, those that were not what the source has",
        "wrong_blocks",
    ),
    "kvrelay_fetch_unchecked_blocks": (
        "Fetched KV blocks drawn for a check whose source gives no checksums",
        "unchecked_blocks",
    ),
    "kvrelay_leases_granted": ("Leases given to decode nodes", "leases_granted"),
    "kvrelay_leases_released": (
        "Leases ended by their reader or by the router",
        "leases_released",
    ),
    "kvrelay_leases_expired": ("Leases that nobody ended in time", "leases_expired"),
}


class EngineMetrics(Collector):
    """A collector of the engine's last report. `labels` are on every sample."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        labels: Mapping[str, str],
        config: NodeConfig,
        info: EngineReady,
    ) -> None:
        self._stats = stats
        self._names, self._values = list(labels), list(labels.values())
        self._max_loras = config.engine.adapter_slots
        self._cache_config = {
            "block_size": str(info.block_size),
            "cache_dtype": config.engine.kv_cache_dtype,
            "enable_prefix_caching": str(config.engine.enable_prefix_caching),
            "gpu_memory_utilization": str(config.engine.gpu_memory_utilization),
            "num_gpu_blocks": str(info.num_blocks),
            "engine": "0",
        }
        speculation = config.engine.speculative_config
        self._max_drafts = speculation.num_speculative_tokens if speculation else 0

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, (text, field) in _GAUGES.items():
            yield self._gauge(name, text, _read(stats, field))
        for name, (text, value) in _computed_gauges(stats).items():
            yield self._gauge(name, text, value)
        for name, (text, field) in _COUNTERS.items():
            yield self._counter(name, text, _read(stats, field))
        for name, (text, value) in _computed_counters(stats).items():
            yield self._counter(name, text, value)
        text = "Facts of the KV cache, in the labels"
        yield self._gauge("vllm:cache_config_info", text, 1, self._cache_config)
        if self._max_loras:
            yield self._adapters(stats)
        yield self._step_sizes(stats)
        accepted = stats.accepted_at or [0] * self._max_drafts
        yield self._counter_by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens that were drawn, by their place in the proposal",
            "position",
            {str(at): accepted[at] for at in range(self._max_drafts)},
        )
        # All from the start, so that a rate can be taken of the first one.
        causes = sorted({*KV_CAUSES, *stats.fetch_failures})
        by_cause = {cause: stats.fetch_failures.get(cause, 0) for cause in causes}
        text = "KV fetches that failed, by cause"
        yield self._counter_by("kvrelay_fetches_failed", text, "cause", by_cause)

    def _gauge(
        self, name: str, text: str, value: float, more: Mapping[str, str] | None = None
    ) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=[*self._names, *(more or {})])
        gauge.add_metric([*self._values, *(more or {}).values()], value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=self._names)
        counter.add_metric(self._values, value)
        return counter

    def _counter_by(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=[*self._names, label])
        for value, count in counts.items():
            counter.add_metric([*self._values, value], count)
        return counter

    def _adapters(self, stats: EngineStats) -> Metric:
        # As in vLLM: the labels say which adapters are in use, the value is the time.
        labels = {
            "max_lora": str(self._max_loras),
            "running_lora_adapters": ",".join(stats.running_adapters),
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
        }
        return self._gauge("vllm:lora_requests_info", "Adapters in use", time.time(), labels)

    def _step_sizes(self, stats: EngineStats) -> Metric:
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens that an engine step computes", labels=self._names
        )
        sizes = stats.step_sizes or [0] * (len(STEP_TOKENS) + 1)
        bounds = [*map(str, map(float, STEP_TOKENS)), "+Inf"]
        buckets = list(zip(bounds, accumulate(sizes), strict=True))
        family.add_metric(self._values, buckets, stats.step_tokens)
        return family


def _read(stats: EngineStats, field: str) -> float:
    place, _, name = field.rpartition(".")
    return float(getattr(stats.load if place else stats, name))


def _computed_gauges(stats: EngineStats) -> dict[str, tuple[str, float]]:
    load = stats.load
    used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    older = "vllm:kv_cache_usage_perc by its older name, which gateways still read"
    return {
        "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", used),
        "vllm:gpu_cache_usage_perc": (older, used),
        "vllm:num_requests_swapped": ("Always 0: nothing is swapped, a preempted request waits", 0),
        "vllm:cpu_cache_usage_perc": ("Always 0: no KV is swapped to the host's memory", 0),
    }


def _computed_counters(stats: EngineStats) -> dict[str, tuple[str, float]]:
    queries = stats.prompt_tokens + stats.cached_prompt_tokens
    failures = sum(stats.fetch_failures.values())
    return {
        "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", queries),
        "vllm:gpu_prefix_cache_queries": ("vllm:prefix_cache_queries by its older name", queries),
        "vllm:nixl_num_failed_transfers": ("KV fetches that failed, over any connector", failures),
    }
