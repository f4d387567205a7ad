"""Prometheus metrics of a node: its requests, its processes, and its engine (engine_metrics.py).

A request that is handed over runs on two nodes, and each counts its own part: sums over the nodes
of one role are sums over requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvrelay.node.engine_metrics import EngineMetrics
from kvrelay.openai_api.fast_metrics import FastHistogram
from kvrelay.wire.config import NodeConfig, Role
from kvrelay.wire.engine_messages import EngineReady, EngineStats, Timing
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
_ALIASES = {
    "vllm:time_per_output_token_seconds": (_ITL, f"{_ITL} by its older name"),
    "vllm:nixl_xfer_time_seconds": (_TRANSFER, f"{_TRANSFER} by vLLM's name"),
    "vllm:request_params_max_tokens": (_MAX_TOKENS, f"{_MAX_TOKENS} by its other name"),
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
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "role": str(config.role)}
        self._labels = tuple(labels.values())
        self._kv_bytes_per_token = info.kv_bytes_per_token
        self.registry.register(EngineMetrics(stats, labels, config, info))
        ProcessCollector(registry=self.registry)
        ProcessCollector(namespace="kvrelay_engine", pid=engine_pid, registry=self.registry)
        sizes = _one_two_five(info.max_model_len)
        tables = _HISTOGRAMS | {name: (text, sizes) for name, text in _TOKEN_COUNTS.items()}
        self._histograms = {
            name: FastHistogram(name, text, bounds, self.registry, fixed=labels)
            for name, (text, bounds) in tables.items()
        }
        for alias, (name, text) in _ALIASES.items():
            self.registry.register(_Alias(self._histograms[name], alias, text))
        self._counters: dict[str, Counter] = {}
        for name, text in _COUNTERS.items():
            self._counters[name] = Counter(name, text, list(labels), registry=self.registry)
            self._counters[name].labels(*self._labels)
        for name, (text, label, values) in _LABELLED.items():
            self._counters[name] = Counter(name, text, [*labels, label], registry=self.registry)
            for value in values:
                self._counters[name].labels(*self._labels, value)
        self._by_role = ByRole(self.registry, model_name, config.role)

    def count_replay(self, outcome: str) -> None:
        self._count(_REPLAYS, outcome)

    def count_flip(self, outcome: str) -> None:
        self._count(_FLIPS, outcome)

    def set_role(self, role: Role) -> None:
        """Attribute what is counted from now on to this role."""
        self._by_role.set_role(role)

    def observe_first_token(self, seconds: float) -> None:
        self._histograms[_TTFT].observe(seconds)

    def observe_next_tokens(self, seconds: float) -> None:
        self._histograms[_ITL].observe(seconds)

    def count_submit(
        self, prompt_tokens: int, max_tokens: int, choices: int, *, fetches: bool
    ) -> None:
        """Count a submitted request; one that `fetches` gets its prompt's KV from another node."""
        self._histograms[_PROMPT_TOKENS].observe(prompt_tokens)
        self._histograms[_MAX_TOKENS].observe(max_tokens)
        self._histograms[_N].observe(choices)
        if fetches:
            self._count(_EXTERNAL_QUERIES, by=prompt_tokens)

    def count_end(
        self,
        finish: Finish,
        total_s: float,
        tokens: int,
        timing: Timing | None,
        *,
        not_fetched: bool,
    ) -> None:
        """Count a request that ended here with `tokens` generated here."""
        self._count(_SUCCESS, finish.value)
        self._histograms[_E2E].observe(total_s)
        self._histograms[_OUTPUT_TOKENS].observe(tokens)
        if not_fetched:
            self._count(_NOT_LOADED if finish is Finish.ERROR else _RECOMPUTED)
        if timing is not None:
            self._observe_stages(timing, tokens)

    def text(self) -> bytes:
        return generate_latest(self._by_role)

    def _count(self, name: str, *values: str, by: float = 1) -> None:
        self._counters[name].labels(*self._labels, *values).inc(by)

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
            self._count(_EXTERNAL_HITS, by=fetched_tokens)
        if timing.transfer_s:
            histograms[_DECODE_QUEUE].observe(timing.decode_queue_s)
        if timing.first_step_s:
            histograms[_FIRST_STEP].observe(timing.first_step_s)
        if tokens > 1:
            histograms[_TPOT].observe(timing.decode_s / (tokens - 1))


class _Alias(Collector):
    def __init__(self, metric: Collector, name: str, text: str) -> None:
        self._metric, self._name, self._text = metric, name, text

    def collect(self) -> Iterator[Metric]:
        for family in self._metric.collect():
            renamed = Metric(self._name, self._text, family.type)
            for sample in family.samples:
                name = sample.name.replace(family.name, self._name, 1)
                renamed.add_sample(name, sample.labels, sample.value)
            yield renamed


def _one_two_five(largest: int) -> tuple[float, ...]:
    bounds, ten = [1.0], 1
    while bounds[-1] < largest:
        bounds += [float(ten * 2), float(ten * 5), float(ten * 10)]
        ten *= 10
    return tuple(bound for bound in bounds if bound <= largest) or (1.0,)


_ROLE_METRIC = "kvrelay_node_role"
_CUMULATIVE = ("counter", "histogram")

_Key = tuple[str, tuple[tuple[str, str], ...]]


class ByRole(Collector):
    """A view of a registry that splits counts by the role in which they were counted.

    All metrics are declared with the role at the start. Gauges get the present role; counts stay
    with the role that the node had. Registers a gauge of the role. A node that never changes its
    role is passed through.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, role: Role) -> None:
        self._registry, self._model_name, self._now = registry, model_name, role
        self._before: Mapping[_Key, float] = {}
        """All counts when the present role began."""
        self._counts: dict[Role, dict[_Key, float]] = {role: {}}
        """Of each role, until its last end."""
        text = "1 for the role that the node has now, else 0"
        self._gauge = Gauge(_ROLE_METRIC, text, ["model_name", "role"], registry=registry)
        self._show_role()

    def set_role(self, role: Role) -> None:
        """Attribute what is counted from now on to this role."""
        counts = {
            _key(sample): sample.value
            for family in self._registry.collect()
            if family.type in _CUMULATIVE
            for sample in family.samples
        }
        mine = self._counts[self._now]
        for key, count in counts.items():
            mine[key] = mine.get(key, 0.0) + count - self._before.get(key, 0.0)
        self._before, self._now = counts, role
        self._counts.setdefault(role, {})
        self._show_role()

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if len(self._counts) > 1 and family.name != _ROLE_METRIC:
                family.samples = list(self._split(family))
            yield family

    def _show_role(self) -> None:
        roles = {Role.AGGREGATED} if self._now is Role.AGGREGATED else {Role.PREFILL, Role.DECODE}
        for role in roles:
            self._gauge.labels(self._model_name, role.value).set(role is self._now)

    def _split(self, family: Metric) -> Iterator[Sample]:
        cumulative = family.type in _CUMULATIVE
        for role, counts in self._counts.items():
            for sample in family.samples:
                present = role is self._now
                if "role" not in sample.labels:
                    if present:
                        yield sample
                    continue
                labels = sample.labels | {"role": role.value}
                if cumulative and not sample.name.endswith("_created"):
                    key = _key(sample)
                    since = sample.value - self._before.get(key, 0.0) if present else 0.0
                    yield sample._replace(labels=labels, value=counts.get(key, 0.0) + since)
                elif present:
                    yield sample._replace(labels=labels)


def _key(sample: Sample) -> _Key:
    return sample.name, tuple(sample.labels.items())
