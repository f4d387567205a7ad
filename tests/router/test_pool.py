"""Node states, leases and loads, with times given by hand."""

from typing import Any

import pytest
from router_doubles import leg_on

from kvrelay.router.node_load import Share
from kvrelay.router.nodes.node import HealthReport, Node, NodeKind, NodeSpec, Source
from kvrelay.router.nodes.pool import LOST_AFTER_MISSES, Pool
from kvrelay.wire.config import Role
from kvrelay.wire.outputs import Load


def report(
    role: str = "prefill", model: str = "m", generation: str = "g1", load: Load | None = None
) -> HealthReport:
    return HealthReport(Role(role), model, generation=generation, load=load or Load())


@pytest.fixture
def pool() -> Pool:
    pool = Pool(["http://p0/", "http://p1"], ["http://d0"])
    for node in pool.nodes:
        pool.note_report(node, report(node.role), started=0.0, now=0.1)
    return pool


def test_a_blamed_node_returns_only_by_a_check_started_after_the_blame(pool: Pool) -> None:
    node = pool.nodes[0]
    pool.blame(node, "it broke", now=5.0)
    pool.note_report(node, report(), started=4.9, now=5.1)
    assert not node.up
    pool.note_report(node, report(), started=5.2, now=5.3)
    assert node.up


def test_an_adapter_that_several_models_have_means_one_of_them_in_both_legs() -> None:
    urls = ["http://p0", "http://p1"], ["http://d0", "http://d1"]
    pool = Pool(*urls)
    for node, model in zip(pool.nodes, ("b", "a", "b", "a"), strict=True):
        pool.note_report(node, HealthReport(node.role, model, adapters=["x", "a"]), 0.0, 0.1)
    assert pool.adapters() == {"x": "a", "a": "a"}
    for role in (Role.PREFILL, Role.DECODE):
        assert [node.model for node in pool.up(role, model="x")] == ["a"]
        assert [node.model for node in pool.up(role, model="a")] == [
            "a"
        ]  # a model's own name comes first


def test_a_node_that_is_down_has_no_say_in_what_an_adapter_belongs_to() -> None:
    pool = Pool(["http://p0", "http://p1"], [])
    for node, model in zip(pool.nodes, ("a", "b"), strict=True):
        pool.note_report(node, HealthReport(node.role, model, adapters=["x"]), 0.0, 0.1)
    assert pool.base_of("x") == "a"
    pool.blame(pool.nodes[0], "it broke", 1.0)
    assert pool.base_of("x") == "b"


def test_of_two_kinds_the_one_with_the_shorter_queue_gets_a_request() -> None:
    pool = Pool(["http://p0", "http://p1"], ["http://d0", "http://d1"])
    for busy in NodeKind:
        for node, kind in zip(pool.nodes, [*NodeKind] * 2, strict=True):
            load = Load(running=9 * (kind is busy))
            pool.note_report(node, HealthReport(node.role, "m", kind=kind, load=load), 0.0, 0.1)
        assert pool.kind_for("m") is not busy


def test_a_new_process_numbers_its_requests_anew(pool: Pool) -> None:
    node, share = pool.nodes[0], Share()
    lease = pool.hold(node, share, None)
    lease.note_load(Load(legs=6, leg=7))
    assert node.state.rows == 1
    pool.note_report(node, report(generation="g2", load=Load(legs=9)), 1.0, 1.1)
    assert node.state.rows == 1  # it still runs here, and is not one of its nine


def test_the_longest_context_is_what_each_node_that_was_up_can_take(pool: Pool) -> None:
    for node, longest in zip(pool.nodes, (100, 50, 0), strict=True):
        pool.note_report(node, HealthReport(node.role, "m", max_model_len=longest), 1.0, 1.0)
    pods = [NodeSpec(url, Role.DECODE, "m") for url in ("http://new", "http://newer")]
    pool.set_members(Source.KUBERNETES, pods, 1.0)  # they are labelled with the model
    assert pool.models() == {"m": 50}


