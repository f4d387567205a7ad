"""Draining: when it is over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvrelay.node.engine_client import EngineClient
from kvrelay.node.lifecycle import Drain
from kvrelay.wire.engine_messages import EngineStats
from kvrelay.wire.errors import DeadlineExceeded, Draining, EngineDead
from kvrelay.wire.outputs import Load


@dataclass
class FakeEngine:
    """What a drain asks of an engine client."""

    requests: int = 0
    held: list[int] = field(default_factory=list)
    info: Any = "ready"
    dies: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def queue_depth(self) -> int:
        return self.requests

    async def fresh_stats(self, deadline_s: float) -> EngineStats:
        if self.dies:
            self.ended.set()
            raise EngineDead("gone")
        held = self.held.pop(0) if len(self.held) > 1 else self.held[0]
        if held < 0:
            raise DeadlineExceeded("a long step")
        return EngineStats(Load(), held_blocks=held)


def drain_of(**fields: Any) -> Drain:
    return Drain(cast(EngineClient, FakeEngine(**fields)))


async def test_it_is_over_when_kv_was_fetched_and_not_before() -> None:
    engine = FakeEngine(held=[4, -1, 4, 0])
    assert await Drain(cast(EngineClient, engine)).wait_idle(5.0)
    assert engine.held == [0]


@pytest.mark.parametrize("fields", [{"requests": 1, "held": [0]}, {"held": [2]}])
async def test_by_the_deadline_it_is_not_over_while_a_request_runs_or_kv_is_held(
    fields: dict[str, Any],
) -> None:
    assert not await drain_of(**fields).wait_idle(0.12)


async def test_a_node_that_loads_or_whose_engine_has_ended_has_nothing_to_wait_for() -> None:
    assert await drain_of(info=None).wait_idle(0.1)
    assert await drain_of(dies=True).wait_idle(5.0)


def test_new_legs_are_refused_while_it_drains_and_each_change_is_told_once() -> None:
    drain, told = drain_of(), list[bool]()
    drain.on_change = lambda: told.append(drain.draining)
    drain.check()
    drain.begin()
    drain.begin()
    with pytest.raises(Draining) as refused:
        drain.check()
    assert (refused.value.status, refused.value.body().code) == (503, "draining")
    drain.end()
    drain.end()
    drain.check()
    assert told == [True, False]
