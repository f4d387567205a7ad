"""A network namespace for each process, and one between them in which this process is: real links,
which lose, delay and drop real packets. Nothing of it can be reached from outside, and all of it
ends with the last process in it.

Each process's namespace has one link to ours, and ours passes packets on. What goes wrong is a rule
there, so the connections of clients and of whoever watches (which begin here) are never touched. A
delay is netem's where the kernel has it, else a rate so low that bytes queue.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.soak.chaos.network import Bad, Place

__all__ = ["Namespaces", "enter", "inside"]

_INSIDE = "CHAOS_NAMESPACE"
_TOOLS = ("unshare", "nsenter", "ip", "iptables", "tc")
_SLOW = "2mbit"
"""Where there is no netem: a burst of 64 KiB takes a quarter of a second."""


def inside() -> bool:
    """Whether this process is in a namespace of its own already."""
    return bool(os.environ.get(_INSIDE))


def enter(argv: Sequence[str]) -> None:
    """Become `argv` in a network namespace of its own. Returns if this machine does not allow it."""
    if not all(shutil.which(tool) for tool in _TOOLS):
        return
    probe = (
        "ip link set lo up && ip link add chaos0 type veth peer name chaos1 && iptables -w -A "
        "FORWARD -j DROP"
    )
    probe += " && echo 1 > /proc/sys/net/ipv4/ip_forward"
    for flags in (["--net"], ["--user", "--map-root-user", "--net"]):
        tried = subprocess.run(
            ["unshare", *flags, "sh", "-c", probe], capture_output=True, check=False
        )
        if tried.returncode == 0:
            os.environ[_INSIDE] = "1"
            sys.stdout.flush()
            os.execvp("unshare", ["unshare", *flags, *argv])


class Namespaces:
    """Only for who is `inside`."""

    name = "namespaces"
    kinds = frozenset({"cut", "resets", "loss", "delay"})

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers: dict[str, int] = {}
        self._delays: dict[str, list[float]] = {}
        """Seconds, by name: all that are under way there. The longest is the one that is felt."""
        self._lock = threading.Lock()  # of the delays: changes come from any thread
        _do("ip", "link", "set", "lo", "up")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        probe = ("tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "0ms")
        self.netem = subprocess.run(probe, capture_output=True, check=False).returncode == 0
        if self.netem:
            _do("tc", "qdisc", "del", "dev", "lo", "root")

    async def join(self, names: Mapping[str, Sequence[int]]) -> None:
        """A namespace for each, held by a process that waits for our end."""
        for name in names:
            number = self._numbers[name] = len(self._numbers) + 1
            holder = self._holders[name] = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert holder.stdout is not None
            await asyncio.to_thread(holder.stdout.readline)  # it is in its namespace now
            ours = f"chaos{number}"
            _do(
                "ip",
                "link",
                "add",
                ours,
                "type",
                "veth",
                "peer",
                "name",
                "link0",
                "netns",
                str(holder.pid),
            )
            _do("ip", "addr", "add", f"10.77.{number}.1/24", "dev", ours)
            _do("ip", "link", "set", ours, "up")
            there = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
            _do(*there, "ip", "link", "set", "lo", "up")
            _do(*there, "ip", "addr", "add", f"10.77.{number}.2/24", "dev", "link0")
            _do(*there, "ip", "link", "set", "link0", "up")
            _do(*there, "ip", "route", "add", "default", "via", f"10.77.{number}.1")

    def place(self, name: str) -> Place:
        """An address of its own."""
        prefix = ("nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net", "--")
        return Place(self._address(name), prefix)

    async def begin(self, bad: Bad) -> None:
        """Raises CalledProcessError."""
        await asyncio.to_thread(self._change, bad, "-I")

    async def end(self, bad: Bad) -> None:
        """Raises CalledProcessError."""
        await asyncio.to_thread(self._change, bad, "-D")

    async def close(self) -> None:
        """The namespaces end with their last process."""
        for holder in self._holders.values():
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(5)

    def _change(self, bad: Bad, how: str) -> None:
        if bad.kind == "delay":
            with self._lock:
                self._delay(bad, how == "-I")
            return
        what = {
            "cut": ["-j", "DROP"],
            "loss": [
                "-m",
                "statistic",
                "--mode",
                "random",
                "--probability",
                f"{bad.amount:g}",
                "-j",
                "DROP",
            ],
            "resets": ["-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"],
        }[bad.kind]
        address, other = (
            self._address(bad.name),
            self._address(bad.other) if bad.other else "0.0.0.0/0",
        )
        if bad.way in ("both", "in"):
            _do("iptables", "-w", how, "FORWARD", "-s", other, "-d", address, *what)
        if bad.way in ("both", "out"):
            _do("iptables", "-w", how, "FORWARD", "-s", address, "-d", other, *what)

    def _delay(self, bad: Bad, begins: bool) -> None:
        under_way = self._delays.setdefault(bad.name, [])
        (under_way.append if begins else under_way.remove)(bad.amount)
        device, slow = f"chaos{self._numbers[bad.name]}", []
        if under_way and self.netem:
            slow = ["netem", "limit", "20000", "delay", f"{max(under_way) * 1e3:g}ms"]
        elif under_way:
            slow = [
                "tbf",
                "rate",
                _SLOW,
                "burst",
                "16kb",
                "latency",
                f"{max(*under_way, 0.05) * 1e3:g}ms",
            ]
        there = ("nsenter", f"--net=/proc/{self._holders[bad.name].pid}/ns/net")
        for prefix, dev in (((), device), (there, "link0")):
            _do(
                *prefix, "tc", "qdisc", "replace" if under_way else "del", "dev", dev, "root", *slow
            )

    def _address(self, name: str) -> str:
        return f"10.77.{self._numbers[name]}.2"


def _do(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.decode(errors='replace').strip()}")
