"""One end of a measured hand-over: a pool, and a connector over it.

Serves calls of transfer_times.py as JSON lines on stdin and stdout, until stdin ends.
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

from kvrelay.kernels.pool_memory import zeros
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
from kvrelay.preflight import memory_here
from kvrelay.wire.config import TransferConfig
from kvrelay.wire.errors import ConfigError, KvrelayError, TransferError
from kvrelay.wire.transfer import Fingerprint, Ticket
from kvrelay.wire.versions import HANDOVER

# Of the memory that is free when a process starts; both ends may be in the same memory.
POOL_SHARE = 0.3
# Leases are freed by a message of the reader, at once.
RELEASE_S = 10.0
CLOSE_S = 3.0
# Llama-3.1-8B: 32 layers of 8 heads of 128 elements of 2 bytes, keys and values.
TOKEN_BYTES = 131_072


class End:
    """A source or a reader of transfers, whose methods the parent calls by name.

    Raises ConfigError if there is no room for a pool of `unit_bytes`.
    """

    def __init__(self, name: str, device: str, want_bytes: int, unit_bytes: int) -> None:
        self._name = name
        self._device = torch.device(device)
        if self._device.type == "cuda":
            if (self._device.index or 0) >= (there := torch.cuda.device_count()):
                raise ConfigError(f"no device {device}: {there} GPUs are visible here")
            torch.cuda.set_device(self._device)
            free = int(torch.cuda.mem_get_info(self._device)[0])
        else:
            free = min(each.free for each in memory_here())
        room = int(free * POOL_SHARE)
        num_bytes = min(-(-want_bytes // unit_bytes), room // unit_bytes) * unit_bytes
        if num_bytes == 0:
            raise ConfigError(
                f"no pool of {unit_bytes} bytes on {device}: {room} bytes may be taken; use "
                f"smaller blocks"
            )
        self._pool = zeros(num_bytes, self._device)
        self._woken = threading.Event()
        self._connector: TransferEngine | None = None

    def open(self, kind: str, block_bytes: int, checksums: float) -> int:
        """Open a connector over blocks of this size; return how many there are.

        Raises ConfigError if this machine cannot have it.
        """
        self.close()
        self._block_size = max(1, block_bytes // TOKEN_BYTES)
        num_blocks = self._pool.numel() // block_bytes
        fingerprint = Fingerprint(
            protocol=HANDOVER.newest,
            model="measured",
            kv_dtype="bfloat16",
            block_size=self._block_size,
            kv_heads=8,
            head_dim=128,
            layers=32,
            window=0,
            tp_size=1,
        )
        region = PoolRegion(self._pool.data_ptr(), num_blocks, block_bytes, str(self._device))
        config = TransferConfig(kv_connector=cast(Any, kind), kv_checksums=checksums)
        self._connector = open_connector(self._name, fingerprint, region, config, self._woken.set)
        return num_blocks

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()
            self._connector = None
            # A plane that takes longer than it promises would meet the next one here.
            for thread in threading.enumerate():
                if thread.name.startswith("kv-"):
                    thread.join(CLOSE_S)

    def offer(self, name: str, blocks: list[int], growing: bool) -> Any:
        """Lease blocks, none readable yet if `growing`; return the ticket."""
        assert self._connector is not None
        tokens = len(blocks) * self._block_size
        ticket = self._connector.offer(name, blocks, tokens, 0 if growing else None)
        return msgspec.to_builtins(ticket)

    def announce(self, name: str, ready: Sequence[int], first_s: float, spacing_s: float) -> None:
        """Announce the blocks of a growing offer, the first after `first_s`."""
        assert self._connector is not None
        time.sleep(first_s)
        for blocks in ready[:-1]:
            self._connector.grow(name, blocks)
            time.sleep(spacing_s)
        self._connector.complete(name, Completion([1]))

    def released(self) -> None:
        """Wait until the lease has ended. Raises TransferError if it has run out."""
        event = self._event(RELEASE_S)
        if not isinstance(event, Released) or event.expired:
            raise TransferError(f"the source lost a lease during the transfer: {event}")

    def take(
        self, name: str, ticket: Any, blocks: list[int], lead_s: float, within_s: float
    ) -> tuple[float, int]:
        """Fetch a ticket that was watched for `lead_s`.

        Returns the seconds that were exposed, and how many blocks were checked.
        """
        assert self._connector is not None
        claim = msgspec.convert(ticket, Ticket)
        self._connector.watch(name, claim)
        time.sleep(lead_s)
        checked_before = self._connector.stats().checked_blocks
        self._connector.fetch(name, claim.remote_block_ids[0], blocks)
        event = self._event(within_s)
        if not isinstance(event, Fetched):
            raise TransferError(f"unexpected {event}")
        return event.exposed_s, self._connector.stats().checked_blocks - checked_before

    def _event(self, within_s: float) -> Event:
        assert self._connector is not None
        until = time.monotonic() + within_s
        while not (got := self._connector.events()):
            if not self._woken.wait(max(0.0, until - time.monotonic())):
                raise TransferError(f"no event of the {self._name} within {within_s:.0f} s")
            self._woken.clear()
        if isinstance(got[0], FetchFailed):
            raise TransferError(got[0].reason)
        return got[0]


def _answered(ask: Any, *arguments: Any) -> tuple[Any, str]:
    try:
        return ask(*arguments), ""
    except KvrelayError as error:
        return None, error.message
    except Exception as error:  # noqa: BLE001 - the edge of this process: the parent prints it and goes on
        return None, f"{type(error).__name__}: {error}"


def main() -> None:
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
