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

from tests.soak.chaos import processes
from tests.soak.chaos.crowd import Seen
from tests.soak.chaos.faults import Fault
from tests.soak.chaos.processes import Cluster, Node
from tests.soak.chaos.proxies import Bad, Proxies
from tests.soak.chaos.run import _strike_all
from tests.soak.chaos.shim import Shim
from tests.soak.chaos.streams import Heard, difference
from tests.soak.chaos.verdict import Outage, judged


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
        ((DONE,), "[DONE] before the end"),
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


TWIN = event({"text": "abc", "token_ids": [1, 2, 3], "logprobs": {"tokens": ["a", "b", "c"]}})


@pytest.mark.parametrize(
    ("fields", "ended", "differs"),
    [
        ({"text": "abd"}, True, "other from 2 on: 'd', not 'c'"),
        ({"text": "ab"}, True, "2 instead of 3 long"),
        ({"text": "ab", "token_ids": [1, 2]}, False, ""),
        ({"text": "ab", "token_ids": [1, 3]}, False, "other from 1 on"),
        ({"index": 1, "text": "a"}, False, "choice 1"),
    ],
)
def test_where_an_answer_differs_from_its_twin_is_named(
    fields: dict[str, object], ended: bool, differs: str
) -> None:
    got = {"token_ids": [1, 2, 3], **fields} if ended else fields
    told = difference(heard(TWIN, END, DONE).answer(), heard(event(got)).answer(), ended=ended)
    assert bool(told) == bool(differs)
    assert differs in told


LOST = "2 nodes were lost while they had this request"


def seen(end: str, began: float, ended: float, **fields: object) -> Seen:
    return Seen(1, "greedy", began, id="r1", end=end, ended=ended, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "broken"),
    [
        (seen("done", 0, 9, times=[1.0, 8.0]), ""),
        (seen("refused", 4, 6, status=503), ""),
        (seen("refused", 50, 51, status=503), "though nodes were up"),
        (seen("hung", 4, 6), "hung"),
        (seen("done", 50, 99, times=[51.0, 60.0]), "nothing came for 39.0 s"),
        (seen("done", 0, 42, times=[3.0]), ""),  # waited while no decode node was up
        (seen("done", 50, 99, times=[51.0, 60.0], slow=True), ""),
        (
            seen("done", 0, 120, times=[3.0, 43.0, 80.0, 119.0]),
            "nothing came for 37.0 s from 43.0 on",
        ),  # a second one
        (seen("broken", 70, 71, status=200), ""),  # its router was killed
        (seen("refused", 72, 72.5, status=503), ""),
        (seen("refused", 72, 72.5, status=500), "though nodes were up"),
        (seen("broken", 74, 75), "broken"),
        (
            seen("broken", 205, 206),
            "",
        ),  # its router was told to end at 200, and had 20 s for what was under way
        (seen("broken", 199, 221, status=200), "broken"),
        (seen("error", 199, 220.5, status=200), ""),
        (
            seen("refused", 5, 6, status=503, past_router=True),
            "though nodes were up",
        ),  # of that node nobody knows
        (seen("refused", 300, 302, status=503, error=LOST), ""),
        (seen("refused", 310, 311, status=503, error=LOST), "though nodes were up"),  # only one
    ],
)
def test_what_breaks_a_promise(one: Seen, broken: str) -> None:
    routers = [Outage(70.5, 72.0), Outage(200.0, 223.0, 220.0)]
    lost = [[(301.0, 309.0)], [(301.0, 312.0)], []]
    verdict = judged([one], [(5.0, 35.0)], 30.0, routers, lost=lost)
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
        proxies.tell("begin", cut)
        while await answered(reader, writer, 0.3):
            pass
        proxies.tell("end", cut)
        async with asyncio.timeout(20):
            await reader.readexactly(1)
        writer.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A router, a prefill and a decode node whose processes have ended."""
    made = Cluster(tmp_path, [], [])
    made.logs.close()
    (tmp_path / "log").write_text("its log\n")
    ended = subprocess.Popen(["true"])
    ended.wait()
    made.router, *made.nodes = [
        Node(name, name.rstrip("0"), (1,), [], tmp_path / "log", ended)
        for name in ("router", "prefill0", "decode0")
    ]
    return made


async def test_a_node_that_does_not_come_back_ends_the_wait(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START_DEADLINE_S", 0.2)
    cluster.nodes[1].falls(time.monotonic())
    assert not cluster.lost()
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match=r"decode0 is down for 0.2 s: its log"):
            await cluster.whole()


class Failing:
    """The first one fails, the second one finds nobody to strike."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def strike(self, fault: Fault) -> None:
        if fault.kind == "cut":
            raise OSError("no such rule")
        self._cluster.note(fault, self._cluster.nodes, missed=fault.kind == "kill")


async def test_a_strike_that_fails_and_a_kind_that_never_happens_are_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def whole() -> None:
        pass

    monkeypatch.setattr(cluster, "whole", whole)
    faults = (Fault(0.0, kind, (0,)) for kind in ("cut", "kill", "stop"))
    options = argparse.Namespace(each_once=True, rolling=False, every_s=0.0, seconds=0.0)
    await _strike_all(options, cluster, Failing(cluster), faults, 0.0)  # type: ignore[arg-type]
    first, *others = cluster.surprises
    assert first == "cut at 0.0 s failed: OSError('no such rule')"
    assert others == ["cut has not happened", "kill has not happened"]
