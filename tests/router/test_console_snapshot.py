"""What several workers see becomes one picture, whose names the page reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from kvrelay.router.nodes.node import BreakerState
from kvrelay.router.nodes.pool import Pool
from kvrelay.router.state import (
    KEPT_REQUESTS,
    Health,
    NodeStatus,
    Snapshot,
    WorkerStatus,
    node_statuses,
    snapshot_of,
)
from kvrelay.router.timeline import EndedRequest

P, D = "http://p:1", "http://d:1"
SEEN = {status.url: status for status in node_statuses(Pool([P], [D]), 0.0)}


def node(url: str = P, **fields: Any) -> NodeStatus:
    return replace(SEEN[url], **({"up": True, "up_in": 1} | fields))


def worker(*ended: float, nodes: Sequence[NodeStatus] = ()) -> WorkerStatus:
    requests: list[Any] = [SimpleNamespace(ended=at) for at in ended]
    return WorkerStatus(list(nodes), requests, {"running": 1, "waiting": 2})


def shown(own: WorkerStatus, *workers: WorkerStatus, wanted: int = 1) -> Snapshot:
    named: dict[str, Any] = {"health": Health.OK, "models": {"m": True}, "uptime_s": 60.0}
    return snapshot_of(own, workers or [own], wanted=wanted, now=5000.0, **named)


def test_what_workers_see_is_added_up_where_each_knows_a_part() -> None:
    own = worker(18.0, nodes=[node(legs=3)])
    seen = shown(own, own, worker(19.0, 17.0, nodes=[node(legs=4)]), wanted=3)
    assert seen.counts == {"running": 2, "waiting": 4}
    assert (seen.workers, seen.wanted, seen.nodes[0].legs) == (2, 3, 7)
    assert [each.ended for each in seen.requests] == [19.0, 18.0, 17.0]
    assert len(shown(worker(*range(KEPT_REQUESTS + 9))).requests) == KEPT_REQUESTS


def test_of_what_each_finds_out_by_itself_the_worst_is_told() -> None:
    half, is_open = BreakerState("half_open", "was slow"), BreakerState("open", "cut", 3.0)
    own = worker(nodes=[node(breaker=half)])
    other = worker(nodes=[node(up=False, breaker=is_open), node(D)])
    seen = shown(own, own, other, wanted=2)
    first, second = seen.nodes
    assert (first.up, first.up_in) == (True, 1)
    assert first.breaker == is_open
    assert (second.url, second.up_in) == (D, 1)


def test_the_page_reads_no_name_that_is_not_told(repository: Path) -> None:
    told = {
        "picture": Snapshot,
        "node": NodeStatus,
        "request": EndedRequest,
    }
    read: set[tuple[str, str]] = set()
    for file in (repository / "router" / "console" / "static").glob("*.js"):
        read |= set(re.findall(rf"\b({'|'.join(told)})\.(\w+)", file.read_text(encoding="utf-8")))
    assert {("picture", "counts"), ("node", "breaker"), ("request", "stages_s")} <= read
    assert not {(of, name) for of, name in read if name not in told[of].__struct_fields__}
