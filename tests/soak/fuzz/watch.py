"""Watches the stand while it is attacked: how long `/live` takes, what memory processes have, who
goes on computing.

A process of its own (`python -m tests.soak.fuzz.watch`), because the one that attacks is busy. A
stand with more resident memory than its limit is ended, before the machine's OOM killer is. (Torch's
virtual sizes are far above what it uses, so an RLIMIT_AS would not do.)

A stall of `/live` is the time of an answer less what the machine has taken: the larger of the lag
of this process' own idle loop and of what the asked process' main threads have waited for a core
meanwhile. Work that nobody waits for is looked for by itself (`still_busy`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.local_cluster import family
from tests.soak.chaos.processes import Node
from tests.soak.fuzz.stand import Stand

__all__ = ["MAX_STALL_S", "Live", "Watch", "still_busy"]

MAX_STALL_S = 1.0
FLOOR_BYTES = 256 << 20
"""A process that has less counts as having this much: a body of 16 MiB may become 400 MiB of
objects for a moment.
"""
SETTLE_S = 2.0
"""CPU time that a process may use behind the last answer, or when its clients have gone."""
MAX_IDLE_SHARE = 0.3
"""Share of a core: what a process may use when nobody asks for anything."""
_ASK_EVERY_S, _LOOK_EVERY_S, _CONTROL_S, _SHARE_S = 0.1, 0.2, 0.02, 0.3
_ASK_DEADLINE_S, _SAY_DEADLINE_S = 60.0, 30.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Live:
    """The worst answer of a process' `/live`: how long it took, and how much of that the machine
    has taken.
    """

    took_s: float = 0.0
    lag_s: float = 0.0
    waited_s: float = 0.0
    status: int = 200

    @property
    def stall_s(self) -> float:
        return max(0.0, self.took_s - max(self.lag_s, self.waited_s))

    def wrong(self, role: str) -> list[str]:
        if self.status != 200:
            return [f"{role} /live answered {self.status or 'nothing'}"]
        if self.stall_s <= MAX_STALL_S:
            return []
        machine_s = self.took_s - self.stall_s
        return [f"{role} /live took {self.took_s:.2f} s, {machine_s:.2f} s of it by the machine"]


class Watch:
    """The watching process, for the time of an `async with`."""

    def __init__(self, stand: Stand, limit_bytes: int) -> None:
        self._stand, self._limit = stand, limit_bytes
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Watch:
        listening: dict[int, set[str]] = {}
        for port in self._stand.ports():
            listening.setdefault(port.number, set()).add(str(port.pid))
        told = [
            f"{one.role}:{one.process.pid}:{one.ports[0]}:{','.join(listening[one.ports[0]])}"
            for one in self._stand.processes
        ]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            str(self._limit),
            *told,
            stdin=-1,
            stdout=-1,
            limit=1 << 20,
        )
        await self._say("warm")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def look(self) -> list[str]:
        """Return what was wrong since the last look."""
        return await self._say("look")

    async def _say(self, word: str) -> list[str]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{word}\n".encode())
        async with asyncio.timeout(_SAY_DEADLINE_S):
            return msgspec.json.decode(await process.stdout.readline(), type=list[str])


async def still_busy(processes: list[Node]) -> list[str]:
    """Find who goes on computing though nobody waits for anything."""
    first = before = _cpu_s(processes)
    until = time.monotonic() + _SAY_DEADLINE_S
    while True:
        began = time.monotonic()
        await asyncio.sleep(_SHARE_S)
        now, passed_s = _cpu_s(processes), time.monotonic() - began
        busy = [
            who
            for who, used in now.items()
            if who in before and used - before[who] > MAX_IDLE_SHARE * passed_s
        ]
        used_s = {who: now[who] - first.get(who, now[who]) for who in busy}
        late = time.monotonic() > until
        if not busy or late or max(used_s.values()) > SETTLE_S:
            return [
                f"{who} computes for nobody: {used:.1f} s and on"
                for who, used in used_s.items()
                if used > SETTLE_S or late
            ]
        before = now


def _cpu_s(processes: list[Node]) -> dict[str, float]:
    used = {}
    for process in processes:
        for pid in family(process.process.pid):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                used[f"{process.role} {pid}"] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return used


class _Family:
    def __init__(self, told: str) -> None:
        self.role, pid, port, threads = told.split(":")
        self.pid, self.port = int(pid), int(port)
        self._main = [Path(f"/proc/{each}/task/{each}/schedstat") for each in threads.split(",")]
        self.asked: dict[float, float] = {}
        """When those were asked that have not answered yet, and what had been waited then."""
        self.worst = Live()

    def waited_s(self) -> float:
        """For a core, since their start: the main threads of those who may answer, together."""
        waited = 0.0
        for at in self._main:
            with contextlib.suppress(OSError, ValueError):
                waited += int(at.read_text().split()[1]) / 1e9
        return waited


class _Watcher:
    def __init__(self, limit: int, families: list[_Family]) -> None:
        self._limit, self._families = limit, families
        self._lags: deque[tuple[float, float]] = deque(maxlen=3000)  # a minute of them
        self._warm: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self._over = 0
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        always = [
            asyncio.create_task(each()) for each in (self._control, self._ask_all, self._sample)
        ]
        while word := (await reader.readline()).strip():
            if word == b"warm":
                self._measure()
                self._warm, self._limits = dict(self._peaks), {}
            sys.stdout.buffer.write(msgspec.json.encode(self._wrong()) + b"\n")
            sys.stdout.flush()
        for task in always:
            task.cancel()

    async def _control(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_CONTROL_S)
            now = time.monotonic()
            self._lags.append((now, now - began - _CONTROL_S))

    async def _ask_all(self) -> None:
        while True:
            for each in self._families:
                task = asyncio.create_task(self._ask(each))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
            await asyncio.sleep(_ASK_EVERY_S)

    async def _ask(self, asked: _Family) -> None:
        began, status = time.monotonic(), 0
        asked.asked[began] = asked.waited_s()
        try:
            async with asyncio.timeout(_ASK_DEADLINE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", asked.port)
                try:
                    writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                    status = int((await reader.readline())[9:12] or 0)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            pass
        self._note(asked, began, asked.asked.pop(began), status)

    def _note(self, asked: _Family, began: float, waited_s: float, status: int) -> None:
        now = time.monotonic()
        lag_s = max((lag for when, lag in self._lags if when >= began), default=0.0)
        live = Live(now - began, lag_s, asked.waited_s() - waited_s, status)
        if live.stall_s > asked.worst.stall_s or live.status != 200:
            asked.worst = live

    async def _sample(self) -> None:
        while True:
            self._measure()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _measure(self) -> None:
        found = {}
        for each in self._families:
            for pid in family(each.pid):
                with contextlib.suppress(OSError):
                    found[f"{each.role} {pid}"] = (
                        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
                    )
        for who, rss in found.items():
            self._peaks[who] = max(rss, self._peaks.get(who, 0))
            if who not in self._warm:
                self._limits[who] = max(
                    _address_space(who.rpartition(" ")[2]), self._limits.get(who, 0)
                )
        total = sum(found.values())
        if total > self._limit:
            self._over = total
            for who in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(who.partition(" ")[2]), signal.SIGKILL)

    def _wrong(self) -> list[str]:
        found = []
        if self._over:
            found.append(f"the stand was ended: it had {self._over >> 20} MiB together")
        for each in self._families:
            for began, waited_s in each.asked.items():
                self._note(each, began, waited_s, 200)
            found += each.worst.wrong(each.role)
            each.worst = Live()
        for who, peak in self._peaks.items():
            warm = self._warm.get(who, 0)
            # Twice what it had; of a process that came later, what the kernel allows it.
            if peak > max(2 * max(warm, FLOOR_BYTES), self._limits.get(who, 0)):
                found.append(f"{who} had {peak >> 20} MiB, and {warm >> 20} MiB before")
        self._peaks, self._limits = {}, {}
        return found


def _address_space(pid: str) -> int:
    with contextlib.suppress(OSError):
        soft = next(
            line
            for line in Path(f"/proc/{pid}/limits").read_text().splitlines()
            if "address space" in line
        )
        return int(soft.split()[3]) if soft.split()[3].isdigit() else 0
    return 0


if __name__ == "__main__":  # a limit in bytes, then `role:pid:port:listeners` of each family
    limit_bytes, *told = sys.argv[1:]
    asyncio.run(_Watcher(int(limit_bytes), [_Family(each) for each in told]).run())
