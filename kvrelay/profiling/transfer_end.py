"""One end of a measured hand-over: a pool, a connector over it, and the clock of a transfer.

Serves calls of transfer_pair.py as JSON lines on stdin and stdout, until stdin ends. Bytes and
seconds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch

from kvrelay.kv_transfer.connector import (
    Completion,
    Event,
    Fetched,
    FetchFailed,
    PoolRegion,
    Released,
)
from kvrelay.kv_transfer.transfer_engine import TransferEngine, open_connector
from kvrelay.node.process import die_with_parent
from kvrelay.paged_engine.kv_pool import zeros
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError, KvrelayError, TransferError
from kvrelay.wire.transfer import Fingerprint, Ticket
from kvrelay.wire.versions import HANDOVER

# Of the memory that is free when a process starts. Both ends may be in the same memory, and see the
# same free bytes.
POOL_SHARE = 0.3
# Leases are freed by a message of the reader, at once.
RELEASE_S = 10.0
CLOSE_S = 3.0
# Llama-3.1-8B: 32 layers of 8 heads of 128 elements of 2 bytes, keys and values.
TOKEN_BYTES = 131_072
# Odd, so that neighbours differ in all bytes (golden ratio, and a prime).
ELEMENT_STEP, BLOCK_STEP = 0x1E3779B97F4A7C15, 0x00000100000001B3


class End:
    """An end of a transfer: the source or the reader. The parent calls methods by name; results are
    JSON.

    Raises ConfigError if there is no room for a pool of `unit_bytes`.
    """

    def __init__(self, name: str, device: str, want_bytes: int, unit_bytes: int) -> None:
        self._name = name
        self._device = torch.device(device)
        if self._device.type == "cuda":
            there = torch.cuda.device_count()
            if not 0 <= (self._device.index or 0) < there:
                raise ConfigError(
                    f"no device {device} for the {name}: {there} GPUs are visible here"
                )
            torch.cuda.set_device(self._device)
        room = int(_free_bytes(self._device) * POOL_SHARE)
        num_bytes = min(-(-want_bytes // unit_bytes), room // unit_bytes) * unit_bytes
        if num_bytes == 0:
            raise ConfigError(
                f"no pool of {unit_bytes} bytes on {device}: {room} bytes may be taken; use "
                f"smaller blocks"
            )
        self._pool = zeros(num_bytes, self._device)
        self._woken = threading.Event()
        self._connector: TransferEngine | None = None

    def about(self) -> dict[str, Any]:
        """Return the device and the pool, for a table's head."""
        gpu = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if gpu else f"CPU, {os.cpu_count()} cores"
        return {"device": str(self._device), "name": name, "pool_bytes": self._pool.numel()}

    def open(self, kind: str, block_bytes: int, checksums: float = 0.0) -> int:
        """Open a connector over blocks of this size, and fill the source's; return how many.

        Raises ConfigError if this machine cannot have it.
        """
        self.close()
        self._rows = self._pool.view(torch.int64).view(-1, block_bytes // 8)
        self._base = (
            torch.arange(block_bytes // 8, dtype=torch.int64, device=self._device) * ELEMENT_STEP
        )
        if self._name == "source":
            for block, row in enumerate(self._rows):
                torch.add(self._base, block * BLOCK_STEP, out=row)
            self._settle()
        fingerprint = Fingerprint(
            protocol=HANDOVER.newest,
            model="measured",
            kv_dtype="bfloat16",
            block_size=self._block_size(),
            kv_heads=8,
            head_dim=128,
            layers=32,
            window=0,
            tp_size=1,
        )
        region = PoolRegion(self._pool.data_ptr(), len(self._rows), block_bytes, str(self._device))
        config = TransferConfig(kv_connector=cast(Any, kind), kv_checksums=checksums)
        self._connector = open_connector(self._name, fingerprint, region, config, self._woken.set)
        return len(self._rows)

    def close(self) -> None:
        """Close the connector; the pool stays."""
        if self._connector is not None:
            self._connector.close()
            self._connector = None
            # It promises to be back within a second; a plane that takes longer would meet the next
            # one here.
            for thread in threading.enumerate():
                if thread.name.startswith("kv-"):
                    thread.join(CLOSE_S)

    # The source.

    def offer(self, parts: Sequence[tuple[str, list[int]]], growing: bool) -> list[Any]:
        """Lease the blocks of each (name, blocks), none readable yet if `growing`; return the
        tickets.
        """
        assert self._connector is not None
        ready = 0 if growing else None
        tickets = [
            self._connector.offer(name, blocks, len(blocks) * self._block_size(), ready)
            for name, blocks in parts
        ]
        return [msgspec.to_builtins(ticket) for ticket in tickets]

    def announce(self, name: str, ready: Sequence[int], first_s: float, spacing_s: float) -> float:
        """Announce the blocks of a growing offer; return when the last ones were."""
        assert self._connector is not None
        time.sleep(first_s)
        for blocks in ready[:-1]:
            self._connector.grow(name, blocks)
            time.sleep(spacing_s)
        told_at = time.monotonic()
        self._connector.complete(name, Completion([1]))
        return told_at

    def released(self, count: int) -> None:
        """Wait until so many leases have ended. Raises TransferError if one has run out."""
        for event in self._events(count, RELEASE_S):
            if not isinstance(event, Released) or event.expired:
                raise TransferError(f"the source lost a lease during the transfer: {event}")

    # The reader.

    def take(
        self, parts: Sequence[tuple[str, Any, list[int]]], lead_s: float, within_s: float
    ) -> dict[str, float | list[float]]:
        """Fetch all of (name, ticket, local blocks) after a watch of `lead_s`.

        `asked_at` and `in_hand_at` are of CLOCK_MONOTONIC, which all processes of a host share.
        Raises TransferError.
        """
        assert self._connector is not None
        fetches = []
        for name, ticket, blocks in parts:
            claim = msgspec.convert(ticket, Ticket)
            self._connector.watch(name, claim)
            fetches.append((name, claim.remote_block_ids[0], blocks))
        if lead_s:
            time.sleep(lead_s)
        checked_before = self._connector.stats().checked_blocks
        asked_at = time.monotonic()
        for fetch in fetches:
            self._connector.fetch(*fetch)
        called_at = time.monotonic()
        events = self._events(len(fetches), within_s)
        in_hand_at = time.monotonic()
        exposed_s = []
        for event in events:
            if not isinstance(event, Fetched):
                raise TransferError(f"unexpected {event}")
            exposed_s.append(event.exposed_s)
        return {
            "asked_at": asked_at,
            "call_s": (called_at - asked_at) / len(fetches),
            "in_hand_at": in_hand_at,
            "exposed_s": exposed_s,
            "checked_blocks": self._connector.stats().checked_blocks - checked_before,
        }

    def poison(self, blocks: list[int]) -> None:
        """Overwrite what a transfer is to write."""
        self._rows.index_fill_(0, torch.tensor(blocks, device=self._device), -1)
        self._settle()

    def verify(self, remote: list[int], local: list[int]) -> int:
        """Compare every byte with the source's pattern; return how many. Raises TransferError."""
        wrong = [
            (self._rows[mine] != self._base + theirs * BLOCK_STEP).any()
            for theirs, mine in zip(remote, local, strict=True)
        ]
        bad = torch.stack(wrong).nonzero().flatten().tolist()
        if bad:
            raise TransferError(
                f"{len(bad)} of {len(local)} blocks have other bytes than the source's; the first "
                f"is block {local[bad[0]]} here, {remote[bad[0]]} there"
            )
        return len(local) * self._rows.shape[1] * 8

    def _block_size(self) -> int:
        return max(1, self._rows.shape[1] * 8 // TOKEN_BYTES)

    def _events(self, count: int, within_s: float) -> list[Event]:
        assert self._connector is not None
        got: list[Event] = []
        until = time.monotonic() + within_s
        while len(got) < count:
            if not self._woken.wait(max(0.0, until - time.monotonic())):
                raise TransferError(
                    f"{len(got)} of {count} events of the {self._name} within {within_s:.0f} s"
                )
            self._woken.clear()
            got += self._connector.events()
            for event in got:
                if isinstance(event, FetchFailed):
                    raise TransferError(event.reason)
        return got

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def _answered(ask: Any, *arguments: Any) -> tuple[Any, str]:
    try:
        return ask(*arguments), ""
    except KvrelayError as error:
        return None, error.message
    except Exception as error:  # noqa: BLE001 - the edge of this process: the parent prints it and goes on
        return None, f"{type(error).__name__}: {error}"


def main() -> None:
    """Serve calls until stdin ends: [method, argument, ...] -> [result, error]."""
    die_with_parent()
    # UCX and compilers print to stdout, which is the parent's.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, device, want_bytes, unit_bytes = sys.argv[1:]
    end, error = _answered(End, name, device, int(want_bytes), int(unit_bytes))
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        answer = (None, error) if end is None else _answered(getattr(end, method), *arguments)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if end is not None:
        end.close()


if __name__ == "__main__":
    main()
