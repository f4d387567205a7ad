"""A node's role at run time: how it changes, what it refuses meanwhile, and how its metrics are
divided.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_node_metrics import INFO

from kvrelay.node.engine_client import EngineClient
from kvrelay.node.lifecycle import Drain, NodeRole
from kvrelay.node.metrics import NodeMetrics
from kvrelay.wire.config import EngineConfig, NodeConfig, Role
from kvrelay.wire.engine_messages import EngineStats
from kvrelay.wire.errors import Conflict, Draining, RequestError
from kvrelay.wire.outputs import Finish, Load

P, D = Role.PREFILL, Role.DECODE


@dataclass
class FakeEngine:
    """What a flip asks of an engine client."""

    requests: int = 0
    held: int = 0
    info: Any = "ready"
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def queue_depth(self) -> int:
        return self.requests

    async def fresh_stats(self, deadline_s: float) -> EngineStats:
        return EngineStats(Load(), held_blocks=self.held)


def role_of(
    role: Role = P, deadline_s: float = 30.0, **fields: Any
) -> tuple[NodeRole, FakeEngine, Drain]:
    engine = FakeEngine(**fields)
    client = cast(EngineClient, engine)
    drain = Drain(client)
    return NodeRole(role, client, drain, deadline_s), engine, drain


async def ended(role: NodeRole) -> None:
    async with asyncio.timeout(10):
        while role.flips_to is not None:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("busy", [{"requests": 1}, {"held": 4}])
async def test_it_ends_what_it_has_and_is_then_the_other_role(busy: dict[str, int]) -> None:
    role, engine, _ = role_of(**busy)
    told, counts = list[tuple[Role, Role | None]](), list[str]()
    role.on_change, role.on_flip_end = lambda: told.append((role.now, role.flips_to)), counts.append
    role.check()
    role.change_to(D)
    with pytest.raises(Draining, match="from prefill to decode") as refused:
        role.check()
    assert (refused.value.status, refused.value.body().code) == (503, "draining")
    with pytest.raises(Conflict, match="already; wait") as second:
        role.change_to(D)
    assert (second.value.status, second.value.code) == (409, "flipping")
    engine.requests = engine.held = 0
    await ended(role)
    role.check()
    assert (role.now, role.flips, told, counts) == (D, 1, [(P, D), (D, None)], ["done"])
    role.change_to(P)
    await ended(role)
    assert (role.now, role.flips) == (P, 2)


async def test_the_role_that_it_has_calls_a_flip_off() -> None:
    role, engine, _ = role_of(requests=1)
    counts = list[str]()
    role.on_flip_end = counts.append
    role.change_to(P)  # which it is
    role.change_to(D)
    role.change_to(P)
    role.check()
    engine.requests = 0
    await asyncio.sleep(0.1)  # in which a flip that was not called off would be over
    assert (role.now, role.flips, role.flips_to, counts) == (P, 0, None, ["cancelled"])
    role.change_to(D)
    await ended(role)
    assert role.now is D


async def test_what_is_left_by_the_deadline_goes_on_beside_the_new_role() -> None:
    role, engine, _ = role_of(D, deadline_s=0.12, requests=1, held=2)
    role.change_to(P)
    await ended(role)
    assert (role.now, engine.requests) == (P, 1)


async def test_a_node_that_ends_or_drains_keeps_its_role() -> None:
    role, engine, drain = role_of(requests=1)
    role.change_to(D)
    drain.begin()
    engine.requests = 0
    await ended(role)
    assert (role.now, role.flips) == (P, 0)
    with pytest.raises(Conflict, match="undrain"):
        role.change_to(D)
    drain.end()
    engine.requests = 1
    role.change_to(D)
    engine.ended.set()
    engine.requests = 0
    await ended(role)
    assert role.now is P


async def test_a_flip_that_breaks_leaves_the_old_role(caplog: pytest.LogCaptureFixture) -> None:
    role, engine, _ = role_of(requests=1)

    def broken() -> int:
        raise ZeroDivisionError

    role.change_to(D)
    engine.queue_depth = broken  # type: ignore[method-assign]
    await ended(role)
    role.check()
    assert (role.now, role.flips) == (P, 0)
    assert "the change of role broke" in caplog.text


@pytest.mark.parametrize(("now", "wanted"), [(P, Role.AGGREGATED), (Role.AGGREGATED, P)])
async def test_a_node_alone_has_no_other_role(now: Role, wanted: Role) -> None:
    with pytest.raises(RequestError, match="between prefill and decode") as refused:
        role_of(now)[0].change_to(wanted)
    assert refused.value.param == "role"


def test_the_engine_knows_no_roles(repository: Path) -> None:
    """So that nothing of it has to be made anew: graphs, memory, connector."""
    for folder in ("paged_engine", "kv_transfer", "kernels"):
        for file in (repository / folder).glob("*.py"):
            assert "Role" not in file.read_text(), file
    for file in (
        "engine_process.py",
        "ranks.py",
        "rank_messages.py",
        "probes.py",
        "adapter_loads.py",
        "compiling.py",
    ):
        assert ".role" not in (repository / "node" / file).read_text(), file


def samples(of: Any, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(of.text().decode())
    return {
        s.labels["role"]: s.value for family in families for s in family.samples if s.name == name
    }


def test_counts_belong_to_the_role_in_which_they_were_counted_and_gauges_to_the_newest() -> None:
    stats = [EngineStats(Load(running=1, total_blocks=10, free_blocks=5), prompt_tokens=100)]
    config = NodeConfig(EngineConfig("tiny"), P)
    ours = NodeMetrics(lambda: stats[-1], config, INFO, "tiny", os.getpid)
    before = {family.name for family in text_string_to_metric_families(ours.text().decode())}
    assert samples(ours, "kvrelay_node_role") == {"prefill": 1, "decode": 0}
    ours.count_end(Finish.STOP, 2.0, 3, None, not_fetched=False)
    ours.count_flip("done")
    ours.set_role(D)
    assert samples(ours, "kvrelay_node_role") == {"prefill": 0, "decode": 1}
    assert samples(ours, "vllm:num_requests_running") == {"decode": 1}
    assert samples(ours, "vllm:prompt_tokens_total") == {"prefill": 100, "decode": 0}
    stats.append(msgspec.structs.replace(stats[0], prompt_tokens=130))
    ours.count_end(Finish.STOP, 4.0, 3, None, not_fetched=False)
    for _ in range(2):
        assert samples(ours, "vllm:prompt_tokens_total") == {"prefill": 100, "decode": 30}
        assert samples(ours, "vllm:e2e_request_latency_seconds_sum") == {"prefill": 2, "decode": 4}
        ours.set_role(P)
        ours.set_role(D)
    ours.set_role(P)
    stats.append(msgspec.structs.replace(stats[0], prompt_tokens=135))
    assert samples(ours, "vllm:prompt_tokens_total") == {"prefill": 105, "decode": 30}
    assert {
        family.name for family in text_string_to_metric_families(ours.text().decode())
    } == before
    lines = [line for line in ours.text().decode().splitlines() if not line.startswith("#")]
    assert len({line.rsplit(" ", 1)[0] for line in lines}) == len(lines)
