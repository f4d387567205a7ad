"""Roles that follow the load in a simulated cluster: from a wrong ratio to at least what the best
static one serves.
"""

from __future__ import annotations

from benchmarks.roles import H200, Phase, shifting, slowed
from kvrelay.load.measures import Targets
from kvrelay.planner.goodput import attained
from kvrelay.planner.setting import Result, Setting
from kvrelay.planner.world import simulate
from kvrelay.wire.config import Role

TARGETS = Targets(8_000.0, 120.0)
CARD = slowed(H200, 8.0)
# Documents want three of four nodes for prompts, then long answers want two or three that generate.
PHASES = (Phase(240.0, 1.3, 8_192, 32), Phase(180.0, 4.5, 1_024, 512))


def served(prefill: int, *, changes: bool) -> Result:
    setting = Setting(
        prefill=prefill,
        decode=4 - prefill,
        prefixes=False,
        card=CARD,
        targets=TARGETS,
        changes_roles=changes,
    )
    return simulate(shifting(PHASES), setting)


def test_from_a_wrong_ratio_they_become_the_right_ones_as_the_work_shifts() -> None:
    best = max(attained(served(prefill, changes=False).streams, TARGETS) for prefill in (2, 3))
    result = served(1, changes=True)
    assert attained(result.streams, TARGETS) >= 0.9 * best
    roles = [flip.role for flip in result.flips]
    assert roles[:2] == [Role.PREFILL, Role.PREFILL]
    assert Role.DECODE in roles
    assert len(roles) <= 4
    assert all("node becomes a" in flip.why for flip in result.flips)
