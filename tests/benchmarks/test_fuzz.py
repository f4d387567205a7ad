"""`python -m tests.soak.fuzz`: a bounded run with a fixed seed on real processes, and what it makes
messages of.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.fuzz.__main__ import TARGETS, fuzzed, parsed
from tests.soak.fuzz.examples import LEADS_AWAY, ROUTER, of_node
from tests.soak.fuzz.mutations import as_json, as_msgpack, garbled, mutated
from tests.soak.fuzz.over_sizes import cases

EXAMPLES = [*ROUTER, *of_node("held")]
OPTIONS = "--seconds 10 --seed 7 --most-bytes 4096"
"""The whole range of bodies takes an hour."""


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


@pytest.mark.cluster
def test_wrong_messages_on_every_port_change_nothing(tmp_path: Path) -> None:
    report = asyncio.run(fuzzed(tmp_path, parsed(OPTIONS.split())))
    assert report["broken"] == []
    assert set(report["rounds"]) == set(TARGETS)
    assert report["generators"] == len(
        {case.generator.name for target in ("sizes", "languages") for case in cases(target)}
    )
    # TCP: the router's in each of two workers; of each node HTTP, control, UCX.
    assert report["ports"] == 2 + 2 * 3
    assert (
        report["closed in time"] >= 9
    )  # connections of three processes that never said a whole head
