"""Roles that follow the load in a simulated cluster, from a wrong ratio to the best one."""

from __future__ import annotations

from benchmarks.roles import TARGETS, Phase, run
from kvrelay.planner.goodput import attained
from kvrelay.wire.config import Role

# Documents want three of four nodes for prompts, then long answers want two or three that generate.
PHASES = (Phase(240.0, 1.3, 8_192, 32), Phase(180.0, 4.5, 1_024, 512))


def test_from_a_wrong_ratio_they_become_the_right_ones_as_the_work_shifts() -> None:
    fixed = [run(PHASES, prefill, 4, changes=False)[0] for prefill in (2, 3)]
    result, flips = run(PHASES, 1, 4, changes=True)
    best = max(attained(each.streams, TARGETS) for each in fixed)
    assert attained(result.streams, TARGETS) >= 0.9 * best
    roles = [role for _, role, _ in flips]
    assert roles[:2] == [Role.PREFILL, Role.PREFILL]
    assert Role.DECODE in roles
    assert len(roles) <= 4
    assert all("node becomes a" in why for *_, why in flips)
