"""`python -m tests.soak.chaos`: what it draws, how it reads answers, and what it calls a broken
promise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.soak.chaos.__main__ import _recorded
from tests.soak.chaos.crowd import Seen
from tests.soak.chaos.faults import (
    CLIENTS,
    ROUTER,
    Schedule,
    once,
)
from tests.soak.chaos.faults import KINDS as FAULTS
from tests.soak.chaos.proxies import Bad, Proxies
from tests.soak.chaos.shim import Shim
from tests.soak.chaos.streams import Heard, difference
from tests.soak.chaos.verdict import (
    Outage,
    judged,
)


def event(*choices: dict[str, object], **fields: object) -> bytes:
    every = [{"index": 0, "text": "", "finish_reason": None, **choice} for choice in choices]
    return (
        b"data: "
        + json.dumps({"id": "x", "created": 1, "choices": every, **fields}).encode()
        + b"\n"
    )


DONE = b"data: [DONE]\n"
END = event({"finish_reason": "length"})


def heard(*lines: bytes) -> Heard:
    found = Heard()
    for line in lines:
        found.line(line)
    return found


def test_answers_are_equal_however_they_were_cut() -> None:
    one = heard(
        event({"text": "ab", "token_ids": [1, 2], "logprobs": {"tokens": ["a", "b"]}}), END, DONE
    )
    parts = [
        event({"text": text, "token_ids": [at], "logprobs": {"tokens": [text]}})
        for at, text in ((1, "a"), (2, "b"))
    ]
    other = heard(*parts, b": keep-alive\n", b"\n", END, DONE)
    assert (one.end, other.end, one.pieces, other.pieces) == ("done", "done", 1, 2)
    assert difference(one.answer(), other.answer()) == ""


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        ((event({"text": "a"}),), ""),  # silently
        ((event({"text": "a"}), DONE), "[DONE] before the end of choices [0]"),
        ((DONE,), "[DONE] before the end"),
        ((event({"text": "a"}), END, DONE, DONE), "came behind the end (done)"),
        ((event({"text": "a"}), END, event({"text": "b"}), DONE), "goes on behind its end"),
        (
            (event({"delta": {"role": "assistant"}}), event({"delta": {"role": "assistant"}})),
            "begins twice",
        ),
        (
            (event({"text": "a"}), event({"text": "b"}, id="y")),
            "it changes from ('x', 1) to ('y', 1)",
        ),
        ((b'data: {"error": {"message": "no"}}\n', DONE), "error"),
        ((b'data: {"error": {"message": "no"}}\n', DONE, DONE), "came behind the end"),
    ],
)
def test_what_an_answer_may_not_do_is_named(lines: tuple[bytes, ...], end: str) -> None:
    assert end in heard(*lines).end
    assert bool(end) == bool(heard(*lines).end)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("abd", "other from 2 on: 'd', not 'c'"),
        ("ab", "2 instead of 3 long"),
        ("abbc", "4 instead of 3 long"),
    ],
)
def test_a_token_that_is_lost_or_doubled_is_named(text: str, says: str) -> None:
    twin = heard(event({"text": "abc", "token_ids": [1, 2, 3]}), END, DONE)
    got = heard(event({"text": text, "token_ids": [1, 2, 3]}), END, DONE)
    assert says in difference(twin.answer(), got.answer())


@pytest.mark.parametrize(
    ("lines", "differs"),
    [
        ((), ""),
        ((event({"text": "ab", "token_ids": [1, 2]}),), ""),
        ((event({"text": "ab", "token_ids": [1, 3]}),), "other from 1 on"),
        ((event({"text": "abcd"}),), "4 instead of 3 long"),
        ((event({"index": 1, "text": "a"}),), "choice 1"),
    ],
)
def test_what_has_come_of_an_answer_is_how_its_twin_begins(
    lines: tuple[bytes, ...], differs: str
) -> None:
    twin = heard(
        event({"text": "abc", "token_ids": [1, 2, 3], "logprobs": {"tokens": ["a", "b", "c"]}}),
        END,
        DONE,
    )
    told = difference(twin.answer(), heard(*lines).answer(), ended=False)
    assert bool(told) == bool(differs)
    assert differs in told


def seen(end: str, began: float, ended: float, **fields: object) -> Seen:
    return Seen(1, "greedy", began, id="r1", end=end, ended=ended, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "broken"),
    [
        (seen("done", 0, 9, times=[1.0, 8.0]), ""),
        (seen("refused", 4, 6, status=503), ""),
        (seen("error", 4, 6, status=200), ""),
        (seen("refused", 50, 51, status=503), "though nodes were up"),
        (seen("silent", 4, 6), "silent"),
        (seen("hung", 4, 6), "hung"),
        (seen("unequal", 4, 6), "unequal"),
        (seen("done", 50, 99, times=[51.0, 60.0]), "nothing came for 39.0 s"),
        (seen("done", 0, 42, times=[3.0]), ""),  # waited while no decode node was up
        (seen("left", 50, 51), ""),
        (seen("done", 50, 99, times=[51.0, 60.0], slow=True), ""),
        (
            seen("done", 0, 120, times=[3.0, 43.0, 80.0, 119.0]),
            "nothing came for 37.0 s from 43.0 on",
        ),  # a second one
        (seen("broken", 70, 71, status=200), ""),  # its router was killed
        (seen("refused", 72, 72.5, status=503), ""),
        (seen("refused", 72, 72.5, status=500), "though nodes were up"),
        (seen("error", 70, 72, status=200), "though nodes were up"),
        (seen("silent", 70, 71), "silent"),
        (seen("broken", 74, 75), "broken"),
        (
            seen("broken", 205, 206),
            "",
        ),  # its router was told to end at 200, and had 20 s for what was under way
        (seen("broken", 199, 221, status=200), "broken"),
        (seen("refused", 205, 206, status=503), ""),
        (seen("error", 199, 210, status=200), "though nodes were up"),
        (seen("error", 199, 220.5, status=200), ""),
        (seen("silent", 199, 221), "silent"),
        (
            seen("refused", 5, 6, status=503, past_router=True),
            "though nodes were up",
        ),  # of that node nobody knows
    ],
)
def test_what_breaks_a_promise(one: Seen, broken: str) -> None:
    routers = [Outage(70.5, 72.0), Outage(200.0, 223.0, 220.0)]
    verdict = judged([one], {}, [(5.0, 35.0)], 30.0, routers)
    assert bool(verdict.broken) == bool(broken)
    assert broken in "".join(verdict.broken)


def test_the_wall_clock_of_a_process_jumps_and_no_other_clock(tmp_path: Path) -> None:
    shim = Shim(tmp_path)
    if not shim.there:
        pytest.skip("no C compiler here")
    code = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    env = {**os.environ, **shim.environment("one", {})}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for shift in (0.0, 90.0, -3600.0, 0.0):
            shim.shift("one", shift)
            child.stdin.write(b"x\n")
            child.stdin.flush()
            wall, monotonic = map(float, child.stdout.readline().split())
            assert wall - time.time() == pytest.approx(shift, abs=5)
            assert monotonic == pytest.approx(time.monotonic(), abs=5)


ECHO = """
import socket, sys, threading
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    threading.Thread(target=lambda c=connection: [c.sendall(b) for b in iter(lambda: c.recv(100), b"")]).start()
"""


@contextlib.asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxies, int]]:
    """Proxies, and the port of that from a to an echo named b."""
    echo = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    proxies = Proxies()
    try:
        assert echo.stdout is not None
        port = int(echo.stdout.readline())
        await proxies.join({"a": (), "b": (port,)})
        yield proxies, proxies.links("a")[port]
    finally:
        await proxies.close()
        echo.kill()
        echo.communicate()


async def answered(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, within_s: float
) -> bool:
    writer.write(b"x")
    try:
        async with asyncio.timeout(within_s):
            return bool(await reader.readexactly(1))
    except TimeoutError:
        return False


@pytest.mark.parametrize("way", ["both", "in", "out"])
async def test_a_cut_link_passes_nothing_and_then_what_it_was_given(way: str) -> None:
    async with proxied() as (proxies, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await answered(reader, writer, 20)
        cut = Bad("cut", "b", "a", way)
        proxies.begin(cut)
        while await answered(reader, writer, 0.3):
            pass
        proxies.end(cut)
        async with asyncio.timeout(20):
            await reader.readexactly(1)
        writer.close()


async def test_all_connections_of_a_process_are_reset() -> None:
    async with proxied() as (proxies, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await answered(reader, writer, 20)
        proxies.begin(Bad("resets", "b"))
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(20):
                await reader.readexactly(1)


def test_a_run_that_is_played_again_leaves_its_schedule_as_it_is(tmp_path: Path) -> None:
    first = argparse.Namespace(
        seed=3, streams=9, record=tmp_path / "one.json", schedule=None, json=None
    )
    faults = once(3, 2.0, range(4), FAULTS, longest_s=5.0)
    assert sorted(fault.kind for fault in faults) == sorted(FAULTS)
    assert all(fault.for_s <= 5.0 for fault in faults)
    assert all(bool(fault.nodes) == (fault.kind not in {*ROUTER, *CLIENTS}) for fault in faults)
    assert _recorded(first, faults) == first.record
    assert Schedule.read(first.record) == Schedule(3, {"seed": 3, "streams": 9}, faults)
    again = argparse.Namespace(seed=3, streams=9, record=None, schedule=first.record)
    assert _recorded(again, faults[:1]) == first.record
    assert Schedule.read(first.record).faults == faults
