"""The metrics of several processes as those of one."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.router.metrics import Metrics
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.workers.parent import LARGEST, lasting, summed, text_of

ADDED = frozenset(
    {
        "kvrelay_router_requests_running",
        "kvrelay_router_queue_waiting",
        "kvrelay_router_waiting_for_room",
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
    }
)
"""Gauges of what each worker has."""


def worker(requests: int, seconds: list[float], running: int, up: int) -> list[Metric]:
    registry = CollectorRegistry()
    counter = Counter("kvrelay_router_requests", "r", ["status"], registry=registry)
    if requests:
        counter.labels("200").inc(requests)
    histogram = Histogram("kvrelay_router_x_seconds", "x", buckets=(0.1, 1), registry=registry)
    for each in seconds:
        histogram.observe(each)
    Gauge("kvrelay_router_requests_running", "n", registry=registry).set(running)
    Gauge("kvrelay_router_node_up", "up", ["node"], registry=registry).labels("a").set(up)
    return list(registry.collect())


def values(families: list[Metric]) -> dict[str, float]:
    text = text_of(families).decode()
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {sample.name + "".join(sample.labels.values()): sample.value for sample in samples}


def test_counts_are_summed_and_what_all_see_is_not() -> None:
    told = values(summed([worker(2, [0.05, 5], 3, 1), worker(0, [0.5], 4, 1), worker(5, [], 0, 0)]))
    assert told["kvrelay_router_requests_total200"] == 7
    buckets = [told[f"kvrelay_router_x_seconds_bucket{le}"] for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [1, 2, 3]
    assert told["kvrelay_router_x_seconds_sum"] == pytest.approx(5.55)
    assert (told["kvrelay_router_requests_running"], told["kvrelay_router_node_upa"]) == (7, 1)


def test_of_a_worker_that_has_ended_the_counts_are_left() -> None:
    told = values(summed([worker(2, [], 3, 0), lasting(worker(5, [0.5], 4, 1))]))
    assert told["kvrelay_router_requests_total200"] == 7
    assert told["kvrelay_router_x_seconds_count"] == 1
    assert (told["kvrelay_router_requests_running"], told["kvrelay_router_node_upa"]) == (3, 0)


def test_every_gauge_says_how_it_is_joined() -> None:
    pool = Pool(["http://p"], ["http://d"])
    families = Metrics(pool, ["alice"]).registry.collect()
    gauges = {family.name for family in families if family.type == "gauge"}
    assert gauges == ADDED | LARGEST
    assert not ADDED & LARGEST
