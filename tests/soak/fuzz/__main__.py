"""Wrong and excessive messages on every port of every process of a cluster, which must go on as if
nothing had been.

    python -m tests.soak.fuzz --seconds 600 --seed 1
    python -m tests.soak.fuzz --seconds 3600 --seed 2 --memory-gib 10  # what a release wants
    python -m tests.soak.fuzz --seconds 3600 --target languages --trust-templates

Starts a prefill node, a decode node and a router with two workers on this machine, with all keys
and secrets set. Then rounds: each is some messages for one target, a function of (seed, number,
target). After each one: no process has ended or logged a traceback, `/live` has not stalled for a
second, no process has had twice its memory or computes for nobody, nothing that wants a key has
changed, and a request through both nodes is answered as before. In the end memory, files and
threads are as they were. Exits with 1 if not.

`--target T --round N` plays a round again (with the same seed). What is large is found by "sizes"
(every field of every request) and "languages" (schemas, expressions, grammars, templates). `--only
TEXT` plays their cases that have the text in their name: a route, a field, a generator.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from kvrelay.kv_transfer.connector import LeaseId
from tests.soak.chaos.left_behind import Size, grown
from tests.soak.fuzz import over_http, over_sizes, over_sockets
from tests.soak.fuzz.sizes import MAX_BODY
from tests.soak.fuzz.stand import Stand
from tests.soak.fuzz.watch import Watch, still_busy
from tests.soak.report import reported

__all__ = ["TARGETS", "fuzzed", "parsed"]

_ROLES = ("router", "prefill", "decode")
TARGETS = (
    *(f"{role} {what}" for what in ("fields", "framing") for role in _ROLES),
    "prefill legs",
    "decode legs",
    "heartbeats",
    "control",
    "every port",
    "sizes",
    "languages",
)
HEAD_S, BODY_S, MARGIN_S = 20.0, 60.0, 15.0
"""The servers' deadlines for a head and a body, and how late they may be here."""
SETTLE_S = 30.0
_GROWTH = Size(0, 64 << 20, 12, 12, 8)
"""More of these per family of processes, after the first pass over all targets, is a leak."""
_SMALL_BODIES = 1 << 20
"""Larger ones leave memory with the allocator; then only twice of it is wrong
(tests/soak/fuzz/watch.py).
"""


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="rounds begin for so long")
    add("--seed", type=int, default=0)
    add("--target", choices=TARGETS, help="this one alone")
    add("--round", type=int, default=0, help="begin with this round")
    add("--only", default="", help="cases of sizes and languages with this in their name")
    add("--most-bytes", type=int, default=MAX_BODY, help="of a body of sizes and languages")
    add("--memory-gib", type=float, default=8.0, help="the cluster is ended if it has more")
    add("--trust-templates", action="store_true", help="nodes take requests' chat templates")
    return parser.parse_args(argv)


