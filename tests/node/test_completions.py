"""A node that starts a request: its number, its frames, and the limit of prompts that others can
compute.
"""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from node_doubles import engine_info, serving_of, ticket

from kvrelay.node.completions import start_streamed
from kvrelay.node.engine_client import EngineClient
from kvrelay.node.lifecycle import Node
from kvrelay.node.preprocess import prepare
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.engine_messages import Order, RequestUpdate, Submit, ToEngine
from kvrelay.wire.errors import EngineDead, Overloaded
from kvrelay.wire.frames import FrameKind
from kvrelay.wire.outputs import Finish, Load
from kvrelay.wire.step_costs import StepCosts

INFO = engine_info(costs=StepCosts(10.0, 0.0, 0.0, 0.0, 1.0, 0.0))
"""A millisecond for each token of a prompt."""
TICKET = {**ticket(2), "generated": [2]}


class Engine(EngineClient):
    """A client that keeps what it would send."""

    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config)
        self.info, self.sent = INFO, list[ToEngine]()
        self.load = Load(pace=1.0, spill_ms=100.0)

    @property
    def submits(self) -> list[Submit]:
        return [each for each in self.sent if isinstance(each, Submit)]

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)


@pytest.fixture
async def engine() -> Engine:
    return Engine(NodeConfig(EngineConfig("m")))


@pytest.fixture
def node(engine: Engine, tmp_path: Path) -> Node:
    config = NodeConfig(EngineConfig("m"))
    return Node(config, engine, 0, serving=serving_of(tmp_path, INFO))


async def start(
    node: Node, prompt: str | list[str] = "hi", n: int = 1, **params: Any
) -> tuple[Load, Any]:
    fields = {"model": "m", "prompt": prompt, "n": n, "max_tokens": 9, "temperature": 1}
    body = json.dumps(fields | ({"kv_transfer_params": params} if params else {})).encode()
    return await start_streamed(node, "/v1/completions", {}, body)


async def test_a_request_is_answered_with_its_number_and_the_engine_has_it_by_then(
    node: Node, engine: Engine
) -> None:
    kept = []
    for prompt, n, number in (("hi", 1, 1), ("hi", 3, 4), (["one", "two"], 2, 8), ("hi", 1, 9)):
        load, frames = await start(node, prompt, n)
        kept.append(frames)
        assert (load.leg, load.legs, len(engine.submits)) == (1 + number, 0, number)
    engine.load = Load(legs=9)
    load, frames = await start(node, **TICKET)  # it is over: its claim alone is given up
    assert (load.leg, load.legs) == (11, 9)
    assert engine.sent[-1] == Order("abort", engine.submits[-1].request_id)
    assert [frame.kind for frame in [each async for each in frames]] == [FrameKind.END]


async def test_a_request_that_is_read_while_another_engine_starts_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(*asked: Any) -> Any:
        read = await prepare(*asked)
        node.serving = None
        node.use(EngineClient(node.config))
        return read

    monkeypatch.setattr("kvrelay.node.completions.prepare", slowly)
    with pytest.raises(EngineDead):
        await start(node)


async def test_a_request_that_nobody_reads_is_aborted(node: Node, engine: Engine) -> None:
    _, frames = await start(node, n=2)
    del frames
    gc.collect()
    async with asyncio.timeout(10):
        while engine.queue_depth():
            await asyncio.sleep(0.001)
    aborted = {each.name for each in engine.sent if isinstance(each, Order)}
    assert aborted == {each.request_id for each in engine.submits}


async def test_load_is_in_the_first_frame_with_tokens_and_in_the_last_one(
    node: Node, engine: Engine
) -> None:
    _, frames = await start(node, n=2)
    first, second = (each.request_id for each in engine.submits)
    for update in (
        RequestUpdate(first, []),
        RequestUpdate(second, [65]),
        RequestUpdate(first, [65]),
        RequestUpdate(first, [66], finish=Finish.LENGTH),
        RequestUpdate(second, [66], finish=Finish.LENGTH),
    ):
        engine._queue_update(update)
    found = [frame async for frame in frames]
    tokens, loads = [len(f.token_ids) for f in found], [f.load is not None for f in found]
    assert (tokens, loads) == ([0, 1, 1, 1, 1], [False, True, False, False, True])
    assert found[-1].kind is FrameKind.END


async def test_a_spill_beyond_the_limit_is_refused_before_the_engine_gets_it(
    node: Node, engine: Engine
) -> None:
    prompt = "x" * 59
    await start(node, prompt, spill=True)
    tokens = len(engine.submits[0].prompt_token_ids)
    with pytest.raises(
        Overloaded, match=r"has 4\d ms for prompts that a prefill node can compute"
    ) as refused:
        await start(node, prompt, spill=True)
    assert (refused.value.status, refused.value.code) == (429, "spill_refused")
    assert len(engine.submits) == engine.queue_depth() == 1
    await start(node, prompt)  # nobody else could compute this one
    await start(node, prompt, spill=True, cached_tokens=tokens - 30)
    with pytest.raises(Overloaded):
        await start(node, "x" * 20, spill=True)

    engine.load = Load(pace=1.0, spill_ms=100.0, legs=3)  # says nothing of the third
    with pytest.raises(Overloaded):
        await start(node, "x" * 80, spill=True)
    engine.load = Load(pace=1.0, spill_ms=100.0, legs=4)
    await start(node, "x" * 80, spill=True)
    engine.load = Load(pace=2.0, spill_ms=100.0, legs=5)
    with pytest.raises(Overloaded, match=r"takes 1\d\d ms, and this node now has 100 ms"):
        await start(node, prompt, spill=True)


@pytest.mark.parametrize(
    ("params", "within"),
    [
        ({}, (0.0, 0)),
        ({"tpot_ms": 50.0, "expected_output": 200}, (50.0, 200)),
        ({"tpot_ms": -3.0, "expected_output": -3}, (0.1, 0)),
        ({"tpot_ms": 1e-9, "expected_output": 10**18}, (0.1, 1000)),
        ({"tpot_ms": 1e300}, (1e9, 0)),
    ],
)
async def test_expectations_of_an_answer_are_put_within_limits(
    node: Node, engine: Engine, params: dict[str, Any], within: tuple[float, int]
) -> None:
    await start(node, **params)
    (submit,) = engine.submits
    assert (submit.tpot_ms, submit.expected_output) == within
