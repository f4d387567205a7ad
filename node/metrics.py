"""Prometheus metrics of a node: its requests, its processes, and what its engine reports.

Names that begin with `vllm:` mean what vLLM means by them. A request that is handed over runs on
two nodes, and each counts its own part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from operator import attrgetter

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvrelay.wire.config import NodeConfig, Role
from kvrelay.wire.engine_messages import STEP_TOKENS, EngineReady, EngineStats, Timing
from kvrelay.wire.errors import KV_CAUSES
from kvrelay.wire.outputs import Finish

__all__ = ["NodeMetrics"]

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
_BYTES = tuple(float(2**power) for power in range(11, 36, 2))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)

_TTFT = "vllm:time_to_first_token_seconds"
_ITL = "vllm:inter_token_latency_seconds"
_TPOT = "vllm:request_time_per_output_token_seconds"
_E2E = "vllm:e2e_request_latency_seconds"
_INFERENCE = "vllm:request_inference_time_seconds"
_QUEUE = "vllm:request_queue_time_seconds"
_PREFILL = "vllm:request_prefill_time_seconds"
_DECODE = "vllm:request_decode_time_seconds"
_TRANSFER = "kvrelay_transfer_seconds"
_EXPOSED = "kvrelay_transfer_exposed_seconds"
_DECODE_QUEUE = "kvrelay_decode_queue_seconds"
_FIRST_STEP = "kvrelay_first_step_seconds"
_PROMPT_TOKENS = "vllm:request_prompt_tokens"
_OUTPUT_TOKENS = "vllm:request_generation_tokens"
_MAX_TOKENS = "vllm:request_max_num_generation_tokens"
_N = "vllm:request_params_n"
_TRANSFERRED = "vllm:nixl_bytes_transferred"

_HISTOGRAMS = {
    _TTFT: ("From arrival here to the first token", _TTFT_S),
    _ITL: ("Between tokens that follow each other", _TOKEN_S),
    _TPOT: ("Mean time per token after the first, of a request", _TOKEN_S),
    _E2E: ("From arrival here to the end", _REQUEST_S),
    _INFERENCE: ("Computing, from the first step to the last", _REQUEST_S),
    _QUEUE: ("Waiting for a seat or for blocks", _STAGE_S),
    _PREFILL: ("Computing the prompt", _STAGE_S),
    _DECODE: ("From the first to the last token", _STAGE_S),
    _TRANSFER: ("From a request's first wait for its KV to the last byte", _STAGE_S),
    _EXPOSED: ("The part of kvrelay_transfer_seconds after the prompt was computed", _STAGE_S),
    _DECODE_QUEUE: (
        "With KV from elsewhere: waiting for a seat and blocks, and for a step",
        _STAGE_S,
    ),
    _FIRST_STEP: ("The first decode step, from its launch to its token", _STAGE_S),
    _N: ("Choices of a request's answer", _CHOICES),
    _TRANSFERRED: ("KV bytes of a fetch, over any connector", _BYTES),
}
_TOKEN_COUNTS = {
    _PROMPT_TOKENS: "Tokens of a request's prompt",
    _OUTPUT_TOKENS: "Tokens that a request generated here",
    _MAX_TOKENS: "Most tokens that a request may generate here",
}
_SUCCESS = "vllm:request_success"
_RECOMPUTED = "kvrelay_recomputed_prompts"
_NOT_LOADED = "kvrelay_requests_not_loaded"
_EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries"
_EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
_FLIPS = "kvrelay_node_flips"
_REPLAYS = "kvrelay_kv_event_replays"

_COUNTERS = {
    _RECOMPUTED: (
        "Prompts computed on this decode node after a failed fetch, from the first missing block on"
    ),
    _NOT_LOADED: (
        "Requests ended with an error after a failed fetch (kv_load_failure_policy fail)"
    ),
    _EXTERNAL_QUERIES: "Prompt tokens whose KV another node was to give",
    _EXTERNAL_HITS: "Prompt tokens whose KV another node gave",
}
# With a label and its values, all shown from the start so that a rate can be taken of the first.
_LABELLED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    _SUCCESS: ("Requests by how they ended", "finished_reason", tuple(map(str, Finish))),
    _FLIPS: ("Changes of the node's role, by how they ended", "outcome", ("done", "cancelled")),
    _REPLAYS: (
        "Replays of KV events that were asked for, by whether they could be",
        "outcome",
        ("ok", "malformed"),
    ),
}
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
_ENGINE_COUNTERS = {
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
# Shares of kv_cache_usage_perc; nothing is ever swapped.
_CACHE_GAUGES = {
    "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", 1),
    "vllm:gpu_cache_usage_perc": (
        "vllm:kv_cache_usage_perc by its older name, which gateways still read",
        1,
    ),
    "vllm:num_requests_swapped": ("Always 0: nothing is swapped, a preempted request waits", 0),
    "vllm:cpu_cache_usage_perc": ("Always 0: no KV is swapped to the host's memory", 0),
}
_QUERIES = {
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "vllm:gpu_prefix_cache_queries": "vllm:prefix_cache_queries by its older name",
}
_CUMULATIVE = ("counter", "histogram")
_Key = tuple[str, tuple[tuple[str, str], ...]]


class NodeMetrics:
    """A registry of one node process. `engine_pid` returns -1 while there is no engine process."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        config: NodeConfig,
        info: EngineReady,
        model_name: str,
        engine_pid: Callable[[], int],
    ) -> None:
        self._kv_bytes_per_token = info.kv_bytes_per_token
        counted = CollectorRegistry()
        counted.register(_EngineMetrics(stats, config, info))
        sizes = _one_two_five(info.max_model_len)
        tables = _HISTOGRAMS | {name: (text, sizes) for name, text in _TOKEN_COUNTS.items()}
        self._histograms = {
            name: Histogram(name, text, buckets=bounds, registry=counted)
            for name, (text, bounds) in tables.items()
        }
        self._counters = {
            name: Counter(name, text, registry=counted) for name, text in _COUNTERS.items()
        }
        for name, (text, label, values) in _LABELLED.items():
            self._counters[name] = counter = Counter(name, text, [label], registry=counted)
            for value in values:
                counter.labels(value)
        self._by_role = _ByRole(counted, model_name, config.role)
        self.registry = CollectorRegistry()
        self.registry.register(self._by_role)
        ProcessCollector(registry=self.registry)
        ProcessCollector(namespace="kvrelay_engine", pid=engine_pid, registry=self.registry)

    def count_replay(self, outcome: str) -> None:
        self._counters[_REPLAYS].labels(outcome).inc()

    def count_flip(self, outcome: str) -> None:
        self._counters[_FLIPS].labels(outcome).inc()

    def set_role(self, role: Role) -> None:
        self._by_role.set_role(role)

    def observe_first_token(self, seconds: float) -> None:
        self._histograms[_TTFT].observe(seconds)

    def observe_next_tokens(self, seconds: float) -> None:
        self._histograms[_ITL].observe(seconds)

    def count_submit(
        self, prompt_tokens: int, max_tokens: int, choices: int, *, fetches: bool
    ) -> None:
        self._histograms[_PROMPT_TOKENS].observe(prompt_tokens)
        self._histograms[_MAX_TOKENS].observe(max_tokens)
        self._histograms[_N].observe(choices)
        if fetches:
            self._counters[_EXTERNAL_QUERIES].inc(prompt_tokens)

    def count_end(
        self,
        finish: Finish,
        total_s: float,
        tokens: int,
        timing: Timing | None,
        *,
        not_fetched: bool,
    ) -> None:
        self._counters[_SUCCESS].labels(finish.value).inc()
        self._histograms[_E2E].observe(total_s)
        self._histograms[_OUTPUT_TOKENS].observe(tokens)
        if not_fetched:
            self._counters[_NOT_LOADED if finish is Finish.ERROR else _RECOMPUTED].inc()
        if timing is not None:
            self._observe_stages(timing, tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _observe_stages(self, timing: Timing, tokens: int) -> None:
        histograms = self._histograms
        histograms[_QUEUE].observe(timing.queue_s)
        histograms[_PREFILL].observe(timing.prefill_s)
        histograms[_DECODE].observe(timing.decode_s)
        histograms[_INFERENCE].observe(timing.prefill_s + timing.decode_s)
        if timing.transfer_bytes:
            histograms[_TRANSFER].observe(timing.transfer_s)
            histograms[_EXPOSED].observe(timing.exposed_s)
            histograms[_TRANSFERRED].observe(timing.transfer_bytes)
            fetched_tokens = timing.transfer_bytes // max(1, self._kv_bytes_per_token)
            self._counters[_EXTERNAL_HITS].inc(fetched_tokens)
        if timing.transfer_s:
            histograms[_DECODE_QUEUE].observe(timing.decode_queue_s)
        if timing.first_step_s:
            histograms[_FIRST_STEP].observe(timing.first_step_s)
        if tokens > 1:
            histograms[_TPOT].observe(timing.decode_s / (tokens - 1))


def _one_two_five(largest: int) -> tuple[float, ...]:
    bounds, ten = [1.0], 1
    while bounds[-1] < largest:
        bounds += [float(ten * 2), float(ten * 5), float(ten * 10)]
        ten *= 10
    return tuple(bound for bound in bounds if bound <= largest) or (1.0,)


class _ByRole(Collector):
    """A view of metrics that adds the labels model_name and role to each sample.

    Counts stay with the role in which they were counted; gauges have the present role.
    """

    def __init__(self, counted: CollectorRegistry, model_name: str, role: Role) -> None:
        self._counted, self._model_name, self._role = counted, model_name, role
        self._before: Mapping[_Key, float] = {}
        """All counts when the present role began."""
        self._past: dict[Role, dict[_Key, float]] = {}

    def set_role(self, role: Role) -> None:
        counts = {
            _key(sample): sample.value
            for family in self._counted.collect()
            if family.type in _CUMULATIVE
            for sample in family.samples
        }
        past = self._past.setdefault(self._role, {})
        for key, count in counts.items():
            past[key] = past.get(key, 0.0) + count - self._before.get(key, 0.0)
        self._before, self._role = counts, role

    def collect(self) -> Iterator[Metric]:
        for family in self._counted.collect():
            family.samples = list(self._labelled(family))
            yield family
        text = "1 for the role that the node has now, else 0"
        gauge = GaugeMetricFamily("kvrelay_node_role", text, labels=["model_name", "role"])
        for role in Role:
            if (role is Role.AGGREGATED) == (self._role is Role.AGGREGATED):
                gauge.add_metric([self._model_name, role.value], role is self._role)
        yield gauge

    def _labelled(self, family: Metric) -> Iterator[Sample]:
        cumulative = family.type in _CUMULATIVE
        for role in {**self._past, self._role: {}} if cumulative else [self._role]:
            for sample in family.samples:
                if sample.name.endswith("_created"):  # a time, no count
                    continue
                labels = {"model_name": self._model_name, "role": role.value, **sample.labels}
                value = sample.value
                if cumulative:
                    key = _key(sample)
                    value -= self._before.get(key, 0.0) if role is self._role else value
                    value += self._past.get(role, {}).get(key, 0.0)
                yield sample._replace(labels=labels, value=value)


def _key(sample: Sample) -> _Key:
    return sample.name, tuple(sample.labels.items())


class _EngineMetrics(Collector):
    def __init__(
        self, stats: Callable[[], EngineStats], config: NodeConfig, info: EngineReady
    ) -> None:
        self._stats = stats
        engine, speculation = config.engine, config.engine.speculative_config
        self._max_loras = engine.adapter_slots
        self._max_drafts = speculation.num_speculative_tokens if speculation else 0
        self._cache_config = {
            "block_size": str(info.block_size),
            "cache_dtype": engine.kv_cache_dtype,
            "enable_prefix_caching": str(engine.enable_prefix_caching),
            "gpu_memory_utilization": str(engine.gpu_memory_utilization),
            "num_gpu_blocks": str(info.num_blocks),
            "engine": "0",
        }

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        load, failures = stats.load, stats.fetch_failures
        used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
        for name, (text, field) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, attrgetter(field)(stats))
        for name, (text, share) in _CACHE_GAUGES.items():
            yield GaugeMetricFamily(name, text, share * used)
        for name, (text, field) in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(name, text, attrgetter(field)(stats))
        queries = stats.prompt_tokens + stats.cached_prompt_tokens
        for name, text in _QUERIES.items():
            yield CounterMetricFamily(name, text, queries)
        text = "KV fetches that failed, over any connector"
        yield CounterMetricFamily("vllm:nixl_num_failed_transfers", text, sum(failures.values()))
        text = "Facts of the KV cache, in the labels"
        yield _gauge_of_labels("vllm:cache_config_info", text, 1, self._cache_config)
        if self._max_loras:
            # As in vLLM: the labels say which adapters are in use, the value is the time.
            adapters = {
                "max_lora": str(self._max_loras),
                "running_lora_adapters": ",".join(stats.running_adapters),
                "waiting_lora_adapters": ",".join(stats.waiting_adapters),
            }
            text = "Adapters in use"
            yield _gauge_of_labels("vllm:lora_requests_info", text, time.time(), adapters)
        sizes = accumulate(stats.step_sizes or [0] * (len(STEP_TOKENS) + 1))
        bounds = [*map(str, map(float, STEP_TOKENS)), "+Inf"]
        yield HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens that an engine step computes",
            buckets=list(zip(bounds, sizes, strict=True)),
            sum_value=stats.step_tokens,
        )
        accepted = stats.accepted_at or [0] * self._max_drafts
        yield _counter_by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens that were drawn, by their place in the proposal",
            "position",
            {str(at): accepted[at] for at in range(self._max_drafts)},
        )
        # All from the start, so that a rate can be taken of the first one.
        by_cause = {cause: failures.get(cause, 0) for cause in sorted({*KV_CAUSES, *failures})}
        text = "KV fetches that failed, by cause"
        yield _counter_by("kvrelay_fetches_failed", text, "cause", by_cause)


def _gauge_of_labels(name: str, text: str, value: float, labels: Mapping[str, str]) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=list(labels))
    gauge.add_metric(list(labels.values()), value)
    return gauge


def _counter_by(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    counter = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        counter.add_metric([value], count)
    return counter
