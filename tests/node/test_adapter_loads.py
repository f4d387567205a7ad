"""Adapters between the two processes of a node: who may load them, and whose KV is taken for a
request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.node.admin_routes import load_adapter, unload_adapter
from kvrelay.node.engine_client import EngineClient
from kvrelay.paged_engine.adapters import Loaded, answer_load
from kvrelay.paged_engine.request import Request
from kvrelay.wire.config import EngineConfig, NodeConfig
from kvrelay.wire.engine_messages import (
    AdapterAnswer,
    AdapterFacts,
    LoadAdapter,
    Order,
    Submit,
)
from kvrelay.wire.errors import NotFound, RequestError
from kvrelay.wire.kv_events import ROOT, root_of
from kvrelay.wire.sampling import SamplingParams
from kvrelay.wire.transfer import Ticket

FACTS = AdapterFacts("a", "d1" * 16, 8)


class StubEngine:
    """An engine client that answers with what it is given."""

    def __init__(self, answer: AdapterAnswer | None = None) -> None:
        self.answer, self.heard = answer, []

    async def ask(
        self, question: Callable[[int], LoadAdapter], deadline_s: float, *, failed: str
    ) -> AdapterAnswer:
        self.heard.append(question(1))
        assert self.answer is not None
        return self.answer

    def send(self, unload: Order) -> None:
        self.heard.append(unload)


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


A = body(lora_name="a", lora_path="/x", load_inplace=True)


def node_of(answer: AdapterAnswer | None = None, *, allowed: bool = True) -> Any:
    """A node with slots for adapters and none loaded."""
    serving = SimpleNamespace(model_name="m", adapters={})
    engine = EngineConfig("m", enable_lora=True, max_loras=2, allow_runtime_lora=allowed)
    return SimpleNamespace(
        config=NodeConfig(engine), engine=StubEngine(answer), ready=lambda: serving
    )


async def test_loading_needs_the_operators_leave():
    node = node_of(allowed=False)
    node.ready().adapters["a"] = FACTS
    with pytest.raises(NotFound, match="--allow-runtime-lora"):
        await load_adapter(node, A)
    with pytest.raises(NotFound, match="--allow-runtime-lora"):
        unload_adapter(node, A)
    assert node.ready().adapters


async def test_what_is_loaded_and_unloaded_is_known_at_once():
    node = node_of(AdapterAnswer(1, FACTS))
    await load_adapter(node, A)
    assert node.ready().adapters == {"a": FACTS}
    assert node.engine.heard[0].in_place
    unload_adapter(node, A)
    assert node.ready().adapters == {}
    with pytest.raises(NotFound, match="'a' is not loaded"):
        unload_adapter(node, A)


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        (b"{", RequestError, "lora_name and lora_path"),
        (body(lora_name="", lora_path="/x"), RequestError, "length >= 1"),
        (body(lora_name="m", lora_path="/x"), RequestError, "the model itself"),
        (body(lora_name="a" * 300, lora_path="/x"), RequestError, "length <= 256"),
        (body(lora_name="a\n", lora_path="/x"), RequestError, "printable"),
        (A, NotFound, "no such"),
    ],
)
async def test_bad_bodies_and_missing_files(raw, kind, words):
    node = node_of(AdapterAnswer(1, reason="no such thing", missing=True))
    with pytest.raises(kind, match=words):
        await load_adapter(node, raw)
    assert not node.ready().adapters


async def test_an_engine_that_reads_an_adapter_is_not_silent_before_the_deadline() -> None:
    client = EngineClient(NodeConfig(EngineConfig("m")))
    client._heard_at -= 100
    sent: list[Any] = []
    client.send = sent.append  # type: ignore[method-assign]
    assert client.silent_s() >= 100

    def load(number: int) -> LoadAdapter:
        return LoadAdapter(number, "a", "/x")

    for deadline_s in (0.01, 50.0):
        asking = asyncio.create_task(client.ask(load, deadline_s, failed="it was not read"))
        await asyncio.wait([asking], timeout=0.2)
        assert (0 < client.silent_s() < 50) == (deadline_s < 1)
        asking.cancel()
    assert client.silent_s() == 0  # the engine still reads
    assert len(sent) == 2


def asked(adapter: AdapterFacts | None, name: str, digest: str) -> Request:
    fetch = Ticket(adapter=name, adapter_digest=digest)
    submit = Submit("r", [1], SamplingParams(1, seed=0), fetch=fetch)
    return Request.from_submit(submit, 0.0, None if adapter is None else Loaded(0, adapter))


def test_kv_is_taken_of_the_same_name_and_content_alone():
    assert asked(None, "", "").kv_mismatch() is None
    assert asked(FACTS, "a", FACTS.digest).kv_mismatch() is None
    assert "'a' of content d1d1" in (asked(FACTS, "a", "e2" * 16).kv_mismatch() or "")
    assert "no adapter" in (asked(FACTS, "", "").kv_mismatch() or "")
    assert "'b'" in (asked(FACTS, "b", FACTS.digest).kv_mismatch() or "")
    assert asked(None, "a", FACTS.digest).kv_mismatch() is not None
    assert asked(FACTS, "", "").adapter_key == ("a", FACTS.digest)
    assert asked(None, "", "").adapter_key == ("", "")


def test_an_engine_without_slots_refuses_what_it_is_asked():
    for path in ("/nowhere", "~nobody-at-all", "x" * 5000, "\0", ""):
        reason = "this node has no slots for adapters; start it with --max-loras"
        answer = answer_load(None, LoadAdapter(1, "a", path))
        assert answer == AdapterAnswer(1, reason=reason, missing=True)


def test_the_root_of_a_prefix_is_of_salt_and_adapter():
    given = [(None,), ("s",), (None, "s"), ("s", "t"), ("st",), (None, "st")]
    roots = [root_of(*each) for each in given]
    assert roots[0] == ROOT
    assert len(set(roots)) == len(roots)
