"""`vllm bench serve` against one or several arms at once, and what it saw.

Several processes share a load: one alone is too slow to read the streams of two GPUs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peer.arms import MODEL_NAME, Setting
from benchmarks.peer.works import BLOCK_TOKENS, Load, Request
from kvrelay.load.measures import percentile

__all__ = ["Ask", "Figures", "Seen", "ask", "client_command", "figures_of", "seen_by"]

_BEGINS = b"Starting main benchmark run"
_START_S, _LONGEST_S = 180.0, 420.0
_LONGEST_LINE = 1 << 20
_TAIL = 3000


@dataclass(frozen=True, slots=True)
class Ask:
    """A load for one arm."""

    urls: Sequence[str]
    load: Load


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as its client saw it; seconds. `output` is 0 if it failed."""

    asked: Request
    sent_s: float
    prompt: int
    """Tokens that the server has counted, if it was answered."""
    output: int
    ttft_s: float
    gaps_s: Sequence[float]

    @property
    def answered(self) -> bool:
        return self.output == self.asked.output

    @property
    def tpot_s(self) -> float:
        return sum(self.gaps_s) / max(1, self.output - 1)


class Figures(msgspec.Struct, frozen=True):
    """A cell's result."""

    requests: int
    failed: int
    in_time: float | None
    """Share of all requests; none in a closed loop."""
    prompt_tokens: float
    """Average, as servers have counted: equal for all arms."""
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    itl_p99_ms: float | None
    late_p99_ms: float | None
    """How late the client sent, in an open loop: it was too slow, or its processes did not begin
    together.
    """


def client_command(
    setting: Setting,
    url: str,
    asks: Path,
    many: int,
    result: Path,
    clients: int,
) -> list[str]:
    """Name the words of one process for `many` requests of a file."""
    paced = (
        ["--no-self-timed", "--request-rate=inf", f"--max-concurrency={clients}"]
        if clients
        else ["--self-timed"]
    )
    return [
        setting.vllm,
        "bench",
        "serve",
        "--backend=openai",
        f"--base-url={url}",
        f"--model={MODEL_NAME}",
        f"--tokenizer={setting.model}",
        "--dataset-name=timed_trace",
        f"--dataset-path={asks}",
        f"--timed-trace-chunk-hash-size={BLOCK_TOKENS}",
        f"--num-prompts={many}",
        *paced,
        "--temperature=0",
        "--disable-tqdm",
        "--save-result",
        "--save-detailed",
        f"--result-dir={result.parent}",
        f"--result-filename={result.name}",
    ]


def ask(
    asks: Sequence[Ask], processes: int, seed: int, setting: Setting, folder: Path
) -> list[Figures]:
    """Send all of these loads at the same time. `seed`: of the texts. Raises RuntimeError if a
    client fails.
    """
    return asyncio.run(_ask(asks, processes, seed, setting, folder))


@dataclass(frozen=True, slots=True)
class _Sender:
    process: Process
    number: int
    share: Sequence[Request]
    result: Path

    @property
    def log(self) -> Path:
        return self.result.with_suffix(".log")


async def _ask(
    asks: Sequence[Ask], processes: int, seed: int, setting: Setting, folder: Path
) -> list[Figures]:
    env = os.environ | {
        "PYTHONHASHSEED": str(seed),
        "PYTHONUNBUFFERED": "1",
    }  # the client draws words by hash()
    senders: list[_Sender] = []
    try:
        for number, each in enumerate(asks):
            names = count(1)
            for at, (share, clients) in enumerate(dealt(each.load, processes)):
                file, result = folder / f"{number}-{at}.jsonl", folder / f"{number}-{at}.json"
                file.write_text(
                    "".join(_line(request, names) for request in share), encoding="utf-8"
                )
                url = each.urls[at % len(each.urls)]
                argv = client_command(setting, url, file, len(share), result, clients)
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdout=PIPE,
                    stderr=STDOUT,
                    env=env,
                    limit=_LONGEST_LINE,
                    start_new_session=True,
                )
                senders.append(_Sender(process, number, share, result))
        async with asyncio.timeout(_START_S):
            await asyncio.gather(*map(_stopped, senders))
        for sender in senders:
            _signal(sender.process, signal.SIGCONT)
        async with asyncio.timeout(_LONGEST_S):
            await asyncio.gather(*map(_ended, senders))
    finally:
        for sender in senders:
            if sender.process.returncode is None:
                _signal(sender.process, signal.SIGKILL)
                await sender.process.wait()
    seen: list[list[Seen]] = [[] for _ in asks]
    for sender in senders:
        seen[sender.number] += seen_by(json.loads(sender.result.read_bytes()), sender.share)
    return [figures_of(of, each.load) for of, each in zip(seen, asks, strict=True)]


