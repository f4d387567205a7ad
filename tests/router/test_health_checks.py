"""The health loop: nothing that a check does ends it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvrelay.router.membership.health_checks import check_nodes
from kvrelay.router.nodes.node import HealthReport, Node
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from tests.router.router_doubles import until


class Asked:
    """A client: `failures` of the checks raise what nobody thought of."""

    def __init__(self, failures: int) -> None:
        self.failures, self.checks = failures, 0

    async def health(self, node: Node) -> HealthReport:
        self.checks += 1
        if self.checks <= self.failures:
            raise ValueError("a defect")
        return HealthReport(Role.PREFILL, "m", generation="g")

    def forget(self, node: Node) -> None: ...


async def test_a_check_that_fails_in_any_way_is_a_miss_and_the_next_one_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, asked = Pool(["http://p"], []), Asked(2)
    doubles: Any = asked
    with caplog.at_level(logging.WARNING, "kvrelay.router"):
        async with check_nodes(pool, doubles, 0.01, follow=False):
            await until(lambda: asked.checks > 3 and pool.nodes[0].up)
    assert sum(record.exc_info is not None for record in caplog.records) == 2
