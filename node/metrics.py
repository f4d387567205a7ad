"""Prometheus metrics of a node: `vllm:` names that dashboards already scrape, `kvrelay_` names for the hand-over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from wire.engine_messages import EngineStats, Timing
from wire.outputs import Finish

__all__ = ["NodeMetrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
# Of a stage: from 100 us on.
_STAGE_SECONDS = (0.0001, 0.00025, 0.0005, *_SECONDS)


class _EngineCollector(Collector):
    """Turns the engine's last report into samples at scrape time."""

    def __init__(self, stats: Callable[[], EngineStats], labels: dict[str, str], max_loras: int) -> None:
        self._stats, self._labels, self._max_loras = stats, labels, max_loras

    def _adapters(self, stats: EngineStats) -> Metric:
        """Which adapters are in use: in its labels, as vLLM has it; the value is the time."""
        names = {
            "max_lora": str(self._max_loras),
            "running_lora_adapters": ",".join(stats.running_adapters),
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
        }
        gauge = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use", labels=[*self._labels, *names])
        gauge.add_metric([*self._labels.values(), *names.values()], time.time())
        return gauge

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        load = stats.load
        used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
        gauges = {
            "vllm:num_requests_running": ("Requests in the current batch", load.running),
            "vllm:num_requests_waiting": ("Requests that wait for a seat or for blocks", load.waiting),
            "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", used),
            "kvrelay_blocks_free": ("KV blocks that can be given out", load.free_blocks),
            "kvrelay_blocks_total": ("KV blocks of the pool", load.total_blocks),
            "kvrelay_blocks_held": ("KV blocks kept under a lease for a decode node", stats.held_blocks),
            "kvrelay_blocks_quarantined": (
                "KV blocks that a lost transfer may still write to",
                stats.quarantined_blocks,
            ),
            "kvrelay_blocks_cached": ("KV blocks that the prefix cache can find", stats.cached_blocks),
            "kvrelay_waiting_tokens": ("Tokens of prompts that are still to be computed", load.waiting_tokens),
        }
        counters = {
            "vllm:prompt_tokens": ("Prompt tokens computed", stats.prompt_tokens),
            "vllm:generation_tokens": ("Tokens generated", stats.generated_tokens),
            "vllm:num_preemptions": ("Requests that lost their blocks to older ones", stats.preemptions),
            "vllm:spec_decode_num_drafts": ("Decode steps of a request with proposed tokens", stats.drafts),
            "vllm:spec_decode_num_draft_tokens": ("Tokens proposed before they were drawn", stats.draft_tokens),
            "vllm:spec_decode_num_accepted_tokens": ("Proposed tokens that were drawn", stats.accepted_tokens),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", stats.cached_prompt_tokens),
            "vllm:prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache",
                stats.prompt_tokens + stats.cached_prompt_tokens,
            ),
            "kvrelay_forked_blocks": ("KV blocks of prompts that further choices have shared", stats.forked_blocks),
            "kvrelay_engine_steps": ("Engine steps", stats.steps),
            "kvrelay_engine_step_seconds": ("Time inside engine steps", stats.step_s),
            "kvrelay_fetches": ("KV fetches started", stats.fetches),
            "kvrelay_fetch_retries": ("Reads of a KV fetch that broke and were tried again", stats.fetch_retries),
            "kvrelay_fetch_kept_blocks": (
                "KV blocks of failed fetches that need not be computed again",
                stats.fetch_kept_blocks,
            ),
            "kvrelay_fetched_bytes": ("KV bytes fetched from prefill nodes", stats.fetched_bytes),
            "kvrelay_fetch_seconds": ("Time in which fetched KV was waited for, prompts computed", stats.fetch_s),
            "kvrelay_leases_granted": ("Leases given to decode nodes", stats.leases_granted),
            "kvrelay_leases_released": ("Leases ended by their reader or by the router", stats.leases_released),
            "kvrelay_leases_expired": ("Leases that nobody ended in time", stats.leases_expired),
        }
        names, values = list(self._labels), list(self._labels.values())
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, value)
            yield counter
        if self._max_loras:
            yield self._adapters(stats)
        failed = CounterMetricFamily(
            "kvrelay_fetches_failed", "KV fetches that failed, by cause", labels=[*names, "cause"]
        )
        for cause in sorted({*_CAUSES, *stats.fetch_failures}):
            failed.add_metric([*values, cause], stats.fetch_failures.get(cause, 0))
        yield failed


