"""Whether the client of `kvrelay bench` is fast enough: how much one of its processes takes, and
how late it is.

    python -m benchmarks.bench_client [--seconds 10] [--aiohttp]

A server that costs next to nothing (`--serve`, a process of its own) answers with so many tokens at
a pace. Rows: what one process of the client takes when answers come as fast as they can; then many
streams at the pace of an engine, with what the client says of being late and of its core, and what
it measures of a pace that is known. `--aiohttp` reads the first row's answers with aiohttp instead,
for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import cast

import aiohttp
import uvloop

from kvrelay.load.config import BenchConfig
from kvrelay.load.experiment import Experiment
from kvrelay.load.results import Run

_MAX_TOKENS, _LENGTH = (
    re.compile(rb'"max_tokens": ?(\d+)'),
    re.compile(rb"\r\ncontent-length: ?(\d+)", re.IGNORECASE),
)
_CHUNK = b'{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1,"model":"known",'
_TOKEN = (
    b"data: "
    + _CHUNK
    + b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
_LAST = (
    b"data: "
    + _CHUNK
    + b'"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}]}\n\n'
)
_USAGE = (
    b"data: "
    + _CHUNK
    + b'"choices":[],"usage":{"prompt_tokens":16,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
)
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"known","object":"model"}]}'


def _chunked(said: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(said), said)


class _Connection(asyncio.Protocol):
    """Answers one request after the other; `steps` are called once for each token that all streams
    get.
    """

    def __init__(self, gap_s: float, steps: list[Callable[[], bool]]) -> None:
        self._gap_s, self._steps, self._buffer = gap_s, steps, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._buffer[:end])
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < size:
                return
            request, self._buffer = self._buffer[:size], self._buffer[size:]
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        if not request.startswith(b"POST"):
            status = b"200 OK" if b"/v1/models" in request[:30] else b"404 Not Found"
            self._transport.write(
                b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(_MODELS), _MODELS)
            )
            return
        found = _MAX_TOKENS.search(request)
        tokens = int(found[1]) if found else 16
        end = _chunked(_LAST + _USAGE % tokens) + b"0\r\n\r\n"
        if not self._gap_s:
            # A chunk for each token, many in a write: the client has to read them all the same.
            self._transport.write(_OK + _chunked(_TOKEN) * tokens + end)
            return
        left = tokens

        def step() -> bool:
            nonlocal left
            left -= 1
            if self._transport.is_closing():
                return False
            self._transport.write(
                (_OK if left == tokens - 1 else b"") + _chunked(_TOKEN) + (b"" if left else end)
            )
            return left > 0

        self._steps.append(step)


async def _serve(gap_s: float) -> None:
    steps: list[Callable[[], bool]] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Connection(gap_s, steps), "127.0.0.1", 0, backlog=2048
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    due = time.monotonic()
    while True:
        due = max(due + (gap_s or 1.0), time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        steps[:] = [step for step in steps if step()]


@contextlib.contextmanager
def _server(gap_ms: float) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.bench_client", "--serve", f"{gap_ms}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def _run(url: str, config: BenchConfig) -> Run:
    experiment = Experiment(config)
    asyncio.run(experiment.run())
    return experiment.runs[0]


def _row(name: str, run: Run) -> None:
    of = run.measures
    client, failed = of.client, sum(of.failures.values())
    core = client.busiest or float("nan")
    print(
        f"{name:44}{of.achieved_per_s:9.0f}{of.output_tokens_per_s:10.0f}{core:8.0%}"
        f"{of.output_tokens_per_s / core:11.0f}{client.late.p50:8.2f}{client.late.p99:8.2f}{client.lag.p99:8.2f}"
        f"{of.itl_ms.p50:8.2f}{of.itl_ms.p99:8.2f}{failed:6d}",
        flush=True,
    )


async def _with_aiohttp(url: str, seconds: float, clients: int, tokens: int) -> tuple[float, float]:
    """Chunks a second and for a second of CPU, read line by line and not parsed."""
    body = {"model": "known", "prompt": [1000] * 16, "max_tokens": tokens, "stream": True}
    chunks, began, cpu = 0, time.monotonic(), time.process_time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            nonlocal chunks
            while time.monotonic() < began + seconds:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    async for line in answer.content:
                        chunks += line.startswith(b"data: {")

        await asyncio.gather(*(client() for _ in range(clients)))
    return chunks / (time.monotonic() - began), chunks / (time.process_time() - cpu)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument("--aiohttp", action="store_true")
    parser.add_argument("--serve", type=float, metavar="GAP_MS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        uvloop.run(_serve(args.serve / 1e3))
        return 0
    if args.aiohttp:
        with _server(0) as url:
            rate, per_cpu = uvloop.run(_with_aiohttp(url, args.seconds, 16, 256))
        print(f"aiohttp: {rate:.0f} chunks/s, {per_cpu:.0f} for a second of CPU")
        return 0
    heads = (
        "requests/s",
        "tokens/s",
        "core",
        "tokens/core",
        "late",
        "p99",
        "lag p99",
        "ITL",
        "p99",
        "failed",
    )
    widths = (9, 10, 8, 11, 8, 8, 8, 8, 8, 6)
    print(
        f"{'':44}"
        + "".join(
            f" {head}"[-width:].rjust(width) for head, width in zip(heads, widths, strict=True)
        )
    )
    asked = {"processes": 1, "duration_s": args.seconds, "warm_up_s": 1.0, "deadline_s": 60.0}
    closed = {"concurrency": 16, **asked}
    with _server(0) as url:
        _row(
            "at once, 16 clients, 16:256",
            _run(url, BenchConfig(url=url, lengths="16:256", **closed)),
        )
        _row("at once, 16 clients, 16:1", _run(url, BenchConfig(url=url, lengths="16:1", **closed)))
        _row(
            "at once, 16 clients, 8192:16",
            _run(url, BenchConfig(url=url, lengths="8192:16", **closed)),
        )
    for gap_ms, rate, lengths in (
        (10.0, 26.0, "512:256"),
        (10.0, 100.0, "512:256"),
        (20.0, 500.0, "16:64"),
    ):
        with _server(gap_ms) as url:
            config = BenchConfig(url=url, lengths=lengths, rate=f"{rate}", **asked)
            _row(f"{rate:g} requests/s of {lengths}, a token each {gap_ms:g} ms", _run(url, config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
