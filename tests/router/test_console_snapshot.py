"""What the console remembers is bounded and its percentiles are true; what several workers see
becomes one picture.
"""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.router.console.snapshot import Snapshot, WorkerRow, snapshot_of
from kvrelay.router.nodes.breaker import BreakerState
from kvrelay.router.recent_requests import (
    EDGE_SLOTS,
    KEPT_REQUESTS,
    MAX_EDGES,
    SLOT_S,
    SLOTS,
    Edge,
    EndedRequest,
    RecentRequests,
    bucket_of,
    quantile,
)
from kvrelay.router.state import FailedPair, Health, NodeStatus, WorkerStatus
from kvrelay.router.workers.messages import WorkerReport, encode_message, read_message
from kvrelay.wire.config import Role

P, D = "http://p:1", "http://d:1"


def request(at: float, **fields: Any) -> EndedRequest:
    every: dict[str, Any] = {
        "id": f"r{at}",
        "path": "/v1/completions",
        "model": "m",
        "key": "anyone",
        "status": 200,
        "error": "",
        "stream": True,
        "local": False,
        "ended": at,
        "ttft_s": 0.1,
        "inter_token_s": 0.01,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "output_tokens": 7,
        "prefill": P,
        "decode": D,
        "kv_bytes": 0,
        "stages_s": {"total": 0.5},
    }
    return EndedRequest(**(every | fields))


def note(recent: RecentRequests, ended: float, now: float, **fields: Any) -> None:
    """A request ends there."""
    told = request(ended, **fields)
    recent.add_tokens(now, told.output_tokens)
    recent.add(now, told)


def node(url: str = P, **fields: Any) -> NodeStatus:
    every: dict[str, Any] = {
        "url": url,
        "role": "prefill",
        "kind": "kvrelay",
        "model": "m",
        "adapters": [],
        "up": True,
        "draining": False,
        "reason": "",
        "for_s": 1.0,
        "sources": ["static"],
        "legs": 1,
        "held_blocks": 0,
        "queue_depth": 1.0,
        "running": 1,
        "waiting": 0,
        "waiting_tokens": 0,
        "free_blocks": 9,
        "total_blocks": 10,
        "block_size": 16,
        "breakers": {},
    }
    return NodeStatus(**(every | fields))


def worker(
    index: int = 0, recent: RecentRequests | None = None, now: float = 1000.0, **fields: Any
) -> WorkerStatus:
    recent = recent or RecentRequests()
    every: dict[str, Any] = {
        "index": index,
        "uptime_s": 60.0,
        "running": 1,
        "waiting": 2,
        "waiting_for_room": 0,
        "nodes": [node()],
        "slots": recent.slots(now),
        "requests": list(recent.requests),
        "edges": recent.edges(now),
        "counts": {"requests": {"200": 1.0}},
        "failed_pairs": [],
    }
    return WorkerStatus(**(every | fields))


def shown(
    own: WorkerStatus, *others: WorkerStatus, wanted: int = 1, monotonic: float = 1000.0
) -> Snapshot:
    named: dict[str, Any] = {"health": Health.OK, "models": {"m": True}, "version": "1"}
    return snapshot_of(
        own, (own, *others), 0.0, wanted=wanted, now=5000.0, monotonic=monotonic, **named
    )


# What is remembered.


@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(0, 3)), max_size=400))
def test_what_is_kept_is_bounded_whatever_comes(steps: list[tuple[float, int]]) -> None:
    recent, now, ended = RecentRequests(), 0.0, []
    for passed, times in steps:
        now += passed
        for _ in range(times):
            note(recent, now, now)
            ended.append(now)
            recent.add_edge(now, Edge(P, D, 1))
    assert [each.ended for each in recent.requests] == ended[-KEPT_REQUESTS:]
    slots = recent.slots(now)
    assert len(slots) <= SLOTS
    first = (now // SLOT_S - SLOTS + 1) * SLOT_S
    assert sum(slot.ended for slot in slots) == sum(at >= first for at in ended)


def test_pairs_of_nodes_are_counted_apart_up_to_a_bound() -> None:
    recent = RecentRequests()
    note(recent, 0.0, 0.0)
    for at in range(MAX_EDGES + 50):
        recent.add_edge(0.0, Edge(f"p{at}", D, 1))
    recent.add_edge(0.0, Edge("p0", D, 0, 1, 5, 0.5, 0.25))
    edges = recent.edges(0.0)
    assert len(edges) == MAX_EDGES
    assert edges[0] == Edge("p0", D, 1, 1, 5, 0.5, 0.25)
    assert not recent.slots(0.0)[0].edges
    assert not recent.edges(EDGE_SLOTS * SLOT_S)


@given(
    st.lists(st.floats(2e-4, 1000.0), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99])
)
def test_a_percentile_is_off_by_less_than_three_percent(values: list[float], share: float) -> None:
    counts: dict[int, int] = {}
    for value in values:
        counts[bucket_of(value)] = counts.get(bucket_of(value), 0) + 1
    found = quantile(counts, share)
    assert found is not None
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    assert found == pytest.approx(exact, rel=0.03)


def test_nothing_has_no_percentile_and_any_time_has_a_bucket() -> None:
    assert quantile({}, 0.5) is None
    assert bucket_of(0.0) == bucket_of(-1.0)
    assert bucket_of(1e9) == bucket_of(1e12)


# What several see.


