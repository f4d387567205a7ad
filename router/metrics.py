"""The router's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.openai_api.stages import STAGES
from kvrelay.router.nodes.node import State
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.timeline import EndedRequest
from kvrelay.wire.config import Role
from kvrelay.wire.errors import KV_CAUSES
from kvrelay.wire.ladder import RUNGS

__all__ = ["Metrics"]

disable_created_metrics()  # type: ignore[no-untyped-call]

_LEGS = (Role.PREFILL.value, Role.DECODE.value)
_LOCAL_REASONS = ("no_prefill_node", "incompatible", "price")
"""Why a decode node computes a prompt."""
_LIMITS = ("ttft", "ttft_never", "ttft_passed", "tpot_never")

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_STAGE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, *_LATENCY_S)
_BREAKER = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}
_MODEL = "model_name"
"""vLLM's name of the label."""
_INTER_TOKEN_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)


_Levels = Callable[[], Mapping[str, float]]
"""Tells a gauge's levels by model at a scrape."""


def _gauge(
    name: str, about: str, labels: Sequence[str], levels: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = GaugeMetricFamily(f"kvrelay_router_{name}", about, labels=labels)
    for values, level in levels:
        family.add_metric(values, level)
    return family


class Metrics(Collector):
    """A router's metrics; times are taken by one clock.

    The label `model_name` is the model behind an adapter or an alias, and empty if the request
    named none that is served.
    """

    def __init__(self, pool: Pool, keys: Iterable[str]) -> None:
        """`keys` are the names of the API keys."""
        self.registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str, zeros: Iterable[str] = ()) -> Counter:
            made = Counter(name, about, labels, registry=registry)
            for value in zeros:  # so that the first rate is right
                made.labels(value)
            return made

        histogram = partial(Histogram, labelnames=[_MODEL], buckets=_LATENCY_S, registry=registry)
        self._pool = pool
        self.counts = collections.Counter[str]()
        """Counts of the console since the start: `requests`, `failed`, `output_tokens`."""
        registry.register(self)  # first: it makes the others show their zeros
        self.running: _Levels = dict
        self.waiting: _Levels = dict
        self.waiting_for_room: _Levels = dict
        self._wait = histogram(
            "kvrelay_router_queue_wait_seconds",
            "Time in the router's queue, for requests that waited and began.",
            labelnames=(),
        )
        self._refused = counter(
            "kvrelay_router_refused",
            "Requests that never began, by reason.",
            "reason",
            zeros=("queue_full", "deadline", *_LIMITS),
        )
        self._key_requests = counter(
            "kvrelay_router_key_requests",
            "Requests by API key: begun or refused.",
            "key",
            "outcome",
        )
        self.key_tokens = counter(
            "kvrelay_router_key_tokens",
            "Tokens by API key: of prompts and of answers.",
            "key",
            "kind",
        )
        for key in keys:
            self._key_requests.labels(key, "begun")
            self.key_tokens.labels(key, "prompt")
            self.key_tokens.labels(key, "output")
        self.requests = counter(
            "kvrelay_router_requests",
            "Finished requests; 499: the client went away.",
            _MODEL,
            "path",
            "status",
        )
        self.ttft = histogram(
            "kvrelay_router_time_to_first_token_seconds", "Arrival to first token."
        )
        self.e2e = histogram("kvrelay_router_e2e_request_latency_seconds", "Arrival to end.")
        self.inter_token = histogram(
            "kvrelay_router_inter_token_latency_seconds",
            "Mean time between tokens, one observation per request.",
            buckets=_INTER_TOKEN_S,
        )
        self.stage = histogram(
            "kvrelay_router_stage_seconds",
            "Time in each stage of a request.",
            labelnames=[_MODEL, "stage"],
            buckets=_STAGE_S,
        )
        self.output_tokens = counter(
            "kvrelay_router_output_tokens",
            "Tokens seen from the nodes.",
            _MODEL,
        )
        self.failovers = counter(
            "kvrelay_failovers",
            "Requests continued on another node after theirs broke.",
            "leg",
            zeros=_LEGS,
        )
        self.disaggregated = counter(
            "kvrelay_router_disaggregated",
            "Requests handed from a prefill node to a decode node.",
            _MODEL,
        )
        self.local_prefills = counter(
            "kvrelay_router_local_prefills",
            "Prompts of new answers that a decode node computed, by reason.",
            _MODEL,
            "reason",
        )
        self.kv_failures = counter(
            "kvrelay_router_kv_failures",
            "KV that did not come, as decode nodes say, by cause.",
            "cause",
            zeros=KV_CAUSES,
        )
        self.full = counter(
            "kvrelay_router_full_nodes",
            "Requests moved to another node because one had no room.",
            "leg",
            zeros=_LEGS,
        )
        self.retries_refused = counter(
            "kvrelay_router_retries_refused", "Requests not tried again because too many are."
        )
        self.poison = counter(
            "kvrelay_router_poison_requests",
            "Requests with which two nodes died: stopped before a third, or refused when sent again.",
            "outcome",
            zeros=("stopped", "refused"),
        )
        self._prompt_tokens = counter(
            "kvrelay_router_prompt_tokens",
            "Tokens of prompts, by where their KV was found or why it was not.",
            "rung",
            zeros=RUNGS,
        )
        self.role_changes = counter(
            "kvrelay_router_role_changes",
            "Nodes that were asked to take a role because it was short of them: begun or refused.",
            _MODEL,
            "role",
            "outcome",
        )
        self.role_use = Gauge(
            "kvrelay_router_role_use",
            "Use of a role's nodes; above 0.85 it is short of them.",
            [_MODEL, "role"],
            registry=registry,
        )
        ProcessCollector(registry=registry)

    def admitted(self, key: str, waited_s: float | None = None) -> None:
        self._key_requests.labels(key, "begun").inc()
        if waited_s is not None:
            self._wait.observe(waited_s)

    def not_admitted(self, key: str, reason: str) -> None:
        self._refused.labels(reason).inc()
        self._key_requests.labels(key, "refused").inc()

    def model_of(self, asked: str) -> str:
        """Return the label for a model or adapter; empty if no node has reported it."""
        return self._pool.base_of(asked)

    def refused(self, path: str, status: int, asked: str = "") -> None:
        """Count a request refused before it ran; `asked` is the model it named."""
        self._count(self.model_of(asked), path, status)

    def _count(self, model: str, path: str, status: int) -> None:
        self.requests.labels(model, path, str(status)).inc()
        self.counts["requests"] += 1
        self.counts["failed"] += status >= 500

    def local(self, asked: str, reason: str) -> None:
        self.local_prefills.labels(self.model_of(asked), reason).inc()

    def finished(self, model: str, request: EndedRequest) -> None:
        """Count a finished request; its tokens were counted already."""
        self._count(model, request.path, request.status)
        self.counts.update(request.rungs)
        for rung, tokens in request.rungs.items():
            self._prompt_tokens.labels(rung).inc(tokens)
        for name, seconds in request.stages_s.items():
            if name == "total":
                self.e2e.labels(model).observe(seconds)
            else:
                self.stage.labels(model, name).observe(seconds)
        if request.ttft_s is not None:
            self.ttft.labels(model).observe(request.ttft_s)
        if request.inter_token_s is not None:
            self.inter_token.labels(model).observe(request.inter_token_s)

    def collect(self) -> Iterator[Metric]:
        pool, index, now = self._pool, self._pool.prefixes, time.monotonic()
        models = pool.models()
        for model in models:  # from the first scrape on, so that the first rate is right
            for histogram in (self.ttft, self.e2e, self.inter_token):
                histogram.labels(model)
            for counter in (self.output_tokens, self.disaggregated):
                counter.labels(model)
            for reason in _LOCAL_REASONS:
                self.local_prefills.labels(model, reason)
            for stage in STAGES:
                if stage != "total":
                    self.stage.labels(model, stage)
        for name, about, levels in (
            ("requests_running", "Requests being answered now.", self.running()),
            ("queue_waiting", "Requests that wait to begin.", self.waiting()),
            (
                "waiting_for_room",
                "Requests already begun that wait for room on a node again.",
                self.waiting_for_room(),
            ),
        ):
            known = dict.fromkeys(models, 0.0) | dict(levels)
            yield _gauge(name, about, [_MODEL], (([of], level) for of, level in known.items()))
        everyone = (*pool.nodes, *pool.leaving)
        yield _gauge(
            "breaker_state",
            "0: the node takes requests, 1: it is tried (half-open), 2: it takes none (open).",
            ["node"],
            (([node.url], _BREAKER[node.breaker.state(now)]) for node in pool.nodes),
        )
        yield _gauge(
            "node_up",
            "1 if the node takes requests; without a model before its first report.",
            ["node", "role", _MODEL],
            (([node.url, node.role, node.model], float(node.up)) for node in everyone),
        )
        yield _gauge(
            "queue_depth",
            "Queue of the node, as the router sees it.",
            ["node", "role"],
            (([node.url, node.role], node.state.depth) for node in everyone),
        )
        for name, about, size in (
            ("texts", "Pieces of prompts whose blocks the prefix index knows.", index.texts()),
            ("blocks", "Blocks of KV that nodes are known to hold, node by node.", index.blocks()),
        ):
            yield _gauge(f"prefix_{name}", about, [], [([], size)])
