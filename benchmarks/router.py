"""The cost of a router, over nodes that cost next to nothing.

    python -m benchmarks.router [--workers N] [--rounds 3] [-- FLAGS OF THE ROUTER]

A prefill and a decode node (benchmarks/mock_nodes.py) and the client (benchmarks/raw_load.py) are
processes of their own. Prompts have 4 KB. `cpu/req` is CPU of the router's process and its
children, user and system, per request of 16 events, at 1 and at 32 clients; `us/event` the same per
event of 64 paced streams. `+ttft` is the median time to the first event at one client, less that of
asking the decode node itself. Rows `direct` show what client and nodes can do without a router.

`--workers N` adds a row of a router with so many processes, the parent's CPU among theirs. The
kernel deals out connections by their ports, so one may have 12 of 32. Rounds take turns, so that
all see the same machine; medians are shown.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import msgspec

from benchmarks.local_cluster import family, running
from benchmarks.raw_load import Seen, Wave, cpu_s
from kvrelay.load.measures import percentile

ALONE, BUSY = Wave(1, 400, 16), Wave(32, 3000, 16)
PACED = Wave(64, 64, 800, 5)
OURS, DIRECT = "kvrelay", "direct"


class Running(msgspec.Struct, frozen=True):
    """A process that answers, and its children."""

    url: str
    pids: list[int]


class Row(msgspec.Struct, frozen=True):
    """One router in one round. Milliseconds and microseconds of CPU; rates per second."""

    name: str
    ttft_ms: float
    total_ms: float
    alone_cpu_us: float
    rate: float
    busy_cpu_us: float
    busy_p99_ms: float
    client_share: float
    """Share of a core that the client took at 32 streams: near 1 the client is measured."""
    nodes_share: float
    event_us: float
    failed: dict[str, int]


@contextmanager
def mock_node(role: str) -> Iterator[Running]:
    argv = [sys.executable, "-m", "benchmarks.mock_nodes", role]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        try:
            yield Running(f"http://127.0.0.1:{int(process.stdout.readline())}", [process.pid])
        finally:
            process.kill()


@contextmanager
def router(workers: int, prefill: str, decode: str, flags: Sequence[str] = ()) -> Iterator[Running]:
    """Run a router until the block is left, from when all of its workers listen."""
    nodes = [f"--prefill={prefill}", f"--decode={decode}", f"--workers={workers}"]
    with running("router", *nodes, *flags) as (url, pid):
        while not _all_listen(url):
            time.sleep(0.2)
        yield Running(url, family(pid))


def _all_listen(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        workers = msgspec.json.decode(answer.read()).get("workers", {})
    return bool(workers.get("listening") == workers.get("wanted"))


def _wave(url: str, wave: Wave) -> Seen:
    argv = [sys.executable, "-m", "benchmarks.raw_load", url, msgspec.json.encode(wave).decode()]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    return msgspec.json.decode(done.stdout, type=Seen)


def measure(name: str, server: Running, nodes: list[int]) -> Row:
    failed: dict[str, int] = {}

    def wave(wanted: Wave) -> tuple[Seen, list[float]]:
        before = cpu_s([*server.pids, *nodes])
        seen = _wave(server.url, wanted)
        failed.update(seen.failed)
        return seen, [b - a for a, b in zip(before, cpu_s([*server.pids, *nodes]), strict=True)]

    routers = len(server.pids)
    wave(Wave(8, 200, 16))  # connections, caches
    alone, alone_cpu = wave(ALONE)
    busy, busy_cpu = wave(BUSY)
    paced, _ = wave(msgspec.structs.replace(PACED, watched=server.pids))
    return Row(
        name,
        percentile(alone.ttft_ms, 0.5),
        percentile(alone.total_ms, 0.5),
        sum(alone_cpu[:routers]) / ALONE.requests * 1e6,
        len(busy.total_ms) / busy.wall_s,
        sum(busy_cpu[:routers]) / BUSY.requests * 1e6,
        percentile(busy.total_ms, 0.99),
        busy.own_cpu_s / busy.wall_s,
        sum(busy_cpu[routers:]) / busy.wall_s,
        sum(paced.watched_cpu_s) / max(1, paced.events) * 1e6,
        failed,
    )


def _median(rows: list[Row]) -> Row:
    def middle(of: str) -> float:
        return float(statistics.median(getattr(row, of) for row in rows))

    numbers = {
        field: middle(field)
        for field in Row.__struct_fields__
        if isinstance(getattr(rows[0], field), float)
    }
    failed = {why: count for row in rows for why, count in row.failed.items()}
    return msgspec.convert({"name": rows[0].name, "failed": failed, **numbers}, Row)


def _show(rows: list[Row]) -> None:
    base = next(row for row in rows if row.name == DIRECT)
    print(
        f"{'':15}{'+ttft ms':>9}{'+total':>8}{'cpu/req us':>12}{'c=32 req/s':>12}{'cpu/req us':>12}{'p99 ms':>8}"
        f"{'client':>8}{'nodes':>7}{'us/event':>10}"
    )
    for row in rows:
        print(
            f"{row.name:15}{row.ttft_ms - base.ttft_ms:9.2f}{row.total_ms - base.total_ms:8.2f}{row.alone_cpu_us:12.0f}"
            f"{row.rate:12.0f}{row.busy_cpu_us:12.0f}{row.busy_p99_ms:8.1f}{row.client_share:8.2f}{row.nodes_share:7.2f}"
            f"{row.event_us:10.1f}"
        )
    for row in rows:
        for why, count in row.failed.items():
            print(f"{row.name}: {count} failed: {why!r}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1, help="a row with so many processes, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="of the router")
    args = parser.parse_args()
    workers = {DIRECT: 0, OURS: 1} | (
        {f"{OURS} x{args.workers}": args.workers} if args.workers > 1 else {}
    )
    seen: dict[str, list[Row]] = {name: [] for name in workers}
    with mock_node("prefill") as prefill, mock_node("decode") as decode:
        for _ in range(args.rounds):
            for name, count in workers.items():
                started: AbstractContextManager[Running] = (
                    router(count, prefill.url, decode.url, args.flags)
                    if count
                    else nullcontext(Running(decode.url, []))
                )
                with started as server:
                    seen[name].append(measure(name, server, prefill.pids + decode.pids))
    rows = [_median(seen[name]) for name in workers]
    _show(rows)
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
