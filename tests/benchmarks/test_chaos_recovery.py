"""`python -m tests.soak.chaos`: how long until a node is up again, which faults have happened, who
is excused.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.soak.chaos.faults import Fault
from tests.soak.chaos.lookout import LATEST_S, Look, recoveries
from tests.soak.chaos.processes import Cluster, Node
from tests.soak.chaos.run import _strike_all


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
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
    options = argparse.Namespace(each_once=True, faults=0, every_s=0.0, seconds=0.0)
    await _strike_all(options, cluster, Failing(cluster), iter(faults), 0.0, made)  # type: ignore[arg-type]
    assert made == faults
    first, *others = cluster.surprises
    assert first == "cut at 0.0 s failed: OSError('no such rule')"
    assert others == ["cut has not happened", "kill has not happened"]
