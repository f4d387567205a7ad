"""Load for benchmarks/router.py: one process, raw sockets, answers are counted and not parsed.

    python -m benchmarks.raw_load URL JSON

JSON is a `Wave`; prints a `Seen`. A wave is closed-loop: each of its `streams` connections asks
again until all `requests` are asked. With a pace, the streams begin evenly spread over a second;
events are counted while all of them run, and the CPU of the processes `watched` is read at the ends
of that time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.mock_nodes import MODEL, PROMPT_BYTES

__all__ = ["Seen", "Wave", "cpu_s"]

_EVENT = b"data: "
_SPREAD_S = 1.0
_DEADLINE_S = 300.0


class Wave(msgspec.Struct, frozen=True):
    """`gap_ms` 0: events come as fast as they can."""

    streams: int
    requests: int
    tokens: int
    gap_ms: int = 0
    watched: list[int] = []


class Seen(msgspec.Struct, frozen=True):
    """Milliseconds of all requests, seconds of the wave and of this process's CPU; `failed` says
    why, once each.
    """

    ttft_ms: list[float]
    total_ms: list[float]
    wall_s: float
    own_cpu_s: float
    failed: dict[str, int] = {}
    events: int = 0
    """Events that came while all streams ran, and what they took of the watched processes' CPU."""
    watched_cpu_s: list[float] = []


def cpu_s(pids: list[int]) -> list[float]:
    """User and system seconds of each process so far, all its threads."""
    spent = []
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rpartition(")")[2].split()
        spent.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return spent


class _Stream(asyncio.Protocol):
    def __init__(self) -> None:
        self._answer: asyncio.Future[str] | None = None
        self.counts = False
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def ask(self, request: bytes) -> asyncio.Future[str]:
        self.first, self._tail = 0.0, b""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.first:
            if not data.startswith(b"HTTP/1.1 200"):
                self._end(" ".join(data.decode(errors="replace").splitlines()[:1]))
                return
            if _EVENT not in data:
                self._tail = data[-8:]
                if b"\r\n\r\n" in data:
                    self.first = -1.0  # headers alone
                return
            self.first = now
        elif self.first < 0:
            self.first = now
        if self.counts:
            self.events += (self._tail[-5:] + data).count(_EVENT)
        self._tail = data[-8:]
        if data.endswith(b"0\r\n\r\n"):
            self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}")

    def _end(self, error: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(error)


def _request(wave: Wave, host: str) -> bytes:
    words = "The mistake that people make about rivers is to think of them as lines. "
    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": (words * (PROMPT_BYTES // len(words) + 1))[:PROMPT_BYTES]}
        ],
        "max_tokens": wave.tokens,
        "stream": True,
        "temperature": 0,
        **({"stop": [f"paced-{wave.gap_ms}"]} if wave.gap_ms else {}),
    }
    said = msgspec.json.encode(body)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    )
    return head.encode() + b"content-length: %d\r\n\r\n" % len(said) + said


async def _run(url: str, wave: Wave) -> Seen:
    host = urlsplit(url).netloc
    loop, request, left = asyncio.get_running_loop(), _request(wave, host), wave.requests
    ttft: list[float] = []
    total: list[float] = []
    failed: dict[str, int] = {}
    name, _, port = host.partition(":")
    streams = [
        (await loop.create_connection(_Stream, name, int(port)))[1] for _ in range(wave.streams)
    ]

    async def client(at: int) -> None:
        nonlocal left
        if wave.gap_ms:
            await asyncio.sleep(_SPREAD_S * at / wave.streams)
        while left > 0:
            left -= 1
            asked = time.perf_counter()
            error = await streams[at].ask(request)
            if error:
                failed[error] = failed.get(error, 0) + 1
                streams[at].transport.abort()
                _, streams[at] = await loop.create_connection(_Stream, name, int(port))
                continue
            ttft.append((streams[at].first - asked) * 1e3)
            total.append((time.perf_counter() - asked) * 1e3)

    window = asyncio.create_task(_watch(streams, wave)) if wave.gap_ms else None
    began, cpu = time.perf_counter(), time.process_time()
    async with asyncio.timeout(_DEADLINE_S):
        await asyncio.gather(*map(client, range(wave.streams)))
    seen = Seen(ttft, total, time.perf_counter() - began, time.process_time() - cpu, failed)
    if window is None:
        return seen
    events, watched = await window
    return msgspec.structs.replace(seen, events=events, watched_cpu_s=watched)


async def _watch(streams: list[_Stream], wave: Wave) -> tuple[int, list[float]]:
    length_s = wave.tokens * wave.gap_ms / 1e3
    await asyncio.sleep(_SPREAD_S + 0.1 * (length_s - _SPREAD_S))
    before = cpu_s(wave.watched)
    for stream in streams:
        stream.counts = True
    await asyncio.sleep(0.8 * (length_s - _SPREAD_S))
    for stream in streams:
        stream.counts = False
    spent = [b - a for a, b in zip(before, cpu_s(wave.watched), strict=True)]
    return sum(stream.events for stream in streams), spent


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as _runner:
        _wave = msgspec.json.decode(sys.argv[2], type=Wave)
        sys.stdout.buffer.write(msgspec.json.encode(_runner.run(_run(sys.argv[1], _wave))))