def cut_count(pool: Pool, node: Node) -> tuple[list[str], "object"]:
    cuts: list[str] = []
    context = leg_on(pool, node.role, [other for other in pool.nodes if other is not node])
    lease = context.__enter__()
    lease.cut = lambda: cuts.append("cut")
    return cuts, context


def test_legs_on_a_silent_node_are_cut_after_three_missed_checks(pool: Pool) -> None:
    cuts, _context = cut_count(pool, pool.nodes[0])
    for at in range(LOST_AFTER_MISSES - 1):
        pool.note_unready(pool.nodes[0], "silent", float(at), missed=True)
    assert (pool.nodes[0].up, cuts) == (False, [])
    pool.note_unready(pool.nodes[0], "silent", 9.0, missed=True)
    assert cuts == ["cut"]


def test_an_answered_check_starts_the_count_of_misses_anew(pool: Pool) -> None:
    cuts, _context = cut_count(pool, pool.nodes[0])
    for at in range(LOST_AFTER_MISSES * 2):
        pool.note_unready(pool.nodes[0], "silent", float(at), missed=True)
        pool.note_unready(pool.nodes[0], "its health check answers 503", float(at))
    assert cuts == []


@pytest.mark.parametrize("ends", ["restarted", "dead"])
def test_requests_of_a_process_that_is_gone_are_cut(ends: str, pool: Pool) -> None:
    node = pool.nodes[0]
    cuts, _context = cut_count(pool, node)
    if ends == "restarted":
        pool.note_report(node, report(generation="g2"), 1.0, 1.0)
    else:
        pool.note_unready(node, "its engine is dead", 1.0, died=True, cut=True)
    assert (node.up, cuts) == (ends == "restarted", ["cut"])


def test_a_node_that_does_not_say_which_process_it_is_is_the_one_that_it_was(pool: Pool) -> None:
    node = pool.nodes[0]
    cuts, _context = cut_count(pool, node)
    pool.drain(node, 1.0)
    pool.note_report(node, report(generation=""), 2.0, 2.0)
    assert (cuts, node.generation, node.drain_asked) == ([], "g1", True)
    pool.note_report(node, report(generation="g2"), 3.0, 3.0)
    assert (cuts, node.drain_asked) == (["cut"], False)


# Whether a process has died.


ASK, DIED, DRAINS, ANSWERED = "ask", "died", "drains", "answered"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        # A check that began before the loss proves nothing, a later one that the process lives.
        ([(ASK, "g1", 1.0), (ANSWERED, "g1", 0.9)], []),
        ([(ASK, "g1", 1.0), (ANSWERED, "g1", 1.0), (DIED,)], [False]),
        # Another generation proves a death, also to who asks later.
        ([(ASK, "g1", 1.0), (ANSWERED, "g2", 0.5), (ASK, "g1", 1.0)], [True, True]),
        ([(ANSWERED, "g2", 0.5), (ASK, "g2", 1.0)], []),
        # An engine that is called dead has died until it goes on.
        ([(ASK, "g1", 1.0), (DIED,), (ASK, "g1", 1.0)], [True, True]),
        ([(DIED,), (ANSWERED, "g1", 2.0), (ASK, "g1", 1.0), (ASK, "g1", 3.0)], [False]),
        # The end of a process that drains is no death, unless it drains no more.
        ([(DRAINS,), (DIED,), (ANSWERED, "g2", 2.0), (ASK, "g1", 1.0)], [False]),
        (
            [(DRAINS,), (ANSWERED, "g1", 2.0), (ASK, "g1", 3.0), (DIED,)],
            [True],
        ),
    ],
)
def test_whether_a_process_has_died_is_told_once_it_is_known(
    steps: list[tuple[Any, ...]], said: list[bool]
) -> None:
    node, told = Node("http://p", Role.PREFILL), list[bool]()
    node.answered("g1", 0.0, drains=False)
    for what, *which in steps:
        if what == ASK:
            node.ask_if_died(*which, told.append)
        elif what == ANSWERED:
            node.answered(*which, drains=False)
        else:
            getattr(node, what)()
    assert told == said
