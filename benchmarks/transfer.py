"""Speed of the hand-over between two processes, by connector, block size and transfer size.

    python -m benchmarks.transfer [--devices cuda:0,cuda:1] [--sizes 16,512] [--checksums 1]

No model and no HTTP: a source and a reader, each with a pool of blocks and a connector. The blocks
of a transfer are drawn at random on both sides, others each time. What is timed is *exposed*: from
the call of `fetch` until the KV is admitted; the ticket was watched for 10 ms before, as by a
request that is queued. The last row's ticket grows in four chunks: its time begins when the last
one is announced. A row with checksums has the transfers of which a block was checked. GB of 1e9
bytes.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence

from kvrelay.profiling.transfer_times import Pair, open_pair
from kvrelay.wire.errors import TransferError

WARM_UPS = 2
# A row has at least 7 transfers and goes on for a while, up to 21; if they are slow, it has fewer.
FEWEST, MOST, MORE_S, ROW_S = 7, 21, 0.3, 10.0
# A chunk of a growing ticket comes every so many times of a whole transfer: computing a prompt
# takes longer than that.
CHUNKS, SPACING = 4, 5.0
MIB = 1 << 20


def run(
    connector: str, devices: Sequence[str], block_bytes: int, sizes: Sequence[int], checksums: float
) -> int:
    """Print a row for each size that the pools have room for; return how many rows there were.

    Raises TransferError.
    """
    rows, median_s = 0, 0.0
    until = time.monotonic() + 60.0 + 2 * ROW_S * len(sizes)
    with open_pair(devices, 2 * max(sizes), block_bytes, until) as pair:
        pair.open(connector, block_bytes, checksums)
        for size, chunks in [*((size, 1) for size in sizes), (max(sizes), CHUNKS)]:
            blocks = size // block_bytes
            if not chunks <= blocks < min(pair.num_blocks):
                print(f"{connector}: {blocks} blocks of {block_bytes} bytes are left out")
                continue
            times = _times(pair, blocks, chunks, SPACING * median_s, checked=checksums > 0)
            if not times:
                print(f"{connector}: no block of {size} bytes was checked")
                continue
            median_s, cuts = (
                statistics.median(times),
                statistics.quantiles([*times, times[-1]], n=10),
            )
            how = f"in {chunks} chunks" if chunks > 1 else f"{size / median_s / 1e9:.2f} GB/s"
            print(
                f"{connector:8}{block_bytes / MIB:8g} MiB{size / MIB:8g} MiB{len(times):4}"
                f"{median_s * 1e3:10.3f}{cuts[0] * 1e3:10.3f}{cuts[-1] * 1e3:10.3f}  {how}",
                flush=True,
            )
            rows += 1
    return rows


def _times(pair: Pair, blocks: int, chunks: int, spacing_s: float, *, checked: bool) -> list[float]:
    rng, times = random.Random(blocks), list[float]()
    began = math.inf
    for count in range(WARM_UPS + 4 * MOST):
        if count == WARM_UPS:
            began = time.monotonic()
        # Block 0 is nobody's, as in a node.
        remote, local = (rng.sample(range(1, there), blocks) for there in pair.num_blocks)
        exposed_s, compared = pair.hand_over(remote, local, chunks, spacing_s)
        if count >= WARM_UPS and (compared or not checked):
            times.append(exposed_s)
        took_s = time.monotonic() - began
        if len(times) >= MOST or (len(times) >= FEWEST and took_s > MORE_S) or took_s > ROW_S:
            break
    return times


def main() -> int:
    def numbers(text: str) -> list[int]:
        return sorted({int(part) for part in text.split(",")})

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connectors", default="direct,nixl,nccl")
    parser.add_argument("--devices", default="cpu,cpu", help="the source's and the reader's")
    parser.add_argument("--sizes", type=numbers, default="16,64,512,1024,4096", help="MiB")
    parser.add_argument("--block-bytes", type=numbers, default=[2 * MIB, 8 * MIB])
    parser.add_argument("--checksums", type=float, default=0.0, help="share of blocks")
    asked = parser.parse_args()
    print(f"{'':8}{'block':>12}{'size':>12}{'n':>4}{'median ms':>10}{'p10':>10}{'p90':>10}")
    rows = 0
    for connector in asked.connectors.split(","):
        for block_bytes in asked.block_bytes:
            sizes = [size * MIB for size in asked.sizes]
            try:
                rows += run(
                    connector, asked.devices.split(","), block_bytes, sizes, asked.checksums
                )
            except TransferError as why:
                print(f"{connector}: {why.message}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
