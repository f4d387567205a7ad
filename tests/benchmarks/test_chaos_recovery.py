"""`python -m tests.soak.chaos`: how long until a node is up again, which faults have happened, who
is excused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from tests.soak.chaos import lookout
from tests.soak.chaos.crowd import Seen
from tests.soak.chaos.faults import Fault
from tests.soak.chaos.lookout import LATEST_S, Look, Size, recoveries
from tests.soak.chaos.processes import Cluster, Node
from tests.soak.chaos.rude import Rude
from tests.soak.chaos.run import _strike_all
from tests.soak.chaos.strikes import Strikes


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Two nodes and a router, of which nothing runs."""
    made = Cluster(tmp_path, [], [])
    made.logs.close()
    ended = subprocess.Popen(["true"])
    ended.wait()
    roles = {"router": "router", "prefill0": "prefill", "decode0": "decode"}
    made.router, *made.nodes = [
        Node(name, roles[name], (1,), [], tmp_path / name, ended) for name in roles
    ]
    return made


def looks(ups: Mapping[float, bool]) -> dict[str, list[Look]]:
    return {"decode0": [Look(at, up, legs=True) for at, up in ups.items()]}


def struck(
    cluster: Cluster, kind: str, at: float, ended: float, nodes: Sequence[int] = (1,)
) -> None:
    """One fault, and what is kept of it."""
    fault, node = Fault(at, kind, tuple(nodes)), cluster.nodes[1]
    cluster.note(fault, [node])
    cluster.struck[-1] = type(cluster.struck[-1])(at, fault, node.name)
    cluster.over.append((ended, fault, node))


def test_a_node_that_was_stopped_is_waited_for_though_it_rises_later(cluster: Cluster) -> None:
    struck(cluster, "stop", 10.0, 20.0)
    cluster.nodes[1].down.append((10.0, 21.0))  # it was healthy a second after it went on
    (found,) = recoveries(cluster, looks({15.0: False, 20.5: False, 21.5: True}), 60.0)
    assert (found.kind, found.up_s, found.leg_s, found.watched_s, found.late) == (
        "stop",
        1.5,
        1.5,
        40.0,
        False,
    )


def test_what_else_is_wrong_with_a_node_is_no_recovery(cluster: Cluster) -> None:
    struck(cluster, "cut", 10.0, 20.0)
    cluster.nodes[1].down.append((15.0, 30.0))
    assert recoveries(cluster, looks({31.0: True}), 60.0) == []


@pytest.mark.parametrize(
    ("ups", "until", "up_s", "late"),
    [
        ({20.125: True, 20.9: True}, 60.0, 0.125, False),
        (
            {20.125: True, 21.0: False, 24.0: True, 25.0: True},
            60.0,
            4.0,
            False,
        ),  # the first was from before the cut
        (
            {20.125: True, 21.0: True, 50.0: False, 51.0: True},
            60.0,
            0.125,
            False,
        ),  # that is another matter
        ({20.125: False, 50.0: True}, 60.0, 30.0, True),
        ({20.125: False, 59.0: False}, 60.0, None, True),  # it never was
        ({20.125: False}, 20.0 + LATEST_S, None, False),  # nobody knows
        ({}, 60.0, None, True),
    ],
)
def test_a_node_is_up_again_when_it_stays_up(
    cluster: Cluster, ups: dict[float, bool], until: float, up_s: float | None, late: bool
) -> None:
    struck(cluster, "cut", 19.5, 20.0)
    (found,) = recoveries(cluster, looks(ups), until)
    assert (found.up_s, found.late) == (up_s, late)


def test_a_fault_of_what_is_down_does_not_count(cluster: Cluster) -> None:
    cluster.nodes[1].falls(5.0)
    cluster.note(Fault(6.0, "cut", (0, 1)), cluster.nodes)
    cluster.note(Fault(6.0, "peers cut", (0,)), cluster.nodes, missed=True)
    assert [each.missed for each in cluster.struck] == [False, True, True, True]


def test_who_asked_a_node_is_excused_only_while_it_was_down(cluster: Cluster) -> None:
    node = cluster.nodes[1]
    node.falls(10.0)
    assert node.was_down(8.0, 11.0)
    assert not node.was_down(8.0, 9.0)
    node.rises(20.0)
    assert node.was_down(19.0, 22.0)
    assert not node.was_down(21.0, 22.0)


@pytest.mark.parametrize(("down", "end"), [(True, "left"), (False, "error")])
async def test_a_node_that_was_up_may_not_fail_those_who_ask_it_alone(
    cluster: Cluster, down: bool, end: str
) -> None:
    class Asked:
        async def ask_one(self, *_: object, **__: object) -> Seen:
            return Seen(1, "long answer", 11.0, end="error", ended=12.0, past_router=True)

    if down:
        cluster.nodes[1].falls(11.5)
    seen = await Rude(cluster, Asked(), 1000)._ask_node(cluster.nodes[1], random.Random(1))  # type: ignore[arg-type]
    assert seen.end == end


class Failing:
    """The first one fails, the second one finds nobody to strike."""

    crowd = None

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def strike(self, fault: Fault) -> None:
        if fault.kind == "cut":
            raise OSError("no such rule")
        self._cluster.note(fault, self._cluster.nodes, missed=fault.kind == "kill")


async def test_a_strike_that_fails_and_a_kind_that_never_happens_are_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def whole() -> None:
        pass

    monkeypatch.setattr(cluster, "whole", whole)
    faults, made = [Fault(0.0, kind, (0,)) for kind in ("cut", "kill", "stop")], list[Fault]()
    options = argparse.Namespace(each_once=True, faults=0, every_s=0.0, soak=0.0, seconds=0.0)
    await _strike_all(options, cluster, Failing(cluster), iter(faults), 0.0, made)  # type: ignore[arg-type]
    assert made == faults
    first, *others = cluster.surprises
    assert first == "cut at 0.0 s failed: OSError('no such rule')"
    assert others == ["cut has not happened", "kill has not happened"]


async def test_clocks_that_jump_while_they_are_off_go_back_in_the_end(cluster: Cluster) -> None:
    class Clocks:
        told: ClassVar[list[float]] = []

        def shift(self, _: str, seconds: float) -> None:
            self.told.append(seconds)

    cluster.shim = Clocks()  # type: ignore[assignment]
    strikes = Strikes(cluster, None, None)  # type: ignore[arg-type]
    jumps = [
        Fault(0.0, "clock jump", (1,), for_s, amount=amount)
        for for_s, amount in ((0.05, 90.0), (0.5, -5.0))
    ]
    await asyncio.gather(*map(strikes.strike, jumps))
    assert Clocks.told == [90.0, 85.0, -5.0, 0.0]


async def test_the_prefix_index_of_the_router_is_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills up to its own limit."""

    class Seen:
        router = object()

        async def metrics(self, of: object) -> dict[str, float]:
            assert of is self.router
            return {
                "kvrelay_router_prefix_text_bytes": 1_000_000.0,
                "kvrelay_router_prefix_blocks": 1_000.0,
            }

    of = {"router": Size(1, 100_000_000, 1, 2, 3), "decode0": Size(2, 90_000_000, 4, 5, 6)}
    monkeypatch.setattr(lookout, "sizes", lambda cluster: dict(of))
    apart, index = await lookout.sizes_apart(Seen())  # type: ignore[arg-type]
    assert index == 1_120_000
    assert apart == {"router": Size(1, 98_880_000, 1, 2, 3), "decode0": of["decode0"]}