async def fuzzed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The report of a run: what was sent, and what was `broken`. Raises RuntimeError if the cluster
    does not start.
    """
    report: dict[str, Any] = {"seed": options.seed, "rounds": Counter(), "broken": []}
    broken: list[str] = report["broken"]
    flags = ["--trust-request-chat-template"] if options.trust_templates else []
    async with AsyncExitStack() as stack:
        stand = await stack.enter_async_context(Stand(folder, flags))
        await over_http.warmed(stand)
        await over_sockets.open_planes(stand)
        watch = await stack.enter_async_context(Watch(stand, int(options.memory_gib * 2**30)))
        halves = [
            half
            for process in stand.processes
            for half in await over_http.half_open(process, stand.keys["node"], HEAD_S, BODY_S)
        ]
        began, state = time.monotonic(), await stand.state()
        report["ports"] = len(stand.ports())
        report["generators"], wrong = await over_sizes.small(stand, random.Random(options.seed))
        broken += wrong + await watch.look()
        usage = await _rounds(stand, watch, options, state, report)
        due = [half for half in halves if half.until <= time.monotonic() + MARGIN_S]
        broken += await over_http.still_open(due, MARGIN_S)
        for half in halves:
            half.ended.cancel()
            half.writer.close()
        if not broken:
            broken += await _grown(stand, usage, memory=options.most_bytes <= _SMALL_BODIES)
        report |= {"seconds": time.monotonic() - began, "closed in time": len(due)}
    return report


async def _rounds(
    stand: Stand,
    watch: Watch,
    options: argparse.Namespace,
    state: dict[str, Any],
    report: dict[str, Any],
) -> dict[str, Size]:
    targets = [options.target] if options.target else TARGETS
    usage = stand.usage()
    until = time.monotonic() + options.seconds
    for number in itertools.count(options.round):
        for target in targets:
            if report["broken"] or (number > options.round and time.monotonic() > until):
                return usage
            began = time.monotonic()
            wrong = await _played(stand, watch, options, target, number, state)
            report["rounds"][target] += 1
            report["broken"] += [f"{target}, round {number}: {one}" for one in wrong]
            took_s = time.monotonic() - began
            print(f"{target}, round {number}: {took_s:.1f} s", file=sys.stderr, flush=True)
        if number == options.round:
            usage = stand.usage()
    raise AssertionError


async def _played(
    stand: Stand,
    watch: Watch,
    options: argparse.Namespace,
    target: str,
    number: int,
    state: dict[str, Any],
) -> list[str]:
    rng, wrong = random.Random(f"{options.seed} {number} {target}"), []
    try:
        async with stand.held() as held:
            if target in over_sizes.TARGETS:
                cases = over_sizes.round_of(target, options.seed, number, options.only)
                wrong += await over_sizes.sizes(stand, watch, rng, cases, options.most_bytes)
                if wrong:
                    return wrong  # who stands still would not answer what follows, either
            else:
                wrong += await _round(stand, target, rng, held)
            if not await over_sockets.holds(stand, held):
                wrong.append("KV that was held for somebody is held no more")
        wrong += await _gone_on(stand, state)
        wrong += await still_busy(stand.processes)
    except (aiohttp.ClientError, TimeoutError) as why:
        wrong.append(f"the cluster does not answer: {why!r}; {stand.ended()}")
    return wrong + await watch.look()


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
        case "control":
            return await over_sockets.control(stand, rng, 60, held)
    return await over_sockets.every_port(stand, rng, 4)


async def _gone_on(stand: Stand, state: dict[str, Any]) -> list[str]:
    wrong = stand.ended()
    if wrong:
        return wrong
    await stand.set_right()
    until = time.monotonic() + SETTLE_S
    while (now := await stand.state()) != state and time.monotonic() < until:
        await asyncio.sleep(0.1)
        await stand.set_right()
    wrong += [
        f"{name} is {now.get(name)}, and was {was}"
        for name, was in state.items()
        if now.get(name) != was
    ]
    wrong += [f"{name} has come: {now[name]}" for name in set(now) - set(state)]
    failed = await _failed_fetches(stand)
    said = await stand.canary(secrets.token_hex(8))
    if await _failed_fetches(stand) > failed:
        wrong.append(
            "the canary's KV did not arrive: its fetch failed, and the prompt was computed twice"
        )
    if said != stand.expected:
        wrong.append(f"the canary says {said!r} instead of {stand.expected!r}")
    for process in stand.processes:
        news = stand.news(process)
        if "Traceback" in news:
            wrong.append(f"{process.role} logs {news[news.index('Traceback') - 300 :][:3000]}")
    return wrong


async def _failed_fetches(stand: Stand) -> float:
    told = await stand.cluster.metrics(stand.nodes[1])
    return told.get("kvrelay_fetches_failed_total", 0.0)


async def _grown(stand: Stand, usage: dict[str, Size], *, memory: bool) -> list[str]:
    until = time.monotonic() + SETTLE_S
    more = _GROWTH if memory else replace(_GROWTH, memory=1 << 60)
    while (wrong := grown(usage, stand.usage(), more)) and time.monotonic() < until:
        await asyncio.sleep(0.5)
    return wrong


if __name__ == "__main__":
    options = parsed(sys.argv[1:])
    sys.exit(reported("fuzz", lambda folder: asyncio.run(fuzzed(folder, options))))
