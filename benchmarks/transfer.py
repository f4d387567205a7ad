"""Speed of the hand-over between two processes, by connector, block size and transfer size: bytes
of Llama-3.1-8B.

    python -m benchmarks.transfer [--devices cuda:0,cuda:1] [--sizes 16,512] [--block-bytes 2097152]
    [--json FILE] python -m benchmarks.transfer --connectors direct --checksums 0.01,1    # and what
    --kv-checksums costs

No model and no HTTP: a source and a reader, each with a pool of blocks and a connector. The blocks
of a transfer are drawn at random on both sides, others each time. What is timed is *exposed*: from
the call of `fetch` until the KV is admitted, the source's last word included; the ticket was
watched for 10 ms before, as by a request that is queued, but for the row that says otherwise. A row
with checksums has the figures of those transfers of which a block was checked, and says how many
these were. All bytes of each row's first transfer, which is not timed, are compared with the
source's. A connector that fails says why in one line, and the run goes on. Bytes, seconds, GB of
1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvrelay.profiling.transfer_pair import Pair, Part, Took, open_pair
from kvrelay.wire.errors import TransferError

# What the rows beside the plain ones move: 4,096 tokens, or the largest size if that is smaller.
OTHERS_BYTES = 512 << 20
LEAD_S = 0.010
WARM_UPS = 2
# A row has at least 7 transfers and goes on for a while, up to 21; if they are slow, it has fewer.
FEWEST, MOST, MORE_S, ROW_S = 7, 21, 0.3, 10.0
# A chunk of a growing ticket comes every so many times of a whole transfer: computing a prompt
# takes longer than that.
SPACING = 5.0


@dataclass(frozen=True, slots=True)
class Work:
    """What a row does with its blocks."""

    name: str
    num_bytes: int
    transfers: int = 1
    """So many at once, with equal shares."""
    chunks: int = 1
    """Announced in so many."""
    lead_s: float = LEAD_S
    checksums: float = 0.0
    """Share of its blocks that are checked."""

    @property
    def plain(self) -> bool:
        """One whole transfer that was watched before: what the sizes are compared by."""
        return self.transfers == self.chunks == 1 and self.lead_s > 0 and not self.checksums


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    connector: str
    block_bytes: int
    work: Work
    num_bytes: int
    """What was moved each time: whole blocks."""
    verified_bytes: int
    """Of the first transfer, which is not timed."""
    spacing_s: float
    """Of a growing ticket, between two announcements."""
    took: list[Took] = field(default_factory=list)

    @property
    def counted(self) -> list[Took]:
        """Those that figures are of: with checksums the ones of which a block was compared."""
        return (
            [took for took in self.took if took.checked_blocks]
            if self.work.checksums
            else self.took
        )

    @property
    def exposed_s(self) -> float:
        """Median."""
        return statistics.median(took.exposed_s for took in self.counted)

    @property
    def gb_s(self) -> float | None:
        """By the median; None where most of the bytes are not exposed."""
        return None if self.work.chunks > 1 else self.num_bytes / self.exposed_s / 1e9

    def tenths(self) -> tuple[float, float]:
        """10th and 90th percentile of what is exposed."""
        times = [took.exposed_s for took in self.counted]
        if len(times) == 1:
            return times[0], times[0]
        cuts = statistics.quantiles(times, n=10, method="inclusive")
        return cuts[0], cuts[-1]

    def built(self) -> dict[str, Any]:
        """For JSON."""
        p10, p90 = self.tenths()
        return {
            "connector": self.connector,
            "block_bytes": self.block_bytes,
            **asdict(self.work),
            "num_bytes": self.num_bytes,
            "verified_bytes": self.verified_bytes,
            "spacing_s": self.spacing_s,
            "exposed_s": self.exposed_s,
            "p10_s": p10,
            "p90_s": p90,
            "gb_s": self.gb_s,
            "in_hand_s": statistics.median(took.in_hand_s for took in self.counted),
            "call_s": statistics.median(took.call_s for took in self.counted),
            "counted": len(self.counted),
            "times_s": [took.exposed_s for took in self.took],
            "checked_blocks": [took.checked_blocks for took in self.took],
        }

    def __str__(self) -> str:
        built = self.built()
        rate = f"{self.gb_s:8.2f}" if self.gb_s is not None else f"{'-':>8}"
        times = "".join(
            f"{built[name] * 1e3:10.3f}" for name in ("exposed_s", "p10_s", "p90_s", "in_hand_s")
        )
        more = f" every {self.spacing_s * 1e3:.1f} ms" if self.spacing_s else ""
        more += f", in {len(self.counted)} of {len(self.took)}" if self.work.checksums else ""
        return (
            f"{self.connector:<8}{_size(self.block_bytes):>9}{_size(self.num_bytes):>10}  "
            f"{self.work.name + more:<34}"
            f"{len(self.counted):>4}{times}{rate}{built['call_s'] * 1e6:9.0f}"
        )


HEAD = (
    f"{'':<8}{'block':>9}{'size':>10}  "
    f"{'how':<34}{'n':>4}{'median ms':>10}{'p10':>10}{'p90':>10}{'in hand':>10}"
    f"{'GB/s':>8}{'call us':>9}"
)


class Bench:
    """All rows of a run, and what could not be had."""

    def __init__(self, arguments: argparse.Namespace, ends_at: float) -> None:
        """`ends_at`: whatever is not measured by then is left out."""
        self.rows: list[Row] = []
        self.missing: list[dict[str, Any]] = []
        self.pools: list[dict[str, Any]] = []
        self._devices: list[str] = arguments.devices.split(",")
        self._sizes: list[int] = arguments.sizes
        self._block_bytes: list[int] = arguments.block_bytes
        self._checksums = [float(share) for share in arguments.checksums.split(",") if share]
        self._spacing_s: float | None = arguments.spacing_ms and arguments.spacing_ms / 1e3
        self._ends_at = ends_at
        self._rng = random.Random(4)
        self._at = ""  # what is being measured

    def run(self, connectors: Sequence[str]) -> None:
        """Run each connector in its own processes, with an equal share of the time that is left."""
        for index, kind in enumerate(connectors):
            now = time.monotonic()
            until = now + (self._ends_at - now) / (len(connectors) - index)
            left = list(self._block_bytes)
            while left:
                begun = len(left)
                self._at = kind
                try:
                    with open_pair(
                        self._devices, 2 * max(self._sizes), math.lcm(*self._block_bytes), until
                    ) as pair:
                        self._show(pair)
                        while left:
                            self._blocks(pair, kind, left.pop(0), until)
                except TransferError as error:
                    self._miss(f"{self._at}: {error.message}", connector=kind)
                    if len(left) == begun or not any(row.connector == kind for row in self.rows):
                        break  # it will not be had with other blocks either

    def _blocks(self, pair: Pair, kind: str, block_bytes: int, until: float) -> None:
        """All rows of a connector and a block size."""
        others = min(OTHERS_BYTES, max(self._sizes))
        works = [Work("one", size) for size in self._sizes]
        works += [
            Work("one, not watched before", others, lead_s=0.0),
            Work("8 at once", others, transfers=8),
            Work("grows in 4 chunks", others, chunks=4),
        ]
        checked = [
            Work(f"one, {share:.3g} checked", size, checksums=share)
            for share in self._checksums
            for size in self._sizes
        ]
        whole_s, opened = 0.0, -1.0
        for work in [*works, *checked]:
            if work.checksums != opened:
                pair.open(kind, block_bytes, work.checksums)
                opened = work.checksums
            count, room = work.num_bytes // block_bytes, min(pair.num_blocks) - 1
            about = f"{kind}, blocks of {_size(block_bytes)}, {_size(work.num_bytes)}, {work.name}"
            if count < work.transfers * work.chunks or count > room:
                self._miss(
                    f"{about}: left out, {count} blocks of a pool with room for {room}",
                    connector=kind,
                )
            elif time.monotonic() >= until:
                self._miss(f"{about}: left out, the time is over (--within-s)", connector=kind)
            else:
                spacing_s = 0.0 if work.chunks == 1 else self._spacing_s or SPACING * whole_s
                self._at = about
                row = self._row(pair, kind, block_bytes, work, spacing_s, until)
                if not row.counted:
                    self._miss(
                        f"{about}: left out, no block of {len(row.took)} transfers was checked",
                        connector=kind,
                    )
                    continue
                if work.plain and work.num_bytes <= others:
                    whole_s = row.exposed_s
                self.rows.append(row)
                print(row, flush=True)

    def _row(
        self, pair: Pair, kind: str, block_bytes: int, work: Work, spacing_s: float, until: float
    ) -> Row:
        """Warm up and verify, then measure."""
        blocks = work.num_bytes // block_bytes // work.transfers
        verified = 0
        for _ in range(WARM_UPS):
            parts = list(self._parts(pair, work.transfers, blocks))
            if not verified:
                pair.poison(parts)
            _hand_over(pair, parts, work, spacing_s)
            verified = verified or pair.verify(parts)
        row = Row(
            kind, block_bytes, work, work.transfers * blocks * block_bytes, verified, spacing_s
        )
        began = time.monotonic()
        while True:
            row.took.append(
                _hand_over(pair, list(self._parts(pair, work.transfers, blocks)), work, spacing_s)
            )
            now, count = time.monotonic(), len(row.counted)
            if (
                count >= MOST
                or (count >= FEWEST and now > began + MORE_S)
                or now > min(began + ROW_S, until)
            ):
                return row

    def _parts(self, pair: Pair, transfers: int, blocks: int) -> Iterator[Part]:
        """Random blocks on both sides; block 0 is nobody's, as in a node."""
        drawn = [self._rng.sample(range(1, count), transfers * blocks) for count in pair.num_blocks]
        for first in range(0, transfers * blocks, blocks):
            remote, local = (side[first : first + blocks] for side in drawn)
            yield Part(remote, local)

    def _show(self, pair: Pair) -> None:
        """The head of the table, once."""
        if not self.pools:
            self.pools = pair.about
            for end, about in zip(("source", "reader"), self.pools, strict=True):
                largest = about["pool_bytes"] / max(self._sizes)
                pool = (
                    f"pool of {_size(about['pool_bytes'])}, {largest:.1f} times the largest "
                    f"transfer"
                )
                print(f"{end}: {about['device']} ({about['name']}), {pool}")
            print(HEAD, flush=True)

    def _miss(self, sentence: str, connector: str) -> None:
        self.missing.append({"connector": connector, "reason": sentence})
        print(sentence, flush=True)

    def best(self) -> dict[int, Row]:
        """By size, of the plain rows."""
        plain: dict[int, list[Row]] = {}
        for row in self.rows:
            if row.work.plain:
                plain.setdefault(row.work.num_bytes, []).append(row)
        return {
            size: min(rows, key=lambda row: row.exposed_s) for size, rows in sorted(plain.items())
        }


