"""`python -m benchmarks.fuzz`: a bounded run with a fixed seed on real processes, and what it makes messages of."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fuzz.__main__ import fuzzed
from benchmarks.fuzz.examples import LEADS_AWAY, ROUTER, of_node
from benchmarks.fuzz.mutations import as_json, as_msgpack, garbled, mutated

EXAMPLES = [*ROUTER, *of_node("held")]
SECONDS = 10


@given(st.integers(0, 2**32))
def test_a_seed_makes_the_same_message_again_and_leads_nowhere_else(seed: int) -> None:
    body = random.Random(seed).choice(EXAMPLES).body
    before = json.dumps(body)
    one, other = (mutated(random.Random(seed), body, LEADS_AWAY) for _ in range(2))
    assert as_json(one) == as_json(other)
    assert as_msgpack(one) == as_msgpack(other)
    assert garbled(random.Random(seed), as_json(one)) == garbled(random.Random(seed), as_json(one))
    assert json.dumps(body) == before  # the example itself is as it was
    for mark in (b"remote_host", b"url"):
        told = as_json(one)
        assert mark not in told or b"127.0.0.1" in told


def test_nesting_is_put_in_behind_the_encoder() -> None:
    deep = {"a": "@deep00003@"}
    assert json.loads(as_json(deep)) == {"a": [[[]]]}
    assert msgspec.msgpack.decode(as_msgpack(deep)) == {"a": [[[None]]]}


@pytest.mark.cluster
def test_wrong_messages_on_every_port_change_nothing(tmp_path: Path) -> None:
    report = asyncio.run(fuzzed(tmp_path, SECONDS, 7))
    assert report["broken"] == []
    assert len(report["rounds"]) == 14
    assert report["ports"] >= 16
    assert report["closed in time"] >= 9  # connections of three processes that never said a whole head
