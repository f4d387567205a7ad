"""`python -m tests.soak.fuzz`: a bounded run with a fixed seed on real processes, and what it makes
messages of.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.fuzz import over_http
from tests.soak.fuzz.__main__ import TARGETS, Options, _command, fuzzed
from tests.soak.fuzz.examples import LEADS_AWAY, ROUTER, of_node
from tests.soak.fuzz.mutations import as_json, as_msgpack, garbled, mutated
from tests.soak.fuzz.over_sizes import cases

EXAMPLES = [*ROUTER, *of_node("held")]
SECONDS = 10
MOST_BYTES = 4096
"""Of a body: the whole range takes an hour."""


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


async def test_an_answer_that_does_not_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()  # the end of the client
        writer.close()

    async with await asyncio.start_server(begin, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(over_http, "ANSWER_S", 0.1)
        assert await over_http.exchange(port, [b"GET / HTTP/1.1\r\n\r\n"]) is None


@pytest.mark.parametrize(
    ("late_s", "said"), [(10.0, ""), (50.0, "a half was closed 50 s after its deadline")]
)
async def test_a_half_that_was_closed_late_is_told_however_much_later_one_looks(
    late_s: float, said: str
) -> None:
    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(closing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        ended = asyncio.create_task(over_http._end_of(reader))
        await asyncio.wait([ended])
        half = over_http.Half("a half", time.monotonic() - late_s, writer, ended)
        assert await over_http.still_open([half], 15.0) == ([said] if said else [])


def test_a_broken_round_comes_with_the_command_that_plays_it_again() -> None:
    given = {
        "seconds": 3600.0,
        "seed": 5,
        "target": None,
        "round": 0,
        "only": "",
        "trust_templates": True,
    }
    again = _command(given, "router fields, round 12: what is wrong, round 7: more")
    assert again == (
        "python -m tests.soak.fuzz --seconds 0 --seed 5 --trust-templates --target 'router "
        "fields' --round 12"
    )


@pytest.mark.cluster
def test_wrong_messages_on_every_port_change_nothing(tmp_path: Path) -> None:
    report = asyncio.run(fuzzed(tmp_path, Options(SECONDS, 7, most_bytes=MOST_BYTES)))
    assert report["broken"] == []
    assert set(report["rounds"]) == set(TARGETS)
    assert report["generators"] == len(
        {case.generator.name for target in ("sizes", "languages") for case in cases(target)}
    )
    # TCP: the router's in each of two workers, for pings; of each node HTTP, KV events, replays,
    # control, UCX.
    assert report["ports"] == 3 + 2 * 5
    assert (
        report["closed in time"] >= 9
    )  # connections of three processes that never said a whole head