def _hand_over(pair: Pair, parts: Sequence[Part], work: Work, spacing_s: float) -> Took:
    if work.chunks > 1:
        return pair.hand_over_growing(parts[0], work.chunks, spacing_s, work.lead_s)
    return pair.hand_over(parts, work.lead_s)


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale and num_bytes % (scale >> 4) == 0:
            return f"{num_bytes / scale:g} {unit}"
    return f"{num_bytes} B"


def _numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def _mebibytes(text: str) -> list[int]:
    return [size << 20 for size in _numbers(text)]


def main() -> int:
    """Print a line per row, and the best connector per size; 1 if nothing could be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connectors", default="direct,nixl,nccl")
    parser.add_argument("--devices", default="cpu,cpu", help="the source's and the reader's")
    parser.add_argument("--sizes", type=_mebibytes, default="16,64,512,1024,4096", help="MiB")
    parser.add_argument("--block-bytes", type=_numbers, default=[2 << 20, 8 << 20])
    parser.add_argument("--checksums", default="", help="shares of blocks: a row for each, too")
    parser.add_argument(
        "--spacing-ms", type=float, help="between chunks; default 5 times a whole transfer"
    )
    parser.add_argument(
        "--within-s",
        type=float,
        default=135.0,
        help="rows that do not fit are left out; default 135",
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    began = time.monotonic()
    bench = Bench(arguments, began + arguments.within_s)
    bench.run(arguments.connectors.split(","))
    best = bench.best()
    if arguments.json is not None:
        figures = {
            "machine": {
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "pools": bench.pools,
            },
            "rows": [row.built() for row in bench.rows],
            "missing": bench.missing,
            "best": {
                str(size): {
                    "connector": row.connector,
                    "block_bytes": row.block_bytes,
                    "exposed_s": row.exposed_s,
                }
                for size, row in best.items()
            },
            "took_s": time.monotonic() - began,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(
        "best: "
        + (
            "; ".join(
                f"{_size(size)} {row.connector} ({_size(row.block_bytes)} blocks, "
                f"{row.exposed_s * 1e3:.3f} ms,"
                f" {row.gb_s:.1f} GB/s)"
                for size, row in best.items()
            )
            or "nothing was measured"
        )
    )
    return 0 if bench.rows else 1


if __name__ == "__main__":
    sys.exit(main())
