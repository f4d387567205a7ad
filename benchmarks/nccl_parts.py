"""Where the time of the NCCL plane goes, part by part, between two GPUs: wire, copies, and one read's time line.

    python -m benchmarks.nccl_parts [--devices cuda:0,cuda:1] [--parts wire,copies,reads]

`wire`: NCCL alone, from the call of send until the reader has seen the end; one operation, and eight that are launched
ahead; by size. `blocks in a group` sends scattered blocks straight from the pool, without
staging. `copies`: pool to staging and back. `reads`: a plane without its desk; when what has happened, in us since the
read was asked for, all medians. `python -m benchmarks.transfer` measures all of it with the desk. On CPUs there is
`reads` alone. Bytes, us, GB of 1e9 bytes.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import paged_engine  # noqa: F401 - makes `kernels` ours
from kernels.pool_memory import zeros
from kv_transfer import pairs, staging
from kv_transfer.communicators import NcclBackend
from kv_transfer.connector import PoolRegion
from kv_transfer.pair_ends import ReaderPair, SourcePair
from kv_transfer.planes import Source
from kv_transfer.staging import BlockPool, cut
from kv_transfer.timer_slack import wake_in_time
from kv_transfer.via_nccl import NcclPlane
from node.parent import PARENT_PID, die_with_parent

MIB = 1 << 20
ROUNDS, WARM_UPS = 9, 2
PATIENCE_S = 30.0
# The source begins so late that the reader is ready.
HEAD_START_S = 0.002
# The plane's thread begins with so much.
POLL_S = 50e-6
SOURCE, READER = 0, 1
_UINT8 = 1


class End:
    """One end; the source's methods are called by the parent, by name. What they return is JSON."""

    def __init__(self, rank: int, device: str, pool_mib: int) -> None:
        wake_in_time()
        self._rank = rank
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._pool = zeros(pool_mib * MIB, self._device)
        self._plane: NcclPlane | None = None
        self._stamps: list[tuple[str, float]] = []
        for owner, names in ((SourcePair, ("serve", "_begin", "_end")), (ReaderPair, ("_begin", "_end", "_done"))):
            for name in names:
                setattr(owner, name, self._stamped(getattr(owner, name), name.lstrip("_")))

    def _stamped(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def stamping(*arguments: Any, **more: Any) -> Any:
            if name == "serve":
                self._stamps.append((name, time.monotonic()))
            try:
                return call(*arguments, **more)
            finally:
                if name != "serve":
                    self._stamps.append((name, time.monotonic()))

        return stamping

    def stamps(self) -> list[tuple[str, float]]:
        """What has happened since the last call, and when."""
        stamps, self._stamps = self._stamps, []
        return stamps

    # wire

    def meet(self, facts: str) -> int:
        """Make a communicator. Returns what it takes of the GPU, once it has moved something."""
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info(self._device)[0]
        self._backend = NcclBackend(self._device.index or 0, PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        self._wire: Any = self._backend.open(self._rank, bytes.fromhex(facts), lambda: False, deadline)
        self._start(0, 8).wait()
        torch.cuda.synchronize()
        return before - torch.cuda.mem_get_info(self._device)[0]

    def part(self) -> None:
        """End it."""
        self._wire.close()

    def move(self, size: int, count: int) -> list[list[float]]:
        """So many operations, launched ahead. Of each round: before, when all were launched, when all were seen."""
        return self._rounds(lambda: [self._start(k % 2 * size, size) for k in range(count)])

    def move_blocks(self, block_bytes: int, count: int) -> list[list[float]]:
        """Scattered blocks in one group."""
        drawn = random.Random(self._rank).sample(range(self._pool.numel() // block_bytes), count)
        return self._rounds(lambda: [self._group([block * block_bytes for block in drawn], block_bytes)])

    def _rounds(self, launch: Callable[[], list[Any]]) -> list[list[float]]:
        times = []
        for _ in range(WARM_UPS + ROUNDS):
            torch.cuda.synchronize()
            if self._rank == SOURCE:
                time.sleep(HEAD_START_S)
            stamps = [time.monotonic()]
            works = launch()
            stamps.append(time.monotonic())
            for work in works:
                work.wait()
            stamps.append(time.monotonic())
            times.append(stamps)
        return times[WARM_UPS:]

    def _start(self, at: int, size: int) -> Any:
        piece = self._pool[at : at + size]
        return self._wire.send(piece) if self._rank == SOURCE else self._wire.recv(piece)

    def _group(self, places: list[int], size: int) -> Any:
        """What a communicator's `send` does, for several pieces."""
        wire, library = self._wire, self._backend.library
        operation = library.ncclSend if self._rank == SOURCE else library.ncclRecv

        def grouped(*_: object) -> int:
            library.ncclGroupStart()
            for place in places:
                address, stream = self._pool.data_ptr() + place, ctypes.c_void_p(wire._wire.cuda_stream)
                operation(address, size, _UINT8, 1 - self._rank, wire._comm, stream)
            return int(library.ncclGroupEnd())

        return wire._start(grouped, self._pool[:1])

    # copies

    def copy(self, block_bytes: int, slice_bytes: int, programs: int) -> list[float]:
        """Microseconds of a gather and of a scatter of one slice, on the device."""
        staging.PROGRAMS = programs
        pool = BlockPool(self._region(block_bytes))
        drawn = random.Random(1).sample(range(pool.num_blocks), slice_bytes // block_bytes)
        with pool.lane() as lane:
            stage, places = lane.staging(slice_bytes), lane.places(drawn)
            (piece,) = cut(len(drawn), block_bytes, slice_bytes)
            return [_device_us(functools.partial(call, places, piece, stage)) for call in (lane.gather, lane.scatter)]

    # reads

    def open(self, block_bytes: int, slice_bytes: int) -> list[str]:
        """A plane. Returns what `read` wants."""
        self.close()
        self._blocks = self._region(block_bytes)
        self._plane = NcclPlane(self._blocks, "127.0.0.1", PATIENCE_S, PATIENCE_S, slice_bytes=slice_bytes)
        self._plane.prepare()
        return [uuid.uuid4().hex, base64.b64encode(self._plane.open()).decode()]

    def close(self) -> None:
        """End it."""
        if self._plane is not None:
            self._plane.close()

    def read(self, source: Sequence[str], num_bytes: int) -> tuple[float, float]:
        """When it was asked for, and when its end was seen."""
        assert self._plane is not None
        generation, metadata = source
        self._plane.add_peer(Source("source", generation, self._blocks, base64.b64decode(metadata)))
        remote, local = (
            random.sample(range(1, self._blocks.num_blocks), num_bytes // self._blocks.block_bytes) for _ in range(2)
        )
        asked_at = time.monotonic()
        handle = self._plane.post_read(generation, remote, local)
        while not self._plane.poll(handle):
            assert time.monotonic() < asked_at + PATIENCE_S
            time.sleep(POLL_S)
        return asked_at, time.monotonic()

    def _region(self, block_bytes: int) -> PoolRegion:
        count = self._pool.numel() // block_bytes
        return PoolRegion(self._pool.data_ptr(), count, block_bytes, str(self._device))


def _device_us(call: Callable[[], object]) -> float:
    """By events, many in a row: what a launch costs the host is hidden as far as it is shorter."""
    for _ in range(WARM_UPS):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(20):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / 20


class SourceProcess:
    """The source, as a process of its own."""

    def __init__(self, device: str, pool_mib: int) -> None:
        command = [sys.executable, "-m", "benchmarks.nccl_parts", "--source", device, str(pool_mib)]
        environment = {**os.environ, PARENT_PID: str(os.getpid())}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method there, whose answer is to be heard."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The answer."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, method: str, *arguments: Any) -> Any:
        """Both."""
        self.tell(method, *arguments)
        return self.hear()

    def both(self, here: End, method: str, *arguments: Any) -> tuple[Any, Any]:
        """The same call at both ends: the source's answer, and ours."""
        self.tell(method, *arguments)
        ours = getattr(here, method)(*arguments)
        return self.hear(), ours

    def end(self) -> None:
        """Let it end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()


def wire_rows(source: SourceProcess, here: End, device: str) -> Iterator[str]:
    """NCCL alone."""
    yield f"{'what':<26}{'launch us':>10}{'all us':>10}{'GB/s':>9}"
    facts = NcclBackend(torch.device(device).index or 0, PATIENCE_S).facts().hex()
    taken = [num_bytes / MIB for num_bytes in source.both(here, "meet", facts)]
    yield f"a communicator takes {taken[0]:.0f} MiB at the source, {taken[1]:.0f} at the reader"
    works: list[tuple[str, int, str, tuple[int, int]]] = [
        (f"{count} x {size} MiB", count * size * MIB, "move", (size * MIB, count))
        for size in (16, 32, 64, 128, 256, 512)
        for count in (1, 8)
    ]
    works += [
        (f"{count} blocks in a group", count * size * MIB, "move_blocks", (size * MIB, count))
        for size, count in ((8, 64), (2, 256))
    ]
    for work, num_bytes, method, arguments in works:
        theirs, ours = source.both(here, method, *arguments)
        launch_s = statistics.median(launched - began for began, launched, _ in theirs)
        all_s = statistics.median(mine[2] - its[0] for its, mine in zip(theirs, ours, strict=True))
        yield f"{work:<26}{launch_s * 1e6:10.0f}{all_s * 1e6:10.0f}{num_bytes / all_s / 1e9:9.1f}"
    source.both(here, "part")


def copy_rows(here: End) -> Iterator[str]:
    """Pool and staging of one GPU; GB/s are counted once, though each byte is read and written."""
    yield f"{'block':>8}{'slice':>9}{'programs':>10}{'gather us':>11}{'scatter us':>11}{'GB/s':>9}{'GB/s':>9}"
    for block_mib in (2, 8):
        for slice_mib in (32, 64, 128):
            for programs in (32, 64, 128, 256):
                times = here.copy(block_mib * MIB, slice_mib * MIB, programs)
                rates = [slice_mib * MIB / us / 1e3 for us in times]
                yield f"{block_mib:>4} MiB{slice_mib:>5} MiB{programs:>10}" + "".join(
                    f"{number:{width}.1f}" for number, width in zip((*times, *rates), (11, 11, 9, 9), strict=True)
                )


MARKS = {
    "asked": (SOURCE, "serve", 0),
    "launch1": (SOURCE, "begin", 0),
    "launchN": (SOURCE, "begin", -1),
    "sent1": (SOURCE, "end", 0),
    "sentN": (SOURCE, "end", -1),
    "recv1": (READER, "begin", 0),
    "in1": (READER, "end", 0),
    "done": (READER, "done", -1),
}
"""What of a read's time line is shown: at which end, which call has ended (begun: `serve`), the first or the last."""


def read_rows(
    source: SourceProcess, here: End, sizes: Sequence[int], blocks: Sequence[int], slices: Sequence[int]
) -> Iterator[str]:
    """Whole reads, without a desk."""
    yield f"{'block':>8}{'slice':>9}{'size':>9}" + "".join(f"{mark:>9}" for mark in MARKS) + f"{'seen':>9}{'GB/s':>9}"
    for block_mib in blocks:
        for slice_mib in slices:
            welcome, _ = source.both(here, "open", block_mib * MIB, slice_mib * MIB)
            for size in sizes:
                lines = []
                for _ in range(WARM_UPS + ROUNDS):
                    asked_at, seen_at = here.read(welcome, size * MIB)
                    time.sleep(HEAD_START_S)  # the source's last word is still to come
                    stamps = [source.ask("stamps"), here.stamps()]
                    line = []
                    for rank, name, which in MARKS.values():
                        line.append([at for what, at in stamps[rank] if what == name][which] - asked_at)
                    lines.append([*line, seen_at - asked_at])
                medians = [statistics.median(times) * 1e6 for times in zip(*lines[WARM_UPS:], strict=True)]
                row = "".join(f"{us:9.0f}" for us in medians)
                yield f"{block_mib:>4} MiB{slice_mib:>5} MiB{size:>5} MiB{row}{size * MIB / medians[-1] / 1e3:9.1f}"


def main() -> int:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="source,reader")
    parser.add_argument("--parts", default="wire,copies,reads")
    arguments = parser.parse_args()
    devices = arguments.devices.split(",")
    gpu = devices[1] != "cpu"
    pool_mib = 2048 if gpu else 128
    source, here = SourceProcess(devices[0], pool_mib), End(READER, devices[1], pool_mib)
    sizes, blocks, slices = ((16, 64, 512), (2, 8), (32, 64, 128)) if gpu else ((4, 16), (1,), (1, 4))
    tables: dict[str, Callable[[], Iterator[str]]] = {
        "wire": lambda: wire_rows(source, here, devices[1]),
        "copies": lambda: copy_rows(here),
        "reads": lambda: read_rows(source, here, sizes, blocks, slices),
    }
    try:
        for part in arguments.parts.split(",") if gpu else ["reads"]:
            print(f"\n{part} (slices under way: {pairs.STAGES})", flush=True)
            for line in tables[part]():
                print(line, flush=True)
    finally:
        here.close()
        source.end()
    return 0


def serve(device: str, pool_mib: str) -> None:
    """The source's process: calls from stdin until it ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    end = End(SOURCE, device, int(pool_mib))
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        answers.write(json.dumps(getattr(end, method)(*arguments)) + "\n")
        answers.flush()
    end.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--source"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main())
