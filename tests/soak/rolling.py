"""Restart every node of a cluster, one after the other, under streams: none may be lost.

    python -m tests.soak.rolling --streams 50                 # 2P2D of the tiny model, here
    python -m tests.soak.rolling --streams 50 --from COMMIT   # an upgrade from that code

Clients ask requests of many kinds (tests/soak/chaos), as many at a time as --streams says; each
answer must equal its undisturbed twin. A node is told to end by SIGTERM, as Kubernetes and systemd
do, drains, and is started again; the next one follows when the router uses it and it has met its
partners. Exits with 1 if an answer was lost, refused or another one, or if anything is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

from tests.soak.chaos.asks import asks
from tests.soak.chaos.crowd import Crowd
from tests.soak.chaos.faults import Fault
from tests.soak.chaos.left_behind import LEASE_S, left_behind
from tests.soak.chaos.model import flags_of
from tests.soak.chaos.processes import Cluster
from tests.soak.chaos.verdict import Times, broken_legs

_FLAGS = [
    "--cpu",
    "--threads",
    "1",
    "--kv-cache-memory-bytes",
    str(128 << 20),
    "--max-num-seqs",
    "256",
]
_SETTLE_S = 3.0
"""Streams before and after each restart."""
_PER_KIND = 4
_ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--streams", type=int, default=50, help="requests under way at any moment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", default="tiny", help="tiny, embedded, or what kvrelay's --model takes"
    )
    parser.add_argument("--from", dest="commit", default="", help="the code that nodes begin with")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rolling-"))
    broken = asyncio.run(_run(options, folder))
    for line in broken:
        print(f"BROKEN: {line}")
    if broken:
        print(f"logs: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


async def _run(options: argparse.Namespace, folder: Path) -> list[str]:
    flags = [
        *flags_of(options.model, folder),
        *_FLAGS,
        "--lease-s",
        str(LEASE_S),
        "--tool-call-parser",
        "hermes",
    ]
    cluster = Cluster(folder, flags, ["--strict-roles"])
    if options.commit:
        old = _code_of(options.commit, folder / "old")
        cluster.code = {"prefill": old, "decode": old}
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as session:
        try:
            await cluster.start(options.prefill, options.decode, session)
            cluster.code = {}
            assert cluster.router is not None
            asked = asks(options.seed, _PER_KIND, longest=1000)
            crowd = Crowd(cluster.router.url, asked, session)
            await crowd.ask_twins(at_once=8)
            return await _rolled(options, cluster, crowd)
        finally:
            await cluster.stop()


async def _rolled(options: argparse.Namespace, cluster: Cluster, crowd: Crowd) -> list[str]:
    began, rolling = time.monotonic(), True
    cluster.supervise()
    clients = [
        asyncio.create_task(
            crowd.keep_asking(random.Random(f"{options.seed} {at}"), lambda: rolling)
        )
        for at in range(options.streams)
    ]
    await asyncio.sleep(_SETTLE_S)
    for index, node in enumerate(cluster.nodes):
        at = time.monotonic()
        await cluster.strike(Fault(at - began, "restart", (index,)))
        while node.starts == 1:
            await asyncio.sleep(0.05)
        drained_s = time.monotonic() - at
        await cluster.whole()
        print(
            f"{node.name} drained and ended within {drained_s:.1f} s, back after "
            f"{time.monotonic() - at:.1f} s"
        )
        await asyncio.sleep(_SETTLE_S)
    rolling = False
    await asyncio.gather(*clients)
    seconds = time.monotonic() - began
    left = await left_behind(cluster)
    assert cluster.router is not None
    log = cluster.router.log.read_text(errors="replace").splitlines()
    ends, legs = Counter(each.end for each in crowd.seen), broken_legs(log)
    gaps = Times.of(max(b - a for a, b in each.gaps()) for each in crowd.seen if each.times)
    lost = sum(ends.values()) - ends["done"] + crowd.asked - len(crowd.seen)
    print(
        f"{options.prefill}P{options.decode}D, {options.streams} streams, {seconds:.0f} s: "
        f"{crowd.asked} requests, "
        f"{ends['done']} equal to their twins, {lost} lost; {len(legs)} had a leg that broke; "
        f"longest wait within a "
        f"stream p50 {gaps.p50:.0f} ms, p99 {gaps.p99:.0f}, at most {gaps.max:.0f}"
    )
    broken = [
        f"{each.kind} {each.number}, id {each.id}: {each.end} {each.status} {each.error}"
        for each in crowd.seen
        if each.end != "done"
    ]
    if crowd.asked != len(crowd.seen):
        broken.append(f"{crowd.asked - len(crowd.seen)} requests have no end at all")
    return [
        *broken,
        *left,
        *cluster.surprises,
        *(f"the router's log: {line}" for line in log if "Traceback" in line),
    ]


def _code_of(commit: str, folder: Path) -> Path:
    packed = subprocess.run(
        ["git", "-C", str(_ROOT), "archive", commit], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder


if __name__ == "__main__":
    sys.exit(main())
