"""Closed-loop load of random token-id prompts on an OpenAI endpoint, over raw sockets: clients parse next to nothing.

An event of the stream is counted as a token (the byte tokenizer of a model without text gives every id a text of its
own), and the usage at its end must name the tokens that were asked for. The clients of a load are several processes,
so that they keep up with 20,000 tokens/s.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import random
import statistics
import time
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

import msgspec

from benchmarks.load import percentile

__all__ = ["Load", "Report", "Seen", "measure"]

_EVENT = b"data: "
_CLIENTS_PER_PROCESS, _MOST_PROCESSES = 8, 4
# Prompts are drawn from the middle of the vocabulary: no special token ends a request.
_FIRST_TOKEN, _LAST_TOKENS = 300, 1000


@dataclass(frozen=True, slots=True)
class Load:
    """`clients` of them keep asking until all `requests` have been asked."""

    prompt_tokens: int
    output_tokens: int
    clients: int
    requests: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """Of `in:out:clients:requests`. Raises ValueError."""
        numbers = [int(part) for part in text.split(":")]
        if len(numbers) != len(fields(cls)) or min(numbers) < 1:
            raise ValueError(f"a load is in:out:clients:requests, all of them at least 1, got {text!r}")
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.prompt_tokens}:{self.output_tokens}:{self.clients}"


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: seconds on the machine's clock when it was asked, and of each token; an error, or nothing."""

    error: str
    asked: float
    times: list[float]


@dataclass(frozen=True, slots=True)
class Report:
    """Of the requests of a load. Milliseconds, but for the rates."""

    done: int
    failed: int
    tokens_per_s: float
    requests_per_s: float
    ttft_p50: float
    ttft_p99: float
    second_token: float
    """Median from the first token to the second: in a cluster, what the hand-over has added to one step."""
    tpot_p50: float
    itl_p50: float
    itl_p99: float

    @classmethod
    def of(cls, load: Load, seen: list[Seen]) -> Report:
        """All times of those that were answered."""
        good = [request for request in seen if not request.error]
        first = [request.times[0] - request.asked for request in good]
        gaps = [
            [b - a for a, b in zip(r.times[: load.output_tokens - 1], r.times[1 : load.output_tokens], strict=False)]
            for r in good
        ]
        wall = max(r.times[-1] for r in good) - min(r.asked for r in good) if good else float("inf")
        every = [gap for of_one in gaps for gap in of_one]
        return cls(
            done=len(good),
            failed=load.requests - len(good),
            tokens_per_s=len(good) * load.output_tokens / wall,
            requests_per_s=len(good) / wall,
            ttft_p50=percentile(first, 0.5) * 1e3,
            ttft_p99=percentile(first, 0.99) * 1e3,
            second_token=percentile([of_one[0] for of_one in gaps if of_one], 0.5) * 1e3,
            tpot_p50=percentile([statistics.fmean(of_one) for of_one in gaps if of_one], 0.5) * 1e3,
            itl_p50=percentile(every, 0.5) * 1e3,
            itl_p99=percentile(every, 0.99) * 1e3,
        )


def measure(url: str, model: str, vocab_size: int, loads: list[Load], seed: int, within_s: float) -> list[list[Seen]]:
    """Run the loads at the same time; what was seen of each. After `within_s` whatever still runs is cut."""
    rng = random.Random(seed)
    begin = time.perf_counter() + 0.5  # all processes of a host share this clock
    waiting = []
    for load in loads:
        bodies = [_body(load, model, vocab_size, rng) for _ in range(load.requests)]
        processes = max(1, min(_MOST_PROCESSES, load.clients // _CLIENTS_PER_PROCESS))
        for index in range(processes):
            share = load.clients // processes + (index < load.clients % processes)
            ours, theirs = multiprocessing.Pipe(duplex=False)
            arguments = (theirs, url, bodies[index::processes], share, load.output_tokens, begin, begin + within_s)
            child = multiprocessing.Process(target=_work, args=arguments, daemon=True)
            child.start()
            theirs.close()
            waiting.append((load, child, ours))
    seen: dict[int, list[Seen]] = {id(load): [] for load in loads}
    for load, child, ours in waiting:
        if ours.poll(max(0.1, begin + within_s + 10 - time.perf_counter())):
            seen[id(load)] += msgspec.msgpack.decode(ours.recv_bytes(), type=list[Seen])
        child.join(2)
        child.kill()
    return [seen[id(load)] for load in loads]


def _body(load: Load, model: str, vocab_size: int, rng: random.Random) -> bytes:
    prompt = [rng.randrange(_FIRST_TOKEN, vocab_size - _LAST_TOKENS) for _ in range(load.prompt_tokens)]
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request).encode()


class _Stream(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[str] | None = None
        self.times: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[str]:
        """The error, or nothing, when the answer has ended."""
        self._head, self._in_body, self._tail, self.last = b"", False, b"", b""
        self.times = []
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._in_body:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            if not self._head.startswith(b"HTTP/1.1 200"):
                self._end(self._head[:300].decode(errors="replace"))
                return
            self._in_body, data = True, self._head.partition(b"\r\n\r\n")[2]
        joined = self._tail + data
        self.times += [now] * joined.count(_EVENT)
        self._tail = joined[-len(_EVENT) + 1 :]
        self.last = (self.last + data)[-700:]
        if joined.endswith(b"0\r\n\r\n"):
            self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}")

    def _end(self, error: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(error)


def _work(
    pipe: multiprocessing.connection.Connection,
    url: str,
    bodies: list[bytes],
    clients: int,
    output_tokens: int,
    begin: float,
    stop: float,
) -> None:
    pipe.send_bytes(msgspec.msgpack.encode(asyncio.run(_clients(url, bodies, clients, output_tokens, begin, stop))))


async def _clients(
    url: str, bodies: list[bytes], clients: int, output_tokens: int, begin: float, stop: float
) -> list[Seen]:
    loop, waiting, seen = asyncio.get_running_loop(), list(bodies), []
    to = urlsplit(url)
    assert to.hostname is not None
    assert to.port is not None
    streams = [(await loop.create_connection(_Stream, to.hostname, to.port))[1] for _ in range(clients)]
    usage = b'"completion_tokens":%d' % output_tokens

    async def client(stream: _Stream) -> None:
        while waiting and time.perf_counter() < stop:
            body = waiting.pop()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {to.netloc}\r\ncontent-type: application/json\r\n"
            asked = time.perf_counter()
            try:
                answer = stream.ask(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                error = await asyncio.wait_for(answer, max(0.1, stop - asked))
            except TimeoutError:
                seen.append(Seen("cut by the deadline", asked, stream.times))
                return
            if not error and usage not in stream.last.replace(b": ", b":"):
                error = f"no usage of {output_tokens} tokens at the end: {stream.last[-300:].decode(errors='replace')}"
            seen.append(Seen(error, asked, stream.times[:output_tokens]))
            if error:
                return

    await asyncio.sleep(max(0.0, begin - time.perf_counter()))
    await asyncio.gather(*map(client, streams))
    for stream in streams:
        stream.transport.close()
    return seen