def dealt(load: Load, processes: int) -> list[tuple[Sequence[Request], int]]:
    many = min(processes, load.clients or processes)
    return [
        (load.requests[at::many], load.clients // many + (at < load.clients % many))
        for at in range(many)
    ]


def _line(request: Request, names: count[int]) -> str:
    missing = -(-request.prompt // BLOCK_TOKENS) - len(request.blocks)
    blocks = [*request.blocks, *(-next(names) for _ in range(missing))]
    told = {
        "timestamp": request.at_s,
        "input_length": request.prompt,
        "output_length": request.output,
    }
    return json.dumps(told | {"hash_ids": blocks}) + "\n"


async def _stopped(sender: _Sender) -> None:
    assert sender.process.stdout is not None
    with sender.log.open("wb") as file:
        async for line in sender.process.stdout:
            file.write(line)
            if line.startswith(_BEGINS):
                _signal(sender.process, signal.SIGSTOP)
                return


async def _ended(sender: _Sender) -> None:
    assert sender.process.stdout is not None
    with sender.log.open("ab") as file:
        async for line in sender.process.stdout:
            file.write(line)
    if code := await sender.process.wait():
        raise RuntimeError(f"the client ended with code {code}:\n{sender.log.read_text()[-_TAIL:]}")


def _signal(process: Process, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


# --- what it saw
# -----------------------------------------------------------------------------------------------------


def seen_by(told: dict[str, Any], asked: Sequence[Request]) -> list[Seen]:
    """Read the JSON of a client with --save-detailed. Raises ValueError if it is about other
    requests.
    """
    lists = (told[name] for name in ("start_times", "input_lens", "output_lens", "ttfts", "itls"))
    return [Seen(*each) for each in zip(asked, *lists, strict=True)]


def figures_of(seen: Sequence[Seen], load: Load) -> Figures:
    """Sum up all processes of a load; their clock is the machine's."""
    good = [each for each in seen if each.answered]
    first_s = min(each.sent_s for each in seen)
    lasted_s = max(each.sent_s + each.ttft_s + sum(each.gaps_s) for each in seen) - first_s
    lags = [each.sent_s - each.asked.at_s for each in seen]
    targets = load.targets
    met = (
        [targets.met(each.asked.prompt, each.ttft_s * 1e3, each.tpot_s * 1e3) for each in good]
        if targets
        else []
    )
    return Figures(
        len(seen),
        len(seen) - len(good),
        sum(met) / len(seen) if targets else None,
        sum(each.prompt for each in good) / max(1, len(good)),
        len(good) / lasted_s,
        sum(each.output for each in good) / lasted_s,
        _ms([each.ttft_s for each in good], 0.5),
        _ms([each.ttft_s for each in good], 0.99),
        _ms([each.tpot_s for each in good if each.output > 1], 0.5),
        _ms([gap for each in good if each.output > 1 for gap in each.gaps_s], 0.99),
        None if load.clients else _ms([lag - min(lags) for lag in lags], 0.99),
    )


def _ms(seconds: Sequence[float], share: float) -> float | None:
    return percentile(seconds, share) * 1e3 if seconds else None
