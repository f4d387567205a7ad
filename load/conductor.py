"""Starts the processes of the client, and joins their records: one load on one server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvrelay.load.measures import percentile
from kvrelay.load.records import (
    Asking,
    Load,
    ProcessReport,
    Progress,
    Record,
    Share,
    pack,
    size_of,
)
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.errors import DeadlineExceeded, KvrelayError

__all__ = ["Outcome", "conduct", "cores", "processes_for"]

_START_S, _READY_S, _SPARE_S = 0.3, 120.0, 60.0
"""From the last process's being ready to the begin; how long that may take; beyond the last
deadline of a request.
"""
_MOST_PROCESSES = 16
_LIMIT = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests of a load in the order in which they were due, and how its client did."""

    records: list[Record]
    cpu_shares: list[float]
    """Share of a core, by process."""
    lags_s: list[float]
    """How late timers were, in the process where they were latest."""


def processes_for(wanted: int, clients: int) -> int:
    """Return how many processes to use: those wanted, or half of the cores, at most one a client."""
    count = wanted or max(1, min(_MOST_PROCESSES, cores() // 2))
    return min(count, clients) if clients else count


def cores(limit: Path = _LIMIT) -> int:
    """Return the cores that we may use, by affinity and by the container's limit in that file."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = limit.read_text(encoding="ascii").split()
        return max(1, min(count, int(quota) // int(period)))
    return count


async def conduct(
    asking: Asking,
    load: Load,
    processes: int = 1,
    told: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Put a load on a server; `told` hears the progress of all processes together.

    Raises KvrelayError if one of them ends early, DeadlineExceeded if one does not end.
    """
    children: list[asyncio.subprocess.Process] = []
    try:
        for index in range(processes):
            children.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "kvrelay.load.sender",
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=child_environ(),
                )
            )  # fmt: skip
            _say(children[-1], Share(asking, load, index, processes))
        async with asyncio.timeout(_READY_S):
            await asyncio.gather(*map(_hear, children))
        begin = time.monotonic() + _START_S
        for child in children:
            _say(child, begin)
        states = [Progress(0, 0, 0, 0)] * processes

        def heard(index: int, progress: Progress) -> None:
            states[index] = progress
            every = [(each.sent, each.done, each.failed, each.tokens) for each in states]
            told(Progress(*map(sum, zip(*every, strict=True))))

        last_s = load.sending_s + asking.deadline_s + _SPARE_S  # nothing is sent after sending_s
        async with asyncio.timeout(last_s if last_s != float("inf") else None):
            ends = await asyncio.gather(
                *(_until_told(child, at, heard) for at, child in enumerate(children))
            )
    except TimeoutError as why:
        raise DeadlineExceeded(
            "a process of the client did not end in time; its machine may be too busy"
        ) from why
    finally:
        await asyncio.gather(*map(_end, children))
    records = sorted(
        (record for end in ends for record in end.records), key=lambda record: record.due_s
    )
    lags = max((end.lags_s for end in ends), key=lambda each: percentile(each or [0.0], 0.99))
    return Outcome(records, [end.cpu_share for end in ends], lags)


def _say(child: asyncio.subprocess.Process, said: object) -> None:
    assert child.stdin is not None
    child.stdin.write(pack(said))


async def _hear(child: asyncio.subprocess.Process) -> Progress | ProcessReport:
    assert child.stdout is not None
    try:
        head = await child.stdout.readexactly(4)
        return msgspec.msgpack.decode(
            await child.stdout.readexactly(size_of(head)), type=Progress | ProcessReport
        )
    except asyncio.IncompleteReadError as why:
        raise KvrelayError(
            "a process of the client has ended before its time; its last words are above"
        ) from why


async def _until_told(
    child: asyncio.subprocess.Process, index: int, heard: Callable[[int, Progress], None]
) -> ProcessReport:
    while True:
        said = await _hear(child)
        if isinstance(said, ProcessReport):
            return said
        heard(index, said)


async def _end(child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    child.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), 5.0)
        return
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    await child.wait()