def test_what_workers_see_is_added_up_where_each_knows_a_part() -> None:
    one, two = RecentRequests(), RecentRequests()
    note(two, 4900.0, 900.0, ttft_s=0.4)
    two.add_edge(900.0, Edge(P, D, 0, 1, 900, 0.5, 0.1))  # longer ago than a minute
    for at in range(10):
        note(one, 4990.0 + at, 990.0 + at, ttft_s=0.1)
        note(two, 4990.5 + at, 990.0 + at, ttft_s=0.4, status=500 if at == 9 else 200)
    for recent, size, took_s in ((one, 100, 0.5), (two, 300, 0.25)):
        recent.add_edge(998.0, Edge(P, D, 1))
        recent.add_edge(999.0, Edge(P, D, 0, 1, size, took_s, 0.1))
    seen = shown(
        worker(1, one, nodes=[node(legs=3)]), worker(0, two, nodes=[node(legs=4)]), wanted=3
    )
    assert (seen.running, seen.waiting, seen.wanted) == (2, 4, 3)
    assert [row.index for row in seen.workers] == [0, 1]
    assert seen.nodes[0].legs == 7
    assert seen.counts == {"requests": {"200": 2.0}}
    assert (sum(seen.series.ended), sum(seen.series.failed), sum(seen.series.output_tokens)) == (
        21,
        1,
        147,
    )
    assert len(seen.series.ended) == len(seen.series.ttft_p50_s) == SLOTS
    assert (seen.ttft.count, seen.total.count) == (21, 20)
    assert seen.ttft.p50_s == pytest.approx(0.4, rel=0.03)
    assert seen.ttft.p99_s == pytest.approx(0.4, rel=0.03)
    assert seen.requests_per_s == pytest.approx(2.0)
    assert [(edge.handovers, edge.fetches, edge.bytes, edge.transfer_s) for edge in seen.edges] == [
        (2, 2, 400, 0.75)
    ]
    assert [each.ended for each in seen.requests[:3]] == [4999.5, 4999.0, 4998.5]


def test_of_what_each_finds_out_by_itself_the_worst_is_told() -> None:
    half, is_open = BreakerState("half_open", "was slow"), BreakerState("open", "cut", 3.0)
    own = worker(0, nodes=[node(breakers={Role.DECODE: half})])
    other = worker(
        1, nodes=[node(up=False, breakers={Role.DECODE: is_open, Role.PREFILL: half}), node(D)]
    )
    seen = shown(own, other, wanted=2)
    first, second = seen.nodes
    assert (first.up, first.up_in) == (True, 1)
    assert first.breakers == {Role.DECODE: is_open, Role.PREFILL: half}
    assert (second.url, second.up_in) == (D, 1)
    assert [row.nodes_up for row in seen.workers] == [1, 1]


def test_a_process_that_serves_nobody_shows_what_its_workers_see() -> None:
    lately, earlier = RecentRequests(), RecentRequests()
    note(lately, 4999.0, 999.0)
    note(earlier, 4990.0, 990.0)
    parent = worker(
        0, nodes=[node(legs=0), node(D, legs=0)], failed_pairs=[FailedPair(P, D, "cut")]
    )
    workers = [
        worker(0, lately, nodes=[node(legs=3)]),
        worker(1, earlier, nodes=[node(up=False, legs=4)]),
    ]
    named: dict[str, Any] = {"health": Health.OK, "models": {}, "version": "1", "wanted": 2}
    seen = snapshot_of(parent, workers, 4995.0, now=5000.0, monotonic=1000.0, **named)
    assert [(each.url, each.legs, each.up_in) for each in seen.nodes] == [(P, 7, 1), (D, 0, 0)]
    assert [row.index for row in seen.workers] == [0, 1]
    assert (seen.failed_pairs, [each.ended for each in seen.requests]) == (
        parent.failed_pairs,
        [4999.0],
    )


def test_a_picture_of_nothing_is_one() -> None:
    seen = shown(worker(nodes=[], counts={}))
    assert (seen.ttft.count, seen.ttft.p50_s, seen.requests_per_s, seen.edges) == (0, None, 0.0, [])


async def test_what_workers_tell_of_it_arrives_as_it_was() -> None:
    recent = RecentRequests()
    note(recent, 4999.0, 999.0)
    recent.add_edge(999.0, Edge(P, D, 0, 1, 100, 0.5, 0.1))
    told = WorkerReport(3, {P: 1}, status=worker(1, recent))
    reader = asyncio.StreamReader()
    reader.feed_data(encode_message(told))
    assert await read_message(reader, WorkerReport) == told


def test_the_json_is_the_same_for_whoever_reads_it() -> None:
    """A contract: the page reads these names."""
    seen = msgspec.to_builtins(shown(worker()))
    assert set(seen) == {
        "now", "version", "health", "models", "wanted", "workers", "running", "waiting", "waiting_for_room",
        "requests_per_s", "output_tokens_per_s", "window_s", "ttft", "inter_token", "total", "series", "nodes",
        "edge_window_s", "edges", "failed_pairs", "counts", "requests", "roles",
    }  # fmt: skip


def test_the_page_reads_no_name_that_is_not_told(repository: Path) -> None:
    told = {
        "picture": Snapshot,
        "node": NodeStatus,
        "request": EndedRequest,
        "edge": Edge,
        "worker": WorkerRow,
    }
    only_here = {
        ("edge", "failed"),
        ("edge", "reason"),
    }  # rows of pairs that failed, which the page makes
    read: set[tuple[str, str]] = set()
    for file in (repository / "router" / "console" / "static").glob("*.js"):
        read |= set(re.findall(rf"\b({'|'.join(told)})\.(\w+)", file.read_text(encoding="utf-8")))
    assert {("picture", "series"), ("node", "breakers"), ("request", "stages_s")} <= read
    assert not {
        (of, name) for of, name in read - only_here if name not in told[of].__struct_fields__
    }
