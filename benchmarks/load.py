"""Closed-loop load on any OpenAI endpoint: tokens/s, TTFT, TPOT, ITL. In-band errors count as failures.

python -m benchmarks.load --url http://127.0.0.1:8000 --requests 16 --concurrency 8 --max-tokens 32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["Outcome", "Report", "percentile", "run_load"]

# About 60 tokens each with the chat template; only the template is a shared prefix.
_TOPICS = (
    "the tides", "a bicycle", "old maps", "honey bees", "the number zero", "glaciers", "a jazz band", "paper",
    "volcanoes", "the violin", "deserts", "clocks", "a lighthouse", "spices", "the moon", "bridges", "tea", "owls",
    "ships", "salt",
)  # fmt: skip
_ASKS = (
    "In plain words, explain to a curious child how {} came to be and why people still care about it today.",
    "Write a short and vivid paragraph about {} that would fit in the opening of a travel magazine.",
    "List a few surprising facts about {} and say for each of them how we know that it is true.",
)


@dataclass(slots=True)
class Outcome:
    """One request as the client saw it; times in seconds from its start."""

    error: str | None = None
    first_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """Medians and tails over the requests of one run."""

    requests: int
    failed: int
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    itl_p99_ms: float
    prompt_tokens_mean: float


def prompts(count: int, seed: int, offset: int = 0) -> list[str]:
    """Distinct questions of about 20 tokens; another offset of the same seed gives others."""
    rng = random.Random(seed)
    combined = [ask.format(topic) for ask in _ASKS for topic in _TOPICS]
    rng.shuffle(combined)
    return [combined[(offset + i) % len(combined)] for i in range(count)]


async def _one(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Outcome:
    outcome, began, last = Outcome(), time.perf_counter(), 0.0
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                outcome.error = f"{answer.status}: {(await answer.text())[:200]}"
                return outcome
            done = False
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    done = True
                    break
                if b'"content":"' in data and b'"content":""' not in data:
                    # Not parsed: the client shares the cores with what it measures.
                    now = time.perf_counter() - began
                    if last:
                        outcome.gaps_s.append(now - last)
                    else:
                        outcome.first_s = now
                    last = now
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    outcome.error = str(chunk["error"])
                    return outcome
                if chunk.get("usage"):
                    outcome.tokens = chunk["usage"]["completion_tokens"]
                    outcome.prompt_tokens = chunk["usage"]["prompt_tokens"]
            outcome.total_s = last
            if not done:
                outcome.error = "the stream ended without [DONE]"
    except (aiohttp.ClientError, TimeoutError) as why:
        outcome.error = f"{type(why).__name__}: {why}"
    return outcome


async def run_load(
    url: str,
    *,
    requests: int,
    concurrency: int,
    max_tokens: int,
    seed: int = 0,
    offset: int = 0,
    api_key: str = "",
    model: str = "",
) -> tuple[Report, list[Outcome]]:
    """Keep `concurrency` streamed, greedy chat requests of exactly `max_tokens` tokens running until all are done."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        if not model:
            async with session.get(f"{url}/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]
        waiting = [
            {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for prompt in prompts(requests, seed, offset)
        ]
        outcomes: list[Outcome] = []

        async def worker() -> None:
            while waiting:
                outcomes.append(await _one(session, url, waiting.pop(0)))

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        wall = time.perf_counter() - began
    return _report(outcomes, wall), outcomes


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all are at most; nan without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _report(outcomes: list[Outcome], wall_s: float) -> Report:
    good = [o for o in outcomes if o.error is None]
    tokens = sum(o.tokens for o in good)
    per_token = [(o.total_s - o.first_s) / (o.tokens - 1) for o in good if o.tokens > 1]
    return Report(
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        wall_s=wall_s,
        output_tokens=tokens,
        output_tokens_per_s=tokens / wall_s,
        ttft_p50_ms=percentile([o.first_s for o in good], 0.5) * 1e3,
        ttft_p99_ms=percentile([o.first_s for o in good], 0.99) * 1e3,
        tpot_p50_ms=percentile(per_token, 0.5) * 1e3,
        itl_p99_ms=percentile([gap for o in good for gap in o.gaps_s], 0.99) * 1e3,
        prompt_tokens_mean=statistics.fmean(o.prompt_tokens for o in good) if good else 0.0,
    )


def main() -> int:
    """Command line. Exit code 1 if any request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="")
    args = parser.parse_args()
    report, outcomes = asyncio.run(
        run_load(
            args.url,
            requests=args.requests,
            concurrency=args.concurrency,
            max_tokens=args.max_tokens,
            seed=args.seed,
            api_key=args.api_key,
        )
    )
    for name in Report.__slots__:
        print(f"{name:22} {getattr(report, name):10.1f}")
    for outcome in outcomes:
        if outcome.error:
            print("failed:", outcome.error)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
