"""`kvrelay up` as a person meets it, with stand-ins for the nodes and the router."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_state import alive
from rich.console import Console

from kvrelay.cluster import _invite
from kvrelay.cluster_plan import ClusterConfig
from kvrelay.machine import this_machine
from kvrelay.router.workers.worker import shared_port
from kvrelay.settings import build

_UP = """
import os, sys
from dataclasses import replace
from kvrelay.cluster import up
from kvrelay.cluster_plan import ClusterConfig, plan
from kvrelay.settings import build
from kvrelay.wire.errors import KvrelayError

server, log_dir, broken, *demo = sys.argv[1:]

def stand_ins(config, machine, folder):
    specs = plan(config, machine, folder)
    ports = [*machine.ports[1:], machine.ports[0]]
    commands = [(sys.executable, server, str(port)) for port in ports]
    if broken == "broken":
        commands[1] = (sys.executable, "-c", "raise SystemExit('no such model folder')")
    return [replace(spec, command=command) for spec, command in zip(specs, commands)]

settings = {"model": "m", "device": "cpu", "port": 0, "log_dir": log_dir, "stop_deadline_s": 5.0}
keys = {"admin_key": os.environ.get("ADMIN", ""), "node_api_key": os.environ.get("NODES", "")}
config = build(ClusterConfig, settings | keys | {"demo_exit": bool(demo)})
try:
    sys.exit(up(config, stand_ins))
except KvrelayError as why:
    sys.exit(why.message)
"""


async def test_ports_are_kept_for_the_processes_that_listen_there() -> None:
    with this_machine(build(ClusterConfig, {"model": "m", "device": "cpu", "port": 0})) as machine:
        for port in machine.ports:
            with socket.socket() as another, pytest.raises(OSError, match="already in use"):
                another.bind(("127.0.0.1", port))
            async with await asyncio.start_server(lambda *_: None, "127.0.0.1", port):
                pass
            with shared_port("127.0.0.1", port) as worker:
                worker.listen()


class Up:
    """A running `kvrelay up`, its output and the processes that it started."""

    shown = ""
    """When it was ready."""

    def __init__(self, repository: Path, log_dir: Path, *arguments: str) -> None:
        server = Path(__file__).with_name("stand_in_server.py")
        env = {**os.environ, "PYTHONPATH": str(repository), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-c", _UP, str(server), str(log_dir), *arguments]
        pipe = subprocess.PIPE
        # Of no help in keeping anything from others.
        self.process = subprocess.Popen(
            command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, umask=0
        )

    def until(self, pattern: str) -> str:
        """Read the output up to a line that matches; fails if it ends before."""
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if re.search(pattern, line):
                return seen
        raise AssertionError(f"no {pattern!r} in:\n{seen}")

    def children(self) -> list[int]:
        return [
            int(each)
            for each in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            .read_text()
            .split()
        ]


def gone(pids: list[int], deadline_s: float = 60.0) -> bool:
    deadline = time.monotonic() + deadline_s
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def running(repository: Path, tmp_path: Path) -> Iterator[Up]:
    up = Up(repository, tmp_path / "logs", "whole")
    up.shown = up.until("Ctrl-C stops everything")
    yield up
    up.process.kill()
    up.process.communicate(timeout=60)


def test_the_demo_starts_answers_and_exits_with_0(repository: Path, tmp_path: Path) -> None:
    up = Up(repository, tmp_path / "logs", "whole", "demo")
    shown, _ = up.process.communicate(timeout=300)
    assert up.process.returncode == 0, shown
    assert "router is ready after" in shown
    assert re.search(r"kvrelay is ready: http://127.0.0.1:\d+/v1 \(model stand-in\)", shown)
    assert "curl -N http://127.0.0.1:" in shown
    assert "A cache of keys and values." in shown
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == [
        "decode-0.log",
        "prefill-0.log",
        "router.log",
    ]
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "logs").iterdir()} == {0o600}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(number: signal.Signals, running: Up) -> None:
    children = running.children()
    assert len(children) == 3
    running.process.send_signal(number)
    assert running.process.wait(60) == 0
    assert gone(children, 0)


def test_no_orphan_is_left_when_it_is_killed_by_force(running: Up) -> None:
    children = running.children()
    running.process.kill()
    assert len(children) == 3
    assert gone(children)


def test_it_draws_keys_and_shows_the_routers_to_a_terminal_alone(
    running: Up, capsys: pytest.CaptureFixture[str]
) -> None:
    (url,) = re.findall(r"watch it, chat with it: (\S+)/console\n", running.shown)

    def told(name: bytes) -> list[bytes]:
        lines = [line for child in running.children() for line in environment(child)]
        return [line.removeprefix(name) for line in lines if line.startswith(name)]

    (key,), nodes_keys = told(b"KVRELAY_ADMIN_KEY="), told(b"KVRELAY_NODE_API_KEY=")
    assert len(nodes_keys) == 3
    (nodes_key,) = {*nodes_keys}
    assert key != nodes_key
    for secret in (key, nodes_key):
        assert len(secret) == 32
        assert secret.decode() not in running.shown
    for terminal, said in ((True, f"{url}/console#key=k\n"), (False, f"{url}/console\n")):
        console = Console(force_terminal=terminal, soft_wrap=True, highlight=False)
        _invite(console, url, "m", "k", has_key=False)
        assert said in capsys.readouterr().out


def environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
