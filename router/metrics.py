"""The router's Prometheus metrics, in a registry of their own. Measures nothing itself; is told."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from openai_api.stages import STAGES
from router.pool import Node, Pool
from router.prefix_metrics import PrefixMetrics
from router.timeline import Timeline

__all__ = ["Metrics"]

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_STAGE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, *_LATENCY_S)
_INTER_TOKEN_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)


class Metrics:
    """All metrics of one router. All times are taken by the router's one clock."""

    def __init__(self, pool: Pool) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvrelay_router_requests",
            "Finished requests; 499: the client went away.",
            ["path", "status"],
            registry=registry,
        )
        self.running = Gauge("kvrelay_router_requests_running", "Requests being answered now.", registry=registry)
        self.ttft = Histogram(
            "kvrelay_router_time_to_first_token_seconds",
            "Arrival to first token.",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.e2e = Histogram(
            "kvrelay_router_e2e_request_latency_seconds", "Arrival to end.", buckets=_LATENCY_S, registry=registry
        )
        self.inter_token = Histogram(
            "kvrelay_router_inter_token_latency_seconds",
            "Mean time between tokens, one observation per request.",
            buckets=_INTER_TOKEN_S,
            registry=registry,
        )
        self.stage = Histogram(
            "kvrelay_router_stage_seconds",
            "Time in each stage of a request, as openai_api/stages.py names them.",
            ["stage"],
            buckets=_STAGE_S,
            registry=registry,
        )
        for name in STAGES:
            if name != "total":
                self.stage.labels(name)
        self.output_tokens = Counter("kvrelay_router_output_tokens", "Tokens seen from the nodes.", registry=registry)
        self.failovers = Counter(
            "kvrelay_failovers", "Legs continued on another node after theirs broke.", ["leg"], registry=registry
        )
        self.releases = Counter(
            "kvrelay_router_releases", "KV given back because no decode leg would take it.", ["told"], registry=registry
        )
        registry.register(_Choices(pool))
        self.meetings = Counter(
            "kvrelay_router_meetings",
            "Pairs of nodes asked to hand a block over before a request needs them to, by how it went.",
            ["outcome"],
            registry=registry,
        )
        self.prefix = PrefixMetrics(registry, pool.prefixes)
        node_up = Gauge("kvrelay_router_node_up", "1 if the node takes legs.", ["node", "role"], registry=registry)
        depth = Gauge("kvrelay_router_queue_depth", "Depth that the choice sees.", ["node", "role"], registry=registry)

        def joined(node: Node) -> None:
            node_up.labels(node.url, node.role).set_function(partial(_up, node))
            depth.labels(node.url, node.role).set_function(partial(_depth, node))

        def left(node: Node) -> None:
            node_up.remove(node.url, node.role)
            depth.remove(node.url, node.role)

        pool.follow(joined, left)

    def finished(self, path: str, status: int, timeline: Timeline | None = None, tokens: int = 0) -> None:
        """Count one finished request; without a timeline it was refused at the door."""
        self.requests.labels(path, str(status)).inc()
        if timeline is None:
            return
        self.output_tokens.inc(tokens)
        stages = timeline.stages_s(timeline.arrived if timeline.ended is None else timeline.ended)
        self.e2e.observe(stages.pop("total", 0.0))
        for name, seconds in stages.items():
            self.stage.labels(name).observe(seconds)
        if timeline.first_token is not None:
            self.ttft.observe(timeline.first_token - timeline.arrived)
        inter_token_s = timeline.inter_token_s(tokens)
        if inter_token_s is not None:
            self.inter_token.observe(inter_token_s)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _Choices(Collector):
    """What the pool counts of its choices."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """One counter."""
        says = "Nodes chosen. prefix: whether the node was believed to have some of the prompt."
        choices = CounterMetricFamily("kvrelay_router_choices", says, labels=["leg", "policy", "prefix"])
        for (role, some), count in self._pool.choices.items():
            choices.add_metric([role.value, self._pool.policies[role], "some" if some else "none"], count)
        yield choices


def _up(node: Node) -> float:
    return float(node.up)


def _depth(node: Node) -> float:
    return node.depth
