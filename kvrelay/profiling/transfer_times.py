"""Times of KV transfers between two processes of this host, by connector and size.

Between two GPUs if there are two, else within one; with several ranks the share of one, since they
read side by side.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvrelay.node.process import PARENT_PID
from kvrelay.paged_engine.before_loading import (
    block_bytes,
    checked_model,
    choose_device,
    default_block_tokens,
    kv_dtype_name,
)
from kvrelay.paged_engine.sharding import shard_config
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.errors import TransferError

__all__ = ["BlocksMoved", "Pair", "open_pair", "transfer_times"]

CONNECTORS = ("direct", "nixl", "nccl")
# Seconds: import of torch from a cold disk, compilers, NIXL's start; closing a connector.
_CALL_S, _END_S = 60.0, 5.0
# Of a transfer: what the connector itself allows, and a little more, so that its own sentence comes
# first.
_FETCH_S, _FLOOR_BYTES_S = 12.0, 100e6
_LEAD_S = 0.010
_WARM_UPS, _FEWEST, _MOST, _SIZE_S = 2, 3, 9, 0.5
# For all of it: processes that start, compilers, connectors that hang.
_PATIENCE_S = 300.0
# Of the largest transfer; the ends' pools are twice that.
_MOST_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}


class _EndProcess:
    def __init__(self, name: str, *arguments: object, until: float) -> None:
        self._name = name
        self._until = until
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvrelay.profiling.transfer_end", name),
                *map(str, arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                # the NIXL plane sets one that UCX knows on a GPU only
                "UCX_WARN_UNUSED_ENV_VARS": "n",
                **child_environ(),
                PARENT_PID: str(os.getpid()),
            },
        )

    def ask(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.hear(method)

    def tell(self, method: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
            self.process.stdin.flush()

    def hear(self, method: str, within_s: float = _CALL_S) -> Any:
        assert self.process.stdout is not None
        limit_s = max(0.0, min(within_s, self._until - time.monotonic()))
        watchdog = threading.Timer(limit_s, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise TransferError(
                f"the {self._name} gave no answer to {method!r}: it ended or was killed after "
                f"{limit_s:.1f} s"
            )
        answer, error = json.loads(line)
        if error:
            raise TransferError(error)
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Pair:
    """A source and a reader."""

    def __init__(self, source: _EndProcess, reader: _EndProcess) -> None:
        self._source, self._reader = source, reader
        self._count = 0
        self._block_bytes = 0
        self.num_blocks: list[int] = []
        """Blocks of either pool, once a connector is open."""

    def open(self, kind: str, block_bytes: int, checksums: float = 0.0) -> None:
        """Open a connector on both ends; `checksums` is the share of blocks that are compared."""
        ends = (self._source, self._reader)
        for method, arguments in (("close", ()), ("open", (kind, block_bytes, checksums))):
            for end in ends:
                end.tell(method, *arguments)
            self.num_blocks = [end.hear(method) for end in ends]
        self._block_bytes = block_bytes

    def hand_over(
        self, remote: list[int], local: list[int], chunks: int = 1, spacing_s: float = 0.0
    ) -> tuple[float, int]:
        """Hand blocks over, with a ticket that grows in `chunks` if there are several.

        Returns the seconds that were exposed, and how many blocks were checked.
        """
        self._count += 1
        name, more_s = f"transfer-{self._count}", chunks * spacing_s
        ticket = self._source.ask("offer", name, remote, chunks > 1)
        within_s = _FETCH_S + len(local) * self._block_bytes / _FLOOR_BYTES_S + more_s
        self._reader.tell("take", name, ticket, local, _LEAD_S, within_s)
        if chunks > 1:
            ready = [len(local) * (chunk + 1) // chunks for chunk in range(chunks)]
            self._source.ask("announce", name, ready, _LEAD_S + spacing_s, spacing_s)
        exposed_s, checked = self._reader.hear("take", within_s + _END_S)
        self._source.ask("released")
        return exposed_s, checked


@contextlib.contextmanager
def open_pair(
    devices: Sequence[str], pool_bytes: int, unit_bytes: int, until: float
) -> Iterator[Pair]:
    """Start a source and a reader, each with a pool of `pool_bytes` if there is room.

    Pools are multiples of `unit_bytes`; nothing is waited for beyond the monotonic time `until`.
    """
    with contextlib.ExitStack() as ends:
        started = []
        for name, device in zip(("source", "reader"), devices, strict=True):
            started.append(_EndProcess(name, device, pool_bytes, unit_bytes, until=until))
            ends.callback(started[-1].end)
        yield Pair(*started)


class BlocksMoved:
    """A set of blocks to move: of which model, of which size, between which devices.

    Raises ConfigError for a model that cannot be served as configured.
    """

    def __init__(self, config: EngineConfig) -> None:
        device = choose_device(config.device)
        model = checked_model(config, device.type)
        dtype = kv_dtype_name(config, model, device.type)
        self.block_size = config.block_size or default_block_tokens(device.type)
        self.block_bytes = block_bytes(
            shard_config(model, config.tensor_parallel_size), self.block_size, dtype
        )
        self.most_blocks = max(1, _MOST_BYTES[device.type] // self.block_bytes)
        """More are not moved at once."""
        self.longest = config.max_model_len or model.max_position
        """Tokens of a context, unless the KV pool has less room."""
        other = min(1, torch.cuda.device_count() - 1)
        self.devices = ("cpu", "cpu") if device.type == "cpu" else ("cuda:0", f"cuda:{other}")


def transfer_times(
    of: BlocksMoved,
    sizes: Sequence[int],
    connector: str,
    seconds: float,
    told: Callable[[str], None],
) -> dict[str, dict[int, float]]:
    """Return median milliseconds by connector and number of blocks.

    `auto` tries all connectors. After `seconds` no further one is begun, and the one that runs does
    its shortest and longest size alone. `told` gets why one cannot be measured.
    """
    times: dict[str, dict[int, float]] = {}
    ends_at = time.monotonic() + seconds
    for kind in CONNECTORS if connector == "auto" else (connector,):
        if of.devices[0] == of.devices[1] and kind == "nccl":
            told("nccl: its two ends need a GPU each")
            continue
        if times and time.monotonic() > ends_at:
            told(f"{kind}: no time was left for it")
            continue
        found: dict[int, float] = {}
        pool_bytes, until = 2 * max(sizes) * of.block_bytes, time.monotonic() + _PATIENCE_S
        try:
            with open_pair(of.devices, pool_bytes, of.block_bytes, until) as pair:
                pair.open(kind, of.block_bytes)
                for blocks in sizes:
                    wanted = blocks in (sizes[0], sizes[-1]) or time.monotonic() < ends_at
                    if wanted and blocks < min(pair.num_blocks):
                        found[blocks] = _median_ms(pair, blocks)
        except TransferError as why:
            # With some sizes missing it would seem to be faster or slower than it is.
            told(f"{kind}: {why.message}")
        else:
            times[kind] = found
    return times


def _median_ms(pair: Pair, blocks: int) -> float:
    rng = random.Random(blocks)
    times: list[float] = []
    began = time.monotonic()
    for count in range(_WARM_UPS + _MOST):
        remote, local = (rng.sample(range(1, there), blocks) for there in pair.num_blocks)
        exposed_s, _ = pair.hand_over(remote, local)
        if count >= _WARM_UPS:
            times.append(exposed_s * 1e3)
        if len(times) >= _FEWEST and time.monotonic() - began > _SIZE_S:
            break
    return statistics.median(times)
