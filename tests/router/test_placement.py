"""One price: what placement promises, whatever the nodes are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.placement import Cluster, Mean, NodeState, Placement, PlacementRequest, Wait, place
from wire.step_costs import StepCosts

COSTS = StepCosts(5.5, 0.006, 4.7e-5, -3.5, 0.0215, 8.7e-7)
NOW = 1_000.0


@st.composite
def nodes(draw: Any, name: str) -> NodeState:
    rows = draw(st.integers(0, 200))
    return NodeState(
        name,
        COSTS.scaled(draw(st.sampled_from([0.5, 1.0, 2.0]))),
        50.0,
        kv_free=draw(st.integers(0, 20_000)),
        backlog_ms=draw(st.floats(0, 2_000)),
        rows=rows,
        context=rows * draw(st.floats(1, 4_000)),
        delayed=rows / 15 / draw(st.floats(1, 500)),
        strictest_ms=15.0 if rows else math.inf,
        budget_ms=draw(st.floats(0, 250)),
        budget_at=NOW - draw(st.floats(0, 500)),
        share=Mean(draw(st.floats(0, 1)), NOW),
        rate=Mean(draw(st.floats(0, 20)), NOW),
    )


requests = st.builds(
    PlacementRequest,
    tokens=st.integers(1, 10_000),
    output=st.floats(1, 2_000),
    kv_tokens=st.integers(1, 20_000),
    ttft_ms=st.floats(50, 5_000),
    tpot_ms=st.floats(5, 100),
    tie=st.integers(0, 1 << 30),
)
named = st.integers(1, 4).flatmap(lambda n: st.tuples(*[nodes(f"d{at}") for at in range(n)]))
sources = st.integers(0, 4).flatmap(lambda n: st.tuples(*[nodes(f"p{at}") for at in range(n)]))


@given(requests, sources, named)
def test_nothing_is_placed_where_its_kv_cannot_fit(
    request: PlacementRequest, prefill: tuple[NodeState, ...], decode: tuple[NodeState, ...]
) -> None:
    placed = place(request, Cluster(prefill, decode), NOW)
    roomy = {node.name for node in decode if node.fits(request)}
    assert isinstance(placed, Placement) == bool(roomy)
    if isinstance(placed, Placement):
        assert placed.decode in roomy
        assert placed.prefill == placed.decode or placed.prefill in {node.name for node in prefill}
        assert placed.otherwise >= placed.price
    else:
        assert placed == Wait()


@given(requests, sources, named, st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_changes_nothing(
    request: PlacementRequest, prefill: tuple[NodeState, ...], decode: tuple[NodeState, ...], rng: Any
) -> None:
    shuffled = [sorted(each, key=lambda _: rng.random()) for each in (prefill, decode)]
    assert place(request, Cluster(prefill, decode), NOW) == place(request, Cluster(*shuffled), NOW)


@given(requests, nodes("p0"), nodes("d0"), st.floats(1, 1_000))
def test_more_load_never_makes_a_node_cheaper(
    request: PlacementRequest, source: NodeState, target: NodeState, more: float
) -> None:
    def price(prefill: list[NodeState], decode: NodeState) -> float:
        placed = place(replace(request, kv_tokens=0), Cluster(prefill, [decode]), NOW)
        assert isinstance(placed, Placement)
        return placed.price

    busier = replace(source, backlog_ms=source.backlog_ms + more)
    assert price([busier], target) >= price([source], target)
    assert price([], replace(target, backlog_ms=target.backlog_ms + more)) >= price([], target)
    assert price([], replace(target, delayed=target.delayed + more)) >= price([], target)


@given(requests, nodes("d0"))
def test_an_idle_node_is_not_passed_over_for_a_busy_one_that_is_equal(
    request: PlacementRequest, busy: NodeState
) -> None:
    idle = NodeState("d1", busy.costs, busy.gap_ms, busy.kv_free)
    idle.kv_free = busy.kv_free = 1 << 30
    if not busy.rows and not busy.backlog_ms:
        return
    placed = place(request, Cluster([], [busy, idle]), NOW)
    assert isinstance(placed, Placement)
    if busy.rows:
        assert placed.decode == "d1"


@given(requests, st.booleans())
def test_a_cancelled_placement_gives_everything_back(request: PlacementRequest, local: bool) -> None:
    request = replace(request, kv_tokens=100)
    prefill = [] if local else [NodeState("p", COSTS, 50.0, 0)]
    cluster = Cluster(prefill, [NodeState("d", COSTS, 50.0, 1_000)])
    placed = place(request, cluster, NOW)
    assert isinstance(placed, Placement)
    cluster.commit(request, placed, NOW)
    cluster.cancel(request, placed, NOW)
    for node in (*cluster.prefill.values(), *cluster.decode.values()):
        assert (node.rows, node.kv_free, node.context, node.delayed) == (0, 1_000 if node.name == "d" else 0, 0, 0)
        assert math.isclose(node.backlog_ms, 0, abs_tol=1e-9)
        assert math.isclose(node.share.at(NOW), 0, abs_tol=1e-9)
        assert math.isclose(node.rate.at(NOW), 0, abs_tol=1e-9)


def test_a_prompt_spills_when_the_prefill_node_is_busy_and_not_beyond_the_limit() -> None:
    request = PlacementRequest(2048, 64, 3_000, 125, 20)
    busy = NodeState("p", COSTS, 50.0, 0, backlog_ms=400)
    target = NodeState("d", COSTS, 50.0, 1 << 30, rows=20, context=40_000, delayed=20 / 20 / 64, strictest_ms=20)
    cluster = Cluster([busy], [target])
    placed = place(request, cluster, NOW)
    assert isinstance(placed, Placement)
    assert placed.prefill == "d"
    target.rate.add(70_000, NOW)  # decodes alone leave nothing of the time per token that is wanted
    target.budget_ms, target.budget_at = 0.0, NOW
    placed = place(request, cluster, NOW + 1)
    assert isinstance(placed, Placement)
    assert placed.prefill == "p"
    busy.backlog_ms = 0.0
    placed = place(request, Cluster([busy], [NodeState("d", COSTS, 50.0, 1 << 30)]), NOW)
    assert isinstance(placed, Placement)
