"""`python -m tests.soak.chaos`: faults that overlap, nodes that stay down, and processes that are
left behind.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import local_cluster
from tests.soak.chaos import processes
from tests.soak.chaos.logs import Logs
from tests.soak.chaos.processes import Cluster, Node


def test_a_log_that_is_stalled_twice_comes_after_both(tmp_path: Path) -> None:
    logs, log = Logs(), tmp_path / "log"
    theirs = logs.pipe(log)
    try:
        logs.stall(log)
        logs.stall(log)
        os.write(theirs, b"one\n")
        logs.go_on(log)
        time.sleep(0.1)
        assert not log.exists()
        logs.go_on(log)
        deadline = time.monotonic() + 20
        while not log.exists() or b" one\n" not in log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.close(theirs)
        logs.close()


def cluster_of(tmp_path: Path, *names: str) -> Cluster:
    cluster = Cluster(tmp_path, [], [])
    made = [
        Node(name, role, (1,), [], tmp_path / "log", subprocess.Popen(["sleep", "600"]))
        for name, role in zip(names, ("router", "decode", "prefill"), strict=False)
    ]
    (tmp_path / "log").write_text("its log\n")
    cluster.router, *cluster.nodes = made
    return cluster


async def test_a_node_that_does_not_come_back_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "START_DEADLINE_S", 0.2)
    cluster = cluster_of(tmp_path, "router", "decode0")
    try:
        cluster.nodes[0].falls(time.monotonic())
        assert not cluster.lost()
        async with asyncio.timeout(20):
            with pytest.raises(
                RuntimeError, match=r"decode0 is down for more than 0.2 s, 1 times started: its log"
            ):
                await cluster.whole()
    finally:
        await cluster.stop()


class Started(Exception):
    """Instead of a process."""


def test_no_benchmark_leaves_its_processes_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = []

    def started(*_: object, env: dict[str, str], **__: object) -> None:
        tied.append(env.get("KVRELAY_PARENT_PID"))
        raise Started

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(Started):
        Cluster(tmp_path, [], [])._launched("router", "router", (1,), [])
    with pytest.raises(Started), local_cluster.running("up"):
        pass
    assert tied == [str(os.getpid())] * 2
