"""Speed of the hand-over between two processes, by connector, block size and transfer size.

    python -m benchmarks.transfer [--devices cuda:0,cuda:1] [--sizes 16,512] [--checksums 1]

No model and no HTTP: a source and a reader, each with a pool of blocks and a connector. The blocks
of a transfer are drawn at random on both sides, others each time. What is timed is *exposed*: from
the call of `fetch` until the KV is admitted; the ticket was watched for 10 ms before, as by a
request that is queued. The last row's ticket grows in four chunks: its time begins when the last one is
announced. A row with checksums has the transfers of which a block was checked. GB of 1e9
bytes.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from kvrelay.kernels.pool_memory import zeros
from kvrelay.kv_transfer.connector import (
    Completion,
    Fetched,
    FetchFailed,
    PoolRegion,
    Released,
)
from kvrelay.kv_transfer.transfer_engine import TransferEngine
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError, KvrelayError, TransferError
from kvrelay.wire.transfer import Fingerprint, Ticket
from kvrelay.wire.versions import HANDOVER

WARM_UPS = 2
# A row has at least 7 transfers and goes on for a while, up to 21; if they are slow, it has fewer.
FEWEST, MOST, MORE_S, ROW_S = 7, 21, 0.3, 10.0
# A chunk of a growing ticket comes every so many times of a whole transfer: computing a prompt
# takes longer than that.
CHUNKS, SPACING = 4, 5.0
MIB = 1 << 20
LEAD_S = 0.01
# Pinning 8 GiB takes longer than 4 s if the virtual machine must be given them first.
PINNED_S = 10.0
# Both ends may be in the same memory.
POOL_SHARE = 0.3
# Llama-3.1-8B: 32 layers of 8 heads of 128 elements of 2 bytes, keys and values.
TOKEN_BYTES = 131_072
# The start of a process, and a transfer beyond the time at 100 MB/s.
START_S, FETCH_S, FLOOR_BYTES_S = 60.0, 12.0, 100e6


class End:
    """One end of hand-overs, in a process of its own: a pool, and a connector over it."""

    def __init__(
        self,
        name: str,
        device: str,
        kind: str,
        pool_bytes: int,
        block_bytes: int,
        checksums: float,
        pool: torch.Tensor | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        """Take a pool, or this one. `keeps`: as a cache process has checksums, here of zeros."""
        on = torch.device(device)
        if on.type == "cuda":
            if (on.index or 0) >= torch.cuda.device_count():
                raise ConfigError(f"no device {device}")
            torch.cuda.set_device(on)
            free = int(torch.cuda.mem_get_info(on)[0])
        else:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.num_blocks = int(min(pool_bytes, free * POOL_SHARE)) // block_bytes
        self._pool = zeros(self.num_blocks * block_bytes, on) if pool is None else pool
        self.num_blocks = self._pool.nbytes // block_bytes
        self._woken = threading.Event()
        self._block_size = max(1, block_bytes // TOKEN_BYTES)
        fingerprint = Fingerprint(
            HANDOVER.newest, "measured", "bfloat16", self._block_size,
            kv_heads=8, head_dim=128, layers=32, window=0, tp_size=1,
        )  # fmt: skip
        region = PoolRegion(self._pool.data_ptr(), self.num_blocks, block_bytes, device)
        # A machine's first launch of a kernel may hold up heartbeats for several seconds.
        asked = {"kv_connector": kind, "kv_checksums": checksums, "lease_s": START_S}
        config = msgspec.convert(asked, TransferConfig)
        self.connector: TransferEngine = TransferEngine(
            name,
            fingerprint,
            region,
            config,
            self._woken.set,
            kept=(lambda blocks: [bytes(64)] * len(blocks)) if keeps else None,
        )

    def offer(self, name: str, blocks: list[int], growing: bool) -> Any:
        """Lease blocks, none readable yet if `growing`; return the ticket."""
        tokens = len(blocks) * self._block_size
        return msgspec.to_builtins(
            self.connector.offer(name, blocks, tokens, 0 if growing else None)
        )

    def announce(self, name: str, ready: Sequence[int], spacing_s: float) -> None:
        """Announce the blocks of a growing offer, one chunk after the other."""
        time.sleep(LEAD_S)
        for blocks in ready:
            time.sleep(spacing_s)
            if blocks < ready[-1]:
                self.connector.grow(name, blocks)
        self.connector.complete(name, Completion([1]))

    def released(self) -> None:
        """Wait until the lease has ended. Raises TransferError if it has run out."""
        event = self._event(FETCH_S)
        if not isinstance(event, Released) or event.expired:
            raise TransferError(f"the source lost a lease during the transfer: {event}")

    def take(self, name: str, ticket: Any, blocks: list[int], within_s: float) -> tuple[float, int]:
        """Fetch a watched ticket; return the exposed seconds, and how many blocks were checked."""
        claim = msgspec.convert(ticket, Ticket)
        self.connector.watch(name, claim)
        time.sleep(LEAD_S)
        before = self.connector.stats().checked_blocks
        self.connector.fetch(name, claim.blocks, blocks)
        event = self._event(within_s)
        if not isinstance(event, Fetched):
            raise TransferError(event.reason if isinstance(event, FetchFailed) else f"{event}")
        return event.exposed_s, self.connector.stats().checked_blocks - before

    def _event(self, within_s: float) -> Any:
        until = time.monotonic() + within_s
        while not (got := self.connector.events()):
            if not self._woken.wait(max(0.0, until - time.monotonic())):
                raise TransferError(f"no event within {within_s:.0f} s")
            self._woken.clear()
        return got[0]


def serve(pipe: Connection, keeps: bool, *arguments: Any) -> None:
    """Answer the parent's calls of an End until it hangs up."""
    try:
        end = End(*arguments, keeps=keeps)
    except KvrelayError as why:
        pipe.send((None, why.message))
        return
    pipe.send((end.num_blocks, ""))
    try:
        while True:
            method, *given = pipe.recv()
            try:
                pipe.send((getattr(end, method)(*given), ""))
            except KvrelayError as why:
                pipe.send((None, why.message))
    except EOFError:
        end.connector.close()


