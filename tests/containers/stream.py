"""An OpenAI client of a cluster in containers: streams, kills containers meanwhile, and waits until
they are back.

Run by run.sh. Exits with 0 if every stream ended whole, with the words that it has when nothing is
killed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import time

import aiohttp
from openai import AsyncOpenAI

_READY_DEADLINE_S = 300.0
_STREAM_DEADLINE_S = 300.0
_SCRAPED_DEADLINE_S = 60.0
_TOKENS = 48
_QUESTIONS = [
    f"Tell me a story about {thing}." for thing in ("a router", "two nodes", "a lease", "a block")
]


async def _up(url: str, nodes: tuple[int, int], gone: str = "") -> dict[str, str]:
    """Wait until the router sees that many prefill and decode nodes, and all pairs that can talk.

    Returns the generation of each URL; `gone` is one that must not be among them any more.
    """
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(
                    f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)
                ) as answer:
                    seen = await answer.json(content_type=None)
                counts = (seen["prefill"]["up"], seen["decode"]["up"])
                generations = {node["url"]: node["generation"] for node in seen["nodes"]}
                if answer.status == 200 and counts == nodes and gone not in generations.values():
                    return generations
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as why:
                seen = repr(why)
            if time.monotonic() - began > _READY_DEADLINE_S:
                raise SystemExit(f"the cluster is not up after {_READY_DEADLINE_S:g} s: {seen}")
            await asyncio.sleep(0.5)


async def _stream(
    client: AsyncOpenAI, model: str, question: str, begun: asyncio.Event | None = None
) -> str:
    """The words of one answer; `begun` is set when the first have come."""
    words, chunks, reason = "", 0, None
    async for event in await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        for choice in event.choices:
            words += choice.delta.content or ""
            chunks += bool(choice.delta.content)
            reason = choice.finish_reason or reason
        if chunks > 2 and begun is not None:
            begun.set()
    if reason != "length" or chunks < _TOKENS // 4:
        raise SystemExit(f"a stream ended with {reason} after {chunks} chunks: {words!r}")
    return words


async def _all(client: AsyncOpenAI, model: str, begun: asyncio.Event | None = None) -> list[str]:
    async with asyncio.timeout(_STREAM_DEADLINE_S):
        return list(
            await asyncio.gather(
                *(_stream(client, model, question, begun) for question in _QUESTIONS)
            )
        )


async def _scraped(prometheus: str, targets: int) -> None:
    """Wait until Prometheus has so many targets, all of them up."""
    deadline = time.monotonic() + _SCRAPED_DEADLINE_S
    found: object = None
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            try:
                async with session.get(f"{prometheus}/api/v1/targets?state=active") as answer:
                    found = [
                        (one["labels"], one["health"])
                        for one in (await answer.json())["data"]["activeTargets"]
                    ]
                if len(found) == targets and all(health == "up" for _, health in found):
                    jobs = sorted(labels["job"] for labels, _ in found)
                    print(f"  Prometheus scrapes {targets} targets: {', '.join(jobs)}", flush=True)
                    return
            except (aiohttp.ClientError, OSError, ValueError, KeyError) as why:
                found = repr(why)
            await asyncio.sleep(0.5)
    raise SystemExit(
        f"Prometheus does not have {targets} targets up after {_SCRAPED_DEADLINE_S:g} s: {found}"
    )


def _kill(container: str) -> None:
    """End the container's first process as a crash would."""
    asked = ["podman", "inspect", "--format", "{{.State.Pid}}", container]
    pid = int(subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout)
    if pid < 2:
        raise SystemExit(f"{container} does not run")
    os.kill(pid, signal.SIGKILL)


async def _run(url: str, nodes: tuple[int, int], kills: list[str]) -> None:
    began = time.monotonic()
    generations = await _up(url, nodes)
    print(
        f"  {nodes[0]} prefill, {nodes[1]} decode nodes are up after "
        f"{time.monotonic() - began:.1f} s",
        flush=True,
    )
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = (await client.models.list()).data[0].id
    began = time.monotonic()
    expected = await _all(client, model)
    print(
        f"  {len(expected)} streams of {_TOKENS} tokens of {model} in "
        f"{time.monotonic() - began:.1f} s",
        flush=True,
    )
    print(f"  {_QUESTIONS[0]} {expected[0][:60]!r}...", flush=True)
    for container in kills:
        alone = nodes[container.startswith("kvrelay_decode")] == 1
        begun = asyncio.Event()
        streams = None if alone else asyncio.create_task(_all(client, model, begun))
        if streams is not None:
            await asyncio.wait_for(begun.wait(), _STREAM_DEADLINE_S)
        _kill(container)
        killed = time.monotonic()
        if streams is not None:
            if await streams != expected:
                raise SystemExit(f"streams that ran while {container} was killed have other words")
            print(
                f"  {container} killed under {len(expected)} streams: all whole, with the same "
                f"words",
                flush=True,
            )
        node = container.removeprefix("kvrelay_").removesuffix("_1")
        generations = await _up(url, nodes, gone=generations[f"http://{node}:8000"])
        print(
            f"  {container} is back {time.monotonic() - killed:.1f} s after it was killed",
            flush=True,
        )
        if await _all(client, model) != expected:
            raise SystemExit(f"streams after {container} came back have other words")
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--nodes", nargs=2, type=int, required=True, metavar=("PREFILL", "DECODE"))
    parser.add_argument("--kill", action="append", default=[], metavar="CONTAINER")
    parser.add_argument(
        "--scraped",
        default="",
        metavar="PROMETHEUS",
        help="Only ask whether it scrapes all of them.",
    )
    given = parser.parse_args()
    if given.scraped:
        asyncio.run(_scraped(given.scraped, sum(given.nodes) + 1))
    else:
        asyncio.run(_run(given.url, (given.nodes[0], given.nodes[1]), given.kill))


if __name__ == "__main__":
    main()