# Named from the start, so that a rate can be taken of the first one.
_CAUSES = ("Incompatible", "LeaseLost", "PeerLost", "TransferError", "TransferTimeout")


class NodeMetrics:
    """One registry per node process."""

    def __init__(self, stats: Callable[[], EngineStats], *, model_name: str, role: str, max_loras: int = 0) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model_name, "role": role}
        self._registry.register(_EngineCollector(stats, labels, max_loras))
        names, self._values = list(labels), list(labels.values())

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, names, buckets=buckets, registry=self._registry)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival here to the first token")
        self._tpot = histogram("vllm:time_per_output_token_seconds", "Mean time per token after the first")
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival here to the end")

        def stage(name: str, text: str) -> Histogram:
            return histogram(name, text, _STAGE_SECONDS)

        self._queue = stage("vllm:request_queue_time_seconds", "Waiting for a seat or for blocks")
        self._prefill = stage("vllm:request_prefill_time_seconds", "Computing the prompt")
        self._decode = stage("vllm:request_decode_time_seconds", "From the first to the last token")
        self._transfer = stage("kvrelay_transfer_seconds", "From a request's first wait for its KV to the last byte")
        self._exposed = stage("kvrelay_transfer_exposed_seconds", "Of that, after the prompt was computed")
        self._decode_queue = stage(
            "kvrelay_decode_queue_seconds", "With KV from elsewhere: waiting for a seat and blocks, and for a step"
        )
        self._first_step = stage("kvrelay_first_step_seconds", "The first decode step, from its launch to its token")
        self._success = Counter(
            "vllm:request_success",
            "Requests by how they ended",
            [*names, "finished_reason"],
            registry=self._registry,
        )
        self._recomputed = Counter(
            "kvrelay_recomputed_prompts",
            "Prompts computed on this decode node after a failed fetch, from the first missing block on",
            names,
            registry=self._registry,
        )
        self._recomputed.labels(*self._values)
        self._not_loaded = Counter(
            "kvrelay_requests_not_loaded",
            "Requests ended with an error after a failed fetch (kv_load_failure_policy fail)",
            names,
            registry=self._registry,
        )
        self._not_loaded.labels(*self._values)

    def first_token(self, seconds: float) -> None:
        """A request's first token left the engine."""
        self._ttft.labels(*self._values).observe(seconds)

    def ended(self, finish: Finish, total_s: float, tokens: int, timing: Timing | None, *, not_fetched: bool) -> None:
        """A request ended here."""
        self._success.labels(*self._values, finish.value).inc()
        self._e2e.labels(*self._values).observe(total_s)
        if not_fetched:
            counter = self._not_loaded if finish is Finish.ERROR else self._recomputed
            counter.labels(*self._values).inc()
        if timing is None:
            return
        self._queue.labels(*self._values).observe(timing.queue_s)
        self._prefill.labels(*self._values).observe(timing.prefill_s)
        self._decode.labels(*self._values).observe(timing.decode_s)
        if timing.transfer_bytes:
            self._transfer.labels(*self._values).observe(timing.transfer_s)
            self._exposed.labels(*self._values).observe(timing.exposed_s)
        if timing.transfer_s:
            self._decode_queue.labels(*self._values).observe(timing.decode_queue_s)
        if timing.first_step_s:
            self._first_step.labels(*self._values).observe(timing.first_step_s)
        if tokens > 1:
            self._tpot.labels(*self._values).observe(timing.decode_s / (tokens - 1))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
