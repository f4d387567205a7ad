"""The watching process of fuzz: what counts as a stall, as too much memory, and who is ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.chaos.processes import Node
from tests.soak.fuzz import watch
from tests.soak.fuzz.watch import Live, still_busy

DEADLINE_S = 60.0


def test_what_the_machine_has_taken_is_no_stall() -> None:
    assert Live(3.0, lag_s=0.2, waited_s=2.5).stall_s == 0.5
    assert Live(3.0, 0.2, 2.5).wrong("router") == []
    (wrong,) = Live(3.0, 0.2, 0.1).wrong("router")
    assert wrong == "router /live took 3.00 s, 0.20 s of it by the machine"
    assert Live(status=503).wrong("router") == ["router /live answered 503"]


def test_a_stand_beyond_its_limit_is_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told = f"node:{child.pid}:9:{child.pid}"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.soak.fuzz.watch", str(1 << 20), told],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as watching:
        assert child.wait(DEADLINE_S) == -9
        said, _ = watching.communicate(b"look\n", DEADLINE_S)
    assert b"the stand was ended" in said


async def test_who_computes_for_nobody_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "SETTLE_S", 0.3)
    monkeypatch.setattr(watch, "MAX_IDLE_SHARE", 0.02)  # on a busy machine nobody gets much
    idle, busy = (
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        for code in ("input()", "while True: pass")
    )
    try:
        began = Node("node", "node", (), [], tmp_path, busy)
        async with asyncio.timeout(DEADLINE_S):
            while (
                sum(watch._cpu_s([began]).values()) < 0.1
            ):  # on a busy machine it takes a while to compute at all
                await asyncio.sleep(0.01)
        (said,) = await still_busy([began])
        assert said.startswith(f"node {busy.pid} computes for nobody")
        assert await still_busy([Node("node", "node", (), [], tmp_path, idle)]) == []
    finally:
        for child in (idle, busy):
            child.kill()
            child.communicate()
