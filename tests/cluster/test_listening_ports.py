"""What the processes of `kvrelay up` listen on: every TCP and UDP port of each of them, as the
kernel has it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from benchmarks.local_cluster import family, free_ports
from tests.cluster.real_cluster import START_DEADLINE_S, Cluster, complete, tiny_model, wait_until
from tests.listening import Port, listening

pytestmark = pytest.mark.cluster

ZMQ_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f"


@contextlib.contextmanager
def up(folder: Path, *flags: str) -> Iterator[tuple[int, str]]:
    """Start 1P1D, until the router sees both; yield the pid of the command and the router's URL."""
    (port,) = free_ports(1)
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-m", "kvrelay.cli", "up", f"--port={port}", "--prefill=1"]
    argv += ["--decode=1", *tiny_model(folder), f"--log-dir={folder / 'logs'}", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    url = f"http://127.0.0.1:{port}"
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=folder)
    try:

        def ready() -> bool:
            assert process.poll() is None, (folder / "up.log").read_text()
            with contextlib.suppress(httpx2.HTTPError):
                return httpx2.get(f"{url}/health", timeout=60).is_success
            return False

        wait_until(ready, "the cluster is ready", deadline_s=START_DEADLINE_S, interval_s=0.2)
        yield process.pid, url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def commands_of(pid: int) -> dict[int, str]:
    """The command line of each process below `pid`, and its own."""
    found = {}
    for each in family(pid):
        with contextlib.suppress(OSError):
            found[each] = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def ports_of(commands: dict[int, str]) -> dict[str, list[list[Port]]]:
    """By what these processes are: the ports of each such process."""
    found = defaultdict(list)
    for pid, command in commands.items():
        what = re.search(r"kvrelay\.cli (\w+)|node\.(engine_process)", command)
        found[(what[1] or what[2]) if what else command].append(listening([pid]))
    return found


def speak_zmq(ports: list[Port]) -> list[bool]:
    """Return which of these have greeted as ZMQ does once one has; UCX says nothing."""
    with contextlib.ExitStack() as stack:
        dialled = [
            stack.enter_context(socket.create_connection((port.address, port.number), timeout=60))
            for port in ports
        ]
        said, _, _ = select.select(dialled, [], [], 60)
        return [each in said and each.recv(len(ZMQ_GREETING)) == ZMQ_GREETING for each in dialled]


def test_without_nixl_an_engine_listens_for_control_messages_alone(small: Cluster) -> None:
    for node in small.nodes:
        (ports,) = ports_of(commands_of(node.popen.pid))["engine_process"]
        assert ([port.protocol for port in ports], speak_zmq(ports)) == (["tcp"], [True])


def test_nothing_listens_but_what_must_and_all_of_it_on_the_loopback(tmp_path: Path) -> None:
    connector = "nixl" if importlib.util.find_spec("nixl") else "auto"
    with up(tmp_path, "--kv-connector", connector) as (pid, url):
        complete(url, "the tide comes in twice a day, and " * 8)
        commands = commands_of(pid)
        found = ports_of(commands)
        (router,) = [command for command in commands.values() if "kvrelay.cli router" in command]
        urls = re.findall(r"--(?:prefill|decode)=(\S+)", router)
        engines = [speak_zmq(ports) for ports in found["engine_process"]]
    assert {
        (port.protocol, port.address) for each in found.values() for ports in each for port in ports
    } == {("tcp", "127.0.0.1")}
    numbers = {
        what: sorted([port.number for port in ports] for ports in each)
        for what, each in found.items()
    }
    listeners = {"router", "prefill", "decode", "engine_process"}
    assert listeners < set(numbers)
    # Of `up` itself, and of the children in which nodes compile and read what clients send.
    assert not any(
        ports for what, each in numbers.items() if what not in listeners for ports in each
    )
    assert numbers["router"] == [[int(url.rpartition(":")[2])]]
    expected = sorted([int(node.rpartition(":")[2])] for node in urls)
    assert sorted(numbers["prefill"] + numbers["decode"]) == expected
    # The control channel; and UCX's listener only where KV goes that way.
    assert [sorted(each) for each in engines] == [
        [False, True] if connector == "nixl" else [True]
    ] * 2
