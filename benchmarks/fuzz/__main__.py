"""Wrong messages on every port of every process of a cluster, which must go on as if nothing had been.

    python -m benchmarks.fuzz --seconds 600 --seed 1

Starts a prefill node, a decode node and a router with two workers on this machine, with all keys and secrets set. Then
rounds: each is some messages for one target, a function of (seed, number, target). After each one: no process has ended
or logged a traceback, nothing that wants a key has changed, and a request through both nodes is answered as before.
In the end memory, files and threads are as they were. Exits with 1 if not; `--target T --round N` plays a round again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fuzz import over_http, over_sockets
from benchmarks.fuzz.stand import Stand, Usage
from kv_transfer.leases import LeaseId

__all__ = ["TARGETS", "fuzzed"]

TARGETS = (
    "router fields", "prefill fields", "decode fields", "router framing", "prefill framing", "decode framing",
    "prefill legs", "decode legs", "heartbeats", "pings", "events", "control", "pairs", "every port",
)  # fmt: skip
HEAD_S, BODY_S, MARGIN_S = 20.0, 60.0, 15.0
"""The servers' deadlines for a head and a body, and how late they may be here."""
SETTLE_S = 30.0
_GROWTH = Usage(64 << 20, 12, 8)
"""More of these per family of processes, after the first pass over all targets, is a leak."""


async def fuzzed(folder: Path, seconds: float, seed: int, options: argparse.Namespace | None = None) -> dict[str, Any]:
    """The report of a run: what was sent, and what was `broken`. Raises RuntimeError if the cluster does not start."""
    targets = [options.target] if options is not None and options.target else TARGETS
    first = 0 if options is None else options.round
    report: dict[str, Any] = {"seed": seed, "rounds": Counter(), "broken": []}
    broken: list[str] = report["broken"]
    async with Stand(folder, 1 if options is None else options.tensor_parallel) as stand:
        halves = [
            half
            for process in stand.processes
            for half in await over_http.half_open(process, stand.keys["node"], HEAD_S, BODY_S)
        ]
        began, number, usage = time.monotonic(), first, {}
        state = await stand.state()
        report["ports"] = len(stand.ports())
        while not broken and (number == first or time.monotonic() - began < seconds):
            for target in targets:
                if number > first and time.monotonic() - began > seconds:
                    break
                at, rng = time.monotonic(), random.Random(f"{seed} {number} {target}")
                wrong = []
                try:
                    async with stand.held() as held:
                        wrong += await _round(stand, target, rng, held)
                        if not await over_sockets.holds(stand, held):
                            wrong.append("KV that was held for somebody is held no more")
                    wrong += await _gone_on(stand, state)
                except (aiohttp.ClientError, TimeoutError) as why:
                    wrong.append(f"the cluster does not answer: {why!r}; {stand.ended()}")
                report["rounds"][target] += 1
                print(f"{target}, round {number}: {time.monotonic() - at:.1f} s", file=sys.stderr, flush=True)
                broken += [f"{target}, round {number}: {one}" for one in wrong]
            number += 1
            if number == first + 1:
                usage = {process: process.usage() for process in stand.processes}
        due = [half for half in halves if half.until <= time.monotonic() + MARGIN_S]
        broken += await over_http.still_open(due, MARGIN_S)
        for half in halves:
            half.ended.cancel()
            half.writer.close()
        broken += await _grown(stand, usage)
        report |= {"seconds": time.monotonic() - began, "closed in time": len(due)}
        report["usage"] = {process.role: (usage[process], process.usage()) for process in stand.processes}
    return report


async def _round(stand: Stand, target: str, rng: random.Random, held: LeaseId) -> list[str]:
    process = next((one for one in stand.processes if target.startswith(one.role)), stand.router)
    key = stand.keys["user" if process is stand.router else "node"]
    match target.rpartition(" ")[2]:
        case "fields":
            return await over_http.fields(stand, rng, process, held.request_id, 48)
        case "framing":
            return await over_http.framing(rng, process, 32, key)
        case "legs":
            return await over_http.leg_streams(stand, rng, process, held.request_id, 8)
        case "heartbeats":
            return await over_sockets.heartbeats(stand, rng, 60)
        case "pings":
            return await over_sockets.pings(stand, rng, 60)
        case "events":
            return await over_sockets.events(stand, rng, 30)
        case "control":
            return await over_sockets.control(stand, rng, 60, held)
        case "pairs":
            return await over_sockets.pairs(stand, rng, 30)
    return await over_sockets.every_port(stand, rng, 4)


async def _gone_on(stand: Stand, state: dict[str, Any]) -> list[str]:
    """What is not as it was before the round."""
    wrong = stand.ended()
    if wrong:
        return wrong
    await stand.set_right(state)
    until = time.monotonic() + SETTLE_S
    while (now := await stand.state()) != state and time.monotonic() < until:
        await asyncio.sleep(0.1)
        await stand.set_right(state)
    wrong += [f"{name} is {now.get(name)}, and was {was}" for name, was in state.items() if now.get(name) != was]
    wrong += [f"{name} has come: {now[name]}" for name in set(now) - set(state)]
    failed = await _failed_fetches(stand)
    said = await stand.canary(secrets.token_hex(8))
    if await _failed_fetches(stand) > failed:
        wrong.append("the canary's KV did not arrive: its fetch failed, and the prompt was computed twice")
    if said != stand.expected:
        wrong.append(f"the canary says {said!r} instead of {stand.expected!r}")
    for process in stand.processes:
        news = process.news()
        if "Traceback" in news:
            wrong.append(f"{process.role} logs {news[news.index('Traceback') - 300 :][:3000]}")
    return wrong


async def _failed_fetches(stand: Stand) -> float:
    return await stand.metric(stand.nodes[1], "kvrelay_fetches_failed_total")


async def _grown(stand: Stand, usage: dict[Any, Usage]) -> list[str]:
    """Who has more than after the first pass, and goes on having it."""
    until = time.monotonic() + SETTLE_S
    while True:
        wrong = []
        for process, was in usage.items():
            now = process.usage()
            if now.rss - was.rss > _GROWTH.rss:
                wrong.append(f"{process.role} has grown by {(now.rss - was.rss) >> 20} MiB")
            # gloo (torch 2.13) never closes what a stranger has opened at the ranks' own ports.
            files = 0 if stand.tensor_parallel > 1 and process is stand.nodes[0] else now.files - was.files
            if files > _GROWTH.files or now.threads - was.threads > _GROWTH.threads:
                wrong.append(f"{process.role} has {now}, and had {was}")
        if not wrong or time.monotonic() > until:
            return wrong
        await asyncio.sleep(0.5)


def main() -> int:
    """Command line. Exit code 1 if something is broken; then the logs stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="rounds begin for so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, help="this one alone")
    parser.add_argument("--round", type=int, default=0, help="begin with this round")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of the prefill node: their ports, too")
    parser.add_argument("--json", type=Path, help="write the report there")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    report = asyncio.run(fuzzed(folder, options.seconds, options.seed, options))
    print(json.dumps({name: value for name, value in report.items() if name != "broken"}, indent=2, default=str))
    for one in report["broken"]:
        print(f"BROKEN: {one}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2, default=str), encoding="utf-8")
    if report["broken"]:
        print(f"logs: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