class Pair:
    """A source and a reader."""

    def __init__(self, pipes: Sequence[Connection], block_bytes: int) -> None:
        self._source, self._reader = pipes
        self._block_bytes, self._count = block_bytes, 0
        self.num_blocks = [heard(pipe, START_S) for pipe in pipes]

    def hand_over(
        self, remote: list[int], local: list[int], chunks: int, spacing_s: float
    ) -> tuple[float, int]:
        """Hand blocks over, with a ticket that grows in `chunks` if there are several.

        Returns the seconds that were exposed, and how many blocks were checked.
        """
        self._count += 1
        name, source = f"transfer-{self._count}", self._source
        within_s = FETCH_S + len(local) * self._block_bytes / FLOOR_BYTES_S + chunks * spacing_s
        source.send(("offer", name, remote, chunks > 1))
        self._reader.send(("take", name, heard(source, FETCH_S), local, within_s))
        if chunks > 1:
            ready = [len(local) * (chunk + 1) // chunks for chunk in range(chunks)]
            source.send(("announce", name, ready, spacing_s))
            heard(source, within_s)
        exposed: tuple[float, int] = heard(self._reader, within_s + FETCH_S)
        source.send(("released",))
        heard(source, 2 * FETCH_S)
        return exposed

    def turned(self) -> Pair:
        """Return the same ends, the other way round."""
        pair = copy.copy(self)
        pair._source, pair._reader = self._reader, self._source
        pair.num_blocks = self.num_blocks[::-1]
        return pair


def heard(pipe: Connection, within_s: float) -> Any:
    """Return an end's answer. Raises TransferError."""
    try:
        if not pipe.poll(within_s):
            raise TransferError(f"an end gave no answer within {within_s:.0f} s")
        answer, error = pipe.recv()
    except EOFError as why:
        raise TransferError("an end has ended") from why
    if error:
        raise TransferError(error)
    return answer


@contextmanager
def open_pair(
    kind: str,
    devices: Sequence[str],
    pool_bytes: int,
    block_bytes: int,
    checksums: float,
    pool: torch.Tensor | None = None,
) -> Iterator[Pair]:
    """Start both ends, the source in this process if it is given a pool."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for name, device in zip(("source", "reader"), devices, strict=True):
            ours, its = context.Pipe()
            pipes.append(ours)
            keeps = device == "cpu" and set(devices) > {"cpu"}  # as a cache process beside a GPU
            arguments = (its, keeps, name, device, kind, pool_bytes, block_bytes, checksums)
            if pool is not None and name == "source":
                threading.Thread(target=serve, args=(*arguments, pool)).start()
                continue
            processes.append(context.Process(target=serve, args=arguments))
            processes[-1].start()
            its.close()
        pair = Pair(pipes, block_bytes)
        if set(devices) > {"cpu"}:
            pair.hand_over([1], [1], 1, 0.0)
            time.sleep(PINNED_S)
        yield pair
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(FETCH_S)
            process.kill()
            process.join()


def run(
    connector: str, devices: Sequence[str], block_bytes: int, sizes: Sequence[int], checksums: float
) -> int:
    """Print a row for each size that the pools have room for; return how many rows there were.

    Raises TransferError.
    """
    rows, median_s = 0, 0.0
    with open_pair(connector, devices, 2 * max(sizes), block_bytes, checksums) as pair:
        for size, chunks in [*((size, 1) for size in sizes), (max(sizes), CHUNKS)]:
            blocks = size // block_bytes
            if not chunks <= blocks < min(pair.num_blocks):
                print(f"{connector}: {blocks} blocks of {block_bytes} bytes are left out")
                continue
            times = _times(pair, blocks, chunks, SPACING * median_s, checked=checksums > 0)
            if not times:
                print(f"{connector}: no block of {size} bytes was checked")
                continue
            median_s = show(connector, block_bytes, size, times, chunks)
            rows += 1
    return rows


def show(kind: str, block_bytes: int, size: int, times: list[float], chunks: int = 1) -> float:
    """Print a row; return the median."""
    median_s, cuts = statistics.median(times), statistics.quantiles([*times, times[-1]], n=10)
    how = f"in {chunks} chunks" if chunks > 1 else f"{size / median_s / 1e9:.2f} GB/s"
    print(
        f"{kind:8}{block_bytes / MIB:8g} MiB{size / MIB:8g} MiB{len(times):4}"
        f"{median_s * 1e3:10.3f}{cuts[0] * 1e3:10.3f}{cuts[-1] * 1e3:10.3f}  {how}",
        flush=True,
    )
    return median_s


def plain(devices: Sequence[str], sizes: Sequence[int]) -> int:
    """Print the times of one cudaMemcpyAsync of each size, in one piece."""
    for size in sizes:
        source, target = (
            torch.empty(size, dtype=torch.uint8, device=device, pin_memory=device == "cpu")
            for device in devices
        )
        times = []
        for _ in range(WARM_UPS + FEWEST):
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            for device in set(devices) - {"cpu"}:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        show("plain", size, size, times[WARM_UPS:])
    return len(sizes)


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
    kinds = "plain is one cudaMemcpyAsync of all bytes"
    parser.add_argument("--connectors", default="direct,nixl,nccl", help=kinds)
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
            devices = asked.devices.split(",")
            try:
                if connector == "plain":
                    rows += plain(devices, sizes)
                else:
                    rows += run(connector, devices, block_bytes, sizes, asked.checksums)
            except TransferError as why:
                print(f"{connector}: {why.message}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
