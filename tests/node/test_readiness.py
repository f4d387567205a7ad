"""What /health and /live of a node rest on: the engine's pulse, its KV link's, and whether the
engine is there.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrelay.node.lifecycle import SILENCE_LIMIT_S, Node
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.engine_messages import EngineStats
from kvrelay.wire.errors import EngineDead
from kvrelay.wire.outputs import Load


def node_of(
    *, loaded: bool = True, silent_s: float = 0.0, kv_silent_s: float = 0.0, ended: bool = False
) -> Node:
    engine = SimpleNamespace(
        ended=asyncio.Event(),
        silent_s=lambda: silent_s,
        stats=EngineStats(Load(), kv_silent_s=kv_silent_s),
    )
    if ended:
        engine.ended.set()
    serving = cast("Any", object()) if loaded else None
    return Node(NodeConfig(EngineConfig("m")), cast("Any", engine), 0, serving=serving)


def test_it_is_ready_while_its_engine_and_its_kv_link_are_seen_at_work() -> None:
    node = node_of(silent_s=SILENCE_LIMIT_S, kv_silent_s=SILENCE_LIMIT_S)
    assert node.ready() is node.serving
    assert node.alive()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"silent_s": 21.0}, "the engine process has said nothing for 21 s"),
        ({"kv_silent_s": 30.0}, "no KV over: a thread of its KV link has stood still for 30 s"),
        ({"ended": True}, "has ended"),
        ({"ended": True, "loaded": False}, "has ended"),
    ],
)
def test_one_that_stands_still_is_neither_ready_nor_alive(fields: dict[str, Any], why: str) -> None:
    node = node_of(**fields)
    with pytest.raises(EngineDead, match=why):
        node.ready()
    assert not node.alive()


def test_one_that_loads_or_drains_is_alive() -> None:
    loading = node_of(loaded=False, silent_s=300.0)
    with pytest.raises(EngineDead, match="still being loaded"):
        loading.ready()
    assert loading.alive()
    draining = node_of()
    draining.drain.begun = True
    assert draining.alive()


def test_one_whose_load_failed_is_not_alive() -> None:
    node = node_of(loaded=False)
    node.failure = "no such model"
    assert not node.alive()
